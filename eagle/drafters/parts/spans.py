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

# On CPUs, query rows of one matrix product. Larger pieces need fewer products, but half of the scores of a piece's rows
# with one another are masked, which is wasted work. At 1,024 rows of 4 heads of 64 forward and backward take
# 24 / 30 / 35 ms with 64 / 128 / 256 rows in fp32, 12.6 / 10.4 / 10.2 ms in bf16; PyTorch's fused attention 30 and 22.
PIECE = {torch.float32: 64, torch.float64: 64}
PIECE_ELSE = 128  # for all other dtypes
# The number of columns that a piece sees is rounded up to a multiple of this: in bf16 CPUs prepare a kernel for each
# new shape of a product, so there should be few shapes.
COLUMNS = {torch.bfloat16: 64}
FLEX_BLOCK = 128  # rows and columns of a block in the mask of PyTorch's flex attention
Drafted = int | tuple[int, ...]
"""How many draft tokens a row sees besides its sequence; one number for each token, if a block of tokens follows it."""
StepPairs = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [k, S, w] of each draft step so far. Row i of a step is seen by wanted row i alone."""


# -- which rows see what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """The wanted rows of concatenated sequences: those whose attention output is computed.

    Attention on CPUs goes through them run by run. A run has rows of one sequence, in ascending order: a range, or a
    list of arbitrary ones.
    """

    rows: Tensor  # [S], the indices of the wanted rows among all rows
    # of each run, the first row of its sequence and its wanted rows
    runs: Sequence[tuple[int, Sequence[int]]]
    count: int  # the number N of all rows
    window: Window | None = None  # which earlier rows of its sequence a row sees; None: all of them
    # flex attention's masks that were made, by the number of draft steps that rows see besides their sequence
    block_masks: dict[Drafted, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        masks: Sequence[Tensor],
        device: torch.device,
        stride: int = 1,
        firsts: Sequence[int] | None = None,
        window: Window | None = None,
    ) -> Spans:
        """Return spans whose wanted rows (tokens), at which attention is computed, are those where masks are true.

        Args:
            masks: A bool mask [rows of the sequence] for each sequence, on the host.
            device: Where the rows are used.
            stride: Only every `stride`-th row of a sequence is considered, starting at `firsts`.
            firsts: The first row of each sequence that is considered, counted from its begin; None: row 0.
            window: Which earlier rows of its sequence a row sees; None: all of them.
        """
        runs: list[tuple[int, Sequence[int]]] = []
        rows = []
        begin = 0  # the first row of the sequence
        for mask, first in zip(masks, firsts or [0] * len(masks), strict=True):
            marked = mask[first::stride]
            start = begin + first
            # where runs of marked rows begin and end, in turn, counted in strides
            edges = F.pad(marked.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                # `high` is after the last row of the run
                runs.append((begin, range(start + low * stride, start + high * stride, stride)))
            rows.append(start + stride * marked.nonzero()[:, 0])
            begin += len(mask)
        return cls(upload(torch.cat(rows), device), runs, count=begin, window=window)

    @classmethod
    def at(cls, places: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> Spans:
        """Return spans whose wanted rows (tokens), at which attention is computed, are arbitrary ones.

        Args:
            places: For each sequence the positions of its wanted rows, in ascending order, on the host.
            lengths: The number of rows of each sequence, wanted or not.
            device: Where the rows are used.
        """
        runs = []
        rows: list[int] = []
        begin = 0  # the first row of the sequence
        for positions, length in zip(places, lengths, strict=True):
            # a sequence without wanted rows has no run
            if len(positions):
                seq_rows = (begin + positions).tolist()
                rows += seq_rows
                runs.append((begin, seq_rows))
            begin += length
        return cls(upload(torch.tensor(rows, dtype=torch.long), device), runs, count=begin)

    def split_runs(self, size: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the wanted rows (tokens that attend) in pieces of at most `size` rows of one run.

        Each piece comes as the index of its sequence's first row, and the indices of its rows, among all rows.
        """
        for begin, rows in self.runs:
            for first in range(0, len(rows), size):
                yield begin, rows[first : first + size]

    def split(self, size: int) -> Iterator[Spans]:
        """Yield the wanted rows (tokens that attend) as smaller spans of at most `size` rows, each of one sequence."""
        done = 0  # wanted rows that were yielded
        for begin, rows in self.split_runs(size):
            end = done + len(rows)
            # masks are of the rows, so the smaller spans make their own
            yield replace(self, rows=self.rows[done:end], runs=[(begin, rows)], block_masks={})
            done = end

    @cached_property
    def begins(self) -> Tensor:
        """[S], for each of the S wanted rows (tokens that attend) the index of the first row of its sequence."""
        counts = [len(rows) for _, rows in self.runs]
        begins = torch.tensor([begin for begin, _ in self.runs])
        return upload(begins.repeat_interleave(torch.tensor(counts)), self.rows.device)

    def block_mask(self, drafted: Drafted) -> Any:
        """Return flex attention's mask of the rows (tokens) that each wanted row sees; it is made once and cached.

        Args:
            drafted: How many draft tokens a row sees besides its sequence. They are not in this mask, but take up part
                of a window. If it is a tuple, it has the number of each token of a block that follows the row, and
                attention's heads are those of these tokens in turn.
        """
        # without a window the mask does not depend on them
        drafted = drafted if self.window else 0
        if drafted not in self.block_masks:
            self.block_masks[drafted] = self._make_block_mask(drafted)
        return self.block_masks[drafted]

    def _make_block_mask(self, drafted: Drafted) -> Any:
        """Return flex attention's mask of S wanted rows (tokens): each sees its sequence up to itself, or a window.

        `drafted` is how many draft tokens a row sees besides, which take up part of a window: one number, or one for
        each token of a block after the row.
        """
        rows = self.rows
        begins = self.begins
        window = self.window
        by_token = (drafted,) if isinstance(drafted, int) else drafted
        token_counts = upload(torch.tensor(by_token), rows.device)
        fewest = min(by_token)

        # flex attention calls this with scalar index tensors: `query` is among the wanted rows, `row` among all rows
        def is_seen(batch: Tensor, head: Tensor, query: Tensor, row: Tensor) -> Tensor:
            """Return whether a wanted row sees a row: both of one sequence, the row not later and not hidden."""
            is_past = (begins[query] <= row) & (row <= rows[query])
            if window is None:
                return is_past
            count = fewest if len(by_token) == 1 else token_counts[head % len(by_token)]
            return is_past & ~window.hides(row, rows[query], begins[query], count)

        if window is None:
            return create_block_mask(is_seen, None, None, len(rows), self.count, device=rows.device)
        # `create_block_mask` would make a mask of all rows and columns, which does not fit in memory for sequences that
        # are long enough to need windows. So the visible blocks are computed from the two ranges that each row sees,
        # its recent rows and its sinks; the ends of the ranges are [S] each.
        # with the fewest draft tokens the window reaches furthest back
        recent_start = torch.maximum(rows - (window.recent - fewest) + 1, begins)
        sinks_end = torch.minimum(begins + window.sinks, rows + 1)
        touched = _touched_blocks(recent_start, rows + 1, self.count) | _touched_blocks(
            begins, sinks_end, self.count
        )
        # for each block of rows: how many blocks of columns it sees, and all column blocks, the visible ones first
        counts = touched.sum(1).int()
        order = touched.int().argsort(dim=1, descending=True, stable=True).int()
        return BlockMask.from_kv_blocks(
            counts[None, None],
            order[None, None],
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=is_seen,
            seq_lengths=(len(rows), self.count),
        )


def _touched_blocks(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return which blocks of flex attention's mask have a row (token) that sees one of their columns (keys).

    The kernel skips all other blocks. A block has FLEX_BLOCK rows and as many columns, so the result is a bool [S /
    FLEX_BLOCK, count / FLEX_BLOCK], both rounded up, for S rows.

    Args:
        low: [S], the first column that each row sees.
        high: [S], the column after the last; a row with low >= high sees none.
        count: The number of all columns.
    """
    query_blocks = torch.arange(len(low), device=low.device) // FLEX_BLOCK
    # +1 at the block where a row's columns begin and -1 after the block where they end, so that a running sum over the
    # blocks of columns counts the rows that touch a block. One more block of columns takes the -1 after the last.
    edges = low.new_zeros((len(low) - 1) // FLEX_BLOCK + 1, (count - 1) // FLEX_BLOCK + 2)
    sees_any = (low < high).to(edges.dtype)  # 0 for a row that sees none, so that it adds nothing
    edges.index_put_((query_blocks, low // FLEX_BLOCK), sees_any, accumulate=True)
    edges.index_put_(
        (query_blocks, (high - 1).clamp(min=0) // FLEX_BLOCK + 1), -sees_any, accumulate=True
    )
    return edges.cumsum(1)[:, :-1] > 0


# -- attention --------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, step_pairs: StepPairs = ()
) -> Tensor:
    """Return the attention output [h, S, w] of the wanted rows (tokens that attend) of concatenated sequences.

    A row attends to its sequence up to itself, and to the keys of the draft steps that continue from it: a training
    step that unrolls a draft sees the earlier steps of the same draft.

    Args:
        query: [h, S, w], of the S wanted rows, with h query heads of width w.
        key: [k, N, w], of all N rows of the sequences, with k key heads.
        value: [k, N, w].
        spans: The wanted rows.
        step_pairs: Keys and values [k, S, w] of each draft step: entry i is seen by wanted row i alone. With a window
            they count as the most recent rows.
    """
    # older steps have left the window
    if spans.window is not None:
        step_pairs = step_pairs[-spans.window.recent :]
    return ATTEND.get(query.device.type, attend_flex)(query, key, value, spans, step_pairs)


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, step_pairs: StepPairs = ()
) -> Tensor:
    """Return the attention output [h, S, w] of the wanted rows (tokens that attend), by products of pieces.

    For CPUs; the arguments are those of `attend`: queries [h, S, w], keys and values [k, N, w] of all rows, which rows
    attend, and keys and values [k, S, w] of each draft step.
    """
    # autograd tracks only tensors that are arguments themselves, not those in a list
    flat: list[Tensor] = []
    for pair in step_pairs:
        flat += pair
    return _Plain.apply(query, key, value, spans, *flat)


ATTEND = {"cpu": attend_plain, "meta": attend_plain}  # by device type; on others flex attention


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    step_pairs: StepPairs = (),
    kernel: Any = None,
) -> Tensor:
    """Return the attention output [h, S, w] of the wanted rows (tokens that attend), by PyTorch's flex attention.

    For accelerators; the arguments are those of `attend`. One call of the kernel reads the sequences. The draft steps,
    whose keys and values are in `step_pairs`, are added by hand, as every row has its own keys there. It has no
    gradient on a CPU. `kernel` replaces flex attention in tests and in forecasts of memory.
    """
    attention = kernel
    # on a CPU, where only tests call this, it is not compiled
    if kernel is None:
        attention = flex_attention if query.device.type == "cpu" else compile_flex()
    output, aux = attention(
        query[None],
        key[None],
        value[None],
        block_mask=spans.block_mask(len(step_pairs)),
        enable_gqa=len(query) != len(key),
        return_aux=AuxRequest(lse=True),
    )
    # `lse` is [1, query heads, wanted rows]: the log-sum-exp of each row's scores with its sequence
    shares = _attention_shares(query, aux.lse[0], step_pairs)
    return _merge_outputs(output[0], shares, step_pairs, len(key))


@cache
def compile_flex() -> Any:
    """Return PyTorch's flex attention, compiled once for batches of all lengths."""
    return torch.compile(flex_attention, dynamic=True)


def _attention_shares(query: Tensor, context: Tensor, step_pairs: StepPairs) -> Tensor:
    """Return the part [1 + steps, h, S] of each row's attention that goes to its sequence, then to each draft step.

    A softmax over the log-sum-exp of the sequence's scores and the scores with the steps gives the shares. By these
    shares the outputs over the sequence and over the steps are added up.

    Args:
        query: [h, S, w], of S rows, with h query heads of width w.
        context: [h, S], the log-sum-exp of a row's scores with its sequence.
        step_pairs: Keys and values [k, S, w] of each draft step, with k key heads; row i sees entry i.
    """
    scale = query.shape[-1] ** -0.5
    scores = [context]
    for key, _ in step_pairs:
        # [k, h / k, S, w]: one key for each row, so a product by element is enough
        products = by_key(query, key) * key[:, None]
        scores.append(products.sum(-1, dtype=context.dtype).flatten(0, 1) * scale)
    return torch.stack(scores).softmax(0)


def _merge_outputs(output: Tensor, shares: Tensor, step_pairs: StepPairs, keys: int) -> Tensor:
    """Return the attention output [h, S, w] over sequences and draft steps, each weighted by its part of the softmax.

    Args:
        output: [h, S, w], that over the sequences alone, of S rows and h query heads of width w.
        shares: [1 + steps, h, S], the share of each row's attention that goes to its sequence, then to each draft step.
        step_pairs: Keys and values [keys, S, w] of each draft step; row i sees entry i.
        keys: The number of key heads.
    """
    shares = shares.to(output.dtype).unsqueeze(-1)
    output = output * shares[0]
    for share, (_, value) in zip(shares[1:], step_pairs, strict=True):
        output = output + (share.unflatten(0, (keys, -1)) * value[:, None]).flatten(0, 1)
    return output


class _Plain(torch.autograd.Function):
    """Attention on CPUs, with two matrix products and a softmax for each piece of rows.

    The backward pass computes the attention probs again, so that they are not stored. The scores with a row's draft
    steps are in the same softmax as those with its sequence, so nothing has to be merged.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, *flat: Tensor
    ) -> Tensor:
        """Return the attention output [h, S, w] of the wanted rows (tokens that attend), by blocks of rows.

        Args:
            ctx: Gets the tensors and spans for `backward`.
            query: [h, S, w], of the S wanted rows, with h query heads of width w.
            key: [k, N, w], of all N rows, with k key heads.
            value: [k, N, w].
            spans: The wanted rows.
            flat: The step pairs of `attend`, key and value [k, S, w] in turn, as autograd takes no lists of tensors.
        """
        step_pairs = _pairs(flat)
        heads, count, width = query.shape
        query = query * width**-0.5
        # contiguous keys make products of twice the speed in bf16
        key = key.contiguous()
        value = value.contiguous()
        # [h, S, w], but in memory [S, h, w]: the output projection reads all heads of a row together
        output = query.new_empty(count, heads, width).transpose(0, 1)
        # [h, S, steps], the scores of each row with the keys of its draft steps
        step_scores = query.new_empty(heads, count, len(step_pairs))
        for step, (step_key, _) in enumerate(step_pairs):
            # [k, h / k, S, w]: a row sees one key of each step, its own, so a product by element is enough
            products = by_key(query, key) * step_key[:, None]
            step_scores[:, :, step] = products.sum(-1).flatten(0, 1)
        step_probs = torch.empty_like(step_scores)
        # piece by piece, as the scores of all rows with all columns would not fit in memory
        for rows, columns, mask in split_pieces(spans, len(step_pairs), query):
            piece_key, piece_value = read_columns(columns, key, value)
            # one softmax over the columns of the sequence and the keys of the draft steps
            probs = attention_probs(query[:, rows], piece_key, step_scores[:, rows], mask)
            seq_probs, piece_step_probs = probs.tensor_split([piece_key.shape[1]], dim=-1)
            output[:, rows] = (seq_probs @ piece_value).view(output[:, rows].shape)
            step_probs[:, rows] = piece_step_probs.reshape(step_probs[:, rows].shape)
        for step, (_, step_value) in enumerate(step_pairs):
            # adds the step's values to `output`, of which `by_key` returns a view
            probs = by_key(step_probs[:, :, step, None], key)
            by_key(output, key).addcmul_(probs, step_value[:, None])
        ctx.save_for_backward(query, key, value, output, step_scores, step_probs, *flat)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at queries, keys and values of the sequences, None for spans, and those at the steps.

        The last are at keys and values of each draft step in turn, as in `forward`.
        """
        query, key, value, output, step_scores, step_probs, *flat = ctx.saved_tensors
        step_pairs = _pairs(flat)
        (grad_out,) = upstream
        grad_query = torch.empty_like(query)
        # [key heads, width, all rows], transposed, which makes faster products
        grad_key = zeros_for_gradient(key)
        grad_value = zeros_for_gradient(value)
        # softmax: ds = p (dp - sum of p dp), and that sum over keys is the sum of output * grad_out over the width
        mean_grad = (grad_out * output).sum(-1, keepdim=True)
        for rows, columns, mask in split_pieces(ctx.spans, len(step_pairs), query):
            piece_key, piece_value = read_columns(columns, key, value)
            probs = attention_probs(query[:, rows], piece_key, step_scores[:, rows], mask)
            # without the probs of the draft steps, which come last
            probs = probs[..., : piece_key.shape[1]]
            query_rows = group_by_key(query[:, rows], key)
            grad_rows = group_by_key(grad_out[:, rows], key)
            add_product(grad_value, columns, grad_rows, probs)
            grad_scores = grad_rows @ piece_value.mT
            grad_scores.sub_(group_by_key(mean_grad[:, rows], key)).mul_(probs)
            grad_query[:, rows] = (grad_scores @ piece_key).view(grad_query[:, rows].shape)
            add_product(grad_key, columns, query_rows, grad_scores)
        # the same for the keys and values of the draft steps, each of which only one row reads
        grad_steps: list[Tensor] = []
        for step, pair in enumerate(step_pairs):
            grad_steps += _add_step_gradients(
                query,
                grad_query,
                grad_out,
                mean_grad,
                pair=pair,
                probs=by_key(step_probs[:, :, step, None], key),
            )
        # the forward pass scaled the query
        grad_query.mul_(query.shape[-1] ** -0.5)
        return grad_query, grad_key.mT, grad_value.mT, None, *grad_steps


def _add_step_gradients(
    query: Tensor,
    grad_query: Tensor,
    grad_out: Tensor,
    mean_grad: Tensor,
    pair: tuple[Tensor, Tensor],
    probs: Tensor,
) -> list[Tensor]:
    """Return the gradients [k, S, w] of a draft step's keys and values, and add its part to `grad_query` in place.

    With p the probability of the step's key, o the output, g its gradient and v the step's value, the gradient of the
    score is p (g v - sum g o).

    Args:
        query: [h, S, w], of S rows (tokens), with h query heads of width w, scaled by 1 / sqrt(w).
        grad_query: [h, S, w], the sum so far.
        grad_out: [h, S, w], the gradient at the attention output.
        mean_grad: [h, S, 1], the sum of output * grad_out over the width.
        pair: The step's keys and values [k, S, w], with k key heads; row i sees entry i alone.
        probs: [k, h / k, S, 1], the attention probs of each row at its key of this step.
    """
    key, value = pair
    grad_out = by_key(grad_out, key)
    grad_scores = (grad_out * value[:, None]).sum(-1, keepdim=True)
    grad_scores.sub_(by_key(mean_grad, key)).mul_(probs)
    by_key(grad_query, key).addcmul_(grad_scores, key[:, None])
    return [(grad_scores * by_key(query, key)).sum(1), (probs * grad_out).sum(1)]


def _pairs(flat: Sequence[Tensor]) -> StepPairs:
    """Return the pairs (keys, values) of draft steps from a flat list that has keys and values in turn.

    Autograd takes no list of pairs as an argument.
    """
    return list(zip(flat[::2], flat[1::2], strict=True))


# -- pieces of sequences ----------------------------------------------------------------------------------------------


def split_pieces(
    spans: Spans, drafted: Drafted, like: Tensor, size: int | None = None
) -> Iterator[tuple[slice, list[slice], Tensor]]:
    """Yield the wanted rows (tokens that attend) in pieces that attend in one matrix product.

    Args:
        spans: The wanted rows.
        drafted: The number of draft steps that a row sees besides its sequence; they take up part of a window. If it
            is a tuple, it has the number for each token of a block that follows the row, and the mask of a window has a
            row for each of these tokens in place of a row of the piece.
        like: A tensor with the dtype and the device of the scores.
        size: The most rows of a piece; None for the best size of the dtype.

    Yields:
        For each piece of n rows: its rows among the wanted ones, as a slice; the columns (keys) that at least one of
        them sees, one or two slices of all rows; and an additive mask [n, columns], minus infinity where a row does not
        see a column. The mask may be of the last of the columns only: all rows see those before.
    """
    size = size or PIECE.get(like.dtype, PIECE_ELSE)
    counts = (drafted,) if isinstance(drafted, int) else drafted
    done = 0
    for begin, row_indices in spans.split_runs(size):
        rows = slice(done, done + len(row_indices))
        done = rows.stop
        end = row_indices[-1] + 1
        if spans.window is None:
            # the mask hides the columns that rounding adds
            end = min(begin + _round_up(end - begin, like.dtype), spans.count)
            yield rows, [slice(begin, end)], _hide_later(row_indices, end, like)
        else:
            # the columns that the piece as a whole sees; the mask hides from each row those beyond its own window
            columns = spans.window.columns(begin, row_indices[0], end, min(counts))
            positions = torch.cat(
                [torch.arange(part.start, part.stop, device=like.device) for part in columns]
            )
            row = torch.tensor(row_indices).repeat_interleave(len(counts))[:, None]
            count = torch.tensor(counts).repeat(len(row_indices))[:, None]
            row, count = upload(row, like.device), upload(count, like.device)
            is_hidden = spans.window.hides(positions, row, begin, count) | (positions > row)
            yield rows, columns, _additive(is_hidden, like.dtype)


def _round_up(count: int, dtype: torch.dtype) -> int:
    """Return a number of columns (keys) rounded up to the dtype's multiple, so that products have few shapes.

    In bf16 a CPU prepares a kernel for each new shape.
    """
    multiple = COLUMNS.get(dtype, 1)
    return -(-count // multiple) * multiple


def _additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask of a bool mask: minus infinity where a key is hidden, 0 elsewhere."""
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return zeros.masked_fill_(is_hidden, -math.inf)


def _hide_later(row_indices: Sequence[int], end: int, like: Tensor) -> Tensor:
    """Return the additive causal mask [n, end - first] of n rows (tokens) over the keys from the first row's to `end`.

    `row_indices` are the indices of the rows, in ascending order. `like` has the dtype and the device of the mask.
    """
    first = row_indices[0]
    # equally spaced rows share one cached mask
    if isinstance(row_indices, range):
        count = len(row_indices)
        return _future(count, row_indices.step, like.dtype, like.device)[:, : end - first]
    row = torch.tensor(row_indices, device=like.device)[:, None]
    return _additive(torch.arange(first, end, device=like.device) > row, like.dtype)


@cache
def _future(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive causal mask [count, columns] of `count` rows (tokens) a stride apart, over keys (columns).

    The columns begin with the first row's own. They are enough for every piece of this size, rounding included, so that
    one cached mask serves all of them.
    """
    row = stride * torch.arange(count, device=device)[:, None]
    columns = torch.arange((count - 1) * stride + COLUMNS.get(dtype, 1), device=device)
    return _additive(columns > row, dtype)


def read_columns(ranges: Sequence[slice], *tensors: Tensor) -> list[Tensor]:
    """Return the m columns (keys or values) of one or two ranges, [heads, m, width], of each tensor.

    The tensors are [heads, columns, width]. In bf16 the results are contiguous: a product copies a tensor that is not,
    and copies it far slower if it transposes it.
    """
    columns = []
    for tensor in tensors:
        if len(ranges) > 1:
            column = torch.cat([tensor[:, part] for part in ranges], dim=1)
        else:
            column = tensor[:, ranges[0]]
            if column.dtype == torch.bfloat16:
                column = column.contiguous()
        columns.append(column)
    return columns


def zeros_for_gradient(tensor: Tensor) -> Tensor:
    """Return zeros [heads, width, N] for the transposed gradient of keys or values [heads, N, width] of N tokens.

    In memory each row is padded to the dtype's multiple of columns, as the products that are added have such sizes.
    """
    keys, count, width = tensor.shape
    return tensor.new_zeros(keys, width, _round_up(count, tensor.dtype))[..., :count]


def add_product(total: Tensor, ranges: Sequence[slice], left: Tensor, right: Tensor) -> None:
    """Add left.mT @ right to m columns of a total in place: the part of some rows in the gradient of keys or values.

    Args:
        total: [key heads, width, N], with N columns.
        ranges: The columns: one or two slices with m columns in all.
        left: [key heads, n, width], of the piece's n rows.
        right: [key heads, n, m].
    """
    sizes = [part.stop - part.start for part in ranges]
    for part, right_part in zip(ranges, right.split(sizes, dim=-1), strict=True):
        total[:, :, part].baddbmm_(left.mT, right_part)


def by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """Return a view [k, h / k, tokens, ..] of [h, tokens, ..]: query heads that share a key head have one first index.

    Only the number k of key heads is read from `key` [k, ..]; h is that of query heads. A product with the keys [k, 1,
    rows, ..] then needs no copy of them.
    """
    return tensor.unflatten(0, (len(key), -1))


def group_by_key(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [k, h / k * n, width] of [h, n, width]: the rows of query heads that share a key are stacked in one head.

    Only the number k of key heads is read from `key` [k, ..]; h is that of query heads, n that of rows (tokens). One
    matrix product with the keys [k, ..] then serves all of these query heads.
    """
    heads, count, width = tensor.shape
    return tensor.reshape(len(key), heads // len(key) * count, width)


def attention_probs(query: Tensor, key: Tensor, extra_scores: Tensor, mask: Tensor) -> Tensor:
    """Return the attention probs [k, h / k * n, m + e] of n rows (tokens) over m keys and e further keys of each row.

    The rows of the h / k query heads that share a key head are stacked, one head after the other.

    Args:
        query: [h, n, w], with h query heads of width w, scaled by 1 / sqrt(w).
        key: [k, m, w], with k key heads.
        extra_scores: [h, n, e], the scores of each row with keys that only it sees.
        mask: [n, ..], the additive mask of the last of the m columns; all rows see those before.
    """
    queries = group_by_key(query, key)
    columns = key.shape[1]
    scores = query.new_empty(len(key), queries.shape[1], columns + extra_scores.shape[2])
    torch.bmm(queries, key.mT, out=scores[..., :columns])
    scores[..., columns:] = group_by_key(extra_scores, key)
    # a view of the same scores in which the rows of each query head are apart: [h, n, m + e]
    by_head = scores.view(len(query), query.shape[1], -1)
    by_head[:, :, columns - mask.shape[1] : columns] += mask
    return scores.softmax(-1)
