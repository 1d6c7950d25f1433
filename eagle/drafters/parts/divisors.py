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
"""With the weight w_k of level k, the sum of w_k * loss_kr over the places that drafts reach is divided by

- slots: how many slots (or anchors) the drafts begin from
- reached: how many places they reach on all levels together, which a mask counts
- weights: the sum of these places' weights
- levels: each level by how many places are reached on it
"""


def reached_levels(mask: Tensor, slots: Tensor, levels: int) -> Tensor:
    """[R, K], whether all tokens up to the one that a level names are supervised, for slots [R] of a text's mask."""
    return F.pad(mask, (0, levels))[slots[:, None] + torch.arange(levels)].long().cumprod(1).bool()


def sum_divisors(divisor: Divisor, reached: Tensor, weights: Sequence[float]) -> tuple[float, ...]:
    """One number for all levels, or one for each: sums over rows [R, K] on the host, so texts add up to a step."""
    counts: list[int] = reached.sum(0).tolist()
    if divisor == "slots":
        return (float(len(reached)),)
    if divisor == "levels":
        return tuple(map(float, counts))
    if divisor == "reached":
        return (float(sum(counts)),)
    return (sum(weight * count for weight, count in zip(weights, counts, strict=True)),)


def level_shares(
    weights: Sequence[float], divisors: Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[K], each level's weight over its divisor; a divisor of 0 belongs to places that are not reached."""
    numbers = divisors if len(divisors) > 1 else [*divisors] * len(weights)
    shares = [weight / (number or 1.0) for weight, number in zip(weights, numbers, strict=True)]
    return upload(torch.tensor(shares, dtype=torch.promote_types(dtype, torch.float32)), device)
