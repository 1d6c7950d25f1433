"""Train a head: `eagle train [RECIPE] [key=value ...] [--check]`; without a recipe the tiny one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from data_prep.read_once import read_examples
from eagle.data.open import follow_head, open_features
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe, parse_train
from eagle.shipped import commit
from eagle.target.borrowed import Borrowed
from eagle.training.first_head import first_head
from eagle.training.launch import launch, resolve_dtype, splits_weights
from eagle.training.train import train
from recipes.check import check
from recipes.held_out import NOT_DECODED, open_decoding
from recipes.tiny import demo


def main(argv: list[str]) -> None:
    """Read the recipe, open its features, train; with `--check`, try every stage on a little data and start nothing."""
    if {"-h", "--help"} & set(argv):
        raise SystemExit(print(f"usage: eagle train [RECIPE] [key=value ...] [--check]\n\n{__doc__}"))
    args = parse_train(argv)
    path = args.recipe
    recipe = resolve_dtype(Recipe.load(path or demo.RECIPE, args.overrides))
    if recipe.joint is not None:
        raise ValueError(
            f"{path} has a section `joint`, which trains the target too: use `eagle train RECIPE` without "
            "--check, or recipes/train_medusa2.py"
        )
    if path is None and not Path(recipe.target.path).exists() and "LOCAL_RANK" not in os.environ:
        demo.run(demo.TO_TRAIN)
    if args.check:
        check(recipe)
        return
    accelerator = launch(recipe.train)
    if accelerator.device.type == "cpu":  # not by timing: a run that goes on must round as it began
        threads = torch.get_num_threads()
        hint = "; OMP_NUM_THREADS=1 is often faster on a shared machine" if threads > 1 else ""
        accelerator.print(f"threads: {threads}{hint}")
    settings = settings_of(recipe.drafter.model_dump(), path or demo.RECIPE)
    target, features = open_features(recipe, settings, partial(read_examples, recipe), main=accelerator.is_main_process)
    torch.manual_seed(recipe.train.seed)  # the head's first weights are part of the run
    head = first_head(recipe, settings, target, features)
    features = follow_head(
        recipe, settings, target, features, head, weights_split=splits_weights(accelerator, recipe.train)
    )
    frozen = target.head.cast(getattr(torch, recipe.train.dtype))
    decoding = open_decoding(recipe, target)
    if isinstance(target, Borrowed) and recipe.train.decode is None and recipe.train.validation:
        accelerator.print(NOT_DECODED)
    if decoding is None and recipe.features.store:
        del target  # only its embedding and LM head are needed
    folder = train(accelerator, recipe, head, frozen, features, decoding, commit())
    accelerator.print(f"head in {folder.resolve()}")
    accelerator.end_training()


if __name__ == "__main__":
    script(main)
