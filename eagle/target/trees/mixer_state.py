"""States of modules as values: rows of them side by side, and one of their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

State = dict[tuple[str, Any], Any]
"""A state [P, ..] by kind and number: tensors, or a model's own cache; {} before the first token."""


def pick_states(states: Sequence[State], rows: Sequence[int]) -> State:
    """A copy of these states, of one row each, as the rows of one."""
    return {key: join([states[row][key] for row in rows]) for key in states[rows[0]]}


def split_state(state: State, count: int) -> list[State]:
    """Each row as a state of its own."""
    return [{key: row_of(value, row) for key, value in state.items()} for row in range(count)]


def join(values: Sequence[Any]) -> Any:
    """Rows of one value each as one copy: of tensors, and of what holds them."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values)) if values[0].dim() > 1 else values[0]
    return _rebuild(values[0], lambda *parts: join(parts), values)


def row_of(value: Any, row: int) -> Any:
    """One row of a value, and of all tensors that it holds."""
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() > 1 else value
    return _rebuild(value, lambda part: row_of(part, row), [value])


def _rebuild(value: Any, change: Callable[..., Any], values: Sequence[Any]) -> Any:
    """A copy of containers, caches and their layers, with `change` of what equal places of them hold."""
    if isinstance(value, dict):
        return {key: change(*(other[key] for other in values)) for key in value}
    if isinstance(value, (list, tuple)):
        return type(value)(change(*parts) for parts in zip(*values, strict=True))
    if isinstance(value, Cache) or type(value).__module__.startswith("transformers."):
        held, other = vars(value), copy.copy(value)
        vars(other).update({name: change(*(vars(owner)[name] for owner in values)) for name in held})
        return other
    return value
