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
from eagle.drafters.parts import text_blocks
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.unrolled_heads import ONE, SHAPE, SPANS, TAPS, frozen_head, moved, new_head, texts_of

TEXTS = [
    SPANS,
    ONE,
    {41: [(3, 40)]},
    {12: [(2, 12)], 25: [(9, 24)]},
]  # other lengths and numbers of texts in each step


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Nothing compiled before, and nothing left."""
    for reset in (torch._dynamo.reset, text_blocks.compile_part.cache_clear, counters.clear):
        reset()
    yield
    torch._dynamo.reset()
    text_blocks.compile_part.cache_clear()


def head_of(name: str, folder: Path, dtype: torch.dtype) -> Any:
    """A head, EAGLE-1's without noise."""
    if name == "eagle1":
        torch.manual_seed(2)
        return moved(Eagle1(Eagle1.Settings(noise=0.0), SHAPE)).to(dtype)
    return new_head(folder, name, dtype)


def train(head: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of the steps, the first step's gradients, and the weights behind the last."""
    frozen, losses, gradients = frozen_head(dtype), [], []
    weights = [weight for weight in head.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    for texts in TEXTS:
        loss = head(collate(texts_of(texts, dtype), TAPS), frozen)["total"]
        loss.backward()
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return (
        torch.stack(losses),
        gradients[0],
        torch.cat([weight.detach().flatten() for weight in weights]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("eagle3.1", torch.float64),
        pytest.param("eagle3.1", torch.float32, marks=pytest.mark.long),
        *(pytest.param(name, torch.float64, marks=pytest.mark.long) for name in ("eagle1", "hass")),
    ],
)
def test_compiled_steps_are_the_eager_ones(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Steps of other lengths and numbers of texts, compiled once; weights in fp64, as AdamW enlarges rounding."""
    eager = head_of(name, tmp_path, dtype)
    compiled = copy.deepcopy(eager)
    compiled.compile_parts()
    losses, gradients, weights = train(compiled, dtype)
    graphs = counters["stats"]["unique_graphs"]
    expected_losses, expected_gradients, expected_weights = train(eager, dtype)
    assert (losses - expected_losses).norm() <= 1e-6 * expected_losses.norm()
    assert (gradients - expected_gradients).norm() <= 1e-6 * expected_gradients.norm()
    assert dtype == torch.float32 or (weights - expected_weights).abs().max() < 1e-9
    assert (
        graphs <= 6 and not counters["graph_break"]
    )  # three parts, with and without what autograd needs


@pytest.mark.slow
def test_a_fault_in_what_is_compiled_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled part that computes something else."""
    part = text_blocks.add_rows
    monkeypatch.setattr(
        text_blocks, "add_rows", lambda block, seen, residual: part(block, seen, residual) * 1.001
    )
    compiled = head_of("eagle1", tmp_path, torch.float64)
    eager = copy.deepcopy(compiled)
    compiled.compile_parts()
    losses, *_ = train(compiled, torch.float64)
    monkeypatch.undo()
    assert (losses - train(eager, torch.float64)[0]).norm() > 1e-5 * losses.norm()


def test_a_head_without_such_parts_is_refused() -> None:
    """A draft model's layers are stock ones."""
    with pytest.raises(
        ValueError, match=r"DraftModel has no parts to compile: leave train\.compile out"
    ):
        DraftModel.compile_parts(object.__new__(DraftModel))
