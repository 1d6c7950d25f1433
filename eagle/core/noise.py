"""Gumbel noise as a function of the position in a text, so that drafting cannot change what is sampled."""

# P positions, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Noise:
    """Gumbel noise by a counter-based hash of (seed, request, position, token), equal on all devices."""

    def __init__(self, seed: int, request: int) -> None:
        self.stream = mix64(mix64(seed) + request)
        self.rows: dict[int, Tensor] = {}

    def __call__(self, positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
        """[P, V] noise at these positions; rows are cached until `forget`."""
        for position in set(positions) - self.rows.keys():
            self.rows[position] = self._row(position, vocab_size, device)
        return torch.stack([self.rows[position] for position in positions])

    def forget(self, position: int) -> None:
        """Drop the cached rows before `position`."""
        self.rows = {key: row for key, row in self.rows.items() if key >= position}

    def _row(self, position: int, vocab_size: int, device: torch.device) -> Tensor:
        key = mix64(self.stream + position)
        words = torch.arange(vocab_size, dtype=torch.int32, device=device) * -1640531535  # 2^32 / golden ratio, odd
        words = _mix32(_mix32(words ^ _to_int32(key)) ^ _to_int32(key >> 32))
        uniform = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        # log1p keeps full precision where it matters: large noise comes from small uniforms
        return uniform.neg_().log1p_().neg_().log_().neg_()


def mix64(word: int) -> int:
    """A bijection of 64-bit words in which every output bit depends on every input bit (splitmix64's finaliser)."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _to_int32(word: int) -> int:
    """The low 32 bits as a signed int."""
    return (word + 2**31) % 2**32 - 2**31


def _mix32(words: Tensor) -> Tensor:
    """A bijective hash of 32-bit words; products wrap, and masks make shifts logical."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * 0x7FEB352D
    words = words ^ ((words >> 15) & 0x1FFFF)
    words = words * _to_int32(0x846CA68B)
    return words ^ ((words >> 16) & 0xFFFF)
