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
    """Return a change that applies `edit`, which works in place, to a copy of the head: the examined head stays."""

    def change(wiring: Wiring) -> Wiring:
        """Return the examined head and its inputs with an edited copy of the head."""
        head = copy.deepcopy(wiring.head)
        edit(head)
        return replace(wiring, head=head)

    return change


def map_tensors(names: list[str], function: Callable[[Tensor], Tensor]) -> Change:
    """Return a change that replaces each of these parameters by a function of itself."""

    def edit(head: Any) -> None:
        """Replace the parameters of the head, in place."""
        for name in names:
            parameter = head.get_parameter(name)
            parameter.data = function(parameter.data)

    return on_head(edit)


def swap_tensors(pairs: list[tuple[str, str]]) -> Change:
    """Return a change that exchanges the two parameters of each pair of names."""

    def edit(head: Any) -> None:
        """Exchange the parameters of each pair, in place."""
        for name, peer_name in pairs:
            parameter = head.get_parameter(name)
            peer = head.get_parameter(peer_name)
            parameter.data, peer.data = peer.data, parameter.data

    return on_head(edit)


def swap_rows(name: str, peer_name: str, starts: tuple[int, int], count: int) -> Change:
    """Return a change that exchanges `count` rows of two matrices, which begin at `starts[0]` and at `starts[1]`."""

    def edit(head: Any) -> None:
        """Exchange the rows of both matrices, in place."""
        rows = head.get_parameter(name).data[starts[0] : starts[0] + count]
        peer_rows = head.get_parameter(peer_name).data[starts[1] : starts[1] + count]
        # these are views of the parameters: one must be saved before it is written over
        buffer = rows.clone()
        rows.copy_(peer_rows)
        peer_rows.copy_(buffer)

    return on_head(edit)


def set_taps(taps: tuple[int, ...]) -> Change:
    """Return a change of the target's layers whose inputs the head reads; -1 stands for the final norm's output."""
    return on_head(lambda head: setattr(head, "taps", taps))


def set_rope(names: list[str], rope_parameters: dict[str, Any]) -> Change:
    """Return a change of the rotary parameters; `names` are those of the head's rotary modules."""

    def edit(head: Any) -> None:
        """Replace the head's rotary modules by ones with the new parameters, in place."""
        # rotary modules read the shape, which a copied head still shares with the original
        head.shape = copy.deepcopy(head.shape)
        head.shape.rope_parameters = rope_parameters
        device = next(head.parameters()).device
        for name in names:
            head.set_submodule(name, Rotary(head.shape).to(device))

    return on_head(edit)


def set_setting(name: str, value: Any) -> Change:
    """Return a change of one setting of the head, also in the modules that copied it."""

    def edit(head: Any) -> None:
        """Set the value in the head's settings and in its modules, in place."""
        head.settings = head.settings.model_copy(update={name: value})
        # modules copy the settings that they read, under the same name, when they are made
        for module in head.modules():
            if name in vars(module):
                setattr(module, name, value)

    return on_head(edit)


def reorder_blocks(matrix: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a copy of a matrix whose block `order[i]` of columns is block i of `matrix`, in `len(order)` equal blocks.

    Each block of columns reads one of several inputs that are concatenated.
    """
    blocks = matrix.chunk(len(order), dim=1)
    return torch.cat([blocks[order.index(i)] for i in range(len(order))], dim=1)


def reorder_rows(matrix: Tensor, width: int, interleaved: bool) -> Tensor:
    """Return a projection whose rows are in the order of the other convention of rotary embeddings.

    Args:
        matrix: [heads * w, ..], a query or key projection.
        width: w, the number of rows of one attention head.
        interleaved: Whether the two rows that are rotated together are neighbours; they become the same row of each
            half of a head. Else the reverse.
    """
    # the other convention has these two dimensions in the other order
    split = (width // 2, 2) if interleaved else (2, width // 2)
    # [heads, w / 2, 2, ..] or [heads, 2, w / 2, ..]
    rows = matrix.unflatten(0, (-1, width)).unflatten(1, split)
    return rows.transpose(1, 2).flatten(1, 2).flatten(0, 1)
