"""A run that goes on from where a shorter one's learning rate began to fall is the run that was made whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import ROOT, apart, equal, rows, run, weights

WSD = ["train.schedule=wsd", "train.warmup=2", "train.epochs=20", "train.checkpoint_every=1"]


@pytest.fixture(scope="module")
def wsd(command: list[str]) -> list[str]:
    """Return the recipe with a rate that falls at the end."""
    return [*command, *WSD]


@pytest.fixture(scope="module")
def shorter(wsd: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of ten steps."""
    return run(wsd, tmp_path_factory.mktemp("runs") / "shorter", "train.max_steps=10")


@pytest.fixture(scope="module")
def whole(wsd: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of twenty steps that was made in one go."""
    return run(wsd, tmp_path_factory.mktemp("runs") / "whole", "train.max_steps=20")


@pytest.mark.slow
def test_a_longer_run_goes_on_before_the_fall(
    shorter: Path,
    whole: Path,
    wsd: list[str],
    tmp_path: Path,
) -> None:
    """Bit by bit, over two stems, with and without a stop; what it wrote is what the whole run wrote from there on."""
    second = run(wsd, tmp_path / "second", "train.max_steps=15", f"train.stem={shorter}")
    third = run(wsd, tmp_path / "third", "train.max_steps=20", f"train.stem={second}")

    assert equal(whole, third)
    assert [row for row in rows(whole) if row["step"] >= 12] == rows(third)
    assert [path.name for path in (third / "stem").iterdir()] == ["step-16"]
    # the rates fell at different steps
    assert apart(weights(shorter), weights(second)) > 1e-4

    # a run that has begun needs its stem no more
    (third / "checkpoints/step-20").rename(tmp_path / "away")
    run(wsd, third, "train.max_steps=20", f"train.stem={tmp_path / 'gone'}")

    assert equal(third, whole)


@pytest.mark.slow
def test_the_fall_is_no_part_of_a_stem(
    shorter: Path,
    whole: Path,
    wsd: list[str],
    tmp_path: Path,
) -> None:
    """Planted fault: from the end of the shorter run another head comes out."""
    # a folder that passes for a stem and holds steps of the fall
    (tmp_path / "stem").symlink_to(shorter / "checkpoints")
    wrong = run(wsd, tmp_path / "run", "train.max_steps=20", f"train.stem={tmp_path}")
    assert apart(weights(whole), weights(wrong)) > 1e-5


def test_a_loss_that_follows_the_progress_has_no_stem(
    shorter: Path,
    wsd: list[str],
    tmp_path: Path,
) -> None:
    """Its steps are others in a longer run."""
    falcon = [str(ROOT / "recipes/tiny/falcon.yaml"), *wsd[1:], "drafter.glance_from=0.5"]
    with pytest.raises(ValueError, match="follows the progress of a run"):
        run(falcon, tmp_path / "run", "train.max_steps=20", f"train.stem={shorter}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.schedule=constant", "expected wsd and a number of steps"),
        ("train.warmup=0.05", "expected wsd and a number of steps"),
        ("train.max_steps=9", "holds 8 steps before its rate fell"),
        ("train.lr=2e-3", r"train\.lr = 0\.001, this one has 0\.002"),
        ("train.stem=nowhere", "nowhere holds no step before its rate fell"),
    ],
)
def test_what_is_no_stem_is_refused(
    override: str,
    message: str,
    shorter: Path,
    wsd: list[str],
    tmp_path: Path,
) -> None:
    """In words, before a step is made."""
    with pytest.raises(ValueError, match=message):
        run(wsd, tmp_path / "run", "train.max_steps=20", f"train.stem={shorter}", override)
