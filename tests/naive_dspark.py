"""DSpark's loss written out for one anchor after the other, on the states of `naive_blocks`."""

# K levels, H hidden, V vocabulary, r rank

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from tests.naive_blocks import draft_tokens, level_states
from tests.naive_divisors import Term, divide_terms


def biases(head: Any, states: Tensor, before: list[int], target_head: TargetHead) -> Tensor:
    """Return [K, V], what each level adds to its logits; `before` holds the token before each level."""
    kind = head.settings.markov
    tokens = torch.tensor(before)
    if kind == "none":
        return torch.zeros(())
    if kind == "domino":
        # Domino: a GRU over the tokens before each level
        read, _ = head.prefix_gru(target_head.embedding(tokens)[None])
        bias = head.embed_proj(torch.cat([states, read[0]], dim=-1))
        unbiased = head.settings.unbiased
        return torch.cat([torch.zeros_like(bias[:unbiased]), bias[unbiased:]])
    markov = head.markov_head
    memory = torch.zeros(head.settings.rank, dtype=states.dtype)
    rows = []
    for state, token in zip(states, markov.markov_w1.weight[tokens], strict=True):
        code = token
        if kind == "gated":
            code = torch.sigmoid(markov.gate_proj(torch.cat([state, token]))) * token
        elif kind == "rnn":
            # (g, n, c) = J [memory; token; state], memory' = g memory + (1 - g) tanh(n)
            gate, new, out = markov.joint_proj(torch.cat([memory, token, state])).chunk(3)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(new)
            code = torch.tanh(out)
        rows.append(markov.markov_w2.weight @ code)
    return torch.stack(rows)


def divergence(settings: Any, logits: Tensor, p: Tensor, token: int) -> Tensor:
    """Return the weighted distance from the target's probs p, and the surprise at the text's own token."""
    # total variation times two
    distance = (p - logits.softmax(-1)).abs().sum()
    # a token that cannot be drafted
    if token < 0:
        return settings.distance * distance
    return settings.distance * distance - settings.likelihood * logits.log_softmax(-1)[token]


def confidence_loss(head: Any, state: Tensor, logits: Tensor, p: Tensor, before: int) -> Tensor:
    """Return the cross-entropy of the confidence head with the share of drafts that would be accepted."""
    accepted = 1 - (p - logits.softmax(-1)).abs().sum().detach() / 2
    # with a Markov head, confidence also reads the token before
    if head.markov_head is not None:
        state = torch.cat([state, head.markov_head.markov_w1.weight[before]])
    confidence = torch.sigmoid(head.confidence_head.proj(state)[0])
    return -accepted * confidence.log() - (1 - accepted) * (1 - confidence).log()


def level_loss(
    head: Any, state: Tensor, plain: Tensor, bias: Tensor, p: Tensor, tokens: list[int], late: float
) -> Tensor:
    """Return the loss of one level.

    Args:
        head: the head.
        state: [H], the level's.
        plain: [V], its logits without a bias.
        bias: [V].
        p: [V], the target's probs of the token.
        tokens: the token before the level, and its own.
        late: how far the run has come, from 0 to 1.
    """
    before, token = tokens
    logits = plain + bias
    loss = divergence(head.settings, logits, p, token)
    if head.settings.markov == "domino":
        # Domino begins with the plain logits alone, which count less as the run goes on
        alone = divergence(head.settings, plain, p, token)
        loss = late * loss + (1 - late) * alone
    if head.settings.confidence:
        loss = loss + confidence_loss(head, state, logits, p, before=before)
    return loss


def split_texts(head: Any, batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Yield each text's tokens, loss mask, taps and the teacher's states."""
    taps = batch.select_taps(head.taps)
    columns = (batch.tokens, batch.loss_mask, taps, batch.select_taps((-1,))[:, 0])
    yield from zip(*(column.split(batch.lengths) for column in columns), strict=True)


def naive_loss(head: Any, batch: Batch, target_head: TargetHead) -> Tensor:
    """Return the loss of the blocks before every supervised token."""
    settings = head.settings
    weights = dict(head.named_parameters())
    drafts = draft_tokens(head)
    # a token that cannot be drafted has no row
    row_of = dict(zip(drafts, range(len(drafts)), strict=True))
    terms: list[Term] = []
    anchors = 0
    for tokens, mask, taps, teacher in split_texts(head, batch):
        for first in mask.nonzero()[:, 0].tolist():
            if first < 2:  # nothing is known before the root
                continue
            anchors += 1
            states = level_states(
                head, weights, taps[: first - 1], tokens[first - 1], target_head=target_head
            )
            # a text's end is filled up with any token, as no level there counts
            before = [*tokens.tolist(), *[0] * len(states)][first - 1 : first - 1 + len(states)]
            plain = target_head.logits(states)[:, drafts]
            bias = biases(head, states, before, target_head).expand_as(plain)
            for level in range(len(states)):
                position = first + level
                if position >= len(tokens) or not mask[position]:
                    break
                loss = level_loss(
                    head,
                    states[level],
                    plain[level],
                    bias[level],
                    p=target_head.logits(teacher[position - 1])[drafts].softmax(-1),
                    tokens=[before[level], row_of.get(int(tokens[position]), -1)],
                    late=batch.progress,
                )
                weight = math.exp(-level / settings.decay)
                terms.append((0, level, weight, loss))
    return divide_terms(settings.divisor, terms, [anchors])
