"""A real accelerator says where the host waits: the runs of tests/simulated_runs.py under CUDA's own check."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Target
from eagle.data.stored_rows import DTYPES
from tests import simulated_runs
from tests.simulated_runs import BUDGETS, CPU, HEADS, decode, fill, new_target, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CYCLE = {"device.py"}  # `to_host`


@contextmanager
def refuse_waits() -> Iterator[list[str]]:
    """An error wherever the host waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield []
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def list_waits() -> Iterator[list[str]]:
    """The files in which the host waits."""
    places: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places += [
        Path(warning.filename).name for warning in seen if "synchronizing" in str(warning.message)
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    """The random target, where the waits are."""
    return new_target(torch.device("cuda", 0))


def test_cuda_sees_a_planted_wait(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing here would mean anything."""
    with refuse_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        target.head.weight[0, 0].item()
    with list_waits() as places:
        target.head.weight[0, 0].item()
    assert places == [Path(__file__).name]
    monkeypatch.setattr(simulated_runs, "watch", refuse_waits)
    with pytest.raises(RuntimeError, match="synchronizing"):
        train(HEADS["eagle1"], target, plant=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_a_training_step_does_not_wait(
    name: str, dtype: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between logs, and once attention is compiled; the losses are the CPU's."""
    settings: dict[str, Any] = {"dtype": dtype}
    train(HEADS[name], target, **settings)
    monkeypatch.setattr(simulated_runs, "watch", refuse_waits)
    got, _ = train(HEADS[name], target, **settings)
    monkeypatch.undo()
    expected, _ = train(HEADS[name], new_target(CPU), **settings)
    if name not in (
        "eagle1",
        "eagle1 as published",
        "hass",
        "falcon",
    ):  # whose noise is each device's own
        assert simulated_runs.difference(expected[:3], got[:3]) < (
            5e-2 if dtype == "bfloat16" else 1e-3
        )


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("budget", [name for name in BUDGETS if "drawn" not in name])
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize(
    "name", ["none", "ngram", "bigram", "draft_model", "eagle1", "eagle3", "several"]
)
def test_a_cycle_waits_at_named_places(
    name: str,
    sampling: str,
    budget: str,
    batch: bool,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for a head, in `to_host`; greedy answers are the CPU's."""
    decode(name, sampling, budget, True, target)  # reads small trees once
    monkeypatch.setattr(simulated_runs, "watch", list_waits)
    got, places = decode(name, sampling, budget, batch, target)
    assert set(places) - {"reader.py", "borrowed.py"} <= CYCLE
    if name.startswith("eagle"):
        assert len(places) <= max(len(cycles) for _, cycles in got) + len(got)
    monkeypatch.undo()
    if sampling == "greedy":
        expected, _ = decode(name, sampling, budget, batch, new_target(CPU))
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_extraction_copies_while_it_computes(
    dtype: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of waits there is one in a forward, in transformers; what is written is the CPU's."""
    monkeypatch.setattr(simulated_runs, "watch", list_waits)
    got, places = fill(dtype, target)
    monkeypatch.undo()
    assert "features.py" not in places and len(places) <= 3
    expected, _ = fill(dtype, new_target(CPU))
    assert simulated_runs.difference(expected, got) < 5e-2
