"""`train.compile`: compiled parts of a head give the eager step's losses and weights, and are compiled once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from eagle.core.examples import collate
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.parts import sequence_blocks
from tests.unrolled_heads import ONE, SPANS, TAPS, frozen_head, new_head, texts_of

# other lengths and numbers of sequences in each step
STEPS = [SPANS, ONE, {41: [(3, 40)]}, {12: [(2, 12)], 25: [(9, 24)]}]


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """Begin with nothing compiled, and leave nothing."""
    for reset in (torch._dynamo.reset, sequence_blocks.compile_part.cache_clear, counters.clear):
        reset()
    yield
    torch._dynamo.reset()
    sequence_blocks.compile_part.cache_clear()


def train(head: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of the steps, the first step's gradients, and the weights after the last."""
    target_head = frozen_head(dtype)
    weights = [weight for weight in head.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    losses = []
    gradients = []

    for texts in STEPS:
        loss = head(collate(texts_of(texts, dtype), TAPS), target_head)["total"]
        loss.backward()
        learned = [weight.grad.flatten() for weight in weights if weight.grad is not None]
        gradients.append(torch.cat(learned))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    after = torch.cat([weight.detach().flatten() for weight in weights])
    return torch.stack(losses), gradients[0], after


@pytest.mark.slow
@pytest.mark.not_long("eagle3.1-dtype0")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("eagle3.1", torch.float64), ("eagle3.1", torch.float32), ("hass", torch.float64)],
)
def test_compiled_steps_are_the_eager_ones(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compiled once for all steps; weights are compared in fp64, as AdamW enlarges rounding."""
    eager = new_head(tmp_path, name, dtype)
    compiled = copy.deepcopy(eager)
    compiled.compile_parts()
    losses, gradients, weights = train(compiled, dtype)
    # before the eager head runs
    graphs = counters["stats"]["unique_graphs"]
    expected_losses, expected_gradients, expected_weights = train(eager, dtype)

    assert (losses - expected_losses).norm() <= 1e-6 * expected_losses.norm()
    assert (gradients - expected_gradients).norm() <= 1e-6 * expected_gradients.norm()
    if dtype == torch.float64:
        assert (weights - expected_weights).abs().max() < 1e-9
    assert graphs <= 6  # three parts, with and without what autograd needs
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.long
def test_a_fault_in_what_is_compiled_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a compiled part that computes something else."""
    add_rows = sequence_blocks.add_rows
    eager = new_head(tmp_path, "hass", torch.float64)
    compiled = copy.deepcopy(eager)

    with monkeypatch.context() as patch:
        # the residual sum of a block
        patch.setattr(sequence_blocks, "add_rows", lambda *args: add_rows(*args) * 1.001)
        compiled.compile_parts()
        losses, *_ = train(compiled, torch.float64)

    assert (losses - train(eager, torch.float64)[0]).norm() > 1e-5 * losses.norm()


def test_a_head_without_such_parts_is_refused() -> None:
    """A draft model's layers are stock ones."""
    with pytest.raises(ValueError, match="DraftModel has no parts to compile"):
        DraftModel.compile_parts(object.__new__(DraftModel))
