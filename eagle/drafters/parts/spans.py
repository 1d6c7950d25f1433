"""Attention at some rows of texts that lie end to end: each sees its text up to itself, and what it drafted since."""

# N rows of all texts, S of them wanted, h heads of queries, k of keys, n rows of a piece, m of its text so far, w width

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from eagle.device import upload
from eagle.drafters.parts.window import FUSED, Window, touched_blocks

# rows of one product, half of whose own square is wasted; at 1,024 rows of 4 heads of 64 forward and backward take
# 24 / 30 / 35 ms with 64 / 128 / 256 rows in fp32, 12.6 / 10.4 / 10.2 ms in bf16; PyTorch's fused attention 30 and 22
PIECE = {torch.float32: 64, torch.float64: 64}
PIECE_ELSE = 128
COLUMNS = {torch.bfloat16: 64}  # of which a piece sees a multiple: CPUs prepare each new shape of products in bf16
Own = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [k, S, w] of every step before: row i of each belongs to wanted row i alone."""


@dataclass(frozen=True)
class Spans:
    """Some rows of texts that lie end to end: their indices, and (begin of the text, first row, end) of each run."""

    rows: Tensor  # [S]
    runs: list[tuple[int, int, int]]
    count: int  # of all rows
    stride: int = 1  # from one row of a run to the next
    window: Window | None = None  # what a row sees of its text so far; without one, all
    scattered: tuple[list[int], ...] = ()  # the rows of each run, where they may lie anywhere in it
    block_masks: dict[int, Any] = field(default_factory=dict)  # by how many rows of their own the rows see

    @classmethod
    def of(
        cls,
        masks: Sequence[Tensor],
        device: torch.device,
        stride: int = 1,
        firsts: Sequence[int] | None = None,
        window: Window | None = None,
    ) -> Spans:
        """The rows that masks on the host mark, a mask for each text; of each `stride`-th row from its first on."""
        runs, rows, begin = [], [], 0
        for mask, first in zip(masks, firsts or [0] * len(masks), strict=True):
            marked = mask[first::stride]
            edges = F.pad(marked.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            start = begin + first
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                runs.append((begin, start + low * stride, start + (high - 1) * stride + 1))
            rows.append(start + stride * marked.nonzero()[:, 0])
            begin += len(mask)
        return cls(upload(torch.cat(rows), device), runs, begin, stride, window)

    @classmethod
    def at(cls, places: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> Spans:
        """The rows at such places [S], in ascending order, of each text of such a length."""
        runs, rows, begin = [], list[list[int]](), 0
        for marked, length in zip(places, lengths, strict=True):
            if len(marked):
                rows.append((begin + marked).tolist())
                runs.append((begin, rows[-1][0], rows[-1][-1] + 1))
            begin += length
        every = torch.tensor([row for run in rows for row in run], dtype=torch.long)
        return cls(upload(every, device), runs, begin, scattered=tuple(rows))

    def split_runs(self, size: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Where a text begins, and the next rows of it, so many at most."""
        for number, (begin, start, stop) in enumerate(self.runs):
            rows = self.scattered[number] if self.scattered else range(start, stop, self.stride)
            for first in range(0, len(rows), size):
                yield begin, rows[first : first + size]

    def split(self, size: int) -> Iterator[Spans]:
        """These spans' rows in parts of at most `size`, each of one text."""
        done = 0
        for begin, places in self.split_runs(size):
            rows, run = self.rows[done : done + len(places)], (begin, places[0], places[-1] + 1)
            scattered = (list(places),) if self.scattered else ()
            yield replace(self, rows=rows, runs=[run], scattered=scattered, block_masks={})
            done += len(places)

    @cached_property
    def begins(self) -> Tensor:
        """[S], where the text of each wanted row begins."""
        sizes = [len(rows) for rows in self.scattered]
        counts = torch.tensor(sizes or [len(range(start, stop, self.stride)) for _, start, stop in self.runs])
        begins = torch.tensor([begin for begin, _, _ in self.runs])
        return upload(begins.repeat_interleave(counts), self.rows.device)

    def block_mask(self, drafted: int) -> Any:
        """Whom each wanted row, which sees so many rows of its own, sees of all texts, as fused attention needs it."""
        drafted = drafted if self.window else 0
        if drafted not in self.block_masks:
            self.block_masks[drafted] = self._make_block_mask(drafted)
        return self.block_masks[drafted]

    def _make_block_mask(self, drafted: int) -> Any:
        """With a window, of the blocks that it touches alone, found without a square of all rows."""
        rows, begins, window = self.rows, self.begins, self.window

        def sees(batch: Tensor, head: Tensor, at: Tensor, place: Tensor) -> Tensor:
            past = (begins[at] <= place) & (place <= rows[at])
            return past if window is None else past & ~window.hides(place, rows[at], begins[at], drafted)

        if window is None:
            return create_block_mask(sees, None, None, len(rows), self.count, device=rows.device)
        near = torch.maximum(rows - (window.recent - drafted) + 1, begins)
        sinks = torch.minimum(begins + window.sinks, rows + 1)
        touched = touched_blocks(near, rows + 1, self.count) | touched_blocks(begins, sinks, self.count)
        counts, order = touched.sum(1).int(), touched.int().argsort(dim=1, descending=True, stable=True).int()
        sizes = len(rows), self.count
        return BlockMask.from_kv_blocks(
            counts[None, None], order[None, None], BLOCK_SIZE=FUSED, mask_mod=sees, seq_lengths=sizes
        )


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = ()) -> Tensor:
    """[h, S, w] from query [h, S, w] and key, value [k, N, w]; rows of their own count as a window's latest."""
    own = own if spans.window is None else own[-spans.window.recent :]
    return ATTEND.get(query.device.type, attend_flex)(query, key, value, spans, own)


def attend_plain(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = ()) -> Tensor:
    """`attend` for CPUs, by products of pieces of the texts."""
    return _Plain.apply(query, key, value, spans, *(tensor for pair in own for tensor in pair))


ATTEND = {"cpu": attend_plain, "meta": attend_plain}  # elsewhere one fused kernel


def attend_flex(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = (), kernel: Any = None) -> Tensor:
    """`attend` for accelerators, by one fused kernel over all texts; it has no gradient on a CPU."""
    attention: Any = kernel or (flex_attention if query.device.type == "cpu" else compile_flex())
    options = {"enable_gqa": len(query) != len(key), "return_aux": AuxRequest(lse=True)}
    output, beside = attention(query[None], key[None], value[None], block_mask=spans.block_mask(len(own)), **options)
    return _merge_parts(output[0], _shares(query, beside.lse[0], own), own, len(key))


@cache
def compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)  # else once for every length of a batch


def _shares(query: Tensor, context: Tensor, own: Own) -> Tensor:
    """[1 + steps, h, S], how much of its attention each row gives to its text, of that log-sum-exp, and to its own."""
    scale, wide = query.shape[-1] ** -0.5, context.dtype
    scores = [(by_key(query, key) * key[:, None]).sum(-1, dtype=wide).flatten(0, 1) * scale for key, _ in own]
    return torch.stack([context, *scores]).softmax(0)


def _merge_parts(output: Tensor, shares: Tensor, own: Own, keys: int) -> Tensor:
    """[h, S, w], what the rows saw of their texts and their own values, each by its share."""
    shares = shares.to(output.dtype).unsqueeze(-1)
    output = output * shares[0]
    for share, (_, value) in zip(shares[1:], own, strict=True):
        output = output + (share.unflatten(0, (keys, -1)) * value[:, None]).flatten(0, 1)
    return output


class _Plain(torch.autograd.Function):
    """Two products and a softmax for each piece, whose probs the backward pass computes again.

    What a row drafted itself stands beside its text in one softmax, so nothing is merged.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, *flat: Tensor) -> Tensor:
        own = _pairs(flat)
        # contiguous keys make products of twice the speed in bf16
        query, key, value = query * query.shape[-1] ** -0.5, key.contiguous(), value.contiguous()
        # a row's heads beside each other, as those who read it want them
        output = query.new_empty(query.shape[1], len(query), query.shape[2]).transpose(0, 1)
        scores = query.new_empty(*query.shape[:2], len(own))
        for step, (own_key, _) in enumerate(own):
            scores[:, :, step] = (by_key(query, key) * own_key[:, None]).sum(-1).flatten(0, 1)
        shares = torch.empty_like(scores)
        for rows, seen, hidden in split_pieces(spans, len(own), query):
            key_seen, value_seen = read_columns(seen, key, value)
            probs = attention_probs(query[:, rows], key_seen, scores[:, rows], hidden)
            text, mine = probs.tensor_split([key_seen.shape[1]], dim=-1)
            output[:, rows] = (text @ value_seen).view(output[:, rows].shape)
            shares[:, rows] = mine.reshape(shares[:, rows].shape)
        for step, (_, own_value) in enumerate(own):
            by_key(output, key).addcmul_(by_key(shares[:, :, step, None], key), own_value[:, None])
        ctx.save_for_backward(query, key, value, output, scores, shares, *flat)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, scores, shares, *flat = ctx.saved_tensors
        grad_out, own, grad_query = upstream[0], _pairs(flat), torch.empty_like(query)
        # the other way round, which makes faster products
        grad_key, grad_value = room_for_gradient(key), room_for_gradient(value)
        gain = (grad_out * output).sum(-1, keepdim=True)
        for rows, seen, hidden in split_pieces(ctx.spans, len(own), query):
            key_seen, value_seen = read_columns(seen, key, value)
            probs = attention_probs(query[:, rows], key_seen, scores[:, rows], hidden)[..., : key_seen.shape[1]]
            query_rows, grad_rows = group_by_key(query[:, rows], key), group_by_key(grad_out[:, rows], key)
            add_product(grad_value, seen, grad_rows, probs)
            grad_score = grad_rows @ value_seen.mT
            grad_score.sub_(group_by_key(gain[:, rows], key)).mul_(probs)
            grad_query[:, rows] = (grad_score @ key_seen).view(grad_query[:, rows].shape)
            add_product(grad_key, seen, query_rows, grad_score)
        grad_own: list[Tensor] = []
        for step, (own_key, own_value) in enumerate(own):
            share, grad_part = by_key(shares[:, :, step, None], key), by_key(grad_out, key)
            grad_score = (grad_part * own_value[:, None]).sum(-1, keepdim=True).sub_(by_key(gain, key)).mul_(share)
            by_key(grad_query, key).addcmul_(grad_score, own_key[:, None])
            grad_own += [(grad_score * by_key(query, key)).sum(1), (share * grad_part).sum(1)]
        return grad_query.mul_(query.shape[-1] ** -0.5), grad_key.mT, grad_value.mT, None, *grad_own


def _pairs(flat: Sequence[Tensor]) -> Own:
    return list(zip(flat[::2], flat[1::2], strict=True))


def split_pieces(
    spans: Spans, drafted: int, like: Tensor, size: int | None = None
) -> Iterator[tuple[slice, list[slice], Tensor]]:
    """Of each piece of a run the rows among the wanted ones, the columns that they see, and what hides some of these.

    The latter is added to the scores of the last columns; rows see so many rows of their own beside the columns.
    """
    done, size = 0, size or PIECE.get(like.dtype, PIECE_ELSE)
    for begin, places in spans.split_runs(size):
        rows, end = slice(done, done + len(places)), places[-1] + 1
        if spans.window is not None:
            seen = spans.window.columns(begin, places[0], end, drafted)
            yield rows, seen, _hide_outside(spans.window, drafted, places, begin, seen, like)
        else:
            end = min(begin + _round_up(end - begin, like.dtype), spans.count)
            yield rows, [slice(begin, end)], _hide_later(places, end, like)
        done += len(places)


def _round_up(count: int, dtype: torch.dtype) -> int:
    """The columns that so many are filled up to."""
    return -(-count // COLUMNS.get(dtype, 1)) * COLUMNS.get(dtype, 1)


def _hide_later(places: Sequence[int], end: int, like: Tensor) -> Tensor:
    """[n, m], what a row adds to the columns from the first row up to an end, to see those up to its own alone."""
    if isinstance(places, range):
        return _future(len(places), places.step, like.dtype, like.device)[:, : end - places[0]]
    row = torch.tensor(places, device=like.device)[:, None]
    hidden = torch.arange(places[0], end, device=like.device) > row
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


def _hide_outside(
    window: Window, drafted: int, rows: Sequence[int], begin: int, seen: Sequence[slice], like: Tensor
) -> Tensor:
    """[n, m], what hides from rows the columns outside their windows, among those that the piece sees."""
    places = torch.cat([torch.arange(part.start, part.stop, device=like.device) for part in seen])
    row = torch.tensor(rows, device=like.device)[:, None]
    hidden = window.hides(places, row, begin, drafted) | (places > row)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


def read_columns(seen: Sequence[slice], *tensors: Tensor) -> list[Tensor]:
    """[k, m, w] of each, in bf16 contiguous: products copy what is not, and what they transpose far slower."""
    if len(seen) > 1:
        return [torch.cat([tensor[:, part] for part in seen], dim=1) for tensor in tensors]
    columns = [tensor[:, seen[0]] for tensor in tensors]
    return [column.contiguous() if column.dtype == torch.bfloat16 else column for column in columns]


def room_for_gradient(part: Tensor) -> Tensor:
    """[k, w, N] zeros for what is [k, N, w], in rows of which a stride is filled up as columns are."""
    return part.new_zeros(len(part), part.shape[2], _round_up(part.shape[1], part.dtype))[..., : part.shape[1]]


def add_product(total: Tensor, seen: Sequence[slice], rows: Tensor, columns: Tensor) -> None:
    """Add rows [k, n, w] times columns [k, n, m] to these m columns of a total [k, w, N]."""
    for part, columns_part in zip(seen, columns.split([part.stop - part.start for part in seen], dim=-1), strict=True):
        total[:, :, part].baddbmm_(rows.mT, columns_part)


def by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """[k, h / k, S, ...], the heads that share a key beside each other."""
    return tensor.unflatten(0, (len(key), -1))


def group_by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """[k, h / k * n, w]: the heads that share a key, one below the other."""
    heads, count, width = tensor.shape
    return tensor.reshape(len(key), heads // len(key) * count, width)


def attention_probs(query: Tensor, key: Tensor, own_scores: Tensor, hidden: Tensor) -> Tensor:
    """[k, h / k * n, m + steps], whom rows look at, by query [h, n, w], key [k, m, w], and scores of their own.

    `hidden` [n, ..] is added to the scores of the last columns of a text.
    """
    by_key, count, seen = group_by_key(query, key), query.shape[1], key.shape[1]
    scores = query.new_empty(len(key), by_key.shape[1], seen + own_scores.shape[2])
    torch.bmm(by_key, key.mT, out=scores[..., :seen])
    scores[..., seen:] = group_by_key(own_scores, key)
    scores.view(len(query), count, -1)[:, :, seen - hidden.shape[1] : seen] += hidden
    return scores.softmax(-1)


@cache
def _future(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, n'], what a row adds to the columns from the first row on, to see those up to its own alone."""
    own_column = stride * torch.arange(count, device=device)[:, None]
    behind = torch.arange((count - 1) * stride + COLUMNS.get(dtype, 1), device=device) > own_column
    return torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, -math.inf)
