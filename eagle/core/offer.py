"""The noise and the filters that a sampling target offers a drafter."""

# P positions, K rows, V vocabulary

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.core.noise import Noise, mix64
from eagle.core.sampling import warp


class Offer:
    """The sampling noise and filters that a drafter may use (`eagle.core.drafter.Noise`), in units of plain logits."""

    def __init__(self, choose: Any, vocab_size: int, device: torch.device) -> None:
        self.choose = choose
        self.temperature = choose.sampling.temperature
        self.vocab_size = vocab_size
        self.device = device
        self.drawn = 0  # rows of private noise

    @cached_property
    def private(self) -> Noise:
        """Noise for drafting only: drafts that shared verification's coins would bias the output."""
        return Noise(mix64(self.choose.private_seed), self.choose.sampling.request)

    def __call__(self, positions: list[int]) -> Tensor:
        """[P, V], the noise that the target adds to its logits when it chooses the tokens at these positions."""
        assert self.choose.noise is not None
        return self.choose.noise(positions, self.vocab_size, self.device) * self.temperature

    def own(self, rows: int) -> Tensor:
        """[rows, V], new noise in every call, which the target never uses."""
        # counted, not by position: the noise at a position may have caused it to be drafted again
        first, self.drawn = self.drawn, self.drawn + rows
        self.private.forget(first)
        return self.private(range(first, self.drawn), self.vocab_size, self.device) * self.temperature

    def filter_logits(self, logits: Tensor) -> Tensor:
        """[K, V], the logits, minus 1000 for tokens that the target's top-k, top-p or min-p removes."""
        sampling = self.choose.sampling
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return logits
        # sorting whole vocabularies at all nodes would cost more than a small head
        best = logits.topk(min(256, logits.shape[-1]))
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside.scatter_(1, best.indices, warp(best.values, sampling).isinf())
        return torch.where(outside, logits - 1000, logits)
