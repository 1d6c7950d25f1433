"""A real accelerator says where the host waits: the runs of tests/simulated_runs.py under CUDA's own check."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from eagle import Target
from eagle.data.stored_rows import DTYPES
from tests import simulated_runs
from tests.simulated_runs import BUDGETS, CPU, HEADS, decode, difference, fill, new_target, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
# heads whose noise is each device's own, so that losses differ
NOISY = ("eagle1", "eagle1 as published", "hass", "falcon")


@contextmanager
def refuse_waits() -> Iterator[list[str]]:
    """Raise an error wherever the host waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield []
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def list_waits() -> Iterator[list[str]]:
    """Collect the files in which the host waits."""
    files: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield files
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    files += [Path(warning.filename).name for warning in waits]


@pytest.fixture(scope="module")
def target() -> Target:
    """The random target on a GPU."""
    return new_target(torch.device("cuda", 0))


def test_cuda_sees_a_planted_wait(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing here would mean anything."""
    with list_waits() as files:
        target.head.weight[0, 0].item()
    assert files == [Path(__file__).name]
    monkeypatch.setattr(simulated_runs, "watch", refuse_waits)
    with pytest.raises(RuntimeError, match="synchronizing"):
        # the loss is read in every step
        train(HEADS["eagle1"], target, plant=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_a_training_step_does_not_wait(
    name: str,
    dtype: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between logs, and once attention is compiled; the losses are the CPU's."""
    train(HEADS[name], target, dtype=dtype)  # compiles attention
    with monkeypatch.context() as patch:
        patch.setattr(simulated_runs, "watch", refuse_waits)
        got, _ = train(HEADS[name], target, dtype=dtype)
    if name not in NOISY:
        expected, _ = train(HEADS[name], new_target(CPU), dtype=dtype)
        rounding = 5e-2 if dtype == "bfloat16" else 1e-3
        assert difference(expected[:3], got[:3]) < rounding


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
    options = {"name": name, "sampling": sampling, "budget": budget}
    decode(target, **options, batch=True)  # reads small trees once
    with monkeypatch.context() as patch:
        patch.setattr(simulated_runs, "watch", list_waits)
        got, files = decode(target, **options, batch=batch)
    # the first two wait when a target is used for the first time
    assert set(files) <= {"reader.py", "borrowed.py", "device.py"}
    if name.startswith("eagle"):
        assert len(files) <= max(len(cycles) for _, cycles in got) + len(got)
    if sampling == "greedy":
        expected, _ = decode(new_target(CPU), **options, batch=batch)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_extraction_copies_while_it_computes(
    dtype: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only waits are in transformers, one in a forward; what is written is the CPU's."""
    with monkeypatch.context() as patch:
        patch.setattr(simulated_runs, "watch", list_waits)
        got, files = fill(dtype, target)
    assert "features.py" not in files
    assert len(files) <= 3
    expected, _ = fill(dtype, new_target(CPU))
    assert difference(expected, got) < 5e-2
