"""The program for a GPU: a unit's fault costs only itself, a second call goes on, all stages run in a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from bench.gpu.__main__ import STAGES, Stage, StageRun, main
from bench.gpu.kernels import idle_share, kind_of
from bench.gpu.page import PAGE, RESULTS, TITLES, describe_unit, render_page
from tests.documents import ROOT
from tests.test_missing_packages import MISSING, make_environment

FAULTS = Stage("tests.bench.gpu_faults", 60, workers=1)
ABOUT = {"device": "a GPU", "torch": "2", "transformers": "5", "date": "2026-01-01", "commit": "abc"}


def context_in(folder: Path) -> dict[str, Any]:
    """Return what a call in this folder gives to its workers."""
    return {"rehearse": False, "results": str(folder), "work": str(folder), "inputs": None}


@pytest.mark.slow
def test_a_fault_costs_only_itself_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """An error, a crash and a unit that hangs are recorded; the others have their figures; failures are tried again."""
    run = StageRun(FAULTS, context_in(tmp_path), again=False)
    assert list(run.queue) == ["first", "fail", "crash", "talk", "last", "hang"]
    run.run(monotonic() + 60)
    units = json.loads(run.file.read_text())["units"]
    lines = {name: figures.get("line") for name, figures in units.items()}
    assert lines["first"] == lines["last"] == "worked" and lines["talk"] == "worked, though it printed"
    assert units["fail"]["error"] == "ValueError: a planted error" and "in fail" in units["fail"]["traceback"]
    assert "status 7" in units["crash"]["error"] and "the last words" in units["crash"]["error"]
    assert "not done after" in units["hang"]["error"]
    assert all(figures["seconds"] >= 0 for figures in units.values())

    (tmp_path / "second call").touch()
    again = StageRun(FAULTS, context_in(tmp_path), again=False)
    assert list(again.queue) == ["fail", "crash", "hang"] and again.kept == 3
    again.queue.remove("hang")
    again.run(monotonic() + 60)
    units = json.loads(run.file.read_text())["units"]
    assert units["fail"]["line"] == "mended" and "error" not in units["fail"] and "status 7" in units["crash"]["error"]
    assert len(StageRun(FAULTS, context_in(tmp_path), again=True).queue) == 6


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("without", [(), MISSING], ids=["all packages", "a bare machine"])
def test_a_rehearsal_runs_every_stage(without: tuple[str, ...], tmp_path: Path) -> None:
    """Without a fault; a second call keeps everything, and the page shows all of it."""
    python = make_environment(tmp_path / "environment", without) if without else sys.executable
    command = [str(python), "-m", "bench.gpu", "--rehearse", "--results", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for stage in STAGES:
        units = json.loads((tmp_path / f"gpu_{stage.name}.json").read_text())["units"]
        assert units and not any("error" in figures for figures in units.values())
    correct = json.loads((tmp_path / "gpu_correct.json").read_text())["units"]
    lossless = [figures for name, figures in correct.items() if name.startswith("lossless")]
    assert all(figures["answers"] == 48 and figures["accepted"] > 0 for figures in lossless)
    page = render_page(tmp_path)
    assert all(f"## {title}" in page for title in TITLES.values()) and "MFU" in page
    second = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert second.returncode == 0 and second.stdout.count("kept") == len(STAGES)


def test_the_page_is_that_of_the_committed_results() -> None:
    """Its figures come from result files, and from nothing else."""
    assert (ROOT / PAGE).read_text() == render_page(RESULTS)


def test_a_page_tells_the_share_of_the_peak_and_what_failed(tmp_path: Path) -> None:
    """MFU is that of the peak measured in the same stage; an error is told in its first line."""
    step = {**ABOUT, "line": "fast", "step s": 1.0, "FLOP/s": 4e14, "forecast GB": 9.0}
    units = {"peak": {**ABOUT, "line": "peak", "FLOP/s": 8e14}, "eagle3, stored": step}
    assert describe_unit("training", step, units) == "fast; MFU 50%; forecast 9.0 GB"
    units["medusa, stored"] = {**ABOUT, "error": "OutOfMemoryError: of memory\n more"}
    (tmp_path / "gpu_training.json").write_text(json.dumps({"units": units}))
    page = render_page(tmp_path)
    assert "| medusa, stored | failed: OutOfMemoryError: of memory |" in page and "a GPU, torch 2" in page
    assert "nothing is measured yet" in render_page(tmp_path / "nowhere")


def test_gaps_are_the_time_in_which_no_kernel_ran() -> None:
    """Kernels may overlap, and one may lie within another."""
    assert idle_share([(0, 4), (1, 2), (3, 6), (8, 10)]) == pytest.approx(0.2)
    assert idle_share([]) is None


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("aten::mm", [[8, 64], [64, 32000]], "logits"),
        ("flex_attention_backward", [[1, 8, 64, 64]], "attention"),
        ("aten::mm", [[8, 64], [64, 64]], "products"),
        ("aten::_fused_adamw_", [], "optimizer"),
        ("aten::mul", [[8, 64]], "others"),
    ],
)
def test_an_operation_is_of_a_kind(name: str, shapes: list[list[int]], kind: str) -> None:
    """By the vocabulary in its shapes first, then by its name."""
    assert kind_of(name, shapes, {32000, 128256}) == kind


def test_a_wrong_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the stages that there are."""
    with pytest.raises(SystemExit):
        main(["--stages", "nosuch"])
    assert "correct" in capsys.readouterr().err
