"""The training of a comparison's arms: features stored once, budgets turned into steps, heads by the project's loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, cast

import torch

from data_prep.extract import fill_store
from data_prep.read_once import read_examples
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Features, collate, gate_mask, trim_mask
from eagle.data.features import roles_of
from eagle.data.identity import tap_identity
from eagle.data.open import follow_head, open_features
from eagle.data.stored_rows import TapRoles, TextSizes, mean_bytes, parts_of
from eagle.disk import lock_folder
from eagle.drafters import settings_of
from eagle.log import progress
from eagle.recipe import Recipe
from eagle.shipped import commit
from eagle.target.borrowed import target_config
from eagle.training.drafts_loss import DraftsLoss
from eagle.training.first_head import first_head
from eagle.training.launch import launch, splits_weights
from eagle.training.plan import Plan
from eagle.training.train import train
from eval.comparison.compare_plan import Arm, Comparison
from eval.comparison.compare_rows import Entry, Rows

ENOUGH = 10**6  # epochs, where a budget decides the steps


def store_features(comparison: Comparison) -> None:
    """Fill every store that arms name, once, with all that they read of the target."""
    stores: dict[str, list[Recipe]] = {}
    for arm in comparison.arms.values():
        if arm.is_trained and arm.recipe.features.store:
            stores.setdefault(arm.recipe.features.store, []).append(arm.recipe)
    for store, recipes in stores.items():
        target = recipes[0].target
        config = target_config(target.path, target.revision, trust_remote_code=target.trust_remote_code)
        roles = TapRoles.join(roles_of(_settings(recipe), config) for recipe in recipes)
        with lock_folder(store):
            fill_store(recipes[0], Path(store), roles, repair=False, strict=False)


@dataclass
class TrainingRun:
    """A training run that is ready for its first step."""

    recipe: Recipe
    accelerator: Any  # as `eagle.training.launch` answers it
    head: TrainableDrafter
    frozen: TargetHead
    features: Features
    slots: list[int]  # supervised tokens of every conversation
    roles: TapRoles  # what the head reads of the target

    @classmethod
    def open(cls, recipe: Recipe) -> TrainingRun:
        """The features of a recipe and its first head, as the training script opens them."""
        accelerator, settings = launch(recipe.train), _settings(recipe)
        target, features = open_features(recipe, settings, partial(read_examples, recipe))
        torch.manual_seed(recipe.train.seed)  # the head's first weights are part of the run
        head = first_head(recipe, settings, target, features)
        if head.follows_progress:  # each count is a run of its own
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"stem": None})})
        split = splits_weights(accelerator, recipe.train)
        features = follow_head(recipe, settings, target, features, head, weights_split=split)
        frozen = target.head.cast(getattr(torch, recipe.train.dtype))
        masks = (gate_mask(features.mask(place), recipe.train.gate) for place in range(len(features)))
        slots = [int(trim_mask(mask).sum()) for mask in masks]
        return cls(recipe, accelerator, head, frozen, features, slots, roles_of(settings, target.config))

    def plan(self, steps: int | None = None) -> Plan:
        """Which conversations the steps read; a number of steps takes the place of the recipe's epochs."""
        settings = self.recipe.train
        if steps is not None:
            settings = settings.model_copy(update={"epochs": ENOUGH, "max_steps": steps})
        return Plan(self.slots, settings)

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that learn from so many supervised tokens."""
        plan, steps, learned = self.plan(ENOUGH), 0, 0
        while learned < tokens:
            learned += sum(self.slots[place] for place in plan.step(steps))
            steps += 1
        return steps

    def train(self, steps: int | None) -> Entry:
        """Train or resume; returns steps, supervised tokens and seconds, scaled up if a killed run made some steps."""
        plan = self.plan(steps)
        recipe = self.recipe.model_copy(update={"train": plan.settings})
        folders = [Path(recipe.train.out) / "checkpoints", Path(recipe.train.stem or recipe.train.out) / "stem"]
        kept = [path.name.removeprefix("step-") for folder in folders for path in folder.glob("step-*")]
        done = max((int(step) for step in kept if step.isdigit()), default=0)
        begin = _seconds()
        train(self.accelerator, recipe, self.head, self.frozen, self.features, None, commit())
        seconds = (_seconds() - begin) * len(plan) / max(len(plan) - done, 1)
        self.accelerator.free_memory()
        return {"steps": len(plan), "tokens": plan.learned(len(plan)), "seconds": round(seconds, 1), **self.sizes()}

    def sizes(self) -> Entry:
        """How many weights the head trains, and the bytes of what it reads of each token."""
        weights, width = (
            (weight for weight in self.head.parameters() if weight.requires_grad),
            self.head.shape.hidden_size,
        )
        parts = parts_of(tap_identity(self.roles))
        texts = TextSizes.of((self.features.mask(place), 0) for place in range(len(self.features)))
        return {
            "weights": sum(weight.numel() for weight in weights),
            "token_bytes": round(mean_bytes(parts, self.recipe.features.dtype, width, texts)),
        }

    def timed_step(self) -> Callable[[int], float]:
        """A function that times a training step, reading included; the trained weights are discarded.

        Texts that are written for several steps at once count in each of these.
        """
        head, plan, settings = self.head.to(self.accelerator.device).train(), self.plan(ENOUGH), self.recipe.train
        policy, features, writing, left = settings.on_policy, cast(Any, self.features), 0.0, 0
        if policy is not None:
            head.register_forward_hook(DraftsLoss(policy, settings.dtype))
        optimizer = torch.optim.AdamW(head.parameters(), lr=settings.lr, betas=settings.betas, fused=True)

        def step(number: int) -> float:
            nonlocal writing, left
            begin = _seconds()
            if policy is not None and not left:
                features.write([(settings.seed + n, plan.step(n)) for n in range(number, number + policy.every)])
                writing, begin, left = (_seconds() - begin) / policy.every, _seconds(), policy.every
            left -= 1
            torch.manual_seed(settings.seed + number)  # which names the texts that are written
            places = plan.step(number)
            batch = collate(self.features.read(places), self.features.taps, plan.seeds(number, places))
            with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                losses = head(batch.to(self.accelerator.device), self.frozen)
            losses["total"].backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            return writing + _seconds() - begin

        return step


def train_arm(comparison: Comparison, rows: Rows, arm: Arm, seed: int) -> None:
    """Train one arm with one seed for its budget, and note what it took."""
    run = TrainingRun.open(arm.for_seed(comparison.folder, seed))
    trained = {part.name: _find_training(rows, part, seed) for part in arm.line()[:-1]}
    learned = sum(row["tokens"] for row in trained.values())
    if arm.section.tokens is not None:
        steps: int | None = run.steps_for(arm.section.tokens - learned)
    elif arm.section.seconds is not None or arm.as_long_as is not None:
        steps = steps_in_time(comparison, rows, arm, seed)
    else:
        steps = None
    if steps is not None and steps < 1:
        raise ValueError(
            f"arms.{arm.name} has no training left: its start has learned from {learned:,} tokens, and a budget "
            "counts those: give it a larger one, or its start a smaller one"
        )
    row = {"arm": arm.name, "digest": arm.digest, "seed": seed, **run.train(steps)}
    rows.add("trained", [row])
    shutil.rmtree(Path(run.recipe.train.out) / "checkpoints", ignore_errors=True)  # nothing goes on from here
    if arm.stem is not None:
        shutil.rmtree(arm.stem.folder(comparison.folder, seed) / "stem", ignore_errors=True)


def is_trained(rows: Rows, arm: Arm, seed: int) -> bool:
    """Whether an arm's training is complete."""
    return not arm.is_trained or rows.find_training(arm.digest, seed) is not None


def _find_training(rows: Rows, arm: Arm, seed: int) -> Entry:
    training = rows.find_training(arm.digest, seed)
    assert training is not None  # arms are trained in the order of their starts
    return training


# -- budgets of time --------------------------------------------------------------------------------------------------


def steps_in_time(comparison: Comparison, rows: Rows, arm: Arm, seed: int) -> int:
    """The steps that fill an arm's budget of seconds, or those of the arm that it is timed by."""
    budget = arm.section.seconds
    if arm.as_long_as is not None:
        budget = _estimate_seconds(comparison, rows, arm.as_long_as.line(), seed)
    assert budget is not None
    left = budget - _estimate_seconds(comparison, rows, arm.line()[:-1], seed)
    return max(round(left / _clock(comparison, rows)[arm.digest]), 0)


def _estimate_seconds(comparison: Comparison, rows: Rows, arms: Sequence[Arm], seed: int) -> float:
    """Seconds of training by the clock."""
    clock = _clock(comparison, rows)
    return sum(_find_training(rows, arm, seed)["steps"] * clock[arm.digest] for arm in arms)


def _clock(comparison: Comparison, rows: Rows) -> dict[str, float]:
    """Seconds of a step of every arm that a budget of time concerns, measured once, the arms in turns."""
    timed = [arm for arm in comparison.arms.values() if arm.section.seconds is not None or arm.as_long_as is not None]
    timed = [part for arm in timed for part in [*arm.line(), *(arm.as_long_as.line() if arm.as_long_as else [])]]
    digests = {arm.digest for arm in timed}
    for row in rows.of("clock"):
        if digests <= row.keys():
            return row
    folder, count = comparison.folder, comparison.section.clock_steps
    recipes = {arm.digest: arm.for_seed(folder, comparison.section.seeds[0]) for arm in timed}
    fresh = {
        digest: recipe.model_copy(update={"train": recipe.train.model_copy(update={"init": None})})
        for digest, recipe in recipes.items()
    }
    steps = {digest: TrainingRun.open(recipe).timed_step() for digest, recipe in fresh.items()}
    warm_up = max(count // 10, 1)
    seconds = dict.fromkeys(steps, 0.0)
    for number in progress(range(warm_up + count), "clock", warm_up + count, unit="steps"):
        for place, (digest, step) in enumerate(steps.items()):
            spent = step(number + place * (warm_up + count))  # a length that is new costs the first arm that meets it
            seconds[digest] += spent if number >= warm_up else 0.0
    rows.add("clock", [{digest: total / count for digest, total in seconds.items()}])
    return rows.of("clock")[-1]


def _seconds() -> float:
    """CPU seconds, which other processes do not affect; wall seconds on an accelerator."""
    if not torch.accelerator.is_available():
        return process_time()
    torch.accelerator.synchronize()
    return perf_counter()


def _settings(recipe: Recipe) -> Any:
    return settings_of(recipe.drafter.model_dump(), "recipe")
