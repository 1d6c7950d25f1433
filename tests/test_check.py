"""`--check` goes through every stage, says what the run needs, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle.recipe import Recipe
from recipes.check import check


def with_data(tiny_target_dir: Path, tmp_path: Path, *overrides: str) -> Recipe:
    """The tiny recipe on the suite's own target and conversations."""
    data = tiny_target_dir / "data/train.jsonl"
    where = [f"target.path={tiny_target_dir / 'target'}", f"data.train={data}", f"train.out={tmp_path / 'out'}"]
    where += [f"features.store={tmp_path / 'features'}", "target.dtype=float32", "train.dtype=float32"]
    return Recipe.load(Path(__file__).parent.parent / "recipes/tiny/eagle1.yaml", [*where, *overrides])


def test_every_stage_runs_and_nothing_is_left(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage is named with its time, the forecast follows, and no file is written."""
    check(with_data(tiny_target_dir, tmp_path))
    said = capsys.readouterr().out
    stages = ["conversations", "tokens and masks", "target", "features", "loss and update"]
    places = [said.index(f"{stage} ...") for stage in [*stages, "save and load", "decode", "export"]]
    assert places == sorted(places)
    assert "identical" in said and "vllm: ready" in said
    assert "GB of disk" in said and "GB of memory while training" in said and "h to train" in said
    assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_serve_the_head_is_named(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would only be noticed after days of training is said before."""
    check(with_data(tiny_target_dir, tmp_path, "drafter.fc_bias=true", "data.limit=40"))
    assert "not for vllm" in capsys.readouterr().out


def test_data_that_are_too_few_are_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Two steps need two batches."""
    with pytest.raises(ValueError, match="2 steps need 32"):
        check(with_data(tiny_target_dir, tmp_path, "train.batch_size=16", "data.limit=5"))
