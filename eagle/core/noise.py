"""Gumbel noise as a function of the position in a sequence, so that drafting cannot change what is sampled."""

# P positions, K rows, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.core.sampling import warp

# logits that one sort looks at; a whole vocabulary at all nodes would cost more than a small head
MAX_FILTERED = 256


class Noise:
    """Gumbel noise by a counter-based hash of (seed, request, position, token), equal on all devices."""

    def __init__(self, seed: int, request: int) -> None:
        self.stream = mix64(mix64(seed) + request)
        self.rows: dict[int, Tensor] = {}

    def __call__(self, positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
        """Return the noise [P, V] at these positions; rows are cached until `forget`."""
        for position in set(positions) - self.rows.keys():
            self.rows[position] = self._row(position, vocab_size, device)
        return torch.stack([self.rows[position] for position in positions])

    def forget(self, position: int) -> None:
        """Drop the cached rows before `position`."""
        self.rows = {key: row for key, row in self.rows.items() if key >= position}

    def _row(self, position: int, vocab_size: int, device: torch.device) -> Tensor:
        """Return the noise [V] at one position."""
        key = mix64(self.stream + position)
        # one word per token, spread by 2^32 / golden ratio, which is odd; int32 products wrap alike on all devices
        words = torch.arange(vocab_size, dtype=torch.int32, device=device) * -1640531535
        words = _mix32(words ^ _to_int32(key))
        words = _mix32(words ^ _to_int32(key >> 32))
        # 31 bits to the middle of 2^31 equal intervals of (0, 1)
        uniform = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
        uniform = uniform.clamp_(max=1 - 2.0**-24)
        # Gumbel: -log(-log(1 - u)). log1p keeps full precision where it matters: large noise comes from small u
        return uniform.neg_().log1p_().neg_().log_().neg_()


class DrafterNoise:
    """The noise and filters that a drafter may use (`eagle.core.drafter.Noise`), in units of plain logits."""

    def __init__(self, choose: Any, vocab_size: int, device: torch.device) -> None:
        self.choose = choose
        self.temperature = choose.sampling.temperature
        self.vocab_size = vocab_size
        self.device = device
        self.used_rows = 0  # of private noise

    @cached_property
    def private(self) -> Noise:
        """Noise for drafting only: drafts that shared verification's coins would bias the output."""
        return Noise(mix64(self.choose.private_seed), self.choose.sampling.request)

    def __call__(self, positions: list[int]) -> Tensor:
        """Return the noise [P, V] that the target adds to its logits when it chooses the tokens at these positions."""
        assert self.choose.noise is not None
        return self.choose.noise(positions, self.vocab_size, self.device) * self.temperature

    def own(self, rows: int) -> Tensor:
        """Return noise [rows, V] that is new in every call and that the target never uses."""
        # Counted, not by position: a rejection may have depended on the noise of its position, so that drafting there
        # again with the same noise would bias what is sampled.
        first = self.used_rows
        self.used_rows += rows
        self.private.forget(first)
        return (
            self.private(range(first, self.used_rows), self.vocab_size, self.device)
            * self.temperature
        )

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [K, V], minus 1000 for tokens that the target's top-k, top-p or min-p removes."""
        sampling = self.choose.sampling
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return logits
        # what the target would not sample is far outside its likeliest tokens: looking at those is enough for a draft
        best = logits.topk(min(MAX_FILTERED, logits.shape[-1]))
        is_removed = torch.ones_like(logits, dtype=torch.bool)
        is_removed.scatter_(1, best.indices, warp(best.values, sampling).isinf())
        return torch.where(is_removed, logits - 1000, logits)


def mix64(word: int) -> int:
    """Return a bijection of 64-bit words in which every output bit depends on every input bit (splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _to_int32(word: int) -> int:
    """Return the low 32 bits as a signed int."""
    return (word + 2**31) % 2**32 - 2**31


def _mix32(words: Tensor) -> Tensor:
    """Return a bijective hash of 32-bit words; products wrap, and masks make shifts logical."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * 0x7FEB352D
    words = words ^ ((words >> 15) & 0x1FFFF)
    words = words * _to_int32(0x846CA68B)
    return words ^ ((words >> 16) & 0xFFFF)
