"""Buffers of several sequences, one slot each with its own length, updated in place."""

# B slots of a forward, N new columns, S columns up to the last new one, X heads or taps, D width, M moved columns

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.device import pick_rows, upload

LEAST = 64  # columns of a first allocation


def with_room(columns: int) -> int:
    """Return the columns allocated for so many: half as many again, for a sequence that grows."""
    return max(columns + columns // 2, LEAST)


class Rows:
    """One buffer [slots, X, columns, D] of a cache; X and D are those of the first write."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.buffer = torch.empty(0, 0, 0, 0)

    def write(self, new: Tensor) -> Tensor:
        """Write [B, X, N, D] at the write offset; return [B, X, S, D], these slots up to the last new column."""
        cache = self.cache
        count, _, columns, width = new.shape
        end = max(cache.starts) + columns
        self.make_room(new, max(cache.slots) + 1, end)
        buffer = self.buffer
        slots = buffer
        # neighbouring slots are a view of the buffer: nothing has to be gathered
        if cache.is_dense and count < len(buffer):
            slots = buffer.narrow(0, cache.slots[0], count)
        if cache.is_level:
            slots.narrow(2, cache.starts[0], columns).copy_(new)
        else:
            indices = cache.flat_rows(columns, buffer)
            buffer.view(-1, width).index_copy_(0, indices, new.reshape(-1, width))
        slots = slots.narrow(2, 0, end)
        if cache.is_dense:
            return slots
        return pick_rows(slots, cache.slots)

    def make_room(self, like: Tensor, slots: int, columns: int) -> None:
        """Allocate at least this many slots and columns, for tensors [.., X, .., D] like the given one."""
        if self.buffer.shape[2] < columns or self.buffer.shape[0] < slots:
            self._allocate(like, *self.cache.room(columns))

    def resize(self, slots: int, columns: int) -> None:
        """Resize the buffer and keep what fits; does nothing before the first write."""
        if self.buffer.shape[2]:
            self._allocate(self.buffer, slots, columns)

    def _allocate(self, like: Tensor, slots: int, columns: int) -> None:
        old = self.buffer
        # zeros, because masked columns are multiplied too and must be finite
        self.buffer = like.new_zeros(slots, like.shape[1], columns, like.shape[3])
        if old.shape[2]:
            common = old[:slots, :, :columns]
            self.buffer[: common.shape[0], :, : common.shape[2]] = common


class SlotCache:
    """Buffers with a slot for each sequence: its committed columns, then those of the last forward until `keep`."""

    def __init__(self) -> None:
        self.lengths = [0]  # committed columns of every slot
        self.buffers: list[Rows] = []
        self.offsets: dict[
            int, int
        ] = {}  # of slots whose prompt has images: what positions are ahead of columns
        self.reserved = (1, 0)  # slots and columns that the current sequences may come to
        self.token_positions: Any = None  # positions of the forward that runs
        self.counts_positions = False  # whether the model takes lengths of its cache for positions
        self.set_write_offset([0])

    def add(self) -> Rows:
        """Add a buffer."""
        self.buffers.append(Rows(self))
        return self.buffers[-1]

    @property
    def written(self) -> list[Rows]:
        """The buffers that have been written to."""
        return [rows for rows in self.buffers if rows.buffer.shape[2]]

    @property
    def length(self) -> int:
        """The committed columns of the first slot, for callers with a single sequence."""
        return self.lengths[0]

    @length.setter
    def length(self, length: int) -> None:
        self.lengths[0] = length
        self.set_write_offset([0])

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one slot, over all buffers in use."""
        buffers = [rows.buffer for rows in self.written]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def set_write_offset(self, slots: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """Direct the next writes to these slots, after their committed columns or from `starts` on."""
        self.slots = list(slots)
        if starts is None:
            starts = [self.lengths[slot] for slot in slots]
        self.starts = list(starts)
        first = self.slots[0]
        self.is_dense = self.slots == list(range(first, first + len(self.slots)))
        self.is_level = self.is_dense and min(self.starts) == max(self.starts)
        self.flat: dict[Any, Tensor] = {}

    def from_columns(self, positions: Tensor) -> Tensor:
        """Convert positions [B, N] of the current slots, which count columns, to those that the model counts."""
        if not any(map(self.offsets.get, self.slots)):
            return positions
        offsets = [self.offsets.get(slot, 0) for slot in self.slots]
        return positions + torch.tensor(offsets, device=positions.device)[:, None]

    def room(self, end: int) -> tuple[int, int]:
        """Return slots and columns to allocate for sequences up to this column."""
        slots, columns = self.reserved
        columns = max(columns, self.sizes[1])
        if columns < end:
            columns = with_room(end)
        return max(slots, len(self.lengths)), columns

    @property
    def sizes(self) -> tuple[int, int]:
        """Allocated slots and columns."""
        shapes = [rows.buffer.shape for rows in self.written]
        if not shapes:
            return 0, 0
        return shapes[0][0], max(shape[2] for shape in shapes)

    def flat_rows(self, count: int, buffer: Tensor) -> Tensor:
        """Return [B * X * N], the new columns' indices in [slots * X * columns, D], computed once per forward."""
        heads, columns = buffer.shape[1:3]
        key = (heads, columns, count, buffer.device)
        if key not in self.flat:
            # [B, X, 1] and [B, 1, N]
            head_rows = (
                torch.tensor(self.slots)[:, None, None] * heads + torch.arange(heads)[:, None]
            )
            new_columns = torch.tensor(self.starts)[:, None, None] + torch.arange(count)
            indices = head_rows * columns + new_columns
            self.flat[key] = upload(indices.flatten(), buffer.device)
        return self.flat[key]

    @torch.inference_mode()
    def keep(
        self,
        paths: Mapping[int, Sequence[int]],
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """Commit these of each slot's newest columns, in this order; earlier columns stay in place.

        Args:
            paths: the columns of each slot, counted from its first one that is not committed.
            counts: how many of them are committed; the rest move up after those. None: all.
        """
        moves = []
        for slot, path in paths.items():
            start = self.lengths[slot]
            # what is in its place already stays
            moves += [
                (slot, start + node, start + index)
                for index, node in enumerate(path)
                if index != node
            ]
        if moves:
            self._move(*torch.tensor(moves).T)
        for slot, path in paths.items():
            self.lengths[slot] += len(path) if counts is None else counts[slot]

    @torch.inference_mode()
    def move(self, slots: Sequence[int], nodes: Tensor) -> None:
        """Move the newest columns [B, W] of each slot to the end of what is committed, in their order."""
        count = nodes.shape[1]
        starts = torch.tensor([self.lengths[slot] for slot in slots])
        destination = starts[:, None] + torch.arange(count)
        slot_ids = torch.tensor(slots)[:, None].expand(-1, count)
        # one copy to the device for both
        slot_ids, destination = upload(torch.stack([slot_ids, destination]), nodes.device).flatten(
            1
        )
        first = destination.view_as(nodes)[:, :1]
        self._move(slot_ids, (first + nodes).flatten(), destination)

    @torch.inference_mode()
    def drop(self, gaps: Mapping[int, tuple[int, int]]) -> None:
        """Drop a range of committed columns of each slot; later columns move up."""
        moves = []
        for slot, (start, stop) in gaps.items():
            origin = torch.arange(stop, self.lengths[slot])
            moves.append(
                torch.stack([torch.full_like(origin, slot), origin, origin - (stop - start)])
            )
            self.lengths[slot] -= stop - start
        if moves:
            self._move(*torch.cat(moves, dim=1))

    def _move(self, slots: Tensor, origin: Tensor, destination: Tensor) -> None:
        """Copy columns [M] to other columns of their slots in one operation."""
        pairs = [(rows.buffer, rows.buffer) for rows in self.written]
        copy_columns(pairs, torch.stack([slots, origin]), torch.stack([slots, destination]))

    @torch.inference_mode()
    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        if first == second:
            return
        length = max(self.lengths[first], self.lengths[second])
        for rows in self.written:
            # a slot whose sequence has not been read yet may lie beyond the buffer
            if len(rows.buffer) <= max(first, second):
                rows.resize(*self.room(length))
            first_columns = rows.buffer[first, :, :length]
            second_columns = rows.buffer[second, :, :length]
            saved = first_columns.clone()
            first_columns.copy_(second_columns)
            second_columns.copy_(saved)
        self._set_offsets({first: self.offsets.get(second), second: self.offsets.get(first)})
        self.lengths[first], self.lengths[second] = self.lengths[second], self.lengths[first]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Empty a slot and fill it with zeros: a mask hides what a sequence left there, but not NaN."""
        for rows in self.buffers:
            if slot < len(rows.buffer):
                rows.buffer[slot].zero_()
        if slot < len(self.lengths):
            self.lengths[slot] = 0
        self.offsets.pop(slot, None)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy the committed columns of a slot into another slot."""
        length = self.lengths[source]
        for rows in self.buffers:
            if rows.buffer.shape[2] and len(rows.buffer) <= target:
                rows.resize(*self.room(length))
            # slices, which are empty before the first write
            rows.buffer[target:, :, :length][:1] = rows.buffer[source:, :, :length][:1]
        self.lengths[target] = length
        self._set_offsets({target: self.offsets.get(source)})

    def _set_offsets(self, offsets: Mapping[int, int | None]) -> None:
        """Note these slots' offsets; None for a slot whose prompt has no images."""
        merged = {**self.offsets, **offsets}
        self.offsets = {slot: value for slot, value in merged.items() if value is not None}

    @torch.inference_mode()
    def reserve(self, slots: int, columns: int, most: int | None = None) -> None:
        """Reserve so many slots and columns.

        What is allocated stays up to twice that, or with `most` up to so many slots times columns.
        """
        allocated = self.sizes
        sizes = (max(slots, allocated[0]), max(columns, allocated[1]))
        limit = 2 * max(slots * columns, LEAST) if most is None else most
        if sizes[0] * sizes[1] > limit:
            sizes = (slots, columns)
        self.reserved = sizes
        # slots and columns beyond these are lost
        lengths = self.lengths + [0] * sizes[0]
        self.lengths = [min(length, sizes[1]) for length in lengths[: sizes[0]]]
        if allocated[0] > sizes[0] or allocated[1] > sizes[1]:
            for rows in self.buffers:
                rows.resize(*sizes)


def copy_columns(
    buffers: Iterable[tuple[Tensor, Tensor]],
    origin: Tensor,
    destination: Tensor,
) -> None:
    """Copy columns (slot, column) [2, M] from the first buffer of each pair to those of the second."""
    indices: dict[Any, Tensor] = {}  # by shape, as most layers have one shape
    for source, target in buffers:
        heads, width = source.shape[1], source.shape[3]
        shape = (heads, source.shape[2], target.shape[2], source.device)
        if shape not in indices:
            # both in one copy to the device
            read = _flatten(origin, heads, source.shape[2])
            write = _flatten(destination, heads, target.shape[2])
            indices[shape] = upload(torch.stack([read, write]), source.device)
        read, write = indices[shape]
        moved = source.view(-1, width).index_select(0, read)
        target.view(-1, width).index_copy_(0, write, moved)


def _flatten(columns_at: Tensor, heads: int, columns: int) -> Tensor:
    """Return [M * X], the indices of (slot, column) [2, M] in a buffer [slots * X * columns, D]."""
    slot_ids, indices = columns_at
    head_rows = slot_ids[:, None] * heads + torch.arange(heads, device=slot_ids.device)
    return (head_rows * columns + indices[:, None]).flatten()
