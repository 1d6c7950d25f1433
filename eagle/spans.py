"""Causal attention at some rows of texts that lie end to end: what is not supervised is only looked at."""

# N rows of all texts, S of them wanted, h heads of queries, k of keys, n rows of a piece, m of its text so far, w width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

PIECE = 128  # rows of one attention call: a piece is read under a mask, half of whose square is wasted


@dataclass(frozen=True, slots=True)
class Spans:
    """Some rows of texts that lie end to end: their indices, and (begin of the text, first row, end) of each piece."""

    rows: Tensor  # [S]
    pieces: list[tuple[int, int, int]]

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device) -> Spans:
        """The rows that masks on the host mark, a mask for each text, in runs cut into pieces."""
        pieces, begin = [], 0
        for mask in masks:
            edges = F.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                cuts = range(start, stop, PIECE)
                pieces += [(begin, begin + cut, begin + min(cut + PIECE, stop)) for cut in cuts]
            begin += len(mask)
        return cls(torch.cat(list(masks)).nonzero()[:, 0].to(device, non_blocking=True), pieces)


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor:
    """[h, S, w] from query [h, S, w] and key, value [k, N, w]: each row sees its text up to itself."""
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        return _Plain.apply(query, key, value, spans)
    parts = [
        F.scaled_dot_product_attention(
            query[None, :, rows],
            key[None, :, seen],
            value[None, :, seen],
            attn_mask=causal_lower_right(rows.stop - rows.start, seen.stop - seen.start),
            enable_gqa=len(query) != len(key),
        )[0]
        for rows, seen in _slices(spans)
    ]
    return torch.cat(parts, dim=1)


class _Plain(torch.autograd.Function):
    """Two products and a softmax: in bf16 on a CPU a third of the time of its fused attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor:
        output = torch.empty_like(query)
        for rows, seen in _slices(spans):
            law = _law(query[:, rows], key[:, seen])
            output[:, rows] = (law @ value[:, seen]).view_as(output[:, rows])
        ctx.save_for_backward(query, key, value)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        scale = query.shape[-1] ** -0.5
        for rows, seen in _slices(ctx.spans):
            law, asked = _law(query[:, rows], key[:, seen]), _grouped(query[:, rows], key)
            given = _grouped(upstream[0][:, rows], key)
            by_value[:, seen] += law.transpose(1, 2) @ given
            by_score = torch._softmax_backward_data(given @ value[:, seen].transpose(1, 2), law, -1, law.dtype)
            by_query[:, rows] = (by_score @ key[:, seen]).mul_(scale).view_as(by_query[:, rows])
            by_key[:, seen] += (by_score.transpose(1, 2) @ asked).mul_(scale)
        return by_query, by_key, by_value, None


def _slices(spans: Spans) -> list[tuple[slice, slice]]:
    """Of each piece the rows among the wanted ones, and those that it sees."""
    slices, done = [], 0
    for begin, start, stop in spans.pieces:
        slices.append((slice(done, done + stop - start), slice(begin, stop)))
        done += stop - start
    return slices


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """[k, h / k * n, w]: the heads that share a key, one below the other."""
    return query.reshape(len(key), -1, query.shape[-1])


def _law(query: Tensor, key: Tensor) -> Tensor:
    """[k, h / k * n, m], whom each row looks at, of query [h, n, w] and key [k, m, w]."""
    scores = _grouped(query * query.shape[-1] ** -0.5, key) @ key.transpose(1, 2)
    count = query.shape[1]
    scores.view(len(query), count, -1)[:, :, -count:] += _future(count, scores.dtype)
    return scores.softmax(-1)


@cache
def _future(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count, count), -math.inf, dtype=dtype).triu_(1)
