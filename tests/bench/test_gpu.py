"""The program for a GPU: a unit's fault costs only itself, and a second call goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from bench.gpu.__main__ import STAGES, Stage, list_pending, main, run_stage
from bench.gpu.page import PAGE, RESULTS, SECTIONS, describe_unit, render_page
from bench.gpu.worker import Context, read_units, write_unit
from tests.documents import ROOT
from tests.test_missing_packages import MISSING, make_environment
from tests.trained import finished

FAULTS = Stage("tests.bench.gpu_faults", 60, workers=1)
# a unit that hangs takes all of them, so the others need to be done by then
SECONDS = 90
ABOUT = {
    "device": "a GPU",
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-01",
    "commit": "abc",
}


@pytest.mark.slow
@pytest.mark.long
def test_a_fault_costs_only_itself_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """An error, a crash and a hang are recorded; what failed is tried again."""
    context = Context(
        "first",
        rehearse=False,
        results=str(tmp_path),
        work=str(tmp_path),
    )
    assert list_pending(FAULTS, context) == ["first", "fail", "crash", "talk", "last", "hang"]
    run_stage(FAULTS, context, monotonic() + SECONDS)
    units = read_units(tmp_path, FAULTS.name)
    assert units["first"]["line"] == "worked"
    assert units["last"]["line"] == "worked"
    # what a unit prints is not taken for its result
    assert units["talk"]["line"] == "worked, though it printed"
    assert units["fail"]["error"] == "ValueError: a planted error"
    assert "in fail" in units["fail"]["traceback"]
    assert "status 7" in units["crash"]["error"]
    assert "the last words" in units["crash"]["error"]
    assert "not done" in units["hang"]["error"]
    assert all(figures["seconds"] >= 0 for figures in units.values())
    assert list_pending(FAULTS, context) == []

    # from now on `fail` works
    (tmp_path / "second call").touch()
    context = replace(context, call="second")
    assert list_pending(FAULTS, context) == ["fail", "crash"]
    run_stage(FAULTS, context, monotonic() + 10 * SECONDS)
    units = read_units(tmp_path, FAULTS.name)
    assert units["fail"]["line"] == "mended"
    assert "error" not in units["fail"]
    assert "status 7" in units["crash"]["error"]


@pytest.mark.slow
@pytest.mark.long
def test_a_rehearsal_runs_every_stage_on_a_bare_machine(tmp_path: Path) -> None:
    """Without optional packages; a second call keeps everything, and the page shows all of it."""
    # a process of its own, as packages that are imported cannot be taken away
    python = make_environment(tmp_path / "environment", MISSING)
    command = [
        str(python),
        "-m",
        "bench.gpu",
        "--rehearse",
        "--results",
        str(tmp_path),
    ]
    first = finished(command, seconds=600, PYTHONPATH=str(ROOT))
    assert first.returncode == 0, first.stdout[-3000:]
    for stage in STAGES:
        units = read_units(tmp_path, stage.name)
        assert units
        assert not any("error" in figures for figures in units.values())
    for name, figures in read_units(tmp_path, "correct").items():
        if name.startswith("lossless"):
            assert figures["answers"] == 48
            assert figures["accepted"] > 0
    page = render_page(tmp_path)
    assert all(f"## {title}" in page for title, _ in SECTIONS.values())
    assert "MFU" in page
    second = finished(command, PYTHONPATH=str(ROOT))
    assert second.returncode == 0
    assert second.stdout.count("kept") == len(STAGES)


def test_the_page_is_that_of_the_committed_results() -> None:
    """Its figures come from result files, and from nothing else."""
    assert (ROOT / PAGE).read_text() == render_page(RESULTS)


def test_a_page_tells_what_failed(tmp_path: Path) -> None:
    """By the first line of an error; a unit's last result counts."""
    failed = {
        **ABOUT,
        "unit": "medusa",
        "error": "OutOfMemoryError: of memory\n more",
    }
    for row in (
        failed,
        {
            **ABOUT,
            "unit": "eagle3",
            "error": "at first",
        },
        {
            **ABOUT,
            "unit": "eagle3",
            "line": "fast; MFU 50%",
        },
    ):
        write_unit(str(tmp_path), "training", row)
    assert describe_unit(failed) == "failed: OutOfMemoryError: of memory"
    page = render_page(tmp_path)
    assert "| medusa | failed: OutOfMemoryError: of memory |" in page
    assert "| eagle3 | fast; MFU 50% |" in page
    assert "a GPU, torch 2" in page
    assert "at first" not in page
    assert "nothing is measured yet" in render_page(tmp_path / "nowhere")


def test_a_wrong_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists the stages."""
    with pytest.raises(SystemExit):
        main(["--stages", "nosuch"])
    assert "correct" in capsys.readouterr().err
