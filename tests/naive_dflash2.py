"""DFlash2's convolutions and selector from their formulas: one slot, one tap and one candidate after the other."""

# B slots of a block, K levels, H hidden, V vocabulary, r rank

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.naive_layers import Weights


def convolve(weights: Weights, prefix: str, source: Tensor, x: Tensor, side: int) -> Tensor:
    """Return x [B, H], the slots of one block, convolved over the slots; x itself where a head has no convolution.

    Args:
        weights: the head's weights by name.
        prefix: what the names of the convolution's weights begin with.
        source: [B, H], the input of the sublayer, of which kernels are made.
        x: the sublayer's input, or its output.
        side: 0 for the input, 1 for the output.
    """
    if f"{prefix}base_kernel" not in weights:
        return x
    base = weights[f"{prefix}base_kernel"][side]
    taps, width = base.shape
    projection = weights[f"{prefix}kernel_projection.weight"]
    groups = len(projection) // (2 * taps)
    rows = []
    for slot, state in enumerate(source):
        # of both sides, all taps and all groups, in this order
        kernels = (projection @ state).view(2, taps, groups)[side]
        total = torch.zeros(width, dtype=x.dtype)
        for tap in range(min(taps, slot + 1)):
            by_channel = kernels[tap].repeat_interleave(width // groups)
            total = total + (base[tap] + by_channel) * x[slot - tap]
        rows.append(total)
    return torch.stack(rows)


def candidate_scores(
    head: Any, weights: Weights, state: Tensor, before: int, logits: Tensor
) -> dict[int, Tensor]:
    """Return the score of each candidate of a slot, by its row in the draft vocabulary.

    Args:
        head: the head, for its settings.
        weights: the head's weights by name.
        state: [H], the slot's.
        before: the token before it.
        logits: [V], of all tokens that can be drafted.
    """
    predecessor = weights["candidate_selector.predecessor_codebook"][before]
    projected = weights["candidate_selector.hidden_projection.weight"] @ state
    scores = {}
    for row in logits.argsort(descending=True)[: head.settings.selector_top_k].tolist():
        successor = weights["candidate_selector.successor_codebook"][row]
        scores[row] = logits[row] + (predecessor * projected * successor).sum()
    return scores


def level_logits(head: Any, weights: Weights, state: Tensor, before: int, logits: Tensor) -> Tensor:
    """Return [V], the log-probs of a level after a token: the slot's, of which candidates divide theirs by scores."""
    probs = logits.softmax(-1)
    scores = candidate_scores(head, weights, state, before, logits=logits)
    shared = sum(probs[row] for row in scores)
    norm = sum(score.exp() for score in scores.values())
    chosen = probs.clone()
    for row, score in scores.items():
        chosen[row] = shared * score.exp() / norm
    return chosen.log()


def selector_loss(
    head: Any, weights: Weights, states: Tensor, before: Tensor, labels: Tensor, logits: Tensor
) -> Tensor:
    """Return [K], how surprised the selector is by the text's tokens, times its weight; 0 where one is no candidate.

    It is 0 for a head without a selector.

    Args:
        head: the head, for its settings.
        weights: the head's weights by name.
        states: [K, H], of the levels.
        before: [K], the text's token before each level.
        labels: [K], the row of the text's token of each level, -1 where it cannot be drafted.
        logits: [K, V], of all tokens that can be drafted.
    """
    if head.settings.kind != "dflash2":
        return torch.zeros(len(labels), dtype=logits.dtype)
    losses = []
    for level, label in enumerate(labels.tolist()):
        scores = candidate_scores(
            head, weights, states[level], int(before[level]), logits=logits[level]
        )
        loss = torch.zeros((), dtype=logits.dtype)
        if label in scores:
            loss = torch.stack(list(scores.values())).logsumexp(0) - scores[label]
        losses.append(loss)
    return head.settings.selector * torch.stack(losses)
