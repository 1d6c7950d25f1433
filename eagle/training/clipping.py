"""Clipping of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle.recipe import TrainSection


def clip_gradients(weights: Sequence[Tensor], settings: TrainSection) -> Tensor:
    """Clip the gradients of these weights in place; returns their norm before."""
    if settings.clip_by == "norm":
        return torch.nn.utils.clip_grad_norm_(weights, settings.clip)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    torch.nn.utils.clip_grad_value_(weights, settings.clip)
    return norm
