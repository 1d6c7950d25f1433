"""Ways to change a copy of a head, each back to where a fault had moved it from."""

# w width of an attention head

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle.doctor.effects import Reading
from eagle.drafters.parts.blocks import Rotary

Change = Callable[[Reading], Reading]


def on_head(change: Callable[[Any], None]) -> Change:
    """A change of the head's copy."""

    def changed(reading: Reading) -> Reading:
        head = copy.deepcopy(reading.head)
        change(head)
        return replace(reading, head=head)

    return changed


def setting(**fields: Any) -> Change:
    """Other settings of the head."""

    def change(head: Any) -> None:
        head.settings = head.settings.model_copy(update=fields)

    return on_head(change)


def weight(name: str, made: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """A tensor made of the one that is there."""

    def change(head: Any) -> None:
        parameter = head.get_parameter(name)
        parameter.data = made(parameter.data)

    return change


def tapped(taps: tuple[int, ...]) -> Change:
    """Other states of the target."""

    def change(head: Any) -> None:
        head.taps = taps

    return on_head(change)


def ordered(matrix: Tensor, order: tuple[int, ...]) -> Tensor:
    """The matrix whose block `order[i]` is block i of this one."""
    parts = matrix.chunk(len(order), dim=1)
    return torch.cat([parts[order.index(place)] for place in range(len(order))], dim=1)


def off(name: str) -> Callable[[Any], None]:
    """A norm left out."""

    def change(head: Any) -> None:
        owner, _, own = name.rpartition(".")
        parent: Any = head.get_submodule(owner)
        if own.isdigit():
            parent[int(own)] = nn.Identity()
        else:
            setattr(parent, own, nn.Identity())

    return change


def turning(values: dict[str, Any]) -> Change:
    """Other rotary parameters."""

    def change(head: Any) -> None:
        head.shape = copy.deepcopy(head.shape)
        head.shape.rope_parameters = values
        head.rotary = Rotary(head.shape).to(head.layers[0].mlp.up_proj.weight.device)

    return on_head(change)


def interleaved(back: bool, parts: str = "qk") -> Callable[[Any], None]:
    """Rows of queries, of keys or of both that stood in halves in turns; or `back`."""

    def change(head: Any) -> None:
        attention = head.layers[0].self_attn
        for part in (attention.get_submodule(f"{name}_proj") for name in parts):
            rows = part.weight.data.unflatten(0, (-1, attention.width))
            split = (attention.width // 2, 2) if back else (2, attention.width // 2)
            part.weight.data = rows.unflatten(1, split).transpose(1, 2).flatten(1, 2).flatten(0, 1)

    return change
