"""Dropout that each text's own seed decides, so that it does not depend on the texts beside it."""

# R rows of all texts

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

APART = 1 << 62  # other draws of a text begin from its seed itself


class TextDropout:
    """Zeroes a share of the numbers of rows and scales the others up; every call draws anew."""

    def __init__(self, share: float, seeds: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.share, self.counts = share, list(counts)  # rows of each text
        self.generators = [torch.Generator(device).manual_seed(seed ^ APART) for seed in seeds if share]

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, ..]."""
        if not self.share:
            return rows
        kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
        return self._drop(rows, kept, kept.split(self.counts))

    def drop_padded(self, rows: Tensor) -> Tensor:
        """[B, T, ..], a text in each row; what lies behind it is kept."""
        kept = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        return self._drop(rows, kept, [row[:count] for row, count in zip(kept, self.counts, strict=True)])

    def _drop(self, rows: Tensor, kept: Tensor, texts: Sequence[Tensor]) -> Tensor:
        for part, generator in zip(texts, self.generators, strict=True):
            part.copy_(draw_kept(part, self.share, generator))
        return (rows * kept) * (1 / (1 - self.share))


def draw_kept(like: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Which numbers are kept, of the same shape; a share of them is not, to 1 in 65,536."""
    # a word for each four, as on CPUs a draw costs more than all that is done with it
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    parts = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)[: like.numel()]
    return (parts >= round(share * (1 << 16)) - (1 << 15)).view(like.shape)
