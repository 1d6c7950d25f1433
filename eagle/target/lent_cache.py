"""Caches that keep nothing: none at all, or another cache's keys and values to read."""

# B texts, N new columns, S columns of the lent cache, X heads, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class NoCache(Cache):
    """A cache that keeps nothing. Without a cache, transformers checks for packed texts, and the host waits."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Nothing() for _ in range(num_layers)])


class _Nothing(CacheLayerMixin):
    """A layer that returns only the new keys and values."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class LentCache(Cache):
    """Read-only keys and values [1, X, S, D] of committed tokens by layer; new tokens attend to them."""

    def __init__(self, lent: Sequence[tuple[Tensor, Tensor]], offset: int = 0) -> None:
        super().__init__(layers=[_Lent(keys, values) for keys, values in lent])
        self.starts, self.offset = [lent[0][0].shape[2]], offset

    def from_columns(self, positions: Tensor) -> Tensor:
        """Positions as the model counts them, from those that count columns."""
        return positions + self.offset


class _Lent(_Nothing):
    """One layer's read-only keys and values, followed by the new ones."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lent = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.lent
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_seq_length(self) -> int:
        return self.lent[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lent[0].shape[2] + query_length, 0
