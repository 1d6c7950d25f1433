"""Hydra from its formulas: one slot and one level at a time; the prefix by transformers' own layer, without a cache."""

# T tokens of a text, H width, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.naive_unroll import anchors_of

Weights = Mapping[str, Tensor]


def begin_at(anchor: int) -> int:
    """Whose state of the target a draft reads."""
    return anchor


def tokens_behind(anchor: int, level: int) -> range:
    """Whose embeddings a level reads."""
    return range(anchor + 1, anchor + 2 + level)


def prefix_states(weights: Weights, shape: Any, states: Tensor) -> Tensor:
    """[T, H], what levels read: the states [T, H], or the causal layer's normed output at them."""
    if "norm.weight" not in weights:
        return states
    shape._attn_implementation = "eager"
    layer = LlamaDecoderLayer(shape, 0).to(states.dtype)
    norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
    tables = LlamaRotaryEmbedding(shape)(states, torch.arange(len(states))[None])
    mask = torch.full((len(states), len(states)), float("-inf"), dtype=states.dtype).triu(1)[
        None, None
    ]
    held = {
        name.removeprefix("layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("layers.0.")
    }
    given = {"attention_mask": mask, "position_embeddings": tables}
    output = functional_call(layer, held, (states[None],), given, strict=True)
    output = output[0] if isinstance(output, tuple) else output
    return functional_call(norm, {"weight": weights["norm.weight"]}, (output,))[0]


def level_hidden(weights: Weights, level: int, state: Tensor, embedded: Sequence[Tensor]) -> Tensor:
    """[H], what a level's LM head reads: of a state and the tokens behind it."""
    x, block = torch.cat([state, *embedded]), f"blocks.{level}.0"
    x = (
        weights[f"{block}.residual.weight"] @ x
        + weights[f"{block}.residual.bias"]
        + F.silu(weights[f"{block}.weight"] @ x + weights[f"{block}.bias"])
    )
    number = 1
    while f"blocks.{level}.{number}.weight" in weights:
        x = x + F.silu(
            weights[f"blocks.{level}.{number}.weight"] @ x
            + weights[f"blocks.{level}.{number}.bias"]
        )
        number += 1
    return x


def level_logits(weights: Weights, level: int, hidden: Tensor) -> Tensor:
    """[V]."""
    return weights[f"heads.{level}.weight"] @ hidden + weights[f"heads.{level}.bias"]


def hydra_loss(
    weights: Weights, settings: Any, shape: Any, texts: Sequence[Example], frozen: TargetHead
) -> Tensor:
    """Sums over the levels that each anchor reaches, over the number of anchors."""
    total, slots = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        anchors = anchors_of(text.loss_mask, torch.ones_like(text.loss_mask), settings.levels)
        slots += len(anchors)
        states, embedded = text.features[:, -1], frozen.embed(text.tokens)
        first = prefix_states(weights, shape, states)
        for anchor, levels in anchors.items():
            for level in range(levels):
                behind = [embedded[place] for place in tokens_behind(anchor, level)]
                hidden = level_hidden(weights, level, first[begin_at(anchor)], behind)
                own, named = (
                    level_logits(weights, level, hidden).log_softmax(-1),
                    anchor + 2 + level,
                )
                if settings.loss == "tokens":
                    total = total - own[text.tokens[named]]
                else:
                    total = total - (frozen.logits(states[named - 1]).softmax(-1) * own).sum()
                off = (hidden - states[named - 1]).abs()
                smooth = torch.where(off < 1, off.square() / 2, off - 0.5).mean()
                total = total + settings.regression * smooth
    return total / slots
