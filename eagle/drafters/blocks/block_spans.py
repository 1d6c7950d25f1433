"""Attention of a block of tokens after some rows of texts: each token sees the text up to its row, and its block."""

# S wanted rows, B tokens of a block, h heads of queries, k of keys, n rows of a piece, m of its text so far, w width

from __future__ import annotations

import math
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


def attend_block(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Pair, *, causal: bool) -> Tensor:
    """[h, S, B, w] from query [h, S, B, w], a text's key and value [k, N, w], and the blocks' own [k, S, B, w].

    With `causal` a token sees the tokens of its block up to itself, otherwise all.
    """
    attend = ATTEND.get(query.device.type, attend_block_flex)
    return attend(query, key, value, spans, own, causal=causal)


def attend_block_plain(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Pair, *, causal: bool) -> Tensor:
    """`attend_block` for CPUs, by products of pieces of the texts."""
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
    """`attend_block` for accelerators, by one fused kernel over all texts."""
    size, keys = query.shape[2], len(key)
    by_row = query.unflatten(0, (keys, -1)).permute(2, 0, 1, 3, 4).contiguous()  # one copy, which both products read
    output, context = read_texts(by_row.flatten(1, 3).transpose(0, 1), key, value, spans, kernel)
    output, context = (part.transpose(0, 1).unflatten(1, (keys, -1)) for part in (output, context[..., None]))
    own_key, own_value = (part.transpose(0, 1) for part in own)
    scores = (by_row.flatten(2, 3) @ own_key.mT).to(context.dtype) * query.shape[-1] ** -0.5
    if causal:
        scores = hide_later(scores.unflatten(2, (-1, size))).flatten(2, 3)
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    output = output * shares[..., :1] + shares[..., 1:] @ own_value
    return output.unflatten(2, (-1, size)).permute(1, 2, 0, 3, 4).flatten(0, 1)


def read_texts(query: Tensor, key: Tensor, value: Tensor, spans: Spans, kernel: Any = None) -> Pair:
    """[h, S, w], what queries see of their texts, and [h, S], the log of the sum of what scores there are taken to."""
    attention: Any = kernel or compile_flex()
    options = {"enable_gqa": len(query) != len(key), "return_aux": AuxRequest(lse=True)}
    output, beside = attention(query[None], key[None], value[None], block_mask=spans.block_mask(0), **options)
    return output[0], beside.lse[0]


def add_blocks(output: Tensor, context: Tensor, query: Tensor, own: Pair, causal: bool) -> Tensor:
    """[h, S, B, w], what tokens see of their texts, as `read_texts` tells it [h, S, B, w or 1], and of their blocks."""
    scores = own_scores(query, own[0], causal).to(context.dtype) * query.shape[-1] ** -0.5
    shares = torch.cat([context, scores], dim=-1).softmax(-1).to(output.dtype)
    return output * shares[..., :1] + own_product(shares[..., 1:], own[1])


ATTEND = {"cpu": attend_block_plain, "meta": attend_block_plain}


def own_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """[h, S, B, B], how much each token of a block has in common with each other, those hidden at minus infinity."""
    scores = own_product(query, key.mT)
    return hide_later(scores) if causal else scores


def hide_later(scores: Tensor) -> Tensor:
    """Scores [.., B, B] of the tokens of a block, each of which sees those up to itself alone."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def own_product(rows: Tensor, own: Tensor) -> Tensor:
    """[h, S, B, y], rows [h, S, B, x] times what is each block's own [k, S, x, y]."""
    heads, count, size, width = rows.shape
    keys, groups = len(own), heads // len(own)
    by_key = rows.unflatten(0, (keys, groups)).transpose(1, 2).reshape(keys * count, groups * size, width)
    products = by_key @ own.flatten(0, 1)
    return products.view(keys, count, groups, size, own.shape[-1]).transpose(1, 2).flatten(0, 1)


def _own_gradient(upstream: Tensor, rows: Tensor, keys: int) -> Tensor:
    """[k, S, x, y], rows [h, S, B, x] of each block turned round, times what came from above [h, S, B, y]."""
    heads, count, size, _ = rows.shape
    groups = heads // keys

    def by_block(part: Tensor) -> Tensor:
        return part.unflatten(0, (keys, groups)).transpose(1, 2).reshape(keys * count, groups * size, part.shape[-1])

    return (by_block(rows).mT @ by_block(upstream)).view(keys, count, rows.shape[-1], upstream.shape[-1])


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
        query, key, value = query * query.shape[-1] ** -0.5, key.contiguous(), value.contiguous()
        scores = own_scores(query, own_key, causal)
        output, shares = torch.empty_like(query), torch.empty_like(scores)
        for rows, seen, hidden in _pieces(spans, query):
            key_seen, value_seen = read_columns(seen, key, value)
            probs = attention_probs(_flat(query, rows), key_seen, _flat(scores, rows), hidden)
            text, mine = probs.tensor_split([key_seen.shape[1]], dim=-1)
            output[:, rows] = (text @ value_seen).view(output[:, rows].shape)
            shares[:, rows] = mine.reshape(shares[:, rows].shape)
        output += own_product(shares, own_value)
        ctx.save_for_backward(query, key, value, own_key, own_value, output, scores, shares)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, output, scores, shares = ctx.saved_tensors
        grad_out, grad_query = upstream[0].contiguous(), torch.empty_like(query)
        # the other way round, which makes faster products
        grad_key, grad_value = room_for_gradient(key), room_for_gradient(value)
        gain = (grad_out * output).sum(-1, keepdim=True)
        for rows, seen, hidden in _pieces(ctx.spans, query):
            key_seen, value_seen = read_columns(seen, key, value)
            asked, grad_rows = _flat(query, rows), _flat(grad_out, rows)
            probs = attention_probs(asked, key_seen, _flat(scores, rows), hidden)[..., : key_seen.shape[1]]
            asked, grad_rows = group_by_key(asked, key), group_by_key(grad_rows, key)
            add_product(grad_value, seen, grad_rows, probs)
            grad_score = grad_rows @ value_seen.mT
            grad_score.sub_(group_by_key(_flat(gain, rows), key)).mul_(probs)
            grad_query[:, rows] = (grad_score @ key_seen).view(grad_query[:, rows].shape)
            add_product(grad_key, seen, asked, grad_score)
        grad_score = own_product(grad_out, own_value.mT).sub_(gain).mul_(shares)
        grad_query += own_product(grad_score, own_key)
        grad_own = _own_gradient(query, grad_score, len(key)), _own_gradient(grad_out, shares, len(key))
        return grad_query.mul_(query.shape[-1] ** -0.5), grad_key.mT, grad_value.mT, *grad_own, None, None


def _pieces(spans: Spans, query: Tensor) -> Any:
    """Pieces of rows, with a mask for each token of their blocks."""
    size, most = query.shape[2], PIECE.get(query.dtype, PIECE_ELSE)
    for rows, seen, hidden in split_pieces(spans, 0, query, max(most // size, 1)):
        yield rows, seen, hidden.repeat_interleave(size, dim=0)


def _flat(part: Tensor, rows: slice) -> Tensor:
    """[h, n * B, ..], a row for each token of the blocks of some rows."""
    return part[:, rows].flatten(1, 2)
