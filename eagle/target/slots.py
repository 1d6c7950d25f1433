"""Buffers of several texts, one slot each with its own length, updated in place."""

# B slots of a forward, N new columns, S columns up to the last new one, X heads or taps, D width, M moved columns

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.device import pick_rows, upload

LEAST = 64  # columns of a first allocation


def with_room(columns: int) -> int:
    """The columns allocated for so many: half as many again, for a text that grows."""
    return max(columns + columns // 2, LEAST)


class Rows:
    """One buffer [slots, X, columns, D] of a cache; X and D are those of the first write."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache, self.buffer = cache, torch.empty(0, 0, 0, 0)

    def write(self, new: Tensor) -> Tensor:
        """Write [B, X, N, D] at the cache's aim; return [B, X, S, D], these slots up to the last new column."""
        cache, (count, _, columns, width) = self.cache, new.shape
        end = max(cache.starts) + columns
        self.make_room(new, max(cache.slots) + 1, end)
        buffer = self.buffer
        held = buffer.narrow(0, cache.slots[0], count) if cache.is_dense and count < len(buffer) else buffer
        if cache.is_level:
            held.narrow(2, cache.starts[0], columns).copy_(new)
        else:
            rows = cache.flat_rows(columns, buffer)
            buffer.view(-1, width).index_copy_(0, rows, new.reshape(-1, width))
        held = held.narrow(2, 0, end)
        return held if cache.is_dense else pick_rows(held, cache.slots)

    def make_room(self, like: Tensor, slots: int, columns: int) -> None:
        """Allocate at least this many slots and columns, for tensors [.., X, .., D] like the given one."""
        if self.buffer.shape[2] < columns or self.buffer.shape[0] < slots:
            self._allocate(like, *self.cache.room(columns))

    def resize(self, slots: int, columns: int) -> None:
        """Resize the buffer and keep what fits; does nothing before the first write."""
        if self.buffer.shape[2]:
            self._allocate(self.buffer, slots, columns)

    def _allocate(self, like: Tensor, slots: int, columns: int) -> None:
        """Allocate zeros, because masked columns are multiplied too and must be finite."""
        old, sizes = self.buffer, (slots, like.shape[1], columns, like.shape[3])
        self.buffer = like.new_zeros(sizes)
        if old.shape[2]:
            kept = min(old.shape[0], slots), min(old.shape[2], columns)
            self.buffer[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]


class SlotCache:
    """Buffers with a slot for each text: its committed columns, then those of the last forward until `keep`."""

    def __init__(self) -> None:
        self.lengths = [0]  # committed columns of every slot
        self.buffers: list[Rows] = []
        self.offsets: dict[int, int] = {}  # of slots whose prompt has images: what positions are ahead of columns
        self.reserved = (1, 0)  # slots and columns that the texts at hand may come to
        self.places: Any = None  # where the tokens of the forward that runs stand
        self.counts_positions = False  # whether the model takes lengths of its cache for positions
        self.aim([0])

    def add(self) -> Rows:
        """Add a buffer."""
        self.buffers.append(Rows(self))
        return self.buffers[-1]

    @property
    def length(self) -> int:
        """The committed columns of the first slot, for callers with a single text."""
        return self.lengths[0]

    @length.setter
    def length(self, length: int) -> None:
        self.lengths[0] = length
        self.aim([0])

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one slot, over all buffers in use."""
        buffers = [rows.buffer for rows in self.buffers if rows.buffer.shape[2]]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def aim(self, slots: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """Direct the next writes to these slots, after their committed columns or from `starts` on."""
        self.slots = list(slots)
        self.starts = [self.lengths[slot] for slot in slots] if starts is None else list(starts)
        self.is_dense = self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))
        self.is_level = self.is_dense and min(self.starts) == max(self.starts)
        self.flat: dict[Any, Tensor] = {}

    def from_columns(self, positions: Tensor) -> Tensor:
        """Positions [B, N] of the slots at the aim as the model counts them, from those that count columns."""
        if not any(map(self.offsets.get, self.slots)):
            return positions
        offsets = torch.tensor([self.offsets.get(slot, 0) for slot in self.slots], device=positions.device)
        return positions + offsets[:, None]

    def room(self, end: int) -> tuple[int, int]:
        """Slots and columns to allocate for texts up to this column."""
        slots, columns = self.reserved
        held = max(columns, self.sizes[1])
        return max(slots, len(self.lengths)), held if held >= end else with_room(end)

    @property
    def sizes(self) -> tuple[int, int]:
        """Allocated slots and columns."""
        shapes = [rows.buffer.shape for rows in self.buffers if rows.buffer.shape[2]]
        return (shapes[0][0], max(shape[2] for shape in shapes)) if shapes else (0, 0)

    def flat_rows(self, count: int, buffer: Tensor) -> Tensor:
        """[B * X * N], row numbers of new columns in [slots * X * columns, D], computed once per forward."""
        heads, held = buffer.shape[1:3]
        key = (heads, held, count, buffer.device)
        if key not in self.flat:
            first = torch.tensor(self.slots)[:, None, None] * heads + torch.arange(heads)[:, None]
            places = torch.tensor(self.starts)[:, None, None] + torch.arange(count)
            self.flat[key] = upload((first * held + places).flatten(), buffer.device)
        return self.flat[key]

    @torch.inference_mode()
    def keep(self, paths: Mapping[int, Sequence[int]], counts: Mapping[int, int] | None = None) -> None:
        """Commit these of each slot's newest columns, in this order; earlier columns stay in place.

        With `counts`, only so many of them are committed, and the rest move up behind them.
        """
        moves = [
            (slot, self.lengths[slot] + node, self.lengths[slot] + place)
            for slot, path in paths.items()
            for place, node in enumerate(path)
            if place != node
        ]
        if moves:
            self._move(*torch.tensor(moves).T)
        for slot, path in paths.items():
            self.lengths[slot] += len(path) if counts is None else counts[slot]

    @torch.inference_mode()
    def move(self, slots: Sequence[int], nodes: Tensor) -> None:
        """Move the newest columns [B, W] of each slot to the end of what is committed, in their order."""
        count, device = nodes.shape[1], nodes.device
        place = torch.tensor([self.lengths[slot] for slot in slots])[:, None] + torch.arange(count)
        slot, place = upload(torch.stack([torch.tensor(slots)[:, None].expand(-1, count), place]), device).flatten(1)
        start = place.view_as(nodes)[:, :1]
        self._move(slot, (start + nodes).flatten(), place)

    @torch.inference_mode()
    def drop(self, gaps: Mapping[int, tuple[int, int]]) -> None:
        """Drop a range of committed columns of each slot; later columns move up."""
        moves = [
            torch.stack([torch.full_like(origin, slot), origin, origin - (stop - start)])
            for slot, (start, stop) in gaps.items()
            for origin in [torch.arange(stop, self.lengths[slot])]
        ]
        if moves:
            self._move(*torch.cat(moves, dim=1))
        for slot, (start, stop) in gaps.items():
            self.lengths[slot] -= stop - start

    def _move(self, slots: Tensor, origin: Tensor, place: Tensor) -> None:
        """Copy columns [M] to other places of their slots in one operation."""
        buffers = [held.buffer for held in self.buffers if held.buffer.shape[2]]
        copy_columns(zip(buffers, buffers, strict=True), torch.stack([slots, origin]), torch.stack([slots, place]))

    @torch.inference_mode()
    def swap(self, one: int, other: int) -> None:
        """Exchange two slots."""
        if one != other:
            length = max(self.lengths[one], self.lengths[other])
            for rows in (rows for rows in self.buffers if rows.buffer.shape[2]):
                if len(rows.buffer) <= max(one, other):  # a slot whose text has not been read yet
                    rows.resize(*self.room(length))
                first, second = rows.buffer[one, :, :length], rows.buffer[other, :, :length]
                before = first.clone()
                first.copy_(second)
                second.copy_(before)
            self._set_offsets({one: self.offsets.get(other), other: self.offsets.get(one)})
            self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Empty a slot and fill it with zeros: a mask hides what a text left there, but not what is no number."""
        for buffer in (rows.buffer for rows in self.buffers):
            if slot < len(buffer):
                buffer[slot].zero_()
        if slot < len(self.lengths):
            self.lengths[slot] = 0
        self.offsets.pop(slot, None)

    @torch.inference_mode()
    def copy(self, slot: int, other: int) -> None:
        """Copy the committed columns of a slot into another slot."""
        length = self.lengths[slot]
        for rows in self.buffers:
            if rows.buffer.shape[2] and len(rows.buffer) <= other:
                rows.resize(*self.room(length))
            rows.buffer[other:, :, :length][:1] = rows.buffer[slot:, :, :length][:1]
        self.lengths[other] = length
        self._set_offsets({other: self.offsets.get(slot)})

    def _set_offsets(self, offsets: Mapping[int, int | None]) -> None:
        """Note these slots' offsets; None for a slot whose prompt has no images."""
        self.offsets = {slot: value for slot, value in {**self.offsets, **offsets}.items() if value is not None}

    @torch.inference_mode()
    def reserve(self, slots: int, columns: int, most: int | None = None) -> None:
        """Reserve so many slots and columns; what is held stays up to twice that, or to `most` slots times columns."""
        held = self.sizes
        sizes = max(slots, held[0]), max(columns, held[1])
        if sizes[0] * sizes[1] > (2 * max(slots * columns, LEAST) if most is None else most):
            sizes = slots, columns
        self.reserved = sizes
        self.lengths = [min(length, sizes[1]) for length in (self.lengths + [0] * sizes[0])[: sizes[0]]]
        if held[0] > sizes[0] or held[1] > sizes[1]:
            for rows in self.buffers:
                rows.resize(*sizes)


def copy_columns(buffers: Iterable[tuple[Tensor, Tensor]], origin: Tensor, place: Tensor) -> None:
    """Copy columns (slot, column) [2, M] from the first buffer of each pair to places of the second."""
    rows: dict[Any, Tensor] = {}
    for read, written in buffers:
        heads, columns = read.shape[1], (read.shape[2], written.shape[2])
        shape = (heads, *columns, read.device)
        if shape not in rows:
            flat = [
                ((slots[:, None] * heads + torch.arange(heads, device=slots.device)) * count + held[:, None]).flatten()
                for (slots, held), count in zip((origin, place), columns, strict=True)
            ]
            rows[shape] = upload(torch.stack(flat), read.device)
        before, after = rows[shape]
        width = read.shape[3]
        written.view(-1, width).index_copy_(0, after, read.view(-1, width).index_select(0, before))
