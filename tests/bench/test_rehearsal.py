"""A rehearsal runs every stage, and says so where one fails or a head comes back changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.rehearsal import METHODS, ROOT, Rehearsal, compare_heads, main, make_target
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.formats.export import EXPORTERS
from eagle.target.target import Target


@pytest.mark.slow
@pytest.mark.long
def test_a_small_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    """One method; `make rehearsal` takes all, at a real model's sizes."""
    folder, out = tmp_path / "all", tmp_path / "rehearsal.json"
    words = ["--size", "small", "--methods", "eagle3.1", "--folder", folder, "--out", out]
    command = [sys.executable, "-m", "bench.rehearsal", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["stage"]: row for row in json.loads(out.read_text())["stages"]}
    stages = [
        f"{stage}, eagle3.1"
        for stage in ("features", "training", "generate", "export", "inspect", "import", "compare")
    ]
    assert {*rows} == {
        "target",
        "answers of the target",
        "measuring, all",
        "lossless, all",
        *stages,
    }
    assert all(
        row["ok"] and row["peak_mb"] > 100 and row["cpu_seconds"] > 0 for row in rows.values()
    )
    assert rows["lossless, all"]["note"].startswith("8 of 8 answers identical")
    assert rows["compare, eagle3.1"]["note"].startswith("18 tensors bit-equal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target in bf16, and a random head for it."""
    folder = tmp_path_factory.mktemp("rehearsal")
    make_target(folder / "target", "small")
    target = Target.load(folder / "target", dtype="bfloat16")
    assert target.model.dtype == torch.bfloat16 and len(target.tokenizer) == target.vocab_size
    save_head(folder / "head", Eagle1.for_target(Eagle1.Settings(), target.config), "", {})
    return folder


@pytest.mark.quick("a tensor less")
@pytest.mark.parametrize("fault", ["none", "a weight", "a tensor less"])
def test_a_head_that_came_back_changed_is_seen(
    fault: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one weight's last bit too."""
    head, other = folder / "head", tmp_path / "again"
    shutil.copytree(head, other)
    weights = load_file(other / "model.safetensors")
    if fault == "a weight":
        weights["fc.weight"].view(torch.int32)[3, 5] ^= 1
        save_file(weights, other / "model.safetensors")
        with pytest.raises(SystemExit, match=r"1 of \d+ tensors differ, as \['fc.weight'\]"):
            compare_heads(str(folder / "target"), str(head), str(other))
    elif fault == "a tensor less":
        del weights["fc.bias"]
        save_file(weights, other / "model.safetensors")
        with pytest.raises(ValueError, match=r"fc.bias"):
            compare_heads(str(folder / "target"), str(head), str(other))
    else:
        compare_heads(str(folder / "target"), str(head), str(other))
        assert "tensors bit-equal" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_rehearsal(tmp_path: Path) -> None:
    """With what it printed; memory is that of the stage."""
    rehearsal = Rehearsal(tmp_path, "small", ["eagle1"])
    rehearsal.run("large", ["-c", "print(len(b'1' * 1_000_000_000))"])
    with pytest.raises(ValueError, match=r"broken ended with 3, expected 0: (.|\n)*what it said"):
        rehearsal.run(
            "broken",
            ["-c", "print('what it said'); raise SystemExit(3)"],
            ["-c", "print('not run')"],
        )
    assert rehearsal.rows[0]["peak_mb"] > 990
    assert [row["ok"] for row in rehearsal.rows] == [True, False]


def test_every_layout_is_written_by_some_method(tmp_path: Path) -> None:
    """But for those of authors' code, or of methods that are not rehearsed; what is there already is not touched."""
    published = {
        "eagle",
        "medusa",
        "hydra",
        "fms",
        "falcon",
        "zlab",
        "deepspec",
        "specforge",
        "deepseek",
        "mimo",
    }
    assert {
        engine for engines in METHODS.values() for engine in engines
    } == EXPORTERS.keys() - published
    with pytest.raises(ValueError, match="is there already, expected a new folder"):
        main(["--folder", str(tmp_path)])
