"""Train a head: `accelerate launch recipes/train_eagle.py [RECIPE] [key=value ...]`; without a recipe, the tiny one."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import FeatureStore
from eagle.extract import identity, taps_of
from eagle.recipe import Recipe
from eagle.target import Target
from eagle.train import train

TINY = Path(__file__).parent / "tiny" / "eagle1.yaml"


def main(argv: list[str]) -> None:
    """Read the recipe, open its features, train."""
    path = argv.pop(0) if argv and "=" not in argv[0] else str(TINY)
    recipe = Recipe.load(path, argv)
    settings = settings_of(recipe.drafter.model_dump(), path)
    method = DRAFTERS[settings.kind]
    store = FeatureStore(recipe.features.store, expected=identity(recipe, taps_of(method)))
    target = Target.load(recipe.target.path, dtype="float32", revision=recipe.target.revision)
    head = train(recipe, method.for_target(settings, target.config), target.head, store)
    print(f"head in {head}")


if __name__ == "__main__":
    main(sys.argv[1:])
