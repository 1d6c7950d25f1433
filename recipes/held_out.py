"""Decoding of held-out prompts while a head is trained: what tells which of its checkpoints accepts most."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

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
from eagle.training.choice import Counts, judged
from eval.result_files.statistics import estimate_difference

PROMPTS = 24  # that are decoded by default, all at once
NOT_DECODED = (
    "held-out prompts are not decoded, as features are stored and the target is not loaded: train.decode=24 loads it, "
    "and keeps the head that accepts most"
)


class HeldOut:
    """The first prompts of held-out conversations, answered by the target with drafts of the head in training."""

    def __init__(self, recipe: Recipe, target: Target, count: int) -> None:
        self.target, self.count, self.limit = target, count, recipe.eval.max_new_tokens
        self.samplings = [Sampling(temperature) for temperature in sorted({0.0, *recipe.eval.temperatures})]
        self.prompts: list[list[int]] | None = None

    def decode(self, head: TrainableDrafter, features: Features, held_out: Sequence[int]) -> Counts:
        """Tokens and cycles of every prompt, by draft and temperature."""
        if self.prompts is None:
            count = min(self.count, len(held_out))
            chosen = [held_out[number * len(held_out) // count] for number in range(count)]
            texts = [prompt_of(self.target, example) for example in features.read(chosen)]
            most = self.target.max_positions
            self.prompts = [text for text in texts if text and (most is None or len(text) + self.limit <= most)]
        if not self.prompts:
            return {}
        drafter: Any = in_dtype(copy.deepcopy(head).to(self.target.device), self.target.model.dtype)
        drafter.bind(self.target.head)
        counts = {}
        for sampling in self.samplings:
            traces = generate(
                self.target,
                drafter,
                self.prompts,
                budget=Budget.fixed(PUBLISHED_TREE),
                sampling=[replace(sampling, request=number) for number in range(len(self.prompts))],
                max_new_tokens=self.limit,
                batch_size=PROMPTS,
            )
            cycles = [trace.checked().cycles for trace in traces]
            at = f"_at_{sampling.temperature:g}" if sampling.temperature else ""
            counts[f"tree_tau{at}"] = [[sum(cycle.committed for cycle in each), len(each)] for each in cycles]
        return counts

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """How much longer the second's acceptance length with the tree is, and its interval, paired by prompt."""
        return tuple(estimate_difference(judged(first), judged(second), cluster=itemgetter(1)).estimate)  # type: ignore[return-value]


def open_decoding(recipe: Recipe, target: Target | Borrowed) -> HeldOut | None:
    """What decodes while the recipe's head is trained; None without a whole target on this device."""
    count = PROMPTS if recipe.train.decode is None else recipe.train.decode
    if recipe.train.decode and not recipe.train.validation:
        raise ValueError(
            f"train.decode is {count} and train.validation is 0: the prompts are those of held-out conversations, so "
            "hold some out, as train.validation=0.05, or leave train.decode away"
        )
    if not isinstance(target, Target) or recipe.features.shard_target or not count or not recipe.train.validation:
        return None
    return HeldOut(recipe, target, count)


def prompt_of(target: Target, example: Example) -> list[int]:
    """What stands before a conversation's first answer, or with images before the last, behind all of them."""
    answers = example.loss_mask.nonzero()[:, 0]
    if example.shown is None or not len(answers):
        return first_prompt(example.tokens, example.loss_mask)
    begins = answers[torch.cat([torch.ones(1, dtype=torch.bool), answers.diff() > 1])]
    tokens = example.tokens[: int(begins[-1])]
    return PromptTokens(tokens.tolist(), prepare_media(target.processor, example.shown, tokens))


def first_prompt(tokens: Tensor, loss_mask: Tensor) -> list[int]:
    """What stands before a conversation's first answer."""
    answers = loss_mask.nonzero()
    return tokens[: int(answers[0])].tolist() if len(answers) else []
