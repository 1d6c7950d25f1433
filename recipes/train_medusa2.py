"""Train a target together with its heads (Medusa-2): `eagle train RECIPE [key=value ...]`, a recipe with `joint`.

What comes out is a NEW target, whose answers differ from the old one's, and heads for it.
"""

from __future__ import annotations

from functools import partial

import torch

from data_prep.read_once import read_examples
from eagle.data.features import LiveFeatures
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eagle.shipped import commit
from eagle.training.launch import launch, resolve_dtype
from eagle.training.start import first_head, open_features
from eagle.training.train_joint import train_jointly


def main(argv: list[str]) -> None:
    """Train the target and the heads of a recipe together."""
    args = command_line("eagle train", __doc__).parse_intermixed_args(argv)
    recipe = resolve_dtype(Recipe.load(args.recipe, args.overrides))
    if recipe.joint is None:
        raise ValueError(
            f"{args.recipe} has no section `joint`: its head is trained alone, by recipes/train_eagle.py"
        )
    if recipe.features.shard_target:
        raise ValueError(
            "a target that trains is whole on every process: leave features.shard_target out"
        )
    accelerator = launch(recipe.train)
    settings = settings_of(recipe.drafter.model_dump(), args.recipe)

    # The target changes at every step, so that its features cannot be stored.
    live_features = recipe.features.model_copy(update={"store": None})
    live_recipe = recipe.model_copy(update={"features": live_features})
    tokenize = partial(read_examples, recipe)
    _, features = open_features(live_recipe, settings, tokenize, main=accelerator.is_main_process)
    assert isinstance(features, LiveFeatures)

    # The same seed must give the same initial weights, whatever was sampled before.
    torch.manual_seed(recipe.train.seed)
    head = first_head(recipe, settings, features.target, features)
    folder = train_jointly(accelerator, recipe, head, features, commit=commit())
    accelerator.print(
        f"a NEW target in {(folder / 'target').resolve()}: its answers are not those of {recipe.target.path}; the KL "
        "from it is in provenance.json there\n"
        f"heads for it, and for no other target, in {(folder / 'head').resolve()}; "
        f"`eagle measure {folder / 'head/recipe.yaml'}` measures them"
    )
    accelerator.end_training()


if __name__ == "__main__":
    script(main)
