"""P-EAGLE's loss from its formulas: each anchor alone, with its masks, in a dense causal pass over its text so far."""

# T tokens of a text, m masks after an anchor, R = a + 1 + m rows, L taps, H hidden, D vocabulary of the draft

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.naive_divisors import Term, divide_terms
from tests.naive_layers import Weights, attend, finish_block, project_heads, rms
from tests.naive_unroll import fused, law_loss, sayable_ids


def block(weights: Weights, index: int, shape: Any, read: Tensor, residual: Tensor) -> Tensor:
    """Return [R, H], one block's output: every row sees the rows up to itself."""
    layer = f"layers.{index}."
    positions = range(len(read))
    query = project_heads(
        weights,
        f"{layer}self_attn.q_",
        read,
        shape,
        positions=positions,
    )
    key = project_heads(
        weights,
        f"{layer}self_attn.k_",
        read,
        shape,
        positions=positions,
    )
    value = project_heads(weights, f"{layer}self_attn.v_", read, shape)
    # masks are rows like any others: each sees those before it
    causal = torch.ones(len(read), len(read), dtype=torch.bool).tril()
    attention = attend(query, key, value, causal)
    return finish_block(
        weights,
        layer,
        residual,
        attention,
        eps=shape.rms_norm_eps,
    )


def anchor_logits(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: tuple[Tensor, Tensor],
    target_head: TargetHead,
    anchor: int,
    masks: int,
) -> Tensor:
    """Return [1 + m, D], the logits of an anchor and its masks; the text is its tokens and its taps [T, L, H].

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        text: its tokens [T] and its taps [T, L, H].
        target_head: the target's embedding and LM head.
        anchor: the last position that is known.
        masks: how many masks follow it.
    """
    tokens, taps = text

    def norm(rows: Tensor, name: str) -> Tensor:
        return rms(rows, weights[f"{name}.weight"], shape.rms_norm_eps)

    # a mask reads the mask's token and a learned state in place of the target's
    read = torch.cat([tokens[1 : anchor + 2], torch.full((masks,), settings.mask_token)])
    mask_taps = weights["mask_hidden"].view(taps.shape[1:])
    states = [*taps[: anchor + 1], *[mask_taps] * masks]
    hidden = torch.stack([fused(weights, settings, shape, state) for state in states])
    embedded = target_head.embed(read).to(hidden.dtype)
    normed = norm(hidden, "layers.0.hidden_norm")
    both = torch.cat([norm(embedded, "layers.0.input_layernorm"), normed], dim=1)
    residual = normed if settings.norm_before_residual else hidden
    x = block(weights, 0, shape, both, residual=residual)
    for index in range(1, settings.blocks):
        # further blocks read the output of the one before, normed
        normed = norm(x, f"layers.{index}.input_layernorm")
        x = block(weights, index, shape, normed, residual=x)
    return F.linear(norm(x[anchor:], "norm"), weights["lm_head.weight"])


def loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    target_head: TargetHead,
    counts: Sequence[Tensor],
) -> Tensor:
    """Return the loss of the supervised positions and of their masks, whose number `counts` has for each position.

    Features are the taps and, last, what the teacher reads. Tokens that cannot be drafted count nothing.

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        texts: the batch.
        target_head: the target's embedding and LM head.
        counts: for each text how many masks each position has.
    """
    ids = sayable_ids(weights, target_head.weight.shape[0])
    terms: list[Term] = []
    for index, text in enumerate(texts):
        known = (text.tokens, text.features[:, :-1])
        for anchor in text.loss_mask[2:].nonzero()[:, 0].tolist():
            masks = int(counts[index][anchor])
            guesses = anchor_logits(
                weights, settings, shape, known, target_head=target_head, anchor=anchor, masks=masks
            )
            # the anchor itself guesses the next token, each mask one further
            for depth, logits in enumerate(guesses):
                teacher = target_head.logits(text.features[anchor + 1 + depth, -1])[ids]
                can_be_drafted = bool(torch.isin(text.tokens[anchor + 2 + depth], ids))
                term = law_loss(settings.loss, teacher, logits) * can_be_drafted
                terms.append((index, depth, 1, term))
    begins = [int(text.loss_mask[2:].sum()) for text in texts]
    return divide_terms(settings.divisor, terms, begins)
