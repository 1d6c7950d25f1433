"""Heads that guess blocks of tokens, from their formulas: one block at a time, one softmax over all that it sees."""

# T tokens of a text, L taps, H hidden, B slots of a block, K levels, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.drafters.parts.test_objectives_kinds import FORMULAS
from tests.naive_dflash2 import convolve, selector_loss
from tests.naive_divisors import Term, divide_terms
from tests.naive_layers import Weights, attend, project_heads, rms
from tests.naive_lilicorr import path_losses


def block_states(
    head: Any, weights: Weights, features: Tensor, root: Tensor, target_head: TargetHead
) -> Tensor:
    """Return [B, H], the normed states of a block after the features [T, L, H] of the text before its root.

    Args:
        head: the head, for its settings and sizes.
        weights: the head's weights by name.
        features: the text's taps up to the token before the root.
        root: the first token of the block.
        target_head: the target's embedding and LM head.
    """
    settings = head.settings
    eps = head.shape.rms_norm_eps
    length = len(features)
    fused = F.linear(features.flatten(1), weights["fc.weight"])
    context = rms(fused, weights["hidden_norm.weight"], eps)
    masks = [settings.mask_token] * (settings.slots - 1)
    x = target_head.embed(torch.tensor([int(root), *masks]))
    positions = range(length + settings.slots)
    for index in range(settings.blocks):
        layer = f"layers.{index}."
        projections = f"{layer}self_attn."
        normed = rms(x, weights[f"{layer}input_layernorm.weight"], eps)
        own = convolve(weights, f"{layer}attention_conv.", normed, normed, side=0)
        rows = torch.cat([context, own])
        # the text gives keys and values to every layer, and no queries
        query = project_heads(
            weights, f"{projections}q_", own, head.shape, positions=positions[length:]
        )
        key = project_heads(weights, f"{projections}k_", rows, head.shape, positions=positions)
        value = project_heads(weights, f"{projections}v_", rows, head.shape)
        attention = attend(query, key, value, seen_keys(settings, index, length))
        attention = F.linear(attention, weights[f"{projections}o_proj.weight"])
        x = x + convolve(weights, f"{layer}attention_conv.", normed, attention, side=1)
        normed = rms(x, weights[f"{layer}post_attention_layernorm.weight"], eps)
        own = convolve(weights, f"{layer}mlp_conv.", normed, normed, side=0)
        gate = F.linear(own, weights[f"{layer}mlp.gate_proj.weight"])
        up = F.linear(own, weights[f"{layer}mlp.up_proj.weight"])
        mlp = F.linear(F.silu(gate) * up, weights[f"{layer}mlp.down_proj.weight"])
        x = x + convolve(weights, f"{layer}mlp_conv.", normed, mlp, side=1)
    return rms(x, weights["norm.weight"], eps)


def seen_keys(settings: Any, block: int, length: int) -> Tensor:
    """Return a bool [B, length + B]: which keys of the text and of its block each slot sees in one decoder block."""
    blocks = range(settings.blocks) if settings.window_blocks is None else settings.window_blocks
    slides = settings.window is not None and block in blocks
    causal = slides if settings.causal == "window" else settings.causal
    rows = []
    for slot in range(settings.slots):
        row = []
        for key in range(length + settings.slots):
            if key >= length:
                seen = not causal or key - length <= slot
            elif not slides:
                seen = True
            elif settings.window_end == "root":
                # speculators: the W tokens before the root
                seen = length - settings.window.recent <= key < length
            else:
                # all others: the W - 1 positions before the slot's own, as far as they are of the text
                seen = length + slot - (settings.window.recent - 1) <= key < length
            row.append(seen or key < min(settings.window.sinks if slides else 0, length))
        rows.append(row)
    return torch.tensor(rows)


def level_states(
    head: Any, weights: Weights, features: Tensor, root: Tensor, target_head: TargetHead
) -> Tensor:
    """Return [K, H], the states that name the tokens after the root, the next one first."""
    states = block_states(head, weights, features, root, target_head=target_head)
    return states if head.settings.sample_from_anchor else states[1:]


Anchor = tuple[Example, int, int]
"""A text, the position of a root in it, and how many levels after the root are supervised without a gap."""


def anchors_of(texts: Sequence[Example], levels: int) -> Iterator[Anchor]:
    """Yield every root that a supervised token follows."""
    for text in texts:
        for position in range(2, len(text.tokens)):
            supervised = text.loss_mask[position : position + levels].tolist()
            if supervised[0]:
                yield text, position - 1, [*supervised, False].index(False)


def weigh_levels(settings: Any, probs: Tensor) -> Tensor:
    """Return [K], the weight of each level of a block; `probs` [K] are the head's of the text's own tokens."""
    if settings.d_pace:
        kept = 0.5 + 0.5 * probs.detach()
        return torch.stack([kept.cumprod(0)[level:].sum() for level in range(len(kept))])
    decay = math.inf if settings.decay is None else settings.decay
    return torch.tensor([math.exp(-level / decay) for level in range(len(probs))])


def draft_tokens(head: Any) -> list[int]:
    """Return the tokens that a head can draft, in ascending order."""
    if head.drafts is None:
        return list(range(head.shape.vocab_size))
    tokens: list[int] = head.t2d.nonzero()[:, 0].tolist()
    return tokens


def level_losses(
    head: Any, weights: Weights, anchor: Anchor, states: Tensor, target_head: TargetHead
) -> tuple[Tensor, Tensor]:
    """Return the loss of each level of one block [K], and its weight [K]; `states` [K, H] are the levels'."""
    settings = head.settings
    text, root, reached = anchor
    assert text.features is not None
    # a head with a draft vocabulary knows its tokens alone, and the target's law is cut to them
    drafts = draft_tokens(head)
    logits = target_head.logits(states)[:, drafts]
    q = logits.softmax(-1)
    p = target_head.logits(text.features[root : root + reached, -1])[:, drafts].softmax(-1)
    tokens = text.tokens[root + 1 : root + 1 + reached].tolist()
    inside = torch.tensor([token in drafts for token in tokens])
    tokens = [drafts.index(token) if token in drafts else 0 for token in tokens]
    likely = q[range(reached), tokens]
    if settings.d_pace:
        # what cannot be drafted ends a draft
        likely = torch.where(inside, likely, -1.0)
    losses = -likely.log() if settings.loss == "tokens" else FORMULAS[settings.loss](p, q)
    # the weights may follow what the head itself finds likely
    level_weights = weigh_levels(settings, likely)
    if settings.loss == "tokens":
        # no label is outside of the vocabulary; the level counts in the mean all the same
        losses = torch.where(inside, losses, 0.0)
    labels = torch.where(inside, torch.tensor(tokens), -1)
    before = text.tokens[root : root + reached]
    losses = losses + selector_loss(head, weights, states, before, labels, logits=logits)
    return losses, level_weights


def naive_loss(
    head: Any, weights: Weights, anchors: Iterable[Anchor], target_head: TargetHead
) -> Tensor:
    """Return the loss of all levels of all blocks, each with its weight; the last tap is the teacher's.

    Args:
        head: the head, for its settings and sizes.
        weights: the head's weights by name.
        anchors: the roots that count, as `anchors_of` yields them.
        target_head: the target's embedding and LM head.
    """
    settings = head.settings
    terms: list[Term] = []
    paths: list[Tensor] = []
    begins = 0
    for text, root, reached in anchors:
        assert text.features is not None
        read = text.features[:root, : len(settings.taps)]
        # the text before the root is known, and the levels up to the first gap count
        block = level_states(head, weights, read, text.tokens[root], target_head=target_head)
        paths += path_losses(
            head, weights, text, root=root, reached=reached, states=block, target_head=target_head
        )
        states = block[:reached]
        losses, level_weights = level_losses(
            head, weights, (text, root, reached), states, target_head=target_head
        )
        for level in range(reached):
            terms.append((0, level, level_weights[level], losses[level]))
        begins += 1
    loss = divide_terms(settings.divisor, terms, [begins])
    # LiLiCorr's is a mean of its own
    return loss + torch.stack(paths).mean() if paths else loss
