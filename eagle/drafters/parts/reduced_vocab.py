"""Draft vocabularies: their files, keyed to the tokenizer and the data, and heads that draft a part of all tokens."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import HeadShape, TargetHead
from eagle.core.examples import most_frequent, token_counts
from eagle.disk import open_tensors, write_tensors


def count_frequent(
    supervised: Iterable[Tensor] | None, size: int, vocab_size: int, *, key: str
) -> Tensor:
    """Return the ids of the `size` most frequent supervised tokens [size] in ascending order.

    They become a draft vocabulary: a head whose LM head has fewer rows drafts faster.

    Args:
        supervised: The supervised tokens of each sequence, those of the assistant's answers.
        size: How many tokens are chosen.
        vocab_size: The size of the target's vocabulary.
        key: The recipe's key that asks for them, for the error.

    Raises:
        ValueError: No sequences were given, or the vocabulary is smaller than `size`.
    """
    if supervised is None:
        raise ValueError(f"{key} is {size}, but no sequences were given: call for_target with them")
    return most_frequent(token_counts(supervised, vocab_size), size)


def save_draft_vocab(path: str | Path, counts: Tensor, size: int, identity: dict[str, Any]) -> None:
    """Write a draft vocabulary of the `size` most frequent tokens to a file.

    The file has `d2t` [size], which is added to a draft token's id to get the target's id, and `t2d` [V], whether each
    of the target's V tokens is in the draft vocabulary: EAGLE-3's tables.

    Args:
        path: The file.
        counts: [V], how often each token is supervised in the data.
        size: The number of tokens in the draft vocabulary.
        identity: What names the tokenizer and the data; `load_draft_vocab` compares it.
    """
    write_draft_vocab(path, most_frequent(counts, size), len(counts), identity)


def write_draft_vocab(
    path: str | Path, tokens: Tensor, vocab_size: int, identity: dict[str, Any]
) -> None:
    """Write a draft vocabulary of these tokens [D], in ascending order, to a file, as `save_draft_vocab` does."""
    size = len(tokens)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[tokens] = True
    tensors = {"d2t": tokens - torch.arange(size), "t2d": t2d}
    write_tensors(path, tensors, {"identity": json.dumps({**identity, "size": size})})


def load_draft_vocab(
    path: str | Path, expected: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two tables of a draft vocabulary file.

    Args:
        path: A file of `save_draft_vocab`.
        expected: What must be equal in the file's identity, which names the tokenizer and the data; None: nothing.

    Returns:
        `d2t` [D], what to add to the id of each of the D draft tokens to get the target's id; and `t2d` [V] bool,
        whether each of the target's V tokens is in the draft vocabulary.

    Raises:
        ValueError: There is no file, or it was made with another tokenizer or from other data.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"no draft vocabulary at {path}: run `eagle prepare RECIPE --only draft-vocab` first"
        )
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
        identity = json.loads(metadata.get("identity", "{}"))  # of the tokenizer and the data
        for key, value in (expected or {}).items():
            actual = identity.get(key)
            if actual != value:
                raise ValueError(
                    f"the draft vocabulary {path} was made with {key} = {actual!r}, this run needs {value!r}: "
                    "make it again, or name another file"
                )
        return file.get_tensor("d2t"), file.get_tensor("t2d")


def choose_draft_vocab(
    requested: int | str | None, supervised: Iterable[Tensor] | None, vocab_size: int
) -> Tensor:
    """Return the draft vocabulary: the ids of D tokens of the target [D], in ascending order.

    Args:
        requested: None for all tokens, a number for the most frequent tokens, or the path of a draft vocabulary file.
        supervised: The supervised tokens of each sequence, whose frequencies are counted; needed only for a number.
        vocab_size: The size of the target's vocabulary.
    """
    if requested is None:
        return torch.arange(vocab_size)
    if isinstance(requested, int):
        return count_frequent(supervised, requested, vocab_size, key="drafter.draft_vocab")
    # `t2d` tells which tokens of the target are in the draft vocabulary
    _, t2d = load_draft_vocab(requested)
    if len(t2d) != vocab_size:
        raise ValueError(
            f"{requested} was made for a vocabulary of {len(t2d)}, this target has {vocab_size}: make it again with "
            "`eagle prepare --only draft-vocab`"
        )
    return t2d.nonzero()[:, 0]


def draft_vocab_size(shape: HeadShape) -> int:
    """Return the number of tokens that a head of these sizes can draft: all of the target's by default.

    A head with a smaller draft vocabulary has an LM head of fewer rows.
    """
    return getattr(shape, "draft_vocab_size", None) or shape.vocab_size


class ReducedVocab:
    """A head that may draft only a part of the target's tokens; the other base of such a head is a torch module."""

    # both tables are missing if the draft vocabulary is the target's
    d2t: Tensor  # [D], what to add to a draft token's id to get the target's id
    t2d: Tensor  # [V] bool, whether a target token is in the draft vocabulary
    shape: HeadShape
    register_buffer: Any
    # [D], tokens to which drafting alone is restricted (FR-Spec); training knows nothing of them
    restricted: Tensor | None = None
    # [D], the `settings.loss_vocab` tokens whose probs the loss compares, which alone are drafted; None for all tokens.
    # Only heads with `add_loss_tokens` have it. Training counts the tokens at every start, and a file beside the
    # weights holds them.
    loss_tokens: Tensor | None
    settings: Any
    # The target's head, and the same head cut to some tokens, once it is made. They are in a tuple, so that torch does
    # not register the target's modules as parts of this one.
    narrowed: tuple[TargetHead, ...] = ()

    def add_tables(self, shape: HeadShape) -> None:
        """Register buffers for `d2t` and `t2d` if the head drafts only a part of the target's tokens.

        They are zeros until `fill_tables` or a checkpoint sets them. Other heads have no such buffers, because engines
        read them as the sign of a reduced vocabulary.
        """
        size = draft_vocab_size(shape)
        if size < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    def fill_tables(self, tokens: Tensor) -> None:
        """Set both tables of a new head in place; nothing is done if its vocabulary is the target's.

        Args:
            tokens: [D], the target's ids of the draft vocabulary, in ascending order.
        """
        if self.own_drafts is not None:
            self.d2t.copy_(tokens - torch.arange(len(tokens)))
            self.t2d[tokens] = True

    def add_loss_tokens(self) -> None:
        """Register the buffer `loss_tokens` of a head that has the setting `loss_vocab`.

        It holds the tokens whose probabilities the loss compares.
        """
        # not persistent, so that the head's weights are those of any other head of its kind
        self.register_buffer("loss_tokens", None, persistent=False)

    def count_loss_tokens(self, supervised: Iterable[Tensor] | None) -> None:
        """Set the tokens that the loss of a new head compares: the most frequent supervised ones, or all of them.

        Args:
            supervised: The supervised tokens of each sequence, needed only if the settings have a `loss_vocab`.
        """
        size = self.settings.loss_vocab
        if size is not None:
            self.loss_tokens = count_frequent(
                supervised, size, self.shape.vocab_size, key="drafter.loss_vocab"
            )

    @property
    def own_drafts(self) -> Tensor | None:
        """[D], the target's ids of the draft vocabulary that the head was trained with; None for all tokens."""
        if not hasattr(self, "d2t"):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def drafts(self) -> Tensor | None:
        """[D], the target's ids of the tokens that are drafted, one for each logit; None for all tokens.

        They are the head's own draft vocabulary, or for a head that was trained on all tokens, those to which drafting
        is restricted.
        """
        own_drafts = self.own_drafts
        return self.restricted if own_drafts is None else own_drafts

    @drafts.setter
    def drafts(self, tokens: Tensor | None) -> None:
        """Restrict drafting to these tokens [D] (None: all); a head with its own draft vocabulary keeps that."""
        self.restricted = tokens

    def find_drafts(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Look up tokens in the draft vocabulary that the head was trained with.

        Args:
            tokens: Ids of the target's tokens, of any shape.

        Returns:
            Of each token its id in the draft vocabulary, which is its row in the head's LM head, 0 for tokens outside;
            and whether it is inside. Both have the shape of `tokens`.
        """
        drafts = self.own_drafts
        if drafts is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        row_of = torch.zeros(self.shape.vocab_size, dtype=torch.long, device=tokens.device)
        row_of[drafts] = torch.arange(len(drafts), device=tokens.device)
        return row_of[tokens], self.t2d[tokens]

    def narrow_once(self, target_head: TargetHead, tokens: Tensor | None) -> TargetHead:
        """Return the target's LM head with only the rows of these tokens; the whole head for None.

        A head with a draft vocabulary needs no other logits. The rows are copied once for a target and then cached,
        which is right because a draft head always passes the same tokens.
        """
        if tokens is None:
            return target_head
        if not self.narrowed or self.narrowed[0] is not target_head:
            self.narrowed = target_head, target_head.narrow(tokens)
        return self.narrowed[1]

    def on_all_tokens(self, logits: Tensor) -> Tensor:
        """Return logits of the D drafted tokens [.., D] as logits of all V tokens of the target [.., V].

        All other tokens get minus infinity. Logits [.., V] are returned unchanged. Validation compares them with the
        target's.
        """
        drafts = self.drafts
        # a head without its own vocabulary makes logits of all tokens where the target's whole LM head is passed
        if drafts is None or logits.shape[-1] == self.shape.vocab_size:
            return logits
        all_logits = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        all_logits[..., drafts] = logits
        return all_logits
