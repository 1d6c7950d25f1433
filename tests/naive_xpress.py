"""XPress from its formulas: one slot after the other, one channel after the other, one anchor after the other."""

# B slots of a block, K levels, H hidden, r rank, V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from tests.naive_blocks import block_states, draft_tokens
from tests.naive_divisors import Term, divide_terms
from tests.naive_dspark import split_texts


def slot_biases(head: Any, states: Tensor, before: Sequence[int]) -> list[Tensor]:
    """Return [V] for every slot, what the refiner adds to its logits.

    Args:
        head: the head.
        states: [B, H], of a whole block.
        before: the token that each slot reads.
    """
    weights = {
        name.removeprefix("refiner_head."): weight
        for name, weight in head.named_parameters()
        if name.startswith("refiner_head.")
    }
    mean = sum(states) / len(states)
    xs = []
    for state, token in zip(states, before, strict=True):
        read = torch.cat(
            [
                weights["down_h.weight"] @ state,
                weights["down_g.weight"] @ mean,
                weights["token_embed.weight"][token],
            ]
        )
        xs.append(weights["in_proj.weight"] @ read)
    biases = []
    for k in range(len(states)):
        channels = []
        for channel in range(len(xs[k])):
            # x_k += sum over j <= k of L_kj x_j
            x = xs[k][channel]
            for j in range(k + 1):
                x = x + weights["mix_l"][channel, k, j] * xs[j][channel]
            channels.append(x)
        mixed = torch.stack(channels)
        gate = weights["mlp_gate.weight"] @ mixed
        up = weights["mlp_up.weight"] @ mixed
        mixed = mixed + weights["mlp_down.weight"] @ (gate * torch.sigmoid(gate) * up)
        biases.append(weights["readout.weight"] @ mixed)
    return biases


def refined_logits(
    head: Any, states: Tensor, before: Sequence[int], target_head: TargetHead
) -> Tensor:
    """Return [K, V] of the levels of a block; the arguments are those of `slot_biases`."""
    drafts = draft_tokens(head)
    plain = target_head.logits(states)[:, drafts]
    rows = []
    for slot, bias in enumerate(slot_biases(head, states, before)):
        # the root's slot predicts nothing, or the token after the root
        if slot > 0 or head.settings.sample_from_anchor:
            rows.append(plain[slot] + bias)
    return torch.stack(rows)


def likeliest(head: Any, logits: Tensor, noise: Tensor | None = None) -> list[int]:
    """Return the likeliest token of every level by its logits [K, V], with the target's noise added if there is any."""
    drafts = draft_tokens(head)
    if noise is not None:
        logits = logits + noise[:, drafts]
    return [drafts[row] for row in logits.argmax(-1).tolist()]


def plain_logits(head: Any, states: Tensor, target_head: TargetHead) -> Tensor:
    """Return [K, V] of the levels of a block, without a bias."""
    first = 0 if head.settings.sample_from_anchor else 1
    return target_head.logits(states)[first:, draft_tokens(head)]


def draft(
    head: Any,
    states: Tensor,
    first_tokens: Sequence[int],
    target_head: TargetHead,
    noise: Tensor | None = None,
) -> list[int]:
    """Return the tokens of all levels after the settings' passes.

    Args:
        head: the head.
        states: [B, H], of a whole block.
        first_tokens: the token before the root and the root, or where the root's slot predicts a token the root alone.
        target_head: the target's embedding and LM head.
        noise: [K, V], what the target adds to its logits at each level; None if it takes its likeliest token.
    """
    tokens = likeliest(head, plain_logits(head, states, target_head), noise)
    for _ in range(head.settings.passes):
        before = [*first_tokens, *tokens][: len(states)]
        tokens = likeliest(head, refined_logits(head, states, before, target_head), noise)
    return tokens


def distance(settings: Any, logits: Tensor, p: Tensor, row: int) -> Tensor:
    """Return the loss of one level: total variation from the target's probs, and the surprise at the text's token."""
    variation = settings.variation * (p - logits.softmax(-1)).abs().sum() / 2
    # a token that cannot be drafted has no row
    if row < 0:
        return variation
    return variation - settings.likelihood * logits.log_softmax(-1)[row]


def variants(
    head: Any, states: Tensor, before: Sequence[int], target_head: TargetHead
) -> list[tuple[float, Tensor]]:
    """Return the logits [K, V] that the loss of a block compares, each with its weight.

    Args:
        head: the head.
        states: [B, H], of a whole block.
        before: the sequence's token that each slot reads.
        target_head: the target's embedding and LM head.
    """
    settings = head.settings
    found = [(1.0, refined_logits(head, states, before, target_head))]
    # what a draft would read: at first the likeliest tokens without a bias, then its own
    plain = plain_logits(head, states, target_head)
    guessed = likeliest(head, plain)
    first_tokens = before[: 1 if settings.sample_from_anchor else 2]
    for _ in range(settings.rounds):
        fed = [*first_tokens, *guessed][: len(states)]
        logits = refined_logits(head, states, fed, target_head)
        guessed = likeliest(head, logits.detach())
        found.append((settings.consistency / settings.rounds, logits))
    return [*found, (settings.base, plain)]


def naive_loss(head: Any, batch: Batch, target_head: TargetHead) -> Tensor:
    """Return the loss of the blocks before every supervised token."""
    settings = head.settings
    weights = dict(head.named_parameters())
    drafts = draft_tokens(head)
    row_of = dict(zip(drafts, range(len(drafts)), strict=True))
    terms: list[Term] = []
    anchors = 0
    for tokens, mask, taps, teacher in split_texts(head, batch):
        for first in mask.nonzero()[:, 0].tolist():
            if first < 2:  # nothing is known before the root
                continue
            anchors += 1
            root = first - 1
            states = block_states(head, weights, taps[:root], tokens[root], target_head)
            begin = root if settings.sample_from_anchor else root - 1
            # a text's end is filled up with any token, as no level there counts
            before = [*tokens.tolist(), *[0] * len(states)][begin : begin + len(states)]
            compared = variants(head, states, before, target_head)
            for level in range(head.levels):
                position = first + level
                if position >= len(tokens) or not mask[position]:
                    break
                p = target_head.logits(teacher[position - 1])[drafts].softmax(-1)
                row = row_of.get(int(tokens[position]), -1)
                loss = torch.zeros(())
                for factor, logits in compared:
                    loss = loss + factor * distance(settings, logits[level], p, row)
                terms.append((0, level, math.exp(-level / settings.decay), loss))
    return divide_terms(settings.divisor, terms, [anchors])
