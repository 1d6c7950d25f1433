"""Train a head: `accelerate launch recipes/train_eagle.py [RECIPE] [key=value ...]`; without a recipe, the tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_prep.tokens import load_tokenizer, tokenized
from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import Features
from eagle.extract import LiveFeatures, taps_of
from eagle.identity import identity
from eagle.log import script
from eagle.recipe import Recipe
from eagle.store import FeatureStore
from eagle.target import Target
from eagle.train import train

TINY = Path(__file__).parent / "tiny" / "eagle1.yaml"


def main(argv: list[str]) -> None:
    """Read the recipe, open its features, train."""
    path = argv.pop(0) if argv and "=" not in argv[0] else str(TINY)
    recipe = Recipe.load(path, argv)
    settings = settings_of(recipe.drafter.model_dump(), path)
    method = DRAFTERS[settings.kind]
    target = Target.load(**{**recipe.target.model_dump(), "dtype": "float32"})
    store = source(recipe, identity(recipe, taps_of(method)))
    torch.manual_seed(recipe.train.seed)  # the head's first weights are part of the run
    head = train(recipe, method.for_target(settings, target.config), target.head, store)
    print(f"head in {head}")


def source(recipe: Recipe, made: dict[str, Any]) -> Features:
    """The stored features, or such as are computed when they are read, where the recipe has no store."""
    if recipe.features.store:
        return FeatureStore(recipe.features.store, made)
    examples, tally = tokenized(recipe, load_tokenizer(recipe))
    print(tally.table())
    return LiveFeatures(Target.load(**recipe.target.model_dump()), examples, made, recipe.features.batch_tokens)


if __name__ == "__main__":
    script(main)
