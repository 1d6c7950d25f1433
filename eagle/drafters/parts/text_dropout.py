"""Dropout that each sequence's own seed decides, so that it does not depend on the rest of the batch."""

# R rows of all sequences

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# flips a bit of a sequence's seed: other random numbers of the sequence use the seed itself, and these must differ
APART = 1 << 62


class TextDropout:
    """Dropout on the rows of several sequences, each with a random generator from its seed.

    It zeroes a share of the numbers and scales the others up, so that the mean stays. Every call samples a new mask.
    """

    def __init__(
        self, share: float, seeds: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        """Make a random generator for each sequence, from its seed.

        Args:
            share: Of the numbers that are zeroed, below 1; 0 for no dropout.
            seeds: The random seed of each sequence.
            counts: The number of rows (tokens) of each sequence.
            device: Where the rows are.
        """
        self.share = share
        self.counts = list(counts)  # rows of each sequence
        self.generators = [
            torch.Generator(device).manual_seed(seed ^ APART) for seed in seeds if share
        ]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the R concatenated rows (tokens) [R, ..] of all sequences with dropout; `rows` itself without it."""
        if not self.share:
            return rows
        keep_mask = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
        return self._drop(rows, keep_mask, keep_mask.split(self.counts))

    def drop_padded(self, rows: Tensor) -> Tensor:
        """Return right-padded sequences [sequences, tokens, ..] with dropout; padding is only scaled.

        A token gets the same dropout as in `__call__`, so the result does not depend on padding.
        """
        keep_mask = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        seqs = [row[:count] for row, count in zip(keep_mask, self.counts, strict=True)]
        return self._drop(rows, keep_mask, seqs)

    def _drop(self, rows: Tensor, keep_mask: Tensor, seqs: Sequence[Tensor]) -> Tensor:
        """Sample the mask of each sequence, and return the rows (tokens) with dropout.

        Args:
            rows: The rows of all sequences, concatenated or padded.
            keep_mask: A bool mask of the same shape, true at the numbers to keep, which is filled in place.
            seqs: Views of `keep_mask`, one for each sequence, through which it is filled.
        """
        for seq, generator in zip(seqs, self.generators, strict=True):
            seq.copy_(draw_keep_mask(seq, self.share, generator))
        # scaled up, so that the mean stays
        return (rows * keep_mask) * (1 / (1 - self.share))


def draw_keep_mask(like: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Sample a dropout mask of the shape of `like`, true with probability 1 - share, exact to 1 in 65,536.

    The random numbers are those of `generator`, which is on the device of `like`.
    """
    # on CPUs a random word costs more than all that is done with it, so one 64-bit word gives four 16-bit numbers
    # the number of words, rounded up
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    numbers = words.view(torch.int16)[: like.numel()]
    # int16 begins at -2^15, so `share` of the 2^16 values are below this limit
    limit = round(share * (1 << 16)) - (1 << 15)
    return (numbers >= limit).view(like.shape)
