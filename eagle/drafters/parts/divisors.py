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
    """Return a bool [R, K], whether each of R drafts of one sequence reaches each of K levels (tokens of a draft).

    A draft reaches a level if all tokens that it predicts up to that level are supervised.

    Args:
        mask: [slots of the sequence] bool, whether the token that a slot predicts at level 0 is supervised, on the
            host.
        slots: [R], the slots (indices in the mask) from which the drafts begin.
        levels: K.
    """
    # level k of a draft from slot i predicts the token that slot i + k predicts at level 0
    tokens = slots[:, None] + torch.arange(levels)
    # nothing after the end of the sequence is supervised
    is_supervised = F.pad(mask, (0, levels))[tokens]
    return is_supervised.long().cumprod(1).bool()


def sum_divisors(divisor: Divisor, reached: Tensor, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the divisor of the loss over drafts of several levels: one number for all, or one for each level.

    Divisors of several batches can be added up: a training step divides by the sum over all its sequences. A level is
    one token of a draft.

    Args:
        divisor: What is counted: "slots" the drafts, "reached" the tokens that they reach, "weights" the weights of
            these tokens, "levels" the tokens of each level apart.
        reached: [R, K] bool, whether each of R drafts reaches each of K levels, on the host.
        weights: The loss weight of each of the K levels.
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
    """Return [K], the weight of each of K draft levels (tokens of a draft) divided by its divisor.

    It is the factor on the loss terms of the level.

    Args:
        weights: The loss weight of each level.
        divisors: One number for all levels or one for each, by which the summed losses are divided.
        dtype: The dtype of the head; the result has at least fp32.
        device: Where the result is used.
    """
    if len(divisors) == 1:
        divisors = [*divisors] * len(weights)
    # a divisor is 0 if no draft reaches the level: then no loss term has its weight, and any divisor does
    shares = [weight / (divisor or 1.0) for weight, divisor in zip(weights, divisors, strict=True)]
    wide = torch.promote_types(dtype, torch.float32)
    return upload(torch.tensor(shares, dtype=wide), device)
