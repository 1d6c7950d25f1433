"""Train a head: `accelerate launch recipes/train_eagle.py [RECIPE] [key=value ...] [--check]`; else the tiny one."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from data_prep.extract import target_name
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.core.decode import generate
from eagle.core.drafter import Budget, TrainableDrafter
from eagle.data.examples import Features
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.identity import MASK_RULES, data_identity, identity, in_precision
from eagle.data.on_policy import OwnSamples
from eagle.data.store import FeatureStore
from eagle.device import best_device, fastest_dtype, in_dtype
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed, is_here, load_borrowed
from eagle.target.target import Target
from eagle.training.launch import launch
from eagle.training.train import TREES, train
from eval.prompts import first_turns
from eval.results import commit
from recipes.check import check
from recipes.first_head import first_head
from recipes.tiny import demo


def main(argv: list[str]) -> None:
    """Read the recipe, open its features, train; with `--check`, try every stage on a little data and start nothing."""
    if {"-h", "--help"} & set(argv):
        raise SystemExit(print(f"usage: train_eagle.py [RECIPE] [key=value ...] [--check]\n\n{__doc__}"))
    checking = "--check" in argv
    argv = [word for word in argv if word != "--check"]
    path = argv.pop(0) if argv and "=" not in argv[0] else None
    if path is None:
        os.chdir(demo.ROOT)
    recipe = resolved(Recipe.load(path or demo.RECIPE, argv))
    if path is None and not Path(recipe.target.path).exists() and "LOCAL_RANK" not in os.environ:
        demo.run(demo.TO_TRAIN)
    if checking:
        check(recipe)
        return
    accelerator = launch(recipe.train)
    settings = settings_of(recipe.drafter.model_dump(), path or demo.RECIPE)
    target, features = opened(recipe, settings, main=accelerator.is_main_process)
    torch.manual_seed(recipe.train.seed)  # the head's first weights are part of the run
    head = first_head(recipe, settings, target, features)
    if getattr(settings, "samples", "data") == "own":
        features = own_samples(recipe, features, head, accelerator)
    frozen = target.head.cast(getattr(torch, recipe.train.dtype))
    decode = partial(decoded, recipe, target) if isinstance(target, Target) and recipe.train.decode else None
    if decode is None and recipe.features.store:
        del target  # only its embedding and LM head are needed
    folder = train(accelerator, recipe, head, frozen, features, decode, commit())
    accelerator.print(f"head in {folder.resolve()}")
    accelerator.end_training()


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with the precision that suits this device written out."""
    if recipe.train.decode and recipe.features.shard_target:
        raise ValueError("a sharded target cannot decode while a head is trained: set train.decode=0")
    if recipe.train.dtype != "auto":
        return recipe
    dtype = str(fastest_dtype(best_device())).removeprefix("torch.")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": dtype})})


def opened(recipe: Recipe, settings: Any, *, main: bool = True) -> tuple[Target | Borrowed, Features]:
    """What a head borrows from, and the features; the target itself only where it must compute or decode."""
    if recipe.features.store and not recipe.train.decode:
        store = FeatureStore(recipe.features.store)
        if folder := store.borrowed():
            borrowed = load_borrowed(folder, best_device())
            if main:  # its reading of all weights is enough for all processes
                store.expect(needed(recipe, taps_of(settings, borrowed.config), store))
            return borrowed, store
    shard = recipe.features.shard_target
    target = Target.load(**recipe.target.model_dump(), device="cpu" if shard else "auto")
    if shard:
        target.shard()
    return target, source(recipe, target, identity(recipe, taps_of(settings, target.config)))


def needed(recipe: Recipe, taps: tuple[int, ...], store: FeatureStore) -> dict[str, Any]:
    """The identity that a store must have; of a target whose files are not here only the name can be compared."""
    if is_here(recipe.target.path, recipe.target.revision):
        return identity(recipe, taps)
    named, made_from = target_name(recipe), store.index["made"]["target"]
    if named != made_from:
        raise ValueError(
            f"the target {named} is not here, and {store.folder} was made from {made_from}: name that one, or the "
            "folder where this one lies"
        )
    print(f"no target at {recipe.target.path}: its files could not be compared with what made {store.folder}")
    told = store.identity
    elsewhere = recipe.target.model_copy(update={"path": str(store.folder)})  # where no tokenizer lies
    untold = ["tokenizer"] if recipe.data.template else ["tokenizer", "template"]
    return {
        **data_identity(recipe.model_copy(update={"target": elsewhere})),
        **{name: told[name] for name in untold},
        "masks": {"rules": MASK_RULES, "stop_ids": told.get("masks", {}).get("stop_ids")},
        "target": {**told["target"], "dtype": recipe.target.dtype},
        "taps": list(taps),
        "dtype": recipe.features.dtype,
    }


def source(recipe: Recipe, target: Target, made: dict[str, Any]) -> Features:
    """The stored features, or such as are computed when they are read, where the recipe has no store."""
    if recipe.features.store:
        return FeatureStore(recipe.features.store, made)
    examples, tally = tokenize_data(recipe, load_tokenizer(recipe))
    print(tally.table())
    return LiveFeatures(target, examples, in_precision(made, target.model.dtype), recipe.features.batch_tokens)


def own_samples(recipe: Recipe, features: Features, head: TrainableDrafter, accelerator: Accelerator) -> Features:
    """What the head says itself at every step, in place of the answers of the data."""
    engine = accelerator.state.deepspeed_plugin
    if engine is not None and engine.zero_stage == 3:  # whose processes read weights together, and answers differ
        raise ValueError(
            "drafter.samples is own, which needs all weights on every process, and ZeRO-3 splits them: launch with "
            "recipes/accelerate/ddp.yaml or zero2.yaml"
        )
    if not isinstance(features, LiveFeatures):
        raise ValueError(
            f"drafter.samples is own, and features.store is {recipe.features.store}: what the draft says changes with "
            "every step, expected features.store=null, which computes features while training"
        )
    return OwnSamples(features, head)


def decoded(recipe: Recipe, target: Target, head: TrainableDrafter) -> dict[str, float]:
    """The acceptance lengths that the decoder reaches with a chain of 4 and with the published tree, greedily."""
    asked = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"count": recipe.train.decode})})
    drafter: Any = in_dtype(copy.deepcopy(head).to(target.device), target.model.dtype).bind(target.head)
    prompts, found = first_turns(asked, target), {}
    for name, paths in TREES.items():
        traces = [
            generate(target, drafter, prompt, budget=Budget.fixed(paths), max_new_tokens=recipe.eval.max_new_tokens)
            for prompt in prompts
        ]
        cycles = [cycle for trace in traces for cycle in trace.cycles]
        found[f"decoded_{name}_tau"] = sum(cycle.committed for cycle in cycles) / max(len(cycles), 1)
    return found


if __name__ == "__main__":
    script(main)
