"""The program for a GPU: a unit's fault costs only itself, a second call goes on, all stages run in a rehearsal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from bench.gpu.__main__ import STAGES, Stage, list_pending, main, run_stage
from bench.gpu.page import PAGE, RESULTS, SECTIONS, describe_unit, render_page
from bench.gpu.worker import Context, read_units, write_unit
from tests.documents import ROOT
from tests.test_missing_packages import MISSING, make_environment

FAULTS = Stage("tests.bench.gpu_faults", 60, workers=1)
SECONDS = 120  # all of which a unit that hangs takes
ABOUT = {
    "device": "a GPU",
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-01",
    "commit": "abc",
}


@pytest.mark.slow
def test_a_fault_costs_only_itself_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """An error, a crash and a unit that hangs are recorded; the others have their figures; failures are tried again."""
    context = Context("first", rehearse=False, results=str(tmp_path), work=str(tmp_path))
    assert list_pending(FAULTS, context) == ["first", "fail", "crash", "talk", "last", "hang"]
    run_stage(FAULTS, context, monotonic() + SECONDS)
    units = read_units(tmp_path, FAULTS.name)
    lines = {name: figures.get("line") for name, figures in units.items()}
    assert (
        lines["first"] == lines["last"] == "worked" and lines["talk"] == "worked, though it printed"
    )
    assert (
        units["fail"]["error"] == "ValueError: a planted error"
        and "in fail" in units["fail"]["traceback"]
    )
    assert "status 7" in units["crash"]["error"] and "the last words" in units["crash"]["error"]
    assert "not done" in units["hang"]["error"]
    assert all(figures["seconds"] >= 0 for figures in units.values())
    assert list_pending(FAULTS, context) == []

    (tmp_path / "second call").touch()
    context = replace(context, call="second")
    assert list_pending(FAULTS, context) == ["fail", "crash"]
    run_stage(FAULTS, context, monotonic() + 10 * SECONDS)
    units = read_units(tmp_path, FAULTS.name)
    assert (
        units["fail"]["line"] == "mended"
        and "error" not in units["fail"]
        and "status 7" in units["crash"]["error"]
    )


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
        units = read_units(tmp_path, stage.name)
        assert units and not any("error" in figures for figures in units.values())
    correct = read_units(tmp_path, "correct")
    lossless = [figures for name, figures in correct.items() if name.startswith("lossless")]
    assert all(figures["answers"] == 48 and figures["accepted"] > 0 for figures in lossless)
    page = render_page(tmp_path)
    assert all(f"## {title}" in page for title, _ in SECTIONS.values()) and "MFU" in page
    second = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert second.returncode == 0 and second.stdout.count("kept") == len(STAGES)


def test_the_page_is_that_of_the_committed_results() -> None:
    """Its figures come from result files, and from nothing else."""
    assert (ROOT / PAGE).read_text() == render_page(RESULTS)


def test_a_page_tells_what_failed(tmp_path: Path) -> None:
    """An error is told in its first line; a unit's last result counts."""
    row = {**ABOUT, "unit": "medusa", "error": "OutOfMemoryError: of memory\n more"}
    write_unit(str(tmp_path), "training", row)
    write_unit(str(tmp_path), "training", {**ABOUT, "unit": "eagle3", "error": "at first"})
    write_unit(str(tmp_path), "training", {**ABOUT, "unit": "eagle3", "line": "fast; MFU 50%"})
    assert describe_unit(row) == "failed: OutOfMemoryError: of memory"
    page = render_page(tmp_path)
    assert (
        "| medusa | failed: OutOfMemoryError: of memory |" in page
        and "| eagle3 | fast; MFU 50% |" in page
    )
    assert "a GPU, torch 2" in page and "at first" not in page
    assert "nothing is measured yet" in render_page(tmp_path / "nowhere")


def test_a_wrong_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the stages that there are."""
    with pytest.raises(SystemExit):
        main(["--stages", "nosuch"])
    assert "correct" in capsys.readouterr().err
