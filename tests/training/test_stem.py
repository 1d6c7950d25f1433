"""A run that goes on from where a shorter one's learning rate began to fall is the run that was made whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import ROOT, apart, equal, prepared, rows, run, weights

WSD = ["train.schedule=wsd", "train.warmup=2", "train.epochs=20", "train.checkpoint_every=1"]


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own, with a rate that falls at the end."""
    return [*prepared(tiny_target_dir, tmp_path_factory.mktemp("store")), *WSD]


@pytest.fixture(scope="module")
def shorter(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps."""
    return run(command, tmp_path_factory.mktemp("runs") / "shorter", "train.max_steps=10")


@pytest.mark.slow
def test_a_longer_run_goes_on_before_the_fall(
    shorter: Path, command: list[str], tmp_path: Path
) -> None:
    """Bit by bit, over two stems, with and without a stop; what it wrote is what the whole run wrote from there on."""
    whole = run(command, tmp_path / "whole", "train.max_steps=20")
    second = run(command, tmp_path / "second", "train.max_steps=15", f"train.stem={shorter}")
    third = run(command, tmp_path / "third", "train.max_steps=20", f"train.stem={second}")
    assert equal(whole, third) and [row for row in rows(whole) if row["step"] >= 12] == rows(third)
    assert sorted(path.name for path in (third / "stem").iterdir()) == ["step-16"]
    assert apart(weights(shorter), weights(second)) > 1e-4
    (third / "checkpoints/step-20").rename(tmp_path / "away")
    assert equal(
        run(command, third, "train.max_steps=20", f"train.stem={tmp_path / 'gone'}"), whole
    )


@pytest.mark.slow
def test_the_fall_is_no_part_of_a_stem(shorter: Path, command: list[str], tmp_path: Path) -> None:
    """A planted fault: from the end of the shorter run another head comes out."""
    whole = run(command, tmp_path / "whole", "train.max_steps=20")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/stem").symlink_to(shorter / "checkpoints")
    wrong = run(command, tmp_path / "run", "train.max_steps=20", f"train.stem={tmp_path / 'wrong'}")
    assert apart(weights(whole), weights(wrong)) > 1e-5


def test_a_loss_that_follows_the_progress_has_no_stem(
    shorter: Path, command: list[str], tmp_path: Path
) -> None:
    """Its steps are others in a longer run."""
    falcon = [str(ROOT / "recipes/tiny/falcon.yaml"), *command[1:], "drafter.glance_from=0.5"]
    with pytest.raises(ValueError, match="follows the progress of a run"):
        run(falcon, tmp_path / "run", "train.max_steps=20", f"train.stem={shorter}")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.schedule=constant"], "expected wsd and a number of steps"),
        (["train.warmup=0.05"], "expected wsd and a number of steps"),
        (
            ["train.max_steps=9"],
            "holds 8 steps before its rate fell, expected .* at most the 7 steps",
        ),
        (["train.lr=2e-3"], r"holds a run with train\.lr = 0\.001, this one has 0\.002"),
        (["train.stem=nowhere"], "nowhere holds no step before its rate fell"),
    ],
)
def test_what_is_no_stem_is_refused(
    overrides: list[str], says: str, shorter: Path, command: list[str], tmp_path: Path
) -> None:
    """In words, before a step is made."""
    with pytest.raises(ValueError, match=says):
        run(command, tmp_path / "run", "train.max_steps=20", f"train.stem={shorter}", *overrides)
