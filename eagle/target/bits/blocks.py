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

BLOCK = 256  # keys; fewer give more sums to combine, more leave more keys to fp64
FIRST = 512  # position of the first query that reads blocks; before it fp64 costs little more
LAG = 64  # positions from a block's end to a query: trees of up to this depth have the blocks of steps
ROWS = 4  # rows of a call are a multiple: one to three rows are summed by other kernels than more
MAX_ROWS = 160  # of one call, for from 192 on they are cut into other tiles
TRIED_ROWS = (1, 2, 3, 5, 9, 21, 33, 34, 35, 36, 63, 64, 78, 97, 130)


class QueryChunk(NamedTuple):
    """Queries that are read together, and the keys that they read in blocks."""

    sequences: slice
    queries: slice
    start: int  # all of them read the keys before in blocks
    stop: int  # some of them read the keys before in blocks
    in_blocks: Tensor | None  # [B, N, stop - start], of the keys between; None if there are none
    is_unread: Tensor | None  # [B, N, J], of the blocks before `stop`; None if all queries read all

    def hide(self, scores: Tensor, logs: Tensor) -> None:
        """Leave each key to its block or to its score: scores [B, K, G, N, T], logs of blocks [B, K, G, N, J]."""
        if self.in_blocks is not None and self.is_unread is not None:
            scores[..., : self.stop - self.start].masked_fill_(
                self.in_blocks[:, None, None],
                float("-inf"),
            )
            logs.masked_fill_(self.is_unread[:, None, None], float("-inf"))


class Blocks:
    """The keys that the queries of a forward read in blocks: those before `ends` [B, N]."""

    def __init__(self, ends: Tensor, length: int) -> None:
        self.ends, self.length = ends, length
        self.chunks: dict[int, list[QueryChunk]] = {}  # by number of groups

    def fit(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether queries [B, H, N, D], keys and values are the forward's, and the kernel keeps bits."""
        is_forward = (len(query), query.shape[2]) == self.ends.shape and key.shape[2] == self.length
        return is_forward and key.shape == value.shape and keeps_bits(query.dtype, query.shape[-1])

    def cut(self, groups: int, mask: Tensor) -> list[QueryChunk]:
        """Cut the queries into chunks; those from whom the mask hides a key before their end read no blocks.

        Args:
            groups: the queries' heads of each key/value head.
            mask: bool or additive, [B, 1, N or more, S], or [1, 1, 1, 1] if it hides none of these keys.
        """
        at_once = max(1, MAX_ROWS // groups)
        if mask.shape[-1] > 1:
            visible = mask[:, 0, : self.ends.shape[1], : int(self.ends.max())]
            if mask.dtype != torch.bool:
                visible = visible == 0
            # windows and chunks hide the first keys, the indexer of a sparse layer any
            is_later = torch.arange(visible.shape[-1]) >= self.ends[..., None]
            sees_all = (visible | is_later).all(-1)
            if not bool(sees_all.all()):
                return [*Blocks(self.ends * sees_all, self.length)._cut(at_once)]
        if groups not in self.chunks:
            self.chunks[groups] = [*self._cut(at_once)]
        return self.chunks[groups]

    def _cut(self, at_once: int) -> Iterator[QueryChunk]:
        """Yield chunks of at most `at_once` queries.

        A query reads the keys before its entry in `ends` in blocks, and those after it in fp64. A chunk reads in fp64
        from its lowest end on, and hides from each query the keys that it reads in blocks.
        """
        sequences, count = self.ends.shape
        batches = [slice(0, sequences)]
        # sequences with other ends than the first are read one by one: together, all would read in fp64 from the lowest
        # end on, for nothing
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
                # by key: whether a query reads it in blocks; by block: whether a query does without it
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
    """A context in which a forward may read blocks.

    Args:
        starts: the committed columns of each sequence.
        positions: [B, R], of the tokens after them.
        count: the number of last ones that are read.
        is_chain: whether they are a chain, and no tree.
    """
    new = positions.shape[1]
    queries = positions[:, -count:]
    # columns before these hold the tokens of these positions; a tree's own columns do not
    in_order = torch.tensor(starts)[:, None]
    if is_chain:
        in_order = in_order + torch.arange(new - count, new)
    ends = torch.minimum(queries - LAG, in_order).clamp_min(0) // BLOCK * BLOCK
    ends = ends.masked_fill(queries < FIRST, 0)
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
    """Attend to each block of the keys before `end` by itself.

    Args:
        rows: [B * K, R, D], queries.
        key: [B, K, S, D].
        value: [B, K, S, D].
        end: a multiple of the blocks' size.
        scale: of the products.

    Returns:
        Outputs [B * K, R, J, D], and the logarithms [B * K, R, J] of the sums of exp(score), in fp32.
    """
    count = rows.shape[1]
    # the blocks of a key/value head stand for heads
    keys = key[:, :, :end].flatten(0, 1).unflatten(1, (-1, BLOCK))
    values = value[:, :, :end].flatten(0, 1).unflatten(1, (-1, BLOCK))
    # [B * K, J, R, D]
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
    """Return whether the kernel gives a row the same bits whatever the number of rows; tried once on random numbers."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    generator = torch.Generator().manual_seed(0)
    length = 2 * BLOCK
    scale = width**-0.5
    rows = torch.randn(1, MAX_ROWS, width, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 1, length, width, generator=generator).to(dtype)
    try:
        expected = read_blocks(rows, key, value, length, scale=scale)
        for count in TRIED_ROWS:
            got = read_blocks(rows[:, -count:], key, value, length, scale=scale)
            last = [tensor[:, -count:] for tensor in expected]
            if not all(map(torch.equal, got, last)):
                return False
    except (RuntimeError, NotImplementedError):
        return False
    return True
