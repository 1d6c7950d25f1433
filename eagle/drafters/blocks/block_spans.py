"""Attention of a block of tokens after each anchor row: a token sees the sequence up to the anchor, and its block."""

# S anchor rows, B tokens of a block, h query heads, k key heads, g = h / k query heads of a key, w head width
# N rows of all sequences, n anchor rows of a piece, m columns of its sequence so far

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from eagle.drafters.parts.spans import (
    PIECE,
    PIECE_ELSE,
    Drafted,
    Spans,
    add_product,
    attention_probs,
    compile_flex,
    group_by_key,
    read_columns,
    split_pieces,
    zeros_for_gradient,
)

Pair = tuple[Tensor, Tensor]
"""Keys and values of equal shape; or, from `attend_sequences`, an attention output and its log-sum-exp."""


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    block_pair: Pair,
    *,
    causal: bool,
    drafted: Drafted = 0,
) -> Tensor:
    """Return the attention output [h, S, B, w] of blocks of B tokens, one block after each of S anchor rows.

    A token attends to its sequence up to the block's anchor row, and to the tokens of its block. There are h query
    heads and k key heads of width w, and the sequences have N rows in all.

    Args:
        query: [h, S, B, w], of the blocks' tokens.
        key: the sequences' keys [k, N, w].
        value: the sequences' values [k, N, w].
        spans: the anchor rows.
        block_pair: the keys and values of the blocks' tokens [k, S, B, w].
        causal: whether a token sees the tokens of its block up to itself only.
        drafted: for each token of a block, how many tokens of the window of `spans` the block takes up; unused if
            `spans` have no window.
    """
    # the function of this device type; those that are not listed have flex attention
    attend = ATTEND.get(query.device.type, attend_block_flex)
    return attend(query, key, value, spans, block_pair, causal=causal, drafted=drafted)


def attend_block_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    block_pair: Pair,
    *,
    causal: bool,
    drafted: Drafted = 0,
) -> Tensor:
    """`attend_block` for CPUs, by matrix products of pieces of the sequences; the arguments are the same."""
    # autograd's `apply` takes no keywords
    return _Plain.apply(query, key, value, *block_pair, spans, causal, drafted)


def attend_block_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    block_pair: Pair,
    *,
    causal: bool,
    drafted: Drafted = 0,
    kernel: Any = None,
) -> Tensor:
    """`attend_block` for accelerators, by one call of PyTorch's flex attention; the other arguments are the same.

    The kernel reads the sequences. The tokens of a block are added by hand, as every block has its own keys. `kernel`
    replaces flex attention in tests and in forecasts of memory.

    In the shapes below there are S blocks of B tokens, k key heads of width w, and g query heads for each key head.
    """
    size = query.shape[2]  # B
    keys = len(key)  # k
    # [S, k, g, B, w]: one copy, which the products with the sequence and with the block both read
    by_row = query.unflatten(0, (keys, -1)).permute(2, 0, 1, 3, 4).contiguous()
    # tokens of a block see nearly the same part of the sequence, so the kernel gets them as further heads of one row
    flat_query = by_row.flatten(1, 3).transpose(0, 1)
    # the output over the sequences alone, and the log-sum-exp of the scores there
    output, context = attend_sequences(flat_query, key, value, spans, kernel, drafted=drafted)
    output = output.transpose(0, 1).unflatten(1, (keys, -1))  # [S, k, g * B, w]
    context = context[..., None].transpose(0, 1).unflatten(1, (keys, -1))  # [S, k, g * B, 1]
    block_key = block_pair[0].transpose(0, 1)  # [S, k, B, w]
    block_value = block_pair[1].transpose(0, 1)
    scores = (by_row.flatten(2, 3) @ block_key.mT).to(context.dtype) * query.shape[-1] ** -0.5
    if causal:
        scores = hide_later(scores.unflatten(2, (-1, size))).flatten(2, 3)
    # one softmax over both: the sequence is one more score, the log-sum-exp of its scores
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    output = output * shares[..., :1] + shares[..., 1:] @ block_value
    # [S, k, g * B, w] -> [h, S, B, w]
    return output.unflatten(2, (-1, size)).permute(1, 2, 0, 3, 4).flatten(0, 1)


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    kernel: Any = None,
    drafted: Drafted = 0,
) -> Pair:
    """Return the attention output of S rows over their sequences alone, and the log-sum-exp of their scores there.

    With the log-sum-exp, attention to further keys can be merged with this output. There are h query heads and k key
    heads of width w, and the sequences have N rows in all.

    Args:
        query: [h, S, w].
        key: the sequences' keys [k, N, w].
        value: the sequences' values [k, N, w].
        spans: the rows of the queries.
        kernel: replaces flex attention; None for flex attention.
        drafted: how many draft tokens take up part of the window of `spans`. If it is a tuple of n numbers, query head
            i has the number i % n.

    Returns:
        The output [h, S, w] and the log-sum-exp [h, S].
    """
    attention: Any = kernel or compile_flex()
    # flex attention takes a batch dimension, here of one
    output, aux = attention(
        query[None],
        key[None],
        value[None],
        block_mask=spans.block_mask(drafted),
        enable_gqa=len(query) != len(key),
        return_aux=AuxRequest(lse=True),
    )
    return output[0], aux.lse[0]


def add_blocks(
    output: Tensor, context: Tensor, query: Tensor, block_pair: Pair, causal: bool
) -> Tensor:
    """Merge attention to sequences with attention within blocks, and return the output [h, S, B, w] over both.

    There are S blocks of B tokens, h query heads and k key heads of width w.

    Args:
        output: the attention output over the sequences alone, [h, S, B, w].
        context: the log-sum-exp of the scores with the sequences, [h, S, B, 1].
        query: [h, S, B, w].
        block_pair: the keys and values of the blocks' tokens [k, S, B, w].
        causal: whether a token sees the tokens of its block up to itself only.
    """
    # one softmax over both: the sequence is one more score, the log-sum-exp of its scores
    scores = block_scores(query, block_pair[0], causal).to(context.dtype)
    scores = scores * query.shape[-1] ** -0.5
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    return output * shares[..., :1] + block_product(shares[..., 1:], block_pair[1])


ATTEND = {
    "cpu": attend_block_plain,
    "meta": attend_block_plain,
}  # by device type; on others flex attention


def block_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return the scores [h, S, B, B] of the B tokens of each of S blocks with one another, not scaled by the width.

    They are minus infinity where `causal` hides a later token.

    Args:
        query: [h, S, B, w], for h query heads of width w.
        key: [k, S, B, w], of the same tokens, for k key heads.
        causal: whether a token sees the tokens of its block up to itself only.
    """
    scores = block_product(query, key.mT)
    return hide_later(scores) if causal else scores


def hide_later(scores: Tensor) -> Tensor:
    """Return a block's scores [.., queries, keys] with minus infinity where the key is a later token than the query."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def block_product(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return [h, S, B, y], the rows of each block times the block's own matrix.

    Args:
        rows: [h, S, B, x], a row for each of the B tokens of S blocks, in h query heads.
        matrices: [k, S, x, y], a matrix for each block in k key heads. h / k query heads share it.
    """
    heads, count, size, _ = rows.shape  # h, S, B
    keys = len(matrices)
    # [k * S, h / k * B, y]
    products = _by_block(rows, keys) @ matrices.flatten(0, 1)
    products = products.view(keys, count, heads // keys, size, matrices.shape[-1])
    return products.transpose(1, 2).flatten(0, 1)


def _matrix_gradient(upstream: Tensor, rows: Tensor, keys: int) -> Tensor:
    """Return the gradient [k, S, x, y] of `block_product` at its matrices, summed over a key's query heads.

    Args:
        upstream: the gradient at the product, [h, S, B, y], for h query heads and S blocks of B tokens.
        rows: the rows of the product, [h, S, B, x].
        keys: the number k of key heads.
    """
    gradient = _by_block(rows, keys).mT @ _by_block(upstream, keys)
    return gradient.view(keys, rows.shape[1], rows.shape[-1], upstream.shape[-1])


def _by_block(rows: Tensor, keys: int) -> Tensor:
    """Return [k * S, g * B, x] of rows [h, S, B, x]: one matrix for each of S blocks and k = `keys` key heads.

    The rows of the g = h / k query heads that share the key head are stacked in it.
    """
    _, count, size, width = rows.shape  # h, S, B, x
    # [k, g, S, B, x]
    by_key = rows.unflatten(0, (keys, -1))
    return by_key.transpose(1, 2).reshape(keys * count, by_key.shape[1] * size, width)


class _Plain(torch.autograd.Function):
    """Attention on CPUs, with two matrix products and a softmax for each piece of anchor rows.

    The backward pass computes the attention probs again, so that they are not stored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        spans: Spans,
        causal: bool,
        drafted: Drafted,
    ) -> Tensor:
        """Return the attention output [h, S, B, w] of S blocks of B tokens, in h query heads of width w.

        The arguments are those of `attend_block`, with `block_pair` as two tensors: autograd tracks only tensors that
        are arguments themselves.
        """
        query = query * query.shape[-1] ** -0.5
        # contiguous keys make faster products
        key = key.contiguous()
        value = value.contiguous()
        scores = block_scores(query, block_key, causal)  # [h, S, B, B]
        output = torch.empty_like(query)
        block_probs = torch.empty_like(scores)
        # Each piece is n anchor rows of one sequence: their slice among all anchor rows, the columns of the sequence
        # that they see, and the additive mask of the last of these columns. All scores would not fit in memory.
        for rows, columns, mask in _pieces(spans, drafted, query):
            key_seen, value_seen = read_columns(columns, key, value)
            # One softmax over the m columns of the sequence and the B of the block. With g query heads for each of k
            # key heads, the probs are [k, g * n * B, m + B].
            probs = attention_probs(
                _flatten_blocks(query, rows), key_seen, _flatten_blocks(scores, rows), mask
            )
            seq_probs, piece_block_probs = probs.tensor_split([key_seen.shape[1]], dim=-1)
            output[:, rows] = (seq_probs @ value_seen).view(output[:, rows].shape)
            block_probs[:, rows] = piece_block_probs.reshape(block_probs[:, rows].shape)
        output += block_product(block_probs, block_value)
        ctx.save_for_backward(
            query, key, value, block_key, block_value, output, scores, block_probs
        )
        ctx.spans = spans
        ctx.drafted = drafted
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at the arguments of `forward`, given that at its output, [h, S, B, w] for S blocks.

        They are those at the queries, the keys and values of the sequences, and the keys and values of the blocks. The
        other three arguments are no tensors.
        """
        query, key, value, block_key, block_value, output, scores, block_probs = ctx.saved_tensors
        grad_out = upstream[0].contiguous()
        grad_query = torch.empty_like(query)
        # [k, w, N] of keys [k, N, w]: transposed, which makes faster products
        grad_key = zeros_for_gradient(key)
        grad_value = zeros_for_gradient(value)
        # softmax: dL/ds = p * (dL/dp - sum p dL/dp), and that sum is the product of output and its gradient
        mean_grad = (grad_out * output).sum(-1, keepdim=True)
        # the pieces of the forward pass; `add_product` adds to the gradients in place
        for rows, columns, mask in _pieces(ctx.spans, ctx.drafted, query):
            key_seen, value_seen = read_columns(columns, key, value)
            query_rows = _flatten_blocks(query, rows)
            probs = attention_probs(query_rows, key_seen, _flatten_blocks(scores, rows), mask)
            # the block's columns are left to the end
            probs = probs[..., : key_seen.shape[1]]
            query_rows = group_by_key(query_rows, key)
            grad_rows = group_by_key(_flatten_blocks(grad_out, rows), key)
            add_product(grad_value, columns, grad_rows, probs)
            grad_score = grad_rows @ value_seen.mT
            grad_score.sub_(group_by_key(_flatten_blocks(mean_grad, rows), key)).mul_(probs)
            grad_query[:, rows] = (grad_score @ key_seen).view(grad_query[:, rows].shape)
            add_product(grad_key, columns, query_rows, grad_score)
        # the same for the keys and values of the blocks
        grad_score = block_product(grad_out, block_value.mT).sub_(mean_grad).mul_(block_probs)
        grad_query += block_product(grad_score, block_key)
        grad_block_key = _matrix_gradient(query, grad_score, len(key))
        grad_block_value = _matrix_gradient(grad_out, block_probs, len(key))
        # the forward pass scaled the query
        grad_query.mul_(query.shape[-1] ** -0.5)
        grads = grad_query, grad_key.mT, grad_value.mT, grad_block_key, grad_block_value
        return *grads, None, None, None


def _pieces(
    spans: Spans, drafted: Drafted, query: Tensor
) -> Iterator[tuple[slice, Sequence[slice], Tensor]]:
    """Yield pieces of anchor rows that attend in one matrix product, as `split_pieces` does.

    A piece has fewer anchor rows than other attention has rows, as each of them has a block of queries.

    Args:
        spans: The anchor rows.
        drafted: How many draft tokens take up part of the window of `spans`: one number, or one for each token of a
            block.
        query: [h, S, B, w], the queries of S blocks of B tokens.

    Yields:
        For each piece of n anchor rows: its slice of the anchor rows, the columns of the sequence that at least one of
        them sees, and an additive mask [n * B, ..] of the last of these columns, with a row for each token of a block.
    """
    size = query.shape[2]  # B
    # `PIECE` counts queries, of which an anchor row has B
    max_rows = PIECE.get(query.dtype, PIECE_ELSE) // size
    for rows, columns, mask in split_pieces(spans, drafted, query, size=max(max_rows, 1)):
        # With a window and a tuple `drafted`, tokens of a block may see different columns, and the mask has a row for
        # each token already. Else it has a row for each anchor row.
        if len(mask) < (rows.stop - rows.start) * size:
            mask = mask.repeat_interleave(size, dim=0)
        yield rows, columns, mask


def _flatten_blocks(tensor: Tensor, rows: slice) -> Tensor:
    """Return [h, n * B, ..] of [h, S, B, ..]: a row for each token of the blocks after n of the S anchor rows.

    `rows` are these n, and a block has B tokens.
    """
    return tensor[:, rows].flatten(1, 2)
