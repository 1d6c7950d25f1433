"""The floating-point operations that a training step cannot do without: those of all matrix products."""

from __future__ import annotations

from typing import NamedTuple

from transformers import LlamaConfig

from bench.rivals.serve import Text


class Sizes(NamedTuple):
    """The sizes of a head."""

    vocab: int  # that it can draft
    width: int
    mlp: int
    heads: int
    key_heads: int
    head_width: int

    def target_config(self, vocab: int) -> LlamaConfig:
        """The config of a target that such a head is made for."""
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=8,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_width,
        )


def eagle1_flops(sizes: Sizes, texts: list[Text]) -> int:
    """Operations of an EAGLE-1 step: what follows a text's last answer is left out, the rest is read."""
    places = [[place for span in spans for place in range(*span)] for _, spans in texts]
    supervised = sum(map(len, places))
    known = sum(text[-1] - 1 for text in places)  # slots whose keys are seen
    pairs = sum(place - 1 for text in places for place in text)  # of a query and a key that it sees
    fuse = known * 2 * sizes.width**2
    logits = supervised * sizes.vocab * sizes.width
    block = known * 2 * sizes.width * sizes.key_heads * sizes.head_width
    block += supervised * (2 * sizes.width**2 + 3 * sizes.width * sizes.mlp) + 2 * pairs * sizes.width
    # forward: logits of both; backward: the weights of fc, the input of the logits, weights and inputs of the block
    return 2 * (fuse + 2 * logits + block + fuse + logits + 2 * block)


def anchors(supervised: list[bool], steps: int) -> list[tuple[int, int]]:
    """Each slot that is trained, and how many of its steps count: a step does if it and all before it are supervised.

    Slot i names token i + 2, and token i + 2 + s in step s.
    """
    ahead = [0] * (len(supervised) + 1)  # how many supervised tokens lie one behind the other from here
    for place in reversed(range(len(supervised))):
        ahead[place] = (ahead[place + 1] + 1) * supervised[place]
    return [(place - 2, min(ahead[place], steps)) for place in range(2, len(supervised)) if supervised[place]]


def eagle3_flops(sizes: Sizes, supervised: list[bool], steps: int, train_lm_head: bool) -> int:
    """Operations of an EAGLE-3 step with exact gradients, attention included.

    Left out is what nothing asks for: queries and all behind them where no loss is, the token's half of a projection
    twice for one token, a teacher's probabilities twice, and gradients of what is frozen. The gain of the norm of
    embeddings follows from the gradient of the weights behind it, so embeddings need no gradient at all.
    """
    slots = anchors(supervised, steps)
    known = slots[-1][0] + 1  # slots whose keys are seen
    counted = sum(count for _, count in slots)
    drafted = counted - len(slots)  # keys of later steps
    read = len({slot + step for slot, count in slots for step in range(count)})  # tokens; their states are teachers
    pairs = sum(slot + 1 + step for slot, count in slots for step in range(count))  # of a query and a key
    vocab, width, mlp, heads, key_heads, head_width = sizes
    queries, keys = width * heads * head_width, 2 * width * key_heads * head_width
    weights_alone = known * 3 * width**2 + known * keys + read * queries
    weights_and_inputs = counted * queries + (known + drafted) * keys + counted * (queries + 3 * width * mlp)
    attention = pairs * 2 * heads * head_width
    logits = vocab * width
    products = 2 * weights_alone + 3 * (weights_and_inputs + attention) + read * logits
    return 2 * (products + (3 if train_lm_head else 2) * counted * logits)
