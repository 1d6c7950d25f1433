"""The floating-point operations that a training step cannot do without: those of all matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Stack(NamedTuple):
    """What a step that guesses blocks computes: rows are queries of the texts' places, blocks or elements."""

    sizes: Sizes
    blocks: int
    taps: int
    known: int  # slots of texts, whose features are fused
    rows: int  # that every block reads
    last: int  # that the last one answers for, and whose states become logits
    pairs: int  # of a query and a key that it sees, in a block of the stack
    taught: int  # places whose probs by the target are compared with


def stack_flops(stack: Stack, input_width: int, injected: bool) -> int:
    """Operations of such a step with exact gradients; the embedding and the LM head are frozen.

    `input_width` is that of the first block's input. Where features are injected, blocks make keys and values of them
    too. Projections of what no gradient goes through are computed forward and for their weights alone.
    """
    vocab, width, mlp, heads, key_heads, head_width = stack.sizes
    queries, keys = width * heads * head_width, 2 * width * key_heads * head_width
    fuse = 2 * stack.known * stack.taps * width**2
    first = 2 * stack.rows * (queries + keys) * input_width // width
    answers = stack.last + (stack.blocks - 1) * stack.rows  # rows behind attention of all blocks
    behind = answers * (queries + 3 * width * mlp)
    before = (stack.blocks - 1) * stack.rows * keys + (stack.last + (stack.blocks - 2) * stack.rows) * queries
    context = stack.known * keys * stack.blocks * injected
    attention = stack.pairs * 2 * heads * head_width * stack.blocks
    logits = (2 * stack.last + stack.taught) * vocab * width
    return 2 * (fuse + first + 3 * (behind + before + context + attention) + logits)


def injected_stack(sizes: Sizes, mask: list[bool], head: dict[str, Any]) -> Stack:
    """The step of blocks of slots behind drawn anchors; what is drawn is expected."""
    skipped = 0 if head.get("sample_from_anchor", head["kind"] == "dspark") else 1
    size, levels = head["slots"], head["slots"] - skipped
    slots = anchors(mask, levels)
    drawn = min(head["anchors"], len(slots)) / len(slots)
    counted = round(drawn * sum(count for _, count in slots))
    rows = round(drawn * len(slots)) * size
    pairs = round(drawn * sum(size * (slot + 1 + size) for slot, _ in slots))
    read = {slot + level for slot, count in slots for level in range(count)}
    return Stack(sizes, head["blocks"], len(head["taps"]), slots[-1][0] + 1, rows, counted, pairs, len(read))


def parallel_stack(sizes: Sizes, mask: list[bool], head: dict[str, Any]) -> Stack:
    """The step of slots and of masked elements behind them, so many less at each depth; what is drawn is expected."""
    slots = anchors(mask, 1)
    depths = [max(head["keep"] ** depth, 0.2) for depth in range(1, head["depths"])]
    masked = [round((len(slots) - depth) * share) for depth, share in enumerate(depths, 1)]
    known, seen = slots[-1][0] + 1, sum(slot + 1 for slot, _ in slots) / len(slots)
    pairs = known * (known + 1) // 2 + round(sum((seen + depth) * count for depth, count in enumerate(masked, 1)))
    answered = len(slots) + sum(masked)
    return Stack(sizes, head["blocks"], len(head["taps"]), known, known + sum(masked), answered, pairs, len(slots))


def block_flops(sizes: Sizes, mask: list[bool], head: dict[str, Any]) -> int:
    """Operations that a step of such a head cannot do without on a text with this loss mask."""
    if head["kind"] == "peagle":
        return stack_flops(parallel_stack(sizes, mask, head), 2 * sizes.width, injected=False)
    flops = stack_flops(injected_stack(sizes, mask, head), sizes.width, injected=True)
    rank = 256 if head["kind"] == "dspark" else 0  # of its bias, whose factors are trained
    return flops + 6 * injected_stack(sizes, mask, head).last * rank * sizes.vocab
