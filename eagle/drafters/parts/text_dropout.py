"""Dropout that each sequence's own seed decides, so that it does not depend on the rest of the batch."""

# R rows of all sequences

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

APART = 1 << 62  # other random numbers of a sequence begin from its seed itself


class TextDropout:
    """Zeroes a share of the numbers of rows and scales the others up; every call draws again."""

    def __init__(
        self, share: float, seeds: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        self.share = share
        self.counts = list(counts)  # rows of each sequence
        self.generators = [
            torch.Generator(device).manual_seed(seed ^ APART) for seed in seeds if share
        ]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows [R, ..] with dropout."""
        if not self.share:
            return rows
        kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
        return self._drop(rows, kept, kept.split(self.counts))

    def drop_padded(self, rows: Tensor) -> Tensor:
        """Return [B, T, ..] with dropout of the sequence in each row; padding is kept."""
        kept = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        seqs = [row[:count] for row, count in zip(kept, self.counts, strict=True)]
        return self._drop(rows, kept, seqs)

    def _drop(self, rows: Tensor, kept: Tensor, seqs: Sequence[Tensor]) -> Tensor:
        """Draw what is kept of each sequence, and return the rows with the rest zeroed; `seqs` are views of `kept`."""
        for seq, generator in zip(seqs, self.generators, strict=True):
            seq.copy_(draw_kept(seq, self.share, generator))
        return (rows * kept) * (1 / (1 - self.share))


def draw_kept(like: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return [..] bool, which numbers of a tensor of this shape are kept: all but a share, to 1 in 65,536."""
    # one word for four numbers, as on CPUs random words cost more than all that is done with them
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    numbers = words.view(torch.int16)[: like.numel()]
    limit = round(share * (1 << 16)) - (1 << 15)
    return (numbers >= limit).view(like.shape)
