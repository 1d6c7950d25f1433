"""Attention of a block of tokens after some rows: each token sees the sequence up to its row, and its block."""

# S anchor rows, B tokens of a block, h query heads, k key heads, g = h / k query heads of a key, w head width
# N rows of all sequences, n rows of a piece, m of its sequence so far

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
    Spans,
    add_product,
    attention_probs,
    compile_flex,
    group_by_key,
    read_columns,
    room_for_gradient,
    split_pieces,
)

Pair = tuple[Tensor, Tensor]


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    own: Pair,
    *,
    causal: bool,
) -> Tensor:
    """Return [h, S, B, w], what the tokens of blocks see of their sequences and their blocks.

    Args:
        query: [h, S, B, w].
        key: the sequences' keys [k, N, w].
        value: the sequences' values [k, N, w].
        spans: the anchor rows.
        own: the blocks' own keys and values [k, S, B, w].
        causal: whether a token sees the tokens of its block up to itself only.
    """
    attend = ATTEND.get(query.device.type, attend_block_flex)
    return attend(query, key, value, spans, own, causal=causal)


def attend_block_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    own: Pair,
    *,
    causal: bool,
) -> Tensor:
    """`attend_block` for CPUs, by products of pieces of the sequences."""
    return _Plain.apply(query, key, value, *own, spans, causal)


def attend_block_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    own: Pair,
    *,
    causal: bool,
    kernel: Any = None,
) -> Tensor:
    """`attend_block` for accelerators, by one fused kernel over all sequences."""
    size = query.shape[2]
    keys = len(key)
    # [S, k, g, B, w]: one copy, which the products with the sequence and with the block both read
    by_row = query.unflatten(0, (keys, -1)).permute(2, 0, 1, 3, 4).contiguous()
    # to the kernel the tokens of a block are further heads
    output, context = read_texts(by_row.flatten(1, 3).transpose(0, 1), key, value, spans, kernel)
    output = output.transpose(0, 1).unflatten(1, (keys, -1))  # [S, k, g * B, w]
    context = context[..., None].transpose(0, 1).unflatten(1, (keys, -1))  # [S, k, g * B, 1]
    own_key = own[0].transpose(0, 1)  # [S, k, B, w]
    own_value = own[1].transpose(0, 1)
    scores = (by_row.flatten(2, 3) @ own_key.mT).to(context.dtype) * query.shape[-1] ** -0.5
    if causal:
        scores = hide_later(scores.unflatten(2, (-1, size))).flatten(2, 3)
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    output = output * shares[..., :1] + shares[..., 1:] @ own_value
    return output.unflatten(2, (-1, size)).permute(1, 2, 0, 3, 4).flatten(0, 1)


def read_texts(query: Tensor, key: Tensor, value: Tensor, spans: Spans, kernel: Any = None) -> Pair:
    """Return [h, S, w], what queries see of their sequences, and [h, S], the log-sum-exp of their scores there."""
    attention: Any = kernel or compile_flex()
    output, aux = attention(
        query[None],
        key[None],
        value[None],
        block_mask=spans.block_mask(0),
        enable_gqa=len(query) != len(key),
        return_aux=AuxRequest(lse=True),
    )
    return output[0], aux.lse[0]


def add_blocks(output: Tensor, context: Tensor, query: Tensor, own: Pair, causal: bool) -> Tensor:
    """Return [h, S, B, w], what tokens see of their sequences and of their blocks.

    Args:
        output: what they see of their sequences, [h, S, B, w].
        context: its log-sum-exp, [h, S, B, 1].
        query: [h, S, B, w].
        own: the blocks' own keys and values [k, S, B, w].
        causal: as in `attend_block`.
    """
    # one softmax over both: the sequence counts by its log-sum-exp, as one more score
    scores = own_scores(query, own[0], causal).to(context.dtype) * query.shape[-1] ** -0.5
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    return output * shares[..., :1] + own_product(shares[..., 1:], own[1])


ATTEND = {"cpu": attend_block_plain, "meta": attend_block_plain}


def own_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return [h, S, B, B], the scores of the tokens of a block with one another, minus infinity where hidden."""
    scores = own_product(query, key.mT)
    return hide_later(scores) if causal else scores


def hide_later(scores: Tensor) -> Tensor:
    """Return scores [.., B, B] of the tokens of a block, each of which sees those up to itself alone."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def own_product(rows: Tensor, own: Tensor) -> Tensor:
    """Return [h, S, B, y], rows [h, S, B, x] times each block's own matrices [k, S, x, y]."""
    heads, count, size, _ = rows.shape
    keys = len(own)
    products = _by_block(rows, keys) @ own.flatten(0, 1)
    products = products.view(keys, count, heads // keys, size, own.shape[-1])
    return products.transpose(1, 2).flatten(0, 1)


def _own_gradient(upstream: Tensor, rows: Tensor, keys: int) -> Tensor:
    """Return [k, S, x, y], the gradient of `own_product` at the blocks' own matrices.

    Args:
        upstream: the gradient at the product, [h, S, B, y].
        rows: [h, S, B, x].
        keys: the number k of key heads.
    """
    gradient = _by_block(rows, keys).mT @ _by_block(upstream, keys)
    return gradient.view(keys, rows.shape[1], rows.shape[-1], upstream.shape[-1])


def _by_block(rows: Tensor, keys: int) -> Tensor:
    """Return [k * S, g * B, x], the rows [h, S, B, x] of each block that share a key, one below the other."""
    _, count, size, width = rows.shape
    by_key = rows.unflatten(0, (keys, -1))
    return by_key.transpose(1, 2).reshape(keys * count, by_key.shape[1] * size, width)


class _Plain(torch.autograd.Function):
    """Two products and a softmax for each piece, whose probs the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        spans: Spans,
        causal: bool,
    ) -> Tensor:
        query = query * query.shape[-1] ** -0.5
        key = key.contiguous()
        value = value.contiguous()
        scores = own_scores(query, own_key, causal)
        output = torch.empty_like(query)
        own_probs = torch.empty_like(scores)
        for rows, columns, hidden in _pieces(spans, query):
            key_seen, value_seen = read_columns(columns, key, value)
            # one softmax over the sequence's columns and the block's: [k, g * n * B, m + B]
            probs = attention_probs(_flat(query, rows), key_seen, _flat(scores, rows), hidden)
            seq_probs, block_probs = probs.tensor_split([key_seen.shape[1]], dim=-1)
            output[:, rows] = (seq_probs @ value_seen).view(output[:, rows].shape)
            own_probs[:, rows] = block_probs.reshape(own_probs[:, rows].shape)
        output += own_product(own_probs, own_value)
        ctx.save_for_backward(query, key, value, own_key, own_value, output, scores, own_probs)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, output, scores, own_probs = ctx.saved_tensors
        grad_out = upstream[0].contiguous()
        grad_query = torch.empty_like(query)
        # [k, w, N], the other way round, which makes faster products
        grad_key = room_for_gradient(key)
        grad_value = room_for_gradient(value)
        # softmax: dL/ds = p * (dL/dp - sum p dL/dp), and that sum is the product of output and its gradient
        mean = (grad_out * output).sum(-1, keepdim=True)
        for rows, columns, hidden in _pieces(ctx.spans, query):
            key_seen, value_seen = read_columns(columns, key, value)
            query_rows = _flat(query, rows)
            probs = attention_probs(query_rows, key_seen, _flat(scores, rows), hidden)[
                ..., : key_seen.shape[1]
            ]
            query_rows = group_by_key(query_rows, key)
            grad_rows = group_by_key(_flat(grad_out, rows), key)
            add_product(grad_value, columns, grad_rows, probs)
            grad_score = grad_rows @ value_seen.mT
            grad_score.sub_(group_by_key(_flat(mean, rows), key)).mul_(probs)
            grad_query[:, rows] = (grad_score @ key_seen).view(grad_query[:, rows].shape)
            add_product(grad_key, columns, query_rows, grad_score)
        grad_score = own_product(grad_out, own_value.mT).sub_(mean).mul_(own_probs)
        grad_query += own_product(grad_score, own_key)
        grad_own_key = _own_gradient(query, grad_score, len(key))
        grad_own_value = _own_gradient(grad_out, own_probs, len(key))
        grad_query.mul_(query.shape[-1] ** -0.5)
        return grad_query, grad_key.mT, grad_value.mT, grad_own_key, grad_own_value, None, None


def _pieces(spans: Spans, query: Tensor) -> Iterator[tuple[slice, Sequence[slice], Tensor]]:
    """Yield pieces of anchor rows as `split_pieces` does, with a row of the mask for each token of their blocks."""
    size = query.shape[2]
    max_rows = PIECE.get(query.dtype, PIECE_ELSE) // size
    for rows, columns, hidden in split_pieces(spans, 0, query, max(max_rows, 1)):
        yield rows, columns, hidden.repeat_interleave(size, dim=0)


def _flat(tensor: Tensor, rows: slice) -> Tensor:
    """Return [h, n * B, ..], a row for each token of the blocks of some rows."""
    return tensor[:, rows].flatten(1, 2)
