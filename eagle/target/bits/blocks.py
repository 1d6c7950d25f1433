"""Attention over blocks of earlier keys by a fused kernel, with the same bits whatever is read together.

Keys well before a query are at the same places of the cache in every reading: in steps, in chunks of a prompt and in
trees. They are cut into blocks at fixed places, and the kernel gives the softmax of each block by itself. Only the last
keys, which a tree holds in another order than steps do, are left to sums in fp64 (`invariant_attention`).
"""

# B sequences, N new tokens, R of them not committed, S cached and new keys, K key/value heads, J blocks, D head width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # keys of a block; fewer give more sums to combine, more leave more keys to fp64
FIRST = 512  # position of the first query that reads blocks; before it fp64 costs little more
# least distance in positions from a block's end to a query: the nodes of a tree up to this depth then read the same
# blocks as steps by one token
LAG = 64
ROWS = 4  # the kernel gets a multiple of this number of rows: one to three rows are summed by other kernels
MAX_ROWS = 160  # the most rows of one call: from 192 on the kernel cuts rows into other tiles
# numbers of rows by which `keeps_bits` tries the kernel
TRIED_ROWS = (1, 2, 3, 5, 9, 21, 33, 34, 35, 36, 63, 64, 78, 97, 130)


class QueryChunk(NamedTuple):
    """Queries that are read together, and the keys that they read in blocks.

    Keys before `start` are read in blocks by all of these queries, keys from `stop` on by none, and keys between by
    some.
    """

    sequences: slice  # indices of the B sequences of the chunk
    queries: slice  # indices of its N queries
    start: int  # these two are indices of keys
    stop: int
    # [B, N, stop - start], whether a query reads a key in blocks; None if start == stop
    in_blocks: Tensor | None
    # [B, N, J], whether a query does not read each of J blocks before `stop`; None if all queries read all blocks
    is_unread: Tensor | None

    def hide_duplicates(self, scores: Tensor, logs: Tensor) -> None:
        """Let each query read each key only once, in a block or by its own score, by hiding the other in place.

        Attention reads a key in a block by a kernel, and the other keys in fp64. A hidden score is -inf.

        Args:
            scores: [B, K, G, N, T], of N queries of G heads for each of K key/value heads, and the T keys from `start`
                on.
            logs: [B, K, G, N, J], the logarithm of the sum of exp(score) of each of J blocks.
        """
        # None: all queries read the same keys in blocks
        if self.in_blocks is not None and self.is_unread is not None:
            scores[..., : self.stop - self.start].masked_fill_(
                self.in_blocks[:, None, None],
                float("-inf"),
            )
            logs.masked_fill_(self.is_unread[:, None, None], float("-inf"))


class Blocks:
    """The keys that the queries of a forward read in blocks; all layers of the forward share it."""

    def __init__(self, ends: Tensor, length: int) -> None:
        """Keep which keys the queries of a forward read in blocks.

        Args:
            ends: [B, N], for N queries of B sequences an index of a key, a multiple of BLOCK: the query reads the keys
                before it in blocks.
            length: S, the number of cached and new keys.
        """
        self.ends, self.length = ends, length
        self.chunks: dict[int, list[QueryChunk]] = {}  # by number of groups

    def fit(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether a layer can read keys in blocks: its shapes are the forward's, and the kernel keeps bits.

        A kernel keeps bits if a query's output does not depend on how many others are read with it.

        Args:
            query: [B, H, N, D], of N new tokens of B sequences, for H heads of width D.
            key: [B, K, S, D], of S cached and new tokens, for K key/value heads.
            value: [B, K, S, D'].
        """
        # else the layer attends to other keys than the forward's columns, as to pooled ones
        is_forward = (len(query), query.shape[2]) == self.ends.shape and key.shape[2] == self.length
        return is_forward and key.shape == value.shape and keeps_bits(query.dtype, query.shape[-1])

    def cut(self, groups: int, mask: Tensor) -> list[QueryChunk]:
        """Cut the queries into chunks of as many as the kernel may read at once.

        A block is BLOCK earlier keys, which a kernel reads at once. A query reads no blocks if the mask hides one of
        their keys from it.

        Args:
            groups: G, the number of query heads of each key/value head.
            mask: bool or additive, [B, 1, N or more, S], or [1, 1, 1, 1] if it hides none of these keys. B are
                sequences, N queries, and S keys.
        """
        # the queries of a group are rows of the same call
        at_once = max(1, MAX_ROWS // groups)
        if mask.shape[-1] > 1:
            # [B, N, keys that some query reads in blocks]
            visible = mask[:, 0, : self.ends.shape[1], : int(self.ends.max())]
            if mask.dtype != torch.bool:
                visible = visible == 0
            # a window or a chunk hides the first keys, and the indexer of a sparse layer may hide any key
            is_later = torch.arange(visible.shape[-1]) >= self.ends[..., None]
            sees_all = (visible | is_later).all(-1)
            # other blocks than the forward's, for this layer alone: an end of 0 is no block
            if not bool(sees_all.all()):
                return [*Blocks(self.ends * sees_all, self.length)._make_chunks(at_once)]
        if groups not in self.chunks:
            self.chunks[groups] = [*self._make_chunks(at_once)]
        return self.chunks[groups]

    def _make_chunks(self, at_once: int) -> Iterator[QueryChunk]:
        """Yield chunks of at most `at_once` queries, which are read together.

        A query reads the keys before its entry in `ends` in blocks, and those after it in fp64. A chunk reads in fp64
        from its lowest end on, and hides from each query the keys that it reads in blocks.
        """
        sequences, count = self.ends.shape
        batches = [slice(0, sequences)]
        # sequences with different ends are read one by one: in one chunk all would read in fp64 from the lowest end
        # on, and so compute scores that are then hidden
        if not torch.equal(self.ends, self.ends[:1].expand_as(self.ends)):
            batches = [slice(b, b + 1) for b in range(sequences)]
        for b in batches:
            for begin in range(0, count, at_once):
                n = slice(begin, min(begin + at_once, count))
                ends = self.ends[b, n, None]  # [B, N, 1]
                start = int(ends.min())
                stop = int(ends.max())
                in_blocks = None
                is_unread = None
                # the queries' ends differ, so each query reads some keys between in blocks and the others in fp64
                if start < stop:
                    in_blocks = torch.arange(start, stop) < ends
                    is_unread = torch.arange(0, stop, BLOCK) >= ends
                yield QueryChunk(b, n, start, stop, in_blocks=in_blocks, is_unread=is_unread)


BLOCKS: ContextVar[Blocks | None] = ContextVar("blocks", default=None)


@contextmanager
def reading_blocks(
    starts: Sequence[int],
    positions: Tensor,
    count: int,
    *,
    is_chain: bool,
) -> Iterator[None]:
    """A context in which the attention of a forward may read earlier keys in blocks of fixed size.

    A fused kernel then gives the same bits whatever tokens are read together, and costs less than sums in fp64.

    Args:
        starts: the number of committed columns of each sequence.
        positions: [B, R], of the R uncommitted tokens after them, of B sequences.
        count: N, the number of the last of them, which the forward reads.
        is_chain: whether the uncommitted tokens are a chain, and not a tree.
    """
    new = positions.shape[1]
    queries = positions[:, -count:]  # [B, N]
    # column c holds the token of position c only before these columns; the uncommitted columns of a tree do not
    in_order = torch.tensor(starts)[:, None]
    if is_chain:
        in_order = in_order + torch.arange(new - count, new)
    # [B, N], rounded down to whole blocks, at least LAG positions before the query
    ends = torch.minimum(queries - LAG, in_order).clamp_min(0) // BLOCK * BLOCK
    ends = ends.masked_fill(queries < FIRST, 0)
    # None: every query is too near the beginning
    blocks = Blocks(ends, max(starts) + new) if bool(ends.any()) else None
    token = BLOCKS.set(blocks)
    try:
        yield
    finally:
        BLOCKS.reset(token)


def read_blocks(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    end: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to each block of BLOCK keys alone; `_attend` in `invariant.py` combines the blocks' outputs.

    Args:
        rows: [B * K, R, D], R queries of width D for each of K key/value heads of B sequences.
        key: [B, K, S, D], of S tokens.
        value: [B, K, S, D].
        end: the keys before this index are read; a multiple of BLOCK.
        scale: the factor on the products of queries and keys.

    Returns:
        Outputs [B * K, R, J, D] of J = end / BLOCK blocks, and the logarithms [B * K, R, J] of the sums of exp(score),
        in fp32.
    """
    count = rows.shape[1]
    # [B * K, J, BLOCK, D]: the kernel takes the J blocks of a key/value head for heads
    keys = key[:, :, :end].flatten(0, 1).unflatten(1, (-1, BLOCK))
    values = value[:, :, :end].flatten(0, 1).unflatten(1, (-1, BLOCK))
    # [B * K, J, R, D], padded to a multiple of ROWS rows
    rows = F.pad(rows, (0, 0, 0, -count % ROWS))[:, None].expand(-1, keys.shape[1], -1, -1)
    outputs, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows,
        keys,
        values,
        scale=scale,
    )
    return outputs[:, :, :count].transpose(1, 2), logs[:, :, :count].transpose(1, 2).contiguous()


@cache
@torch.inference_mode()
def keeps_bits(dtype: torch.dtype, width: int) -> bool:
    """Return whether the fused kernel gives a query the same bits whatever the number of queries, by a trial.

    The trial, on random numbers, runs once for each dtype and head width `width`.
    """
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    generator = torch.Generator().manual_seed(0)
    length = 2 * BLOCK
    scale = width**-0.5
    rows = torch.randn(1, MAX_ROWS, width, generator=generator).to(dtype)
    # [1, 1, length, width] each, of one head
    key, value = torch.randn(2, 1, 1, length, width, generator=generator).to(dtype)
    try:
        expected = read_blocks(rows, key, value, length, scale=scale)
        for count in TRIED_ROWS:
            got = read_blocks(rows[:, -count:], key, value, length, scale=scale)
            last = [tensor[:, -count:] for tensor in expected]
            if not all(map(torch.equal, got, last)):
                return False
    # this torch has no such kernel for the dtype or width
    except (RuntimeError, NotImplementedError):
        return False
    return True
