"""Changes to a copy of a head, each of which undoes one possible fault."""

# w width of an attention head

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.doctor.wiring import Wiring
from eagle.drafters.parts.decoder_block import Rotary

Change = Callable[[Wiring], Wiring]


def on_head(edit: Callable[[Any], None]) -> Change:
    """A change that edits a copy of the head."""

    def change(wiring: Wiring) -> Wiring:
        head = copy.deepcopy(wiring.head)
        edit(head)
        return replace(wiring, head=head)

    return change


def map_tensors(names: list[str], function: Callable[[Tensor], Tensor]) -> Change:
    """A change that puts a function of each of these parameters in its place."""

    def edit(head: Any) -> None:
        for name in names:
            parameter = head.get_parameter(name)
            parameter.data = function(parameter.data)

    return on_head(edit)


def swap_tensors(pairs: list[tuple[str, str]]) -> Change:
    """A change that puts the parameters of each pair in each other's place."""

    def edit(head: Any) -> None:
        for names in pairs:
            first, second = map(head.get_parameter, names)
            first.data, second.data = second.data, first.data

    return on_head(edit)


def set_taps(taps: tuple[int, ...]) -> Change:
    """A change of the target layers that the head reads."""
    return on_head(lambda head: setattr(head, "taps", taps))


def set_rope(names: list[str], values: dict[str, Any]) -> Change:
    """A change of the rotary parameters."""

    def edit(head: Any) -> None:
        head.shape = copy.deepcopy(head.shape)
        head.shape.rope_parameters = values
        for name in names:
            head.set_submodule(name, Rotary(head.shape).to(next(head.parameters()).device))

    return on_head(edit)


def swap_rows(one: str, other: str, starts: tuple[int, int], count: int) -> Change:
    """A change that exchanges so many rows of two matrices, each from its own start on."""

    def edit(head: Any) -> None:
        first, second = (
            head.get_parameter(name).data[start : start + count]
            for name, start in zip((one, other), starts, strict=True)
        )
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    return on_head(edit)


def set_setting(name: str, value: Any) -> Change:
    """A change of a setting, in the head and in every part that copied it."""

    def edit(head: Any) -> None:
        head.settings = head.settings.model_copy(update={name: value})
        for part in head.modules():
            if name in vars(part):
                setattr(part, name, value)

    return on_head(edit)


def reorder_blocks(matrix: Tensor, order: tuple[int, ...]) -> Tensor:
    """The matrix whose block `order[i]` of columns is block i of this one."""
    parts = matrix.chunk(len(order), dim=1)
    return torch.cat([parts[order.index(place)] for place in range(len(order))], dim=1)


def reorder_rows(matrix: Tensor, width: int, interleaved: bool) -> Tensor:
    """The matrix whose rows of each attention head stand in halves where they were `interleaved`, or the reverse."""
    split = (width // 2, 2) if interleaved else (2, width // 2)
    rows = matrix.unflatten(0, (-1, width)).unflatten(1, split)
    return rows.transpose(1, 2).flatten(1, 2).flatten(0, 1)
