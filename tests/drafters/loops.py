"""Helpers of tests that compare a head with a naive loop: single texts of a batch, and the loop's gradients."""

# T tokens of a text, H hidden

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import Batch
from tests.unrolled_heads import Weights


def split_texts(batch: Batch, tap: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the tokens [T], the states [T, H] of one tap and the loss mask [T] of each text."""
    columns = (batch.tokens, batch.features[:, tap], batch.loss_mask)
    return zip(*(column.split(batch.lengths) for column in columns), strict=True)


def loop_gradients(head: Any, compute_loss: Callable[[Weights], Tensor]) -> Weights:
    """Return a naive loop's loss as `total`, and its gradient for every weight of the head."""
    weights = {}
    for name, tensor in head.state_dict().items():
        weights[name] = tensor.detach().clone().requires_grad_()
    loss = compute_loss(weights)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
