"""Decode held-out prompts while a head is trained, to find the checkpoint with the longest acceptance length."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from eagle.core.arguments import PromptTokens
from eagle.core.budget import Budget
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, Features
from eagle.core.tree import PUBLISHED_TREE
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.device import in_dtype
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed
from eagle.target.talk import prepare_media
from eagle.target.target import Target
from eagle.training.choice import Counts, group_by_prompt
from eval.result_files.statistics import estimate_difference

PROMPTS = 24  # decoded by default, in one batch
NOT_DECODED = (
    "held-out prompts are not decoded, as features are stored and the target is not loaded: train.decode=24 loads it, "
    "and keeps the head that accepts most"
)


class HeldOut:
    """Decodes the first prompts of held-out conversations with the head in training."""

    def __init__(self, recipe: Recipe, target: Target, count: int) -> None:
        self.target = target
        self.count = count
        self.max_new_tokens = recipe.eval.max_new_tokens
        temperatures = sorted({0.0, *recipe.eval.temperatures})
        self.samplings = [Sampling(temperature) for temperature in temperatures]
        self.prompts: list[list[int]] | None = None

    def decode(self, head: TrainableDrafter, features: Features, held_out: Sequence[int]) -> Counts:
        """Return tokens and cycles of every prompt, by kind of draft and temperature."""
        if self.prompts is None:
            self.prompts = self._choose_prompts(features, held_out)
        if not self.prompts:
            return {}
        # Training goes on with the original head, in its own precision.
        drafter: Any = in_dtype(copy.deepcopy(head).to(self.target.device), self.target.model.dtype)
        drafter.bind(self.target.head)
        counts = {}
        for sampling in self.samplings:
            traces = generate(
                self.target,
                drafter,
                self.prompts,
                budget=Budget.fixed(PUBLISHED_TREE),
                # Each prompt has its own noise, so that answers do not depend on the batch.
                sampling=[replace(sampling, request=i) for i in range(len(self.prompts))],
                max_new_tokens=self.max_new_tokens,
                batch_size=PROMPTS,
            )
            suffix = f"_at_{sampling.temperature:g}" if sampling.temperature else ""
            rows = []
            for trace in traces:
                cycles = trace.checked().cycles
                rows.append([sum(cycle.committed for cycle in cycles), len(cycles)])
            counts[f"tree_tau{suffix}"] = rows
        return counts

    def _choose_prompts(self, features: Features, held_out: Sequence[int]) -> list[list[int]]:
        """Return the prompts of evenly spaced held-out examples that leave room for an answer."""
        count = min(self.count, len(held_out))
        indices = [held_out[i * len(held_out) // count] for i in range(count)]
        prompts = [prompt_of(self.target, example) for example in features.read(indices)]
        max_positions = self.target.max_positions or math.inf
        return [
            prompt
            for prompt in prompts
            if prompt and len(prompt) + self.max_new_tokens <= max_positions
        ]

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """Return by how much the second acceptance length is longer, with its interval, paired by prompt."""
        difference = estimate_difference(
            group_by_prompt(first), group_by_prompt(second), cluster=itemgetter(1)
        )
        return tuple(difference.estimate)  # type: ignore[return-value]


def open_decoding(recipe: Recipe, target: Target | Borrowed) -> HeldOut | None:
    """Return what decodes held-out prompts during training; None without a whole target on this device."""
    count = PROMPTS if recipe.train.decode is None else recipe.train.decode
    if recipe.train.decode and not recipe.train.validation:
        raise ValueError(
            f"train.decode is {count} and train.validation is 0: the prompts are those of held-out conversations, so "
            "hold some out, as train.validation=0.05, or leave train.decode away"
        )
    is_wanted = count and recipe.train.validation
    if not is_wanted or not isinstance(target, Target) or recipe.features.shard_target:
        return None
    return HeldOut(recipe, target, count)


def prompt_of(target: Target, example: Example) -> list[int]:
    """Return the tokens before a conversation's first answer; with images, those before its last one."""
    positions = example.loss_mask.nonzero()[:, 0]
    if not len(positions):
        return []
    if example.shown is None:
        return example.tokens[: int(positions[0])].tolist()
    # An answer starts where the supervised positions have a gap; before the last one stand all images.
    starts_answer = torch.cat([torch.ones(1, dtype=torch.bool), positions.diff() > 1])
    last_start = int(positions[starts_answer][-1])
    tokens = example.tokens[:last_start]
    return PromptTokens(tokens.tolist(), prepare_media(target.processor, example.shown, tokens))
