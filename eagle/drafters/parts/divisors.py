"""Divisors of losses over drafts of several levels."""

# R slots or anchors from which drafts begin, K levels

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.device import upload

Divisor = Literal["slots", "reached", "weights", "levels"]
"""With the weight w_k of level k, the sum of w_k * loss_kr over the tokens that drafts reach is divided by

- slots: how many slots (or anchors) the drafts begin from
- reached: how many tokens they reach on all levels together, which a mask counts
- weights: the sum of these tokens' weights
- levels: each level by how many tokens are reached on it
"""


def reached_levels(mask: Tensor, slots: Tensor, levels: int) -> Tensor:
    """Return a bool [R, K]: whether a draft reaches a level, as all tokens up to the one it predicts are supervised.

    Args:
        mask: Whether the first token that each slot of one sequence predicts is supervised, on the host.
        slots: [R], the slots from which drafts begin.
        levels: K.
    """
    # level k of slot i predicts the token that slot i + k predicts first
    tokens = slots[:, None] + torch.arange(levels)
    is_supervised = F.pad(mask, (0, levels))[tokens]
    return is_supervised.long().cumprod(1).bool()


def sum_divisors(divisor: Divisor, reached: Tensor, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the divisor of the loss: one number for all levels, or one for each level.

    Training adds up the divisors of all sequences of a step.

    Args:
        divisor: What is counted.
        reached: [R, K], whether each draft reaches each level, on the host.
        weights: The weight of each level.
    """
    if divisor == "slots":
        return (float(len(reached)),)
    counts: list[int] = reached.sum(0).tolist()
    if divisor == "levels":
        return tuple(float(count) for count in counts)
    if divisor == "reached":
        return (float(sum(counts)),)
    return (sum(weight * count for weight, count in zip(weights, counts, strict=True)),)


def level_shares(
    weights: Sequence[float], divisors: Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return [K], the weight of each level divided by its divisor, at least in fp32.

    `divisors` has one number for all levels or one for each.
    """
    if len(divisors) == 1:
        divisors = [*divisors] * len(weights)
    # a divisor is 0 if no draft reaches the level: then no loss term has its weight, and any divisor does
    shares = [weight / (divisor or 1.0) for weight, divisor in zip(weights, divisors, strict=True)]
    wide = torch.promote_types(dtype, torch.float32)
    return upload(torch.tensor(shares, dtype=wide), device)
