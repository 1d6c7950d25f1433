"""Hydra from its formulas: one position and one level at a time; the prefix layer is transformers' own, uncached."""

# T tokens of a text, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
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
from tests.naive_layers import Weights
from tests.naive_unroll import anchors_of, smooth_l1


def begin_at(anchor: int) -> int:
    """Return the position whose state of the target a draft reads."""
    return anchor


def tokens_behind(anchor: int, level: int) -> range:
    """Return the positions whose embeddings a level reads."""
    return range(anchor + 1, anchor + 2 + level)


def prefix_states(weights: Weights, shape: Any, states: Tensor) -> Tensor:
    """Return [T, H], what the levels read: the states [T, H], or the causal layer's normed output at them."""
    if "norm.weight" not in weights:
        return states
    shape._attn_implementation = "eager"
    layer = LlamaDecoderLayer(shape, 0).to(states.dtype)
    norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
    length = len(states)
    mask = torch.full((1, 1, length, length), -torch.inf, dtype=states.dtype).triu(1)
    options = {
        "attention_mask": mask,
        "position_embeddings": LlamaRotaryEmbedding(shape)(states, torch.arange(length)[None]),
    }
    # functional calls, so that the loss has gradients at these very weights
    own = {
        name.removeprefix("layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("layers.0.")
    }
    output = functional_call(layer, own, (states[None],), options, strict=True)
    output = output[0] if isinstance(output, tuple) else output
    return functional_call(norm, {"weight": weights["norm.weight"]}, (output,))[0]


def level_hidden(weights: Weights, level: int, state: Tensor, embedded: Sequence[Tensor]) -> Tensor:
    """Return [H], what a level's LM head reads, from a state and the embeddings of the tokens after it."""

    def affine(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    # x + silu(Wx + b) in each block; the first has a residual of its own, as it reads more than it returns
    x = torch.cat([state, *embedded])
    first = f"blocks.{level}.0"
    x = affine(f"{first}.residual", x) + F.silu(affine(first, x))
    index = 1
    while f"blocks.{level}.{index}.weight" in weights:
        x = x + F.silu(affine(f"blocks.{level}.{index}", x))
        index += 1
    return x


def level_logits(weights: Weights, level: int, hidden: Tensor) -> Tensor:
    """Return [V], a level's logits."""
    return weights[f"heads.{level}.weight"] @ hidden + weights[f"heads.{level}.bias"]


def hydra_loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    target_head: TargetHead,
) -> Tensor:
    """Return the sum over the levels that each anchor reaches, divided by the number of anchors.

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        texts: the batch.
        target_head: the target's embedding and LM head.
    """
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for text in texts:
        anchors = anchors_of(text.loss_mask, torch.ones_like(text.loss_mask), settings.levels)
        count += len(anchors)
        states = text.features[:, -1]
        embedded = target_head.embed(text.tokens)
        prefix = prefix_states(weights, shape, states)
        for anchor, levels in anchors.items():
            for level in range(levels):
                # one level at a time, with the embeddings that it reads
                behind = [embedded[position] for position in tokens_behind(anchor, level)]
                hidden = level_hidden(
                    weights,
                    level,
                    prefix[begin_at(anchor)],
                    behind,
                )
                log_probs = level_logits(weights, level, hidden).log_softmax(-1)
                position = anchor + 2 + level  # of the token that is guessed
                teacher = states[position - 1]
                if settings.loss == "tokens":
                    total = total - log_probs[text.tokens[position]]
                else:
                    total = total - (target_head.logits(teacher).softmax(-1) * log_probs).sum()
                total = total + settings.regression * smooth_l1(hidden, teacher)
    return total / count
