"""Heads that train on their own drafts: exact resume, and several processes, as for EAGLE-1."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import ROOT, apart, equal, finished, launched, prepared, rows, run, weights

SCRIPT = str(ROOT / "recipes/train_eagle.py")
METHODS = {
    "hass": "drafter={kind: hass}",
    "eagle3": "drafter={kind: eagle3, steps: 3, draft_vocab: 512}",
    "eagle3.1 frozen": "drafter={kind: eagle3, steps: 3, fc_norm: true, norm_output: true, train_lm_head: false}",
}
EVERY = ("train.checkpoint_every=3", "train.validation=0.2", "train.keep=9")


@pytest.fixture(scope="module", params=METHODS)
def command(
    request: pytest.FixtureRequest, tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The recipe of one method over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"), METHODS[request.param])


@pytest.fixture(scope="module")
def alone(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    return run(command, tmp_path_factory.mktemp("alone") / "run", *EVERY)


@pytest.mark.slow
def test_two_halves_are_the_whole(command: list[str], alone: Path, tmp_path: Path) -> None:
    """A run that is stopped after a checkpoint and gone on with leaves the same bytes, and each row once."""
    out = run(command, tmp_path / "run", *EVERY)
    for later in (out / "checkpoints").glob("step-*"):
        if int(later.name[5:]) > 3:
            (later / "complete.json").unlink()
    run(command, out, *EVERY)
    assert equal(out, alone) and equal(out, alone, "head")
    assert rows(out) == rows(alone)


@pytest.mark.quick("eagle3")
def test_parts_of_a_step_add_up(command: list[str], alone: Path, tmp_path: Path) -> None:
    """Whatever share of a part's slots each step of the unroll reaches."""
    parts = run(command, tmp_path / "run", *EVERY, "train.accumulation=2")
    assert apart(weights(parts), weights(alone)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(zero, marks=pytest.mark.long) for zero in ("zero2", "zero3"))]
)
def test_two_processes_are_one_on_the_same_steps(
    config: str, command: list[str], alone: Path, tmp_path: Path
) -> None:
    """Losses, validation and weights agree."""
    done = finished(launched(config, SCRIPT, *command, f"train.out={tmp_path / 'run'}", *EVERY))
    assert done.returncode == 0, done.stdout
    assert apart(weights(tmp_path / "run"), weights(alone)) < 1e-5
    for ours, other in zip(rows(tmp_path / "run"), rows(alone), strict=True):
        assert ours.get("total", 0) == pytest.approx(other.get("total", 0), rel=1e-4)
        assert ours.get("validation", {}) == pytest.approx(other.get("validation", {}), rel=1e-3)
