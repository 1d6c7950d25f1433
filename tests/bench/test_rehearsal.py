"""A rehearsal runs every stage, and says where one fails or a head comes back changed."""

from __future__ import annotations

import json
import shutil
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
from tests.trained import finished

OF_ALL = {
    "target",
    "answers of the target",
    "measuring, all",
    "lossless, all",
}
OF_A_METHOD = (
    "features",
    "training",
    "generate",
    "export",
    "inspect",
    "import",
    "compare",
)
# layouts of authors' repositories, and of methods that are not rehearsed
NOT_REHEARSED = {
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


@pytest.mark.slow
@pytest.mark.long
def test_a_small_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    """One method; `make rehearsal` takes all, at a real model's sizes."""
    out = tmp_path / "rehearsal.json"
    options = f"--size small --methods eagle3.1 --folder {tmp_path / 'all'} --out {out}"
    command = [sys.executable, "-m", "bench.rehearsal", *options.split()]
    done = finished(command, seconds=600, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-3000:]
    rows = {row["stage"]: row for row in json.loads(out.read_text())["stages"]}
    assert rows.keys() == OF_ALL | {f"{stage}, eagle3.1" for stage in OF_A_METHOD}
    # figures depend on the machine: they are only there
    for row in rows.values():
        assert row["ok"]
        assert row["peak_mb"] > 100
        assert row["cpu_seconds"] > 0
    assert rows["lossless, all"]["note"].startswith("8 of 8 answers identical")
    assert rows["compare, eagle3.1"]["note"].startswith("18 tensors bit-equal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small target in bf16 and a random head for it."""
    folder = tmp_path_factory.mktemp("rehearsal")
    make_target(folder / "target", "small")
    target = Target.load(folder / "target", dtype="bfloat16")
    assert target.model.dtype == torch.bfloat16
    assert len(target.tokenizer) == target.vocab_size
    save_head(
        folder / "head",
        Eagle1.for_target(Eagle1.Settings(), target.config),
        "",
        {},
    )
    return folder


@pytest.mark.slow
def test_a_head_that_came_back_changed_is_seen(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By one weight's last bit, and by a tensor that is gone."""
    copy = tmp_path / "copy"
    shutil.copytree(folder / "head", copy)

    def compare() -> None:
        compare_heads(
            str(folder / "target"),
            str(folder / "head"),
            str(copy),
        )

    compare()
    assert "tensors bit-equal" in capsys.readouterr().out
    weights = load_file(copy / "model.safetensors")
    # the last bit of one number
    weights["fc.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(SystemExit, match=r"1 of \d+ tensors differ, as \['fc.weight'\]"):
        compare()
    del weights["fc.bias"]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.bias"):
        compare()


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_rehearsal(tmp_path: Path) -> None:
    """With what it printed; memory is that of the stage."""
    rehearsal = Rehearsal(tmp_path, "small", ["eagle1"])
    # a gigabyte, as the printed length shows that it was made
    rehearsal.run("large", ["-c", "print(len(b'1' * 1_000_000_000))"])
    fail = ["-c", "print('what it said'); raise SystemExit(3)"]
    never = ["-c", "print('not run')"]
    with pytest.raises(ValueError, match=r"broken ended with 3, expected 0: (.|\n)*what it said"):
        rehearsal.run("broken", fail, never)
    assert rehearsal.rows[0]["peak_mb"] > 990
    assert [row["ok"] for row in rehearsal.rows] == [True, False]


def test_every_layout_is_rehearsed_by_some_method(tmp_path: Path) -> None:
    """A new exporter fails here; a folder that exists is never written to."""
    rehearsed: set[str] = set()
    for engines in METHODS.values():
        rehearsed.update(engines)
    assert rehearsed == EXPORTERS.keys() - NOT_REHEARSED
    with pytest.raises(ValueError, match="is there already"):
        main(["--folder", str(tmp_path)])
