"""Acceptance by decoded cycles: the next draft begins where the last one was rejected, not at every place alike."""

# S slots, K levels, M texts, T slots of the longest text

from __future__ import annotations

import torch
from torch import Tensor


def visit_slots(kept: Tensor, in_text: Tensor, text_ids: Tensor) -> Tensor:
    """[S], the probability that a cycle of chains begins at a slot, for chains kept at level k with `kept` [K, S].

    A text's first token comes with the prompt, so that its first cycle begins at its second slot, as in decoding.
    """
    kept = kept * in_text
    numbers, starts = number_slots(text_ids)
    lengths = starts.diff(append=torch.tensor([len(text_ids)]))
    rows = kept.new_zeros(len(kept), len(starts), int(lengths.max()) + len(kept) + 1)
    rows[:, text_ids, numbers] = kept
    reached = torch.cat([torch.ones_like(rows[:1]), rows.cumprod(0)])  # [K + 1, M, T], so many levels or more
    exactly = torch.cat([reached[:-1] - reached[1:], reached[-1:]])
    begins = torch.zeros_like(rows[0])
    begins[:, 1] = 1.0
    begins[lengths == 1, 0] = 1.0
    for place in range(int(lengths.max())):
        for accepted, probs in enumerate(exactly[..., place]):
            begins[:, place + accepted + 1] += begins[:, place] * probs
    return begins[text_ids, numbers]


def number_slots(text_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each slot [S] within its text, and the first slot of each text [M]."""
    counts = torch.bincount(text_ids)
    starts = counts.cumsum(0) - counts
    return torch.arange(len(text_ids)) - starts[text_ids], starts


def expect_accepted(kept: Tensor, expected: Tensor, in_text: Tensor) -> Tensor:
    """[S], the expected number of accepted tokens of a chain that begins at a slot.

    `kept` [K, S] is the chance that a level keeps the text's token; `expected` is its mean over the tokens that the
    target might have chosen there, which has the same mean and less variance.
    """
    kept = kept * in_text
    before = torch.cat([torch.ones_like(kept[:1]), kept[:-1]]).cumprod(0)
    return (before * expected * in_text).sum(0)
