"""Buffers of several sequences, updated in place.

Each sequence has a cache row, an index in the batch dimension of every buffer, and its own length in columns. A column
holds one token.
"""

# B cache rows of a forward, N new columns, S columns up to the last new one, X heads or taps, D width, M moved columns

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.device import pick_rows, upload

MIN_COLUMNS = 64  # columns of a first allocation


def with_room(columns: int) -> int:
    """Return the number of columns (tokens) to allocate in a buffer where `columns` are needed.

    It is half as many again, because sequences grow, and a buffer that is full must be copied to a larger one.
    """
    return max(columns + columns // 2, MIN_COLUMNS)


class CacheBuffer:
    """One buffer [cache rows, X, columns, D] of a cache, such as a layer's keys.

    There is a cache row for each sequence and a column for each token; X heads or taps and width D are those of the
    first write.
    """

    def __init__(self, cache: RowCache) -> None:
        """Make an empty buffer, such as for one layer's keys; `cache` tells it where to write."""
        self.cache = cache
        self.tensor = torch.empty(0, 0, 0, 0)

    def write(self, new: Tensor) -> Tensor:
        """Write new tokens' keys (or values) at the cache's write offset; return all those that attention then reads.

        Args:
            new: [B, X, N, D], as keys or values of N new tokens of B sequences, for X heads (or tapped layers) of width
                D.

        Returns:
            [B, X, S, D], the cache rows of this forward up to the last new column of the longest one.
        """
        cache = self.cache
        count, _, columns, width = new.shape
        end = max(cache.starts) + columns
        self.make_room(new, max(cache.active_rows) + 1, end)
        tensor = self.tensor
        active = tensor
        # consecutive cache rows are a view of the buffer: nothing has to be gathered
        if cache.is_contiguous and count < len(tensor):
            active = tensor.narrow(0, cache.active_rows[0], count)
        # one slice takes the new columns only if they begin at the same column in all cache rows
        if cache.is_aligned:
            active.narrow(2, cache.starts[0], columns).copy_(new)
        else:
            indices = cache.flat_indices(columns, tensor)  # of rows [D] in the flattened buffer
            tensor.view(-1, width).index_copy_(0, indices, new.reshape(-1, width))
        active = active.narrow(2, 0, end)
        if cache.is_contiguous:
            return active
        return pick_rows(active, cache.active_rows)

    def make_room(self, like: Tensor, cache_rows: int, columns: int) -> None:
        """Make the buffer hold at least this many cache rows (sequences) and columns (tokens of each).

        `like` is a tensor [.., X, .., D] that gives its heads X, width D, dtype and device.
        """
        if self.tensor.shape[2] < columns or self.tensor.shape[0] < cache_rows:
            self._allocate(like, *self.cache.room(columns))

    def resize(self, cache_rows: int, columns: int) -> None:
        """Resize the buffer to these numbers of sequences and tokens, and keep the contents that fit.

        Before the first write it has no columns, and nothing is done, as its heads and width are unknown.
        """
        if self.tensor.shape[2]:
            self._allocate(self.tensor, cache_rows, columns)

    def _allocate(self, like: Tensor, cache_rows: int, columns: int) -> None:
        """Replace the buffer by one for so many sequences (rows) and tokens (columns), with the old contents that fit.

        `like` is a tensor [.., X, .., D] that gives heads X, width D, dtype and device.
        """
        old = self.tensor
        # zeros, because masked columns are multiplied too and must be finite
        self.tensor = like.new_zeros(cache_rows, like.shape[1], columns, like.shape[3])
        if old.shape[2]:
            common = old[:cache_rows, :, :columns]
            self.tensor[: common.shape[0], :, : common.shape[2]] = common


class RowCache:
    """Buffers with a cache row for each sequence.

    A cache row holds the committed columns of its sequence, and after them the columns of the last forward, such as
    those of a draft tree. `keep` commits the accepted ones of these.
    """

    def __init__(self) -> None:
        """Make a cache for one sequence; `add` gives it buffers, and `reserve` further cache rows (sequences)."""
        self.lengths = [0]  # committed columns of every cache row
        self.buffers: list[CacheBuffer] = []
        # by cache row, what is added to a column for its position, for prompts with images alone:
        # many tokens of an image share a position
        self.offsets: dict[int, int] = {}
        self.reserved = (1, 0)  # cache rows and columns that the current sequences may grow to
        self.token_positions: Any = None  # the `TokenPositions` of the forward that runs
        # whether the model computes its positions from the length of its cache
        self.counts_positions = False
        self.set_write_offset([0])

    def add(self) -> CacheBuffer:
        """Add a buffer, which takes memory from its first write on, and return it.

        A buffer holds one layer's keys or values, for example.
        """
        self.buffers.append(CacheBuffer(self))
        return self.buffers[-1]

    @property
    def written(self) -> list[CacheBuffer]:
        """The buffers that have been written to, and so have memory."""
        return [buffer for buffer in self.buffers if buffer.tensor.shape[2]]

    @property
    def length(self) -> int:
        """The number of committed columns of the first cache row, for callers with a single sequence."""
        return self.lengths[0]

    @length.setter
    def length(self, length: int) -> None:
        """Set this number; the next forward writes after these columns."""
        self.lengths[0] = length
        self.set_write_offset([0])

    @property
    def column_bytes(self) -> int:
        """Bytes of one token of one sequence, over all buffers in use: a column of one cache row."""
        buffers = [buffer.tensor for buffer in self.written]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def set_write_offset(
        self, cache_rows: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        """Let the next forward write to these cache rows, after their committed columns or from columns `starts` on.

        A model calls its cache with keys and values alone, so the cache must be told before where they belong. A cache
        row is a sequence's index in the batch dimension of the buffers, and a column holds one token.
        """
        self.active_rows = list(cache_rows)
        if starts is None:
            starts = [self.lengths[cache_row] for cache_row in cache_rows]
        self.starts = list(starts)
        first = self.active_rows[0]
        # consecutive cache rows in ascending order, which are a view of a buffer
        self.is_contiguous = self.active_rows == list(range(first, first + len(self.active_rows)))
        # whether the new columns are one slice of a buffer
        self.is_aligned = self.is_contiguous and min(self.starts) == max(self.starts)
        self.flat: dict[Any, Tensor] = {}  # of `flat_indices`, shared by the layers of one forward

    def from_columns(self, positions: Tensor) -> Tensor:
        """Convert indices of tokens in the cache, [B, N] of B sequences, to the positions that the model is given.

        They differ after images, of which many tokens share a position.
        """
        # no sequence has images
        if not any(map(self.offsets.get, self.active_rows)):
            return positions
        offsets = [self.offsets.get(cache_row, 0) for cache_row in self.active_rows]
        return positions + torch.tensor(offsets, device=positions.device)[:, None]

    def room(self, end: int) -> tuple[int, int]:
        """Return the numbers of cache rows and columns to allocate so that column `end` - 1 exists.

        A cache row is a sequence's index in the buffers, and a column holds one token. They are at least what was
        reserved.
        """
        cache_rows, columns = self.reserved
        # a new buffer gets as many columns as the others have
        columns = max(columns, self.sizes[1])
        if columns < end:
            columns = with_room(end)
        return max(cache_rows, len(self.lengths)), columns

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of allocated cache rows (sequences) and columns (tokens); (0, 0) before the first write."""
        shapes = [buffer.tensor.shape for buffer in self.written]
        if not shapes:
            return 0, 0
        return shapes[0][0], max(shape[2] for shape in shapes)

    def flat_indices(self, count: int, buffer: Tensor) -> Tensor:
        """Return [B * X * N], where each new token belongs in a buffer viewed as [cache rows * X * columns, D].

        Layers of one shape share it, so that it is computed and copied to the device once per forward. B are the cache
        rows of the forward.

        Args:
            count: N, the number of new columns of each cache row.
            buffer: [cache rows, X, columns, D], for X heads of width D.
        """
        heads, columns = buffer.shape[1:3]
        key = (heads, columns, count, buffer.device)
        if key not in self.flat:
            # [B, X, 1], the index of each cache row's head; and [B, 1, N]
            head_rows = (
                torch.tensor(self.active_rows)[:, None, None] * heads + torch.arange(heads)[:, None]
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
        """Commit the accepted columns of the last forward, moved next to the committed ones; the others are dropped.

        A column holds one token, such as a node of a draft tree; committed ones are part of the sequence for good.

        Args:
            paths: by cache row the columns to keep, in their new order, counted from its first uncommitted column.
            counts: by cache row how many of them are committed; the rest move up after those. None: all.
        """
        moves = []  # (cache row, column, new column)
        for cache_row, path in paths.items():
            start = self.lengths[cache_row]
            # a column that is in its place already need not be copied
            moves += [
                (cache_row, start + node, start + index)
                for index, node in enumerate(path)
                if index != node
            ]
        if moves:
            self._move(*torch.tensor(moves).T)
        for cache_row, path in paths.items():
            self.lengths[cache_row] += len(path) if counts is None else counts[cache_row]

    @torch.inference_mode()
    def move(self, cache_rows: Sequence[int], nodes: Tensor) -> None:
        """Move uncommitted columns (tokens) right after the committed ones, in the given order, but do not commit them.

        Args:
            cache_rows: B cache rows.
            nodes: [B, W], the W columns to move of each, counted from its first uncommitted column. They may lie on a
                device, so that the host does not wait for them.
        """
        count = nodes.shape[1]
        starts = torch.tensor([self.lengths[cache_row] for cache_row in cache_rows])
        destination = starts[:, None] + torch.arange(count)
        cache_row_ids = torch.tensor(cache_rows)[:, None].expand(-1, count)
        # one copy to the device for both
        cache_row_ids, destination = upload(
            torch.stack([cache_row_ids, destination]), nodes.device
        ).flatten(1)
        first = destination.view_as(nodes)[:, :1]  # the first uncommitted column of each cache row
        self._move(cache_row_ids, (first + nodes).flatten(), destination)

    @torch.inference_mode()
    def drop(self, gaps: Mapping[int, tuple[int, int]]) -> None:
        """Drop committed columns (tokens) `start` to `stop` (exclusive) of each cache row; later columns move up.

        `gaps` holds (start, stop) by cache row.
        """
        moves = []
        for cache_row, (start, stop) in gaps.items():
            origin = torch.arange(stop, self.lengths[cache_row])
            # cache row, column and new column of each moved column
            moves.append(
                torch.stack([torch.full_like(origin, cache_row), origin, origin - (stop - start)])
            )
            self.lengths[cache_row] -= stop - start
        if moves:
            self._move(*torch.cat(moves, dim=1))

    def _move(self, cache_rows: Tensor, origin: Tensor, destination: Tensor) -> None:
        """Copy M columns (tokens) from `origin` [M] to `destination` [M] in their cache rows [M], in all buffers.

        In each buffer all are read before any is written, so that they may overlap.
        """
        pairs = [(buffer.tensor, buffer.tensor) for buffer in self.written]
        copy_columns(
            pairs, torch.stack([cache_rows, origin]), torch.stack([cache_rows, destination])
        )

    @torch.inference_mode()
    def swap(self, first: int, second: int) -> None:
        """Exchange the contents of two cache rows.

        A cache row is a sequence's index in the batch dimension of all buffers. Active sequences must lie without gaps.
        """
        if first == second:
            return
        length = max(self.lengths[first], self.lengths[second])
        for buffer in self.written:
            # the buffer may not have the cache row yet of a sequence that has not been read
            if len(buffer.tensor) <= max(first, second):
                buffer.resize(*self.room(length))
            first_columns = buffer.tensor[first, :, :length]
            second_columns = buffer.tensor[second, :, :length]
            saved = first_columns.clone()
            first_columns.copy_(second_columns)
            second_columns.copy_(saved)
        self._set_offsets({first: self.offsets.get(second), second: self.offsets.get(first)})
        self.lengths[first], self.lengths[second] = self.lengths[second], self.lengths[first]

    @torch.inference_mode()
    def clear(self, cache_row: int) -> None:
        """Empty a cache row (the place of one sequence) and fill it with zeros.

        A mask hides numbers that a sequence left there, but not NaN, for 0 * NaN is NaN.
        """
        for buffer in self.buffers:
            if cache_row < len(buffer.tensor):
                buffer.tensor[cache_row].zero_()
        if cache_row < len(self.lengths):
            self.lengths[cache_row] = 0
        self.offsets.pop(cache_row, None)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy the committed columns (tokens) of a cache row into another cache row, as for a new beam."""
        length = self.lengths[source]
        for buffer in self.buffers:
            if buffer.tensor.shape[2] and len(buffer.tensor) <= target:
                buffer.resize(*self.room(length))
            # slices rather than indices, as a buffer is empty before the first write
            buffer.tensor[target:, :, :length][:1] = buffer.tensor[source:, :, :length][:1]
        self.lengths[target] = length
        self._set_offsets({target: self.offsets.get(source)})

    def _set_offsets(self, offsets: Mapping[int, int | None]) -> None:
        """Set what is added to a token's index in the cache for its position, by cache row; None: without images.

        Many tokens of an image share a position, so that after images a token's position is less than its index.
        """
        merged = {**self.offsets, **offsets}
        self.offsets = {
            cache_row: value for cache_row, value in merged.items() if value is not None
        }

    @torch.inference_mode()
    def reserve(self, cache_rows: int, columns: int, most: int | None = None) -> None:
        """Reserve this many cache rows (sequences) and columns (tokens), and release memory that is far beyond them.

        Args:
            cache_rows: the number of cache rows.
            columns: the number of columns of each.
            most: how many cache rows times columns may stay allocated; None: twice those that are reserved now.
        """
        allocated = self.sizes
        # what is allocated is used on, unless it exceeds the limit
        sizes = (max(cache_rows, allocated[0]), max(columns, allocated[1]))
        limit = 2 * max(cache_rows * columns, MIN_COLUMNS) if most is None else most
        if sizes[0] * sizes[1] > limit:
            sizes = (cache_rows, columns)
        self.reserved = sizes
        # new cache rows are empty, and a sequence is cut at the last column. More zeros are added than are needed
        lengths = self.lengths + [0] * sizes[0]
        self.lengths = [min(length, sizes[1]) for length in lengths[: sizes[0]]]
        if allocated[0] > sizes[0] or allocated[1] > sizes[1]:
            for buffer in self.buffers:
                buffer.resize(*sizes)


def copy_columns(
    buffers: Iterable[tuple[Tensor, Tensor]],
    origin: Tensor,
    destination: Tensor,
) -> None:
    """Copy M columns (tokens) from the first buffer of each pair to the second; pairs may differ in heads and width.

    Args:
        buffers: pairs of tensors [cache rows, X, columns, D] for X heads of width D, a pair for each layer's keys and
            one for its values. The second tensor of each is written to; it may be the first.
        origin: [2, M], cache row and column of each in the first buffer.
        destination: [2, M], cache row and column of each in the second buffer.
    """
    # what to read and what to write by shape, as most layers have one shape
    indices: dict[Any, Tensor] = {}
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
    """Return [M * X], where M tokens lie in a buffer viewed as [cache rows * X * columns, D].

    Args:
        columns_at: [2, M], cache row (sequence) and column (index in it) of each token.
        heads: X, the number of heads.
        columns: how many tokens the buffer holds of each sequence.
    """
    cache_row_ids, indices = columns_at
    head_rows = cache_row_ids[:, None] * heads + torch.arange(heads, device=cache_row_ids.device)
    return (head_rows * columns + indices[:, None]).flatten()
