"""Train a head: `eagle train [RECIPE] [key=value ...] [--check]`; without a recipe the tiny one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from data_prep.read_once import read_examples
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import parse_train
from eagle.shipped import commit
from eagle.target.borrowed import Borrowed
from eagle.training.launch import launch, resolve_dtype, splits_weights
from eagle.training.start import first_head, follow_head, open_features
from eagle.training.train import train
from recipes.check import check
from recipes.held_out import NOT_DECODED, open_decoding
from recipes.tiny import demo


def main(argv: list[str]) -> None:
    """Train the head of a recipe; with `--check`, try every stage on a little data instead."""
    if "-h" in argv or "--help" in argv:
        print(f"usage: eagle train [RECIPE] [key=value ...] [--check]\n\n{__doc__}")
        raise SystemExit
    args = parse_train(argv)
    source = args.recipe or demo.RECIPE
    recipe = resolve_dtype(Recipe.load(source, args.overrides))
    if recipe.joint is not None:
        raise ValueError(
            f"{source} with a section `joint` trains the target too: use `eagle train RECIPE` without --check, or "
            "recipes/train_medusa2.py"
        )
    # Processes of `accelerate launch` must not all make the demo's model at once.
    is_launched = "LOCAL_RANK" in os.environ
    if args.recipe is None and not Path(recipe.target.path).exists() and not is_launched:
        demo.run(demo.TO_TRAIN)
    if args.check:
        check(recipe)
    else:
        train_head(recipe, source)


def train_head(recipe: Recipe, source: str) -> None:
    """Open the features of a recipe, initialise its head, and train it."""
    accelerator = launch(recipe.train)
    if accelerator.device.type == "cpu":
        # The number of threads is not chosen by timing: a resumed run must round as it did before.
        threads = torch.get_num_threads()
        hint = "; OMP_NUM_THREADS=1 is often faster on a shared machine" if threads > 1 else ""
        accelerator.print(f"threads: {threads}{hint}")
    settings = settings_of(recipe.drafter.model_dump(), source)
    tokenize = partial(read_examples, recipe)
    target, features = open_features(recipe, settings, tokenize, main=accelerator.is_main_process)

    # The same seed must give the same initial weights, whatever was sampled before.
    torch.manual_seed(recipe.train.seed)
    head = first_head(recipe, settings, target, features)
    is_sharded = splits_weights(accelerator, recipe.train)
    features = follow_head(recipe, settings, target, features, head=head, weights_split=is_sharded)
    target_head = target.head.cast(getattr(torch, recipe.train.dtype))

    decoding = open_decoding(recipe, target)
    if isinstance(target, Borrowed) and recipe.train.decode is None and recipe.train.validation:
        accelerator.print(NOT_DECODED)
    if decoding is None and recipe.features.store:
        # Stored features replace the target's layers; training reads only its embedding and LM head.
        del target
    folder = train(
        accelerator,
        recipe,
        head,
        target_head,
        features=features,
        decoding=decoding,
        commit=commit(),
    )
    accelerator.print(f"head in {folder.resolve()}")
    accelerator.end_training()


if __name__ == "__main__":
    script(main)
