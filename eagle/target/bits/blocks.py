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


class Piece(NamedTuple):
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
            scores[..., : self.stop - self.start].masked_fill_(self.in_blocks[:, None, None], float("-inf"))
            logs.masked_fill_(self.is_unread[:, None, None], float("-inf"))


class Blocks:
    """The keys that the queries of a forward read in blocks: those before `ends` [B, N]."""

    def __init__(self, ends: Tensor, length: int) -> None:
        self.ends, self.length = ends, length
        self.pieces: dict[int, list[Piece]] = {}  # by number of groups

    def fit(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether queries [B, H, N, D], keys and values [B, K, S, D] are the forward's, and the kernel keeps bits."""
        is_own = (len(query), query.shape[2]) == self.ends.shape and key.shape[2] == self.length
        return is_own and key.shape == value.shape and keeps_bits(query.dtype, query.shape[-1])

    def cut(self, groups: int, mask: Tensor) -> list[Piece]:
        """The queries in pieces; those from whom the mask hides a key before their end read no blocks.

        The mask is bool or additive, [B, 1, N or more, S], or [1, 1, 1, 1] if it hides none of these keys.
        """
        at_once = max(1, MAX_ROWS // groups)
        if mask.shape[-1] > 1:
            shown = mask[:, 0, : self.ends.shape[1], : int(self.ends.max())]
            shown = shown if mask.dtype == torch.bool else shown == 0
            # windows and chunks hide the first keys, the indexer of a sparse layer any
            sees_all = (shown | (torch.arange(shown.shape[-1]) >= self.ends[..., None])).all(-1)
            if not bool(sees_all.all()):
                return [*Blocks(self.ends * sees_all, self.length)._cut(at_once)]
        if groups not in self.pieces:
            self.pieces[groups] = [*self._cut(at_once)]
        return self.pieces[groups]

    def _cut(self, at_once: int) -> Iterator[Piece]:
        sequences, count = self.ends.shape
        # side by side, the shortest would leave the keys of the others to fp64
        are_alike = torch.equal(self.ends, self.ends[:1].expand_as(self.ends))
        for b in [slice(0, sequences)] if are_alike else [slice(b, b + 1) for b in range(sequences)]:
            for begin in range(0, count, at_once):
                n = slice(begin, min(begin + at_once, count))
                ends = self.ends[b, n, None]
                start, stop = (int(end) for end in ends.aminmax())
                differ = start < stop
                in_blocks = torch.arange(start, stop) < ends if differ else None
                is_unread = torch.arange(0, stop, BLOCK) >= ends if differ else None
                yield Piece(b, n, start, stop, in_blocks, is_unread)


BLOCKS: ContextVar[Blocks | None] = ContextVar("blocks", default=None)


@contextmanager
def reading_blocks(starts: Sequence[int], positions: Tensor, count: int, *, is_chain: bool) -> Iterator[None]:
    """A context in which a forward may read blocks: over `starts` columns, the last `count` of R tokens at [B, R]."""
    new = positions.shape[1]
    queries = positions[:, -count:]
    # columns before these hold the tokens of these positions; a tree's own columns do not
    in_order = torch.tensor(starts)[:, None] + (torch.arange(new - count, new) if is_chain else 0)
    ends = torch.minimum(queries - LAG, in_order).clamp_min(0) // BLOCK * BLOCK
    ends = ends.masked_fill(queries < FIRST, 0)
    token = BLOCKS.set(Blocks(ends, max(starts) + new) if bool(ends.any()) else None)
    try:
        yield
    finally:
        BLOCKS.reset(token)


def read_blocks(rows: Tensor, key: Tensor, value: Tensor, end: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of rows [B * K, R, D] over each block of the keys and values [B, K, S, D] before `end`.

    Returns outputs [B * K, R, J, D] and the logarithms [B * K, R, J] of the sums of exp(score), in fp32.
    """
    count = rows.shape[1]
    keys, values = (held[:, :, :end].flatten(0, 1).unflatten(1, (-1, BLOCK)) for held in (key, value))
    # the blocks of a key/value head stand for heads: [B * K, J, R, D]
    rows = F.pad(rows, (0, 0, 0, -count % ROWS))[:, None].expand(-1, keys.shape[1], -1, -1)
    outputs, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, scale=scale)
    return outputs[:, :, :count].transpose(1, 2), logs[:, :, :count].transpose(1, 2).contiguous()


@cache
@torch.inference_mode()
def keeps_bits(dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel gives a row the same bits beside any number of other rows; tried once on random numbers."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, MAX_ROWS, width, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 1, 2 * BLOCK, width, generator=generator).to(dtype)
    try:
        outputs, logs = read_blocks(rows, key, value, 2 * BLOCK, width**-0.5)
        for count in TRIED_ROWS:
            got = read_blocks(rows[:, -count:], key, value, 2 * BLOCK, width**-0.5)
            if not (torch.equal(got[0], outputs[:, -count:]) and torch.equal(got[1], logs[:, -count:])):
                return False
    except (RuntimeError, NotImplementedError):
        return False
    return True
