"""P-EAGLE's loss from its formulas: each anchor alone, with its masks, in a dense causal pass over its text so far."""

# T tokens of a text, m masks behind an anchor, R = a + 1 + m rows, L taps, H width, n heads, w of a head, D vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.naive_divisors import Term, divide_terms
from tests.naive_unroll import fused, law_loss, rms, sayable_ids, turned

Weights = Mapping[str, Tensor]


def heads_of(weights: Weights, layer: str, shape: Any, read: Tensor) -> list[Tensor]:
    """Queries, keys and values [R, n, w]; row r stands at place r."""
    parts = [F.linear(read, weights[f"{layer}self_attn.{name}_proj.weight"]) for name in "qkv"]
    parts = [part.view(len(read), -1, shape.head_dim) for part in parts]
    theta = shape.rope_parameters["rope_theta"]
    return [
        torch.stack([turned(row, at, theta) for at, row in enumerate(part)]) for part in parts[:2]
    ] + parts[2:]


def block(weights: Weights, number: int, shape: Any, read: Tensor, residual: Tensor) -> Tensor:
    """[R, H], one block's output: every row sees the rows up to itself."""
    layer, eps = f"layers.{number}.", shape.rms_norm_eps
    query, key, value = heads_of(weights, layer, shape, read)
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("rnw,snw->nrs", query, key) / shape.head_dim**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    seen = torch.einsum("nrs,snw->rnw", scores.softmax(-1), value).flatten(1)
    x = residual + F.linear(seen, weights[layer + "self_attn.o_proj.weight"])
    normed = torch.stack(
        [rms(row, weights[layer + "post_attention_layernorm.weight"], eps) for row in x]
    )
    gate, up = (
        F.linear(normed, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up")
    )
    return x + F.linear(F.silu(gate) * up, weights[layer + "mlp.down_proj.weight"])


def anchor_logits(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: tuple[Tensor, Tensor],
    frozen: TargetHead,
    anchor: int,
    masks: int,
) -> Tensor:
    """[1 + m, D] behind an anchor and its masks; the text is its tokens and its taps [T, L, H]."""
    (tokens, taps), eps = text, shape.rms_norm_eps

    def norm(rows: Tensor, name: str) -> Tensor:
        return torch.stack([rms(row, weights[name], eps) for row in rows])

    read = torch.cat([tokens[1 : anchor + 2], torch.full((masks,), settings.mask_token)])
    states = [*taps[: anchor + 1], *[weights["mask_hidden"].view(taps.shape[1:])] * masks]
    hidden = torch.stack([fused(weights, settings, shape, state) for state in states])
    normed = norm(hidden, "layers.0.hidden_norm.weight")
    both = torch.cat(
        [norm(frozen.embed(read).to(hidden.dtype), "layers.0.input_layernorm.weight"), normed],
        dim=1,
    )
    x = block(weights, 0, shape, both, normed if settings.norm_before_residual else hidden)
    for number in range(1, settings.blocks):
        x = block(weights, number, shape, norm(x, f"layers.{number}.input_layernorm.weight"), x)
    return F.linear(norm(x[anchor:], "norm.weight"), weights["lm_head.weight"])


def loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    frozen: TargetHead,
    counts: Sequence[Tensor],
) -> Tensor:
    """The loss of the supervised slots and their masks, so many behind each.

    Features are the taps and, last, what the teacher reads. What cannot be drafted counts nothing.
    """
    ids, terms = sayable_ids(weights, frozen.weight.shape[0]), list[Term]()
    for number, (text, masks) in enumerate(zip(texts, counts, strict=True)):
        for anchor in text.loss_mask[2:].nonzero()[:, 0].tolist():
            known = text.tokens, text.features[:, :-1]
            logits = anchor_logits(
                weights, settings, shape, known, frozen, anchor, int(masks[anchor])
            )
            for depth, own in enumerate(logits):
                wanted = frozen.logits(text.features[anchor + 1 + depth, -1])[ids]
                counted = bool(torch.isin(text.tokens[anchor + 2 + depth], ids))
                terms.append((number, depth, 1, law_loss(settings.loss, wanted, own) * counted))
    return divide_terms(settings.divisor, terms, [int(text.loss_mask[2:].sum()) for text in texts])
