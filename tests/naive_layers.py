"""Parts of a Llama block from their formulas, in plain torch, for the naive renderings of heads."""

# M rows, n heads, w width of a head, H hidden

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x divided by its root mean square over the last dimension, times a weight."""
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Return x [n, w] with each pair (j, j + w/2) turned by position * theta^(-2j/w)."""
    half = x.shape[-1] // 2
    # the angles are in fp32, as heads have them
    angle = position * (1.0 / theta ** (torch.arange(half) * 2.0 / x.shape[-1]))
    cosine = angle.cos().to(x.dtype)
    sine = angle.sin().to(x.dtype)
    left = x[:, :half]
    right = x[:, half:]
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=1)


def project_heads(
    weights: Weights,
    prefix: str,
    rows: Tensor,
    shape: Any,
    positions: Sequence[int] | None = None,
) -> Tensor:
    """Return [M, n, w], the queries, keys or values of rows [M, H].

    Args:
        weights: the head's weights by name.
        prefix: what the names begin with, as `layers.0.self_attn.q_`.
        rows: what the projection reads.
        shape: the head's sizes.
        positions: those of the rows, by which queries and keys are rotated; values have none.
    """
    # DFlash and Qwen norm each head, Llama none
    projected = F.linear(rows, weights[f"{prefix}proj.weight"], weights.get(f"{prefix}proj.bias"))
    heads = projected.unflatten(-1, (-1, shape.head_dim))
    if positions is None:
        return heads
    if f"{prefix}norm.weight" in weights:
        heads = rms(heads, weights[f"{prefix}norm.weight"], shape.rms_norm_eps)
    theta = shape.rope_parameters["rope_theta"]
    pairs = zip(heads, positions, strict=True)
    return torch.stack([turned(row, position, theta) for row, position in pairs])


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return [Q, n * w] of queries [Q, n, w] over the keys that `visible` [Q, M] marks.

    Args:
        query: [Q, n, w].
        key: [M, fewer n, w], each of which serves several queries.
        value: [M, fewer n, w].
        visible: [Q, M], which keys each query sees.
    """
    group = query.shape[1] // key.shape[1]  # queries that share a key
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qnw,mnw->nqm", query, key) / query.shape[-1] ** 0.5
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("nqm,mnw->qnw", probs, value).flatten(1)


def finish_block(
    weights: Weights,
    layer: str,
    residual: Tensor,
    attention: Tensor,
    eps: float,
) -> Tensor:
    """Return a block's output [.., H] from the output of its attention: o_proj, norm and MLP.

    Args:
        weights: the head's weights by name.
        layer: what the names begin with, as `layers.0.`.
        residual: [.., H], what the attention's output is added to.
        attention: [.., n * w].
        eps: of the norm.
    """
    x = residual + F.linear(attention, weights[f"{layer}self_attn.o_proj.weight"])
    normed = rms(x, weights[f"{layer}post_attention_layernorm.weight"], eps)
    gate = F.linear(normed, weights[f"{layer}mlp.gate_proj.weight"])
    up = F.linear(normed, weights[f"{layer}mlp.up_proj.weight"])
    return x + F.linear(F.silu(gate) * up, weights[f"{layer}mlp.down_proj.weight"])
