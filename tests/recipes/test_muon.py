"""The optimizer of the demo's models is torch's Muon, in either precision."""

from __future__ import annotations

import pytest
import torch

from recipes.tiny.train_target import MATRIX_LR, WEIGHT_DECAY, Muon, orthogonalize


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """In bf16, the precision of torch's products, the bits agree; in fp32 the steps are close."""
    start = torch.randn(shape)
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], MATRIX_LR, dtype),
        torch.optim.Muon([theirs], lr=MATRIX_LR, weight_decay=WEIGHT_DECAY),
    ]
    for _ in range(4):
        gradient = torch.randn(shape)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()

    if dtype == torch.bfloat16:
        assert torch.equal(ours, theirs)
    moved = (theirs - start).norm()
    assert moved > 0
    assert (ours - theirs).norm() < 0.02 * moved


def test_singular_values_become_about_one() -> None:
    """The directions stay, and no direction dominates."""
    values = torch.linalg.svdvals(orthogonalize(torch.randn(32, 12)))
    assert values.min() > 0.5
    assert values.max() < 1.5
