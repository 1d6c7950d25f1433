"""Dropout that each text's seed decides, so that a run which goes on draws what it would have drawn."""

# S supervised slots, D width

from __future__ import annotations

import torch
from torch import Tensor

from eagle.data.examples import Batch


class TextDropout:
    """Zeros a share of the numbers at the supervised slots of each text, and raises the rest as much."""

    def __init__(self, share: float, batch: Batch) -> None:
        self.kept = 1 - share
        self.counts = [int(mask.sum()) for mask in batch.loss_mask.split(batch.lengths)]
        self.generators = [torch.Generator(batch.tokens.device).manual_seed(seed) for seed in batch.seeds]

    def __call__(self, states: Tensor) -> Tensor:
        """[S, D], other numbers at every call."""
        if self.kept == 1:
            return states
        mask = torch.empty_like(states)
        for part, generator in zip(mask.split(self.counts), self.generators, strict=True):
            part.bernoulli_(self.kept, generator=generator)
        return states * mask.div_(self.kept)
