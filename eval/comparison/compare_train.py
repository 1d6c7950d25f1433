"""Train a comparison's arms: store features once, turn budgets into steps, and train heads in the project's loop."""

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
from eagle.data.stored_rows import SequenceSizes, TapRoles, mean_bytes, parts_of
from eagle.disk import lock_folder
from eagle.drafters import settings_of
from eagle.log import progress
from eagle.recipe import Recipe
from eagle.shipped import commit
from eagle.target.borrowed import target_config
from eagle.training.drafts_loss import DraftsLoss
from eagle.training.launch import launch, splits_weights
from eagle.training.plan import Plan
from eagle.training.start import first_head, follow_head, open_features
from eagle.training.train import train
from eval.comparison.compare_plan import Arm, Comparison, with_train
from eval.comparison.compare_rows import Entry, Rows

# epochs, where a budget decides the steps
ENOUGH = 10**6


def store_features(comparison: Comparison) -> None:
    """Fill every store that arms name, once, with all that they read of the target."""
    stores: dict[str, list[Recipe]] = {}
    for arm in comparison.arms.values():
        if arm.is_trained and arm.recipe.features.store:
            stores.setdefault(arm.recipe.features.store, []).append(arm.recipe)

    for store, recipes in stores.items():
        target = recipes[0].target
        config = target_config(
            target.path, target.revision, trust_remote_code=target.trust_remote_code
        )
        roles = TapRoles.join(roles_of(_settings(recipe), config) for recipe in recipes)
        with lock_folder(store):
            fill_store(recipes[0], Path(store), roles, repair=False, strict=False)


@dataclass
class TrainingRun:
    """A training run that is ready for its first step."""

    recipe: Recipe
    accelerator: Any  # as `eagle.training.launch` answers it
    head: TrainableDrafter
    target_head: TargetHead
    features: Features
    slots: list[int]  # supervised tokens of every conversation
    roles: TapRoles  # what the head reads of the target

    @classmethod
    def open(cls, recipe: Recipe) -> TrainingRun:
        """Open the features of a recipe and its first head, as the training script does."""
        accelerator = launch(recipe.train)
        settings = _settings(recipe)
        target, features = open_features(recipe, settings, partial(read_examples, recipe))

        # the head's first weights are part of the run
        torch.manual_seed(recipe.train.seed)
        head = first_head(recipe, settings, target, features)
        if head.follows_progress:
            # its loss depends on the length of the run, so counts share no steps
            recipe = with_train(recipe, {"stem": None})

        split = splits_weights(accelerator, recipe.train)
        features = follow_head(recipe, settings, target, features, head=head, weights_split=split)

        # a position that is not supervised teaches nothing, and counts for no budget
        slots = []
        for i in range(len(features)):
            mask = trim_mask(gate_mask(features.mask(i), recipe.train.gate))
            slots.append(int(mask.sum()))
        return cls(
            recipe=recipe,
            accelerator=accelerator,
            head=head,
            target_head=target.head.cast(getattr(torch, recipe.train.dtype)),
            features=features,
            slots=slots,
            roles=roles_of(settings, target.config),
        )

    def plan(self, steps: int | None = None) -> Plan:
        """Plan which conversations the steps read; a number of steps replaces the recipe's epochs."""
        settings = self.recipe.train
        if steps is not None:
            settings = settings.model_copy(update={"epochs": ENOUGH, "max_steps": steps})
        return Plan(self.slots, settings)

    def steps_for(self, tokens: int) -> int:
        """Return the fewest steps that learn from so many supervised tokens."""
        plan = self.plan(ENOUGH)
        steps = 0
        learned = 0
        while learned < tokens:
            learned += sum(self.slots[i] for i in plan.step(steps))
            steps += 1
        return steps

    def train(self, steps: int | None) -> Entry:
        """Train or resume.

        Args:
            steps: How many; None for those of the recipe.

        Returns:
            Steps, supervised tokens, seconds and sizes, as the comparison's file holds them.
        """
        plan = self.plan(steps)
        recipe = self.recipe.model_copy(update={"train": plan.settings})
        done = _count_saved_steps(recipe)
        begin = _seconds()
        train(
            self.accelerator,
            recipe,
            self.head,
            self.target_head,
            features=self.features,
            commit=commit(),
        )

        # seconds of a resumed run are scaled up to all of its steps
        seconds = (_seconds() - begin) * len(plan) / max(len(plan) - done, 1)
        self.accelerator.free_memory()
        return {
            "steps": len(plan),
            "tokens": plan.learned(len(plan)),
            "seconds": round(seconds, 1),
            **self.sizes(),
        }

    def sizes(self) -> Entry:
        """Return how many weights the head trains, and the bytes of what it reads of each token."""
        sizes = SequenceSizes.of((self.features.mask(i), 0) for i in range(len(self.features)))
        token_bytes = mean_bytes(
            parts_of(tap_identity(self.roles)),
            self.recipe.features.dtype,
            self.head.shape.hidden_size,
            sizes,
        )
        trained = [weight.numel() for weight in self.head.parameters() if weight.requires_grad]
        return {"weights": sum(trained), "token_bytes": round(token_bytes)}

    def timed_step(self) -> Callable[[int], float]:
        """Return a function that times a training step, reading included. The trained weights are discarded."""
        settings = self.recipe.train
        device = self.accelerator.device
        head = self.head.to(device).train()
        plan = self.plan(ENOUGH)
        writing = self._timed_writing(plan)
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.lr, betas=settings.betas, fused=True
        )

        def step(step_index: int) -> float:
            # on-policy answers are written for several steps at once, and count in each of these
            written = writing(step_index)

            begin = _seconds()
            # the seed names the answers that are written
            torch.manual_seed(settings.seed + step_index)
            batch_indices = plan.step(step_index)
            seeds = plan.seeds(step_index, batch_indices)
            batch = collate(self.features.read(batch_indices), self.features.taps, seeds)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                losses = head(batch.to(device), self.target_head)

            losses["total"].backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            return written + _seconds() - begin

        return step

    def _timed_writing(self, plan: Plan) -> Callable[[int], float]:
        """Return a function that writes the answers of the next steps, and returns one step's share of the seconds."""
        settings = self.recipe.train
        policy = settings.on_policy
        if policy is None:
            return lambda _: 0.0
        self.head.register_forward_hook(DraftsLoss(policy, settings.dtype))

        # only features of answers that the head writes have `write`
        features = cast(Any, self.features)
        share = 0.0
        left = 0

        def write(step_index: int) -> float:
            nonlocal share, left
            if not left:
                begin = _seconds()
                steps = range(step_index, step_index + policy.every)
                features.write([(settings.seed + i, plan.step(i)) for i in steps])
                share = (_seconds() - begin) / policy.every
                left = policy.every
            left -= 1
            return share

        return write


def _count_saved_steps(recipe: Recipe) -> int:
    """Return the steps of the newest checkpoint that training goes on from."""
    done = 0
    stem = Path(recipe.train.stem or recipe.train.out) / "stem"
    for folder in (Path(recipe.train.out) / "checkpoints", stem):
        for path in folder.glob("step-*"):
            # a folder that is still being written has a longer name
            step = path.name.removeprefix("step-")
            if step.isdigit():
                done = max(done, int(step))
    return done


def train_arm(comparison: Comparison, rows: Rows, arm: Arm, seed: int) -> None:
    """Train one arm with one seed for its budget, and record what it took.

    Raises:
        ValueError: The arm's start has used up its budget.
    """
    run = TrainingRun.open(arm.for_seed(comparison.folder, seed))
    learned = sum(_find_training(rows, start, seed)["tokens"] for start in arm.line()[:-1])

    steps: int | None = None
    # without a budget the recipe's epochs decide
    if arm.section.tokens is not None:
        steps = run.steps_for(arm.section.tokens - learned)
    elif arm.section.seconds is not None or arm.as_long_as is not None:
        steps = steps_in_time(comparison, rows, arm, seed)
    if steps is not None and steps < 1:
        raise ValueError(
            f"arms.{arm.name} has no training left: its start has learned from {learned:,} tokens, and a budget "
            "counts those: give it a larger one, or its start a smaller one"
        )
    row = {"arm": arm.name, "digest": arm.digest, "seed": seed, **run.train(steps)}
    rows.add("trained", [row])

    # nothing goes on from here
    shutil.rmtree(Path(run.recipe.train.out) / "checkpoints", ignore_errors=True)
    if arm.stem is not None:
        shutil.rmtree(arm.stem.folder(comparison.folder, seed) / "stem", ignore_errors=True)


def is_trained(rows: Rows, arm: Arm, seed: int) -> bool:
    """Return whether an arm's training is complete."""
    return not arm.is_trained or rows.find_training(arm.digest, seed) is not None


def _find_training(rows: Rows, arm: Arm, seed: int) -> Entry:
    training = rows.find_training(arm.digest, seed)
    # arms are trained in the order of their starts
    assert training is not None
    return training


# -- budgets of time --------------------------------------------------------------------------------------------------


def steps_in_time(comparison: Comparison, rows: Rows, arm: Arm, seed: int) -> int:
    """Return the steps that fill an arm's budget of seconds, or take as long as the arm that it is timed by."""
    budget = arm.section.seconds
    if arm.as_long_as is not None:
        budget = _estimate_seconds(comparison, rows, arm.as_long_as.line(), seed)
    assert budget is not None
    left = budget - _estimate_seconds(comparison, rows, arm.line()[:-1], seed)
    return max(round(left / _clock(comparison, rows)[arm.digest]), 0)


def _estimate_seconds(comparison: Comparison, rows: Rows, arms: Sequence[Arm], seed: int) -> float:
    """Return the seconds of training by the clock."""
    clock = _clock(comparison, rows)
    return sum(_find_training(rows, arm, seed)["steps"] * clock[arm.digest] for arm in arms)


def _clock(comparison: Comparison, rows: Rows) -> dict[str, float]:
    """Return the seconds of a step of every arm that a budget of time concerns, measured once."""
    timed: dict[str, Arm] = {}
    for arm in comparison.arms.values():
        if arm.section.seconds is not None or arm.as_long_as is not None:
            concerned = arm.line()
            if arm.as_long_as is not None:
                concerned += arm.as_long_as.line()
            timed |= {part.digest: part for part in concerned}

    # a file that knows all of them is not measured again
    for row in rows.of("clock"):
        if timed.keys() <= row.keys():
            return row
    steps = {}
    for digest, arm in timed.items():
        recipe = arm.for_seed(comparison.folder, comparison.section.seeds[0])
        # a step takes as long from fresh weights, and the start may not be trained yet
        run = TrainingRun.open(with_train(recipe, {"init": None}))
        steps[digest] = run.timed_step()

    count = comparison.section.clock_steps
    warm_up = max(count // 10, 1)
    seconds = dict.fromkeys(steps, 0.0)
    # the arms take turns, so that a change of the machine's load concerns them all
    for i in progress(range(warm_up + count), "clock", warm_up + count, unit="steps"):
        for arm_index, (digest, step) in enumerate(steps.items()):
            # each arm has its own steps: a length that is new costs the first arm that meets it
            spent = step(i + arm_index * (warm_up + count))
            if i >= warm_up:
                seconds[digest] += spent

    rows.add("clock", [{digest: total / count for digest, total in seconds.items()}])
    return rows.of("clock")[-1]


def _seconds() -> float:
    """Return CPU seconds, which other processes do not affect, or wall seconds on an accelerator."""
    if not torch.accelerator.is_available():
        return process_time()
    torch.accelerator.synchronize()
    return perf_counter()


def _settings(recipe: Recipe) -> Any:
    return settings_of(recipe.drafter.model_dump(), "recipe")
