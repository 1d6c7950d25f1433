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
        kept = torch.empty(rows.shape, device=rows.device)
        return self._drop(rows, kept, kept.split(self.counts))

    def drop_padded(self, rows: Tensor) -> Tensor:
        """[B, T, ..], a text in each row; what lies behind it is kept."""
        kept = torch.ones(rows.shape, device=rows.device)
        return self._drop(rows, kept, [row[:count] for row, count in zip(kept, self.counts, strict=True)])

    def _drop(self, rows: Tensor, kept: Tensor, texts: Sequence[Tensor]) -> Tensor:
        for part, generator in zip(texts, self.generators, strict=True):
            part.bernoulli_(1 - self.share, generator=generator)
        return rows * kept.div_(1 - self.share).to(rows.dtype)
