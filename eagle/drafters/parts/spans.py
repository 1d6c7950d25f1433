"""Attention at some rows of concatenated sequences: each sees its sequence up to itself, and what it drafted since."""

# N rows of all sequences, S of them wanted, h heads of queries, k of keys, n rows of a piece, m columns that it sees,
# w width of a head

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from eagle.device import upload
from eagle.drafters.parts.window import Window

# Rows of one product, half of whose own square is wasted. At 1,024 rows of 4 heads of 64 forward and backward take
# 24 / 30 / 35 ms with 64 / 128 / 256 rows in fp32, 12.6 / 10.4 / 10.2 ms in bf16; PyTorch's fused attention 30 and 22.
PIECE = {torch.float32: 64, torch.float64: 64}
PIECE_ELSE = 128
# a piece sees a multiple of this: CPUs prepare each new shape of products in bf16
COLUMNS = {torch.bfloat16: 64}
FUSED = 128  # rows and columns of a fused kernel's blocks
Own = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [k, S, w] of every earlier step: row i of each belongs to wanted row i alone."""


# -- which rows see what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """Some rows of concatenated sequences: their indices, and (begin of the sequence, first row, end) of each run."""

    rows: Tensor  # [S]
    runs: list[tuple[int, int, int]]
    count: int  # of all rows
    stride: int = 1  # from one row of a run to the next
    window: Window | None = None  # what a row sees of its sequence so far; without one, all
    scattered: tuple[list[int], ...] = ()  # the rows of each run, where they may lie anywhere in it
    # by how many rows of their own the rows see
    block_masks: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        masks: Sequence[Tensor],
        device: torch.device,
        stride: int = 1,
        firsts: Sequence[int] | None = None,
        window: Window | None = None,
    ) -> Spans:
        """Return the rows that masks mark.

        Args:
            masks: A mask [T] for each sequence, on the host.
            device: Where the rows are used.
            stride: Only every `stride`-th row of a sequence counts, from its first on.
            firsts: The first row of each sequence that counts; None: 0.
            window: What a row sees of its sequence.
        """
        runs = []
        rows = []
        begin = 0
        for mask, first in zip(masks, firsts or [0] * len(masks), strict=True):
            marked = mask[first::stride]
            start = begin + first
            # where runs of marked rows begin and end, in turn
            edges = F.pad(marked.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                runs.append((begin, start + low * stride, start + (high - 1) * stride + 1))
            rows.append(start + stride * marked.nonzero()[:, 0])
            begin += len(mask)
        return cls(upload(torch.cat(rows), device), runs, count=begin, stride=stride, window=window)

    @classmethod
    def at(cls, places: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> Spans:
        """Return the rows at these positions of each sequence, in ascending order, for sequences of these lengths."""
        runs = []
        scattered: list[list[int]] = []
        rows: list[int] = []
        begin = 0
        for positions, length in zip(places, lengths, strict=True):
            if len(positions):
                seq_rows = (begin + positions).tolist()
                scattered.append(seq_rows)
                rows += seq_rows
                runs.append((begin, seq_rows[0], seq_rows[-1] + 1))
            begin += length
        return cls(
            upload(torch.tensor(rows, dtype=torch.long), device),
            runs,
            begin,
            scattered=tuple(scattered),
        )

    def _rows_of(self, run_index: int) -> Sequence[int]:
        if self.scattered:
            return self.scattered[run_index]
        _, start, stop = self.runs[run_index]
        return range(start, stop, self.stride)

    def split_runs(self, size: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield where a sequence begins, and the next wanted rows of it, at most `size` at a time."""
        for run_index, (begin, _, _) in enumerate(self.runs):
            rows = self._rows_of(run_index)
            for first in range(0, len(rows), size):
                yield begin, rows[first : first + size]

    def split(self, size: int) -> Iterator[Spans]:
        """Yield these rows in spans of at most `size`, each of one sequence."""
        done = 0
        for begin, rows in self.split_runs(size):
            end = done + len(rows)
            run = (begin, rows[0], rows[-1] + 1)
            scattered = (list(rows),) if self.scattered else ()
            yield replace(
                self, rows=self.rows[done:end], runs=[run], scattered=scattered, block_masks={}
            )
            done = end

    @cached_property
    def begins(self) -> Tensor:
        """[S], where the sequence of each wanted row begins."""
        counts = [len(self._rows_of(run_index)) for run_index in range(len(self.runs))]
        begins = torch.tensor([begin for begin, _, _ in self.runs])
        return upload(begins.repeat_interleave(torch.tensor(counts)), self.rows.device)

    def block_mask(self, drafted: int) -> Any:
        """Return which rows each wanted row sees, as fused attention needs it, for so many rows of their own."""
        drafted = drafted if self.window else 0
        if drafted not in self.block_masks:
            self.block_masks[drafted] = self._make_block_mask(drafted)
        return self.block_masks[drafted]

    def _make_block_mask(self, drafted: int) -> Any:
        rows = self.rows
        begins = self.begins
        window = self.window

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, row: Tensor) -> Tensor:
            is_past = (begins[query] <= row) & (row <= rows[query])
            if window is None:
                return is_past
            return is_past & ~window.hides(row, rows[query], begins[query], drafted)

        if window is None:
            return create_block_mask(is_seen, None, None, len(rows), self.count, device=rows.device)
        # blocks are found from the ends of every row's window, [S] each: a mask of all rows and columns would not fit
        # in memory for sequences that are long enough to need windows
        recent_start = torch.maximum(rows - (window.recent - drafted) + 1, begins)
        sinks_end = torch.minimum(begins + window.sinks, rows + 1)
        touched = _touched_blocks(recent_start, rows + 1, self.count) | _touched_blocks(
            begins, sinks_end, self.count
        )
        # of each block of rows: how many blocks of columns it sees, and their indices first
        counts = touched.sum(1).int()
        order = touched.int().argsort(dim=1, descending=True, stable=True).int()
        return BlockMask.from_kv_blocks(
            counts[None, None],
            order[None, None],
            BLOCK_SIZE=FUSED,
            mask_mod=is_seen,
            seq_lengths=(len(rows), self.count),
        )


def _touched_blocks(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return [S / 128, count / 128], whether columns `low` to `high` of at least one row are in the block."""
    query_blocks = torch.arange(len(low), device=low.device) // FUSED
    # +1 where a row's columns begin and -1 after they end, so that a running sum counts the rows that touch a block
    edges = low.new_zeros((len(low) - 1) // FUSED + 1, (count - 1) // FUSED + 2)
    is_any = (low < high).to(edges.dtype)
    edges.index_put_((query_blocks, low // FUSED), is_any, accumulate=True)
    edges.index_put_((query_blocks, (high - 1).clamp(min=0) // FUSED + 1), -is_any, accumulate=True)
    return edges.cumsum(1)[:, :-1] > 0


# -- attention --------------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = ()) -> Tensor:
    """Attend from each wanted row to its sequence so far, and to keys of its own.

    Args:
        query: [h, S, w].
        key: [k, N, w].
        value: [k, N, w].
        spans: The wanted rows.
        own: What each wanted row drafted since; in a window these keys are the latest ones.

    Returns:
        [h, S, w].
    """
    if spans.window is not None:
        own = own[-spans.window.recent :]
    return ATTEND.get(query.device.type, attend_flex)(query, key, value, spans, own)


def attend_plain(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = ()) -> Tensor:
    """`attend` for CPUs, by products of pieces of the sequences."""
    # autograd sees tensors among the arguments, not in tuples
    flat: list[Tensor] = []
    for pair in own:
        flat += pair
    return _Plain.apply(query, key, value, spans, *flat)


ATTEND = {"cpu": attend_plain, "meta": attend_plain}  # elsewhere one fused kernel


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = (), kernel: Any = None
) -> Tensor:
    """`attend` for accelerators, by one fused kernel over all sequences; it has no gradient on a CPU."""
    attention = kernel
    if kernel is None:
        attention = flex_attention if query.device.type == "cpu" else compile_flex()
    output, aux = attention(
        query[None],
        key[None],
        value[None],
        block_mask=spans.block_mask(len(own)),
        enable_gqa=len(query) != len(key),
        return_aux=AuxRequest(lse=True),
    )
    shares = _shares(query, aux.lse[0], own)
    return _merge_parts(output[0], shares, own, len(key))


@cache
def compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)  # else once for every length of a batch


def _shares(query: Tensor, context: Tensor, own: Own) -> Tensor:
    """Return [1 + steps, h, S], what share of its attention each row gives to its sequence, and to its own keys.

    `context` [h, S] is the log-sum-exp of its scores of the sequence: softmax over it and its own scores gives the
    shares.
    """
    scale = query.shape[-1] ** -0.5
    scores = [context]
    for key, _ in own:
        products = by_key(query, key) * key[:, None]
        scores.append(products.sum(-1, dtype=context.dtype).flatten(0, 1) * scale)
    return torch.stack(scores).softmax(0)


def _merge_parts(output: Tensor, shares: Tensor, own: Own, keys: int) -> Tensor:
    """Return [h, S, w], what the rows read of their sequences and of their own values, each by its share."""
    shares = shares.to(output.dtype).unsqueeze(-1)
    output = output * shares[0]
    for share, (_, value) in zip(shares[1:], own, strict=True):
        output = output + (share.unflatten(0, (keys, -1)) * value[:, None]).flatten(0, 1)
    return output


class _Plain(torch.autograd.Function):
    """Two products and a softmax for each piece, whose probs the backward pass computes again.

    A row's own keys are in one softmax with its sequence, so nothing is merged.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, *flat: Tensor
    ) -> Tensor:
        own = _pairs(flat)
        heads, count, width = query.shape
        query = query * width**-0.5
        # contiguous keys make products of twice the speed in bf16
        key = key.contiguous()
        value = value.contiguous()
        # in memory a row's heads lie beside each other, as those who read the output want them
        output = query.new_empty(count, heads, width).transpose(0, 1)
        own_scores = query.new_empty(heads, count, len(own))
        for step, (own_key, _) in enumerate(own):
            own_scores[:, :, step] = (by_key(query, key) * own_key[:, None]).sum(-1).flatten(0, 1)
        own_probs = torch.empty_like(own_scores)
        for rows, columns, hidden in split_pieces(spans, len(own), query):
            piece_key, piece_value = read_columns(columns, key, value)
            probs = attention_probs(query[:, rows], piece_key, own_scores[:, rows], hidden)
            seq_probs, piece_own_probs = probs.tensor_split([piece_key.shape[1]], dim=-1)
            output[:, rows] = (seq_probs @ piece_value).view(output[:, rows].shape)
            own_probs[:, rows] = piece_own_probs.reshape(own_probs[:, rows].shape)
        for step, (_, own_value) in enumerate(own):
            step_probs = by_key(own_probs[:, :, step, None], key)
            by_key(output, key).addcmul_(step_probs, own_value[:, None])
        ctx.save_for_backward(query, key, value, output, own_scores, own_probs, *flat)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, own_scores, own_probs, *flat = ctx.saved_tensors
        own = _pairs(flat)
        (grad_out,) = upstream
        grad_query = torch.empty_like(query)
        # transposed, which makes faster products
        grad_key = room_for_gradient(key)
        grad_value = room_for_gradient(value)
        # softmax: ds = p (dp - sum of p dp), and that sum over keys is the sum of output * grad_out over the width
        mean_grad = (grad_out * output).sum(-1, keepdim=True)
        for rows, columns, hidden in split_pieces(ctx.spans, len(own), query):
            piece_key, piece_value = read_columns(columns, key, value)
            probs = attention_probs(query[:, rows], piece_key, own_scores[:, rows], hidden)
            probs = probs[..., : piece_key.shape[1]]
            query_rows = group_by_key(query[:, rows], key)
            grad_rows = group_by_key(grad_out[:, rows], key)
            add_product(grad_value, columns, grad_rows, probs)
            grad_scores = grad_rows @ piece_value.mT
            grad_scores.sub_(group_by_key(mean_grad[:, rows], key)).mul_(probs)
            grad_query[:, rows] = (grad_scores @ piece_key).view(grad_query[:, rows].shape)
            add_product(grad_key, columns, query_rows, grad_scores)
        # the same for a row's own keys and values, each of which one row alone reads
        grad_own: list[Tensor] = []
        for step, pair in enumerate(own):
            step_probs = by_key(own_probs[:, :, step, None], key)
            grad_own += _add_own_gradients(
                query, grad_query, grad_out, mean_grad, own=pair, probs=step_probs
            )
        grad_query.mul_(query.shape[-1] ** -0.5)
        return grad_query, grad_key.mT, grad_value.mT, None, *grad_own


def _add_own_gradients(
    query: Tensor,
    grad_query: Tensor,
    grad_out: Tensor,
    mean_grad: Tensor,
    own: tuple[Tensor, Tensor],
    probs: Tensor,
) -> list[Tensor]:
    """Return the gradients of a step's own keys and values, and add to that of the queries."""
    key, value = own
    grad_out = by_key(grad_out, key)
    grad_scores = (grad_out * value[:, None]).sum(-1, keepdim=True)
    grad_scores.sub_(by_key(mean_grad, key)).mul_(probs)
    by_key(grad_query, key).addcmul_(grad_scores, key[:, None])
    return [(grad_scores * by_key(query, key)).sum(1), (probs * grad_out).sum(1)]


def _pairs(flat: Sequence[Tensor]) -> Own:
    return list(zip(flat[::2], flat[1::2], strict=True))


# -- pieces of sequences ----------------------------------------------------------------------------------------------


def split_pieces(
    spans: Spans, drafted: int, like: Tensor, size: int | None = None
) -> Iterator[tuple[slice, list[slice], Tensor]]:
    """Yield pieces of runs: their rows among the wanted ones, the columns that they see, and what hides some of these.

    The last is added to the scores of the last columns; rows see `drafted` rows of their own besides the columns.
    """
    size = size or PIECE.get(like.dtype, PIECE_ELSE)
    done = 0
    for begin, row_indices in spans.split_runs(size):
        rows = slice(done, done + len(row_indices))
        done = rows.stop
        end = row_indices[-1] + 1
        if spans.window is None:
            end = min(begin + _round_up(end - begin, like.dtype), spans.count)
            yield rows, [slice(begin, end)], _hide_later(row_indices, end, like)
        else:
            # the columns of the whole piece; what single rows of it do not see is hidden by scores
            columns = spans.window.columns(begin, row_indices[0], end, drafted)
            positions = torch.cat(
                [torch.arange(part.start, part.stop, device=like.device) for part in columns]
            )
            row = torch.tensor(row_indices, device=like.device)[:, None]
            is_hidden = spans.window.hides(positions, row, begin, drafted) | (positions > row)
            yield rows, columns, _additive(is_hidden, like.dtype)


def _round_up(count: int, dtype: torch.dtype) -> int:
    """Return the columns that so many are filled up to."""
    multiple = COLUMNS.get(dtype, 1)
    return -(-count // multiple) * multiple


def _additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0, or minus infinity where a column is hidden."""
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return zeros.masked_fill_(is_hidden, -math.inf)


def _hide_later(row_indices: Sequence[int], end: int, like: Tensor) -> Tensor:
    """Return [n, columns], what hides later columns from these rows, from the first of the rows up to `end`."""
    first = row_indices[0]
    if isinstance(row_indices, range):
        count = len(row_indices)
        return _future(count, row_indices.step, like.dtype, like.device)[:, : end - first]
    row = torch.tensor(row_indices, device=like.device)[:, None]
    return _additive(torch.arange(first, end, device=like.device) > row, like.dtype)


@cache
def _future(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [n, n'], what hides later columns from rows a stride apart, of the columns from the first row on."""
    row = stride * torch.arange(count, device=device)[:, None]
    columns = torch.arange((count - 1) * stride + COLUMNS.get(dtype, 1), device=device)
    return _additive(columns > row, dtype)


def read_columns(seen: Sequence[slice], *tensors: Tensor) -> list[Tensor]:
    """Return [k, m, w] of each tensor [k, N, w].

    In bf16 they are contiguous: products copy what is not, and what they transpose far slower.
    """
    columns = []
    for tensor in tensors:
        if len(seen) > 1:
            column = torch.cat([tensor[:, part] for part in seen], dim=1)
        else:
            column = tensor[:, seen[0]]
            if column.dtype == torch.bfloat16:
                column = column.contiguous()
        columns.append(column)
    return columns


def room_for_gradient(part: Tensor) -> Tensor:
    """Return zeros [k, w, N] for what is [k, N, w], in rows of which a stride is filled up as columns are."""
    keys, count, width = part.shape
    return part.new_zeros(keys, width, _round_up(count, part.dtype))[..., :count]


def add_product(total: Tensor, seen: Sequence[slice], rows: Tensor, columns: Tensor) -> None:
    """Add rows [k, n, w] times columns [k, n, m] to these m columns of a total [k, w, N]."""
    sizes = [part.stop - part.start for part in seen]
    for part, columns_part in zip(seen, columns.split(sizes, dim=-1), strict=True):
        total[:, :, part].baddbmm_(rows.mT, columns_part)


def by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [k, h / k, S, ...] of [h, S, ...], the heads that share a key together."""
    return tensor.unflatten(0, (len(key), -1))


def group_by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [k, h / k * n, w] of [h, n, w], where heads that share a key become rows of one head."""
    heads, count, width = tensor.shape
    return tensor.reshape(len(key), heads // len(key) * count, width)


def attention_probs(query: Tensor, key: Tensor, own_scores: Tensor, hidden: Tensor) -> Tensor:
    """Return probs [k, h / k * n, m + steps] from query [h, n, w], key [k, m, w] and scores of the rows' own keys.

    `hidden` [n, ..] is added to the scores of the last columns of the sequence.
    """
    queries = group_by_key(query, key)
    seen = key.shape[1]
    scores = query.new_empty(len(key), queries.shape[1], seen + own_scores.shape[2])
    torch.bmm(queries, key.mT, out=scores[..., :seen])
    scores[..., seen:] = group_by_key(own_scores, key)
    by_head = scores.view(len(query), query.shape[1], -1)
    by_head[:, :, seen - hidden.shape[1] : seen] += hidden
    return scores.softmax(-1)
