"""Every recipe parses, every mistake in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle.drafters import settings_of
from eagle.recipe import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TINY = ROOT / "recipes/tiny/eagle1.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    """A shipped recipe is valid, its drafter section too, and its dump is the same recipe."""
    recipe = Recipe.load(path)
    settings_of(recipe.drafter.model_dump(), str(path))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(recipe.dump())
    assert Recipe.load(dumped) == recipe


def test_overrides_are_laid_over_and_numbers_read_as_numbers() -> None:
    """YAML takes 3e-5 for a string; a recipe does not."""
    recipe = Recipe.load(TINY, ["train.lr=3e-5", "data.limit=7", "eval.temperatures=[0.5]"])
    assert (recipe.train.lr, recipe.data.limit, recipe.eval.temperatures) == (3e-5, 7, (0.5,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "did you mean"),
        ("tarin.lr=1", "did you mean train"),
        ("train.batch_sise=1", "did you mean batch_size"),
        ("regenerate.temprature=1", "did you mean temperature"),
        ("train.lr=-1", "train.lr: got -1"),
        ("train.lr.x=1", "holds a value, not a section"),
        ("nonsense", "expected key.sub=value"),
    ],
)
def test_a_mistake_is_named(override: str, message: str) -> None:
    """Unknown keys are refused with the nearest valid one, bad values with what was got."""
    with pytest.raises(ValueError, match=message):
        Recipe.load(TINY, [override])


def test_the_drafter_section_is_checked_by_its_method() -> None:
    """A method refuses what it does not know, and an unknown method names the known ones."""
    with pytest.raises(ValueError, match="did you mean fc_bias"):
        settings_of({"kind": "eagle1", "fc_bais": True}, "test")
    with pytest.raises(ValueError, match="expected a method with weights: eagle1"):
        settings_of({"kind": "eagle7"}, "test")
    with pytest.raises(ValueError, match="no recipe at"):
        Recipe.load("nowhere.yaml")
