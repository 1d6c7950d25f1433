"""Heads that guess blocks of tokens, from their formulas: one block at a time, one softmax over all that it sees."""

# T tokens of a text, L taps, H width, B slots of a block, K levels, n heads, w of a head, M keys, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.drafters.parts.test_objectives_kinds import FORMULAS
from tests.naive_divisors import Term, divide_terms
from tests.naive_unroll import turned

Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of rows."""
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def project_heads(
    weights: Weights, layer: str, name: str, rows: Tensor, head: Any, places: range | None
) -> Tensor:
    """[M, n, w], queries, keys or values of rows [M, H]; with places normed by head and turned."""
    shape, prefix = head.shape, f"{layer}self_attn.{name}_"
    heads = F.linear(rows, weights[f"{prefix}proj.weight"]).unflatten(-1, (-1, shape.head_dim))
    if places is None:
        return heads
    if head.settings.qk_norm:
        heads = rms(heads, weights[f"{prefix}norm.weight"], shape.rms_norm_eps)
    theta = shape.rope_parameters["rope_theta"]
    return torch.stack(
        [turned(row, place, theta) for row, place in zip(heads, places, strict=True)]
    )


def block_states(
    head: Any, weights: Weights, features: Tensor, root: Tensor, frozen: TargetHead
) -> Tensor:
    """[B, H], the normed states of a block behind features [T, L, H] of the text before its root."""
    settings, eps, length = head.settings, head.shape.rms_norm_eps, len(features)
    context = rms(
        F.linear(features.flatten(1), weights["fc.weight"]), weights["hidden_norm.weight"], eps
    )
    x = frozen.embed(torch.tensor([int(root), *[settings.mask_token] * (settings.slots - 1)]))
    places = range(length + settings.slots)
    visible = torch.ones(settings.slots, settings.slots).bool()
    visible = F.pad(visible.tril() if settings.causal else visible, (length, 0), value=True)
    for number in range(settings.blocks):
        layer = f"layers.{number}."
        own = rms(x, weights[f"{layer}input_layernorm.weight"], eps)
        seen = torch.cat([context, own])
        query = project_heads(weights, layer, "q", own, head, places[length:])
        key = project_heads(weights, layer, "k", seen, head, places)
        value = project_heads(weights, layer, "v", seen, head, None)
        key, value = (
            part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value)
        )
        scores = torch.einsum("bnw,mnw->nbm", query, key) / query.shape[-1] ** 0.5
        probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        output = torch.einsum("nbm,mnw->bnw", probs, value).flatten(1)
        x = x + F.linear(output, weights[f"{layer}self_attn.o_proj.weight"])
        normed = rms(x, weights[f"{layer}post_attention_layernorm.weight"], eps)
        gate, up = (
            F.linear(normed, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up")
        )
        x = x + F.linear(F.silu(gate) * up, weights[f"{layer}mlp.down_proj.weight"])
    return rms(x, weights["norm.weight"], eps)


def level_states(
    head: Any, weights: Weights, features: Tensor, root: Tensor, frozen: TargetHead
) -> Tensor:
    """[K, H], the states that name the tokens behind the root, the next one first."""
    states = block_states(head, weights, features, root, frozen)
    return states if head.settings.sample_from_anchor else states[1:]


Anchor = tuple[Example, int, int]
"""A text, the place of a root in it, and how many levels behind the root are supervised without a gap."""


def anchors_of(texts: Sequence[Example], levels: int) -> Iterator[Anchor]:
    """Every root that a supervised token follows."""
    for text in texts:
        for place in range(2, len(text.tokens)):
            named = text.loss_mask[place : place + levels].tolist()
            if named[0]:
                yield text, place - 1, [*named, False].index(False)


def weigh_levels(settings: Any, probs: Tensor) -> Tensor:
    """[K], what each level of a block counts; `probs` [K] has the head's of the text's own tokens."""
    if settings.d_pace:
        kept = 0.5 + 0.5 * probs.detach()
        return torch.stack([kept.cumprod(0)[level:].sum() for level in range(len(kept))])
    decay = math.inf if settings.decay is None else settings.decay
    return torch.tensor([math.exp(-level / decay) for level in range(len(probs))])


def naive_loss(
    head: Any, weights: Weights, anchors: Iterable[Anchor], frozen: TargetHead
) -> Tensor:
    """The loss of all levels of all blocks, each by its weight; the last tap is what the teacher reads."""
    settings, terms, begins = head.settings, list[Term](), 0
    for text, root, reached in anchors:
        assert text.features is not None
        features, named = (
            text.features[:root, : len(settings.taps)],
            slice(root + 1, root + 1 + reached),
        )
        states = level_states(head, weights, features, text.tokens[root], frozen)[:reached]
        q, p = (
            frozen.logits(states).softmax(-1),
            frozen.logits(text.features[root : root + reached, -1]).softmax(-1),
        )
        likely = q[range(reached), text.tokens[named]]
        losses = -likely.log() if settings.loss == "tokens" else FORMULAS[settings.loss](p, q)
        levels = zip(weigh_levels(settings, likely), losses, strict=True)
        terms += [(0, level, weight, loss) for level, (weight, loss) in enumerate(levels)]
        begins += 1
    return divide_terms(settings.divisor, terms, [begins])
