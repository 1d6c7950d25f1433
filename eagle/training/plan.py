"""Which examples a step reads, as a function of the seed and the step's number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapreplace

import torch

from eagle.recipe import TrainSection

EPOCHS, EXAMPLES = 1_000_003, 1_000_000_007  # more than a run has, so that no two draws share a seed


class Plan:
    """The steps of a run over examples with `slots` supervised tokens each; examples without any are left out."""

    def __init__(self, slots: Sequence[int], settings: TrainSection) -> None:
        self.slots = slots
        self.settings = settings
        usable = [index for index, count in enumerate(slots) if count]
        self.unusable = len(slots) - len(usable)
        held_out = min(math.ceil(settings.validation * len(usable)), len(usable) - 1)
        order = _permute(len(usable), settings.seed * EPOCHS)
        self.validation = sorted(usable[i] for i in order[:held_out])
        self.training = sorted(usable[i] for i in order[held_out:])
        self.steps_an_epoch = math.ceil(len(self.training) / settings.batch_size)
        self.epoch = lru_cache(2)(lambda number: _permute(len(self.training), settings.seed * EPOCHS + 1 + number))

    def __len__(self) -> int:
        steps = self.settings.epochs * self.steps_an_epoch
        return min(steps, self.settings.max_steps or steps)

    def step(self, number: int) -> list[int]:
        """The examples of a step."""
        epoch, step = divmod(number, self.steps_an_epoch)
        start = step * self.settings.batch_size
        return [self.training[i] for i in self.epoch(epoch)[start : start + self.settings.batch_size]]

    def learned(self, steps: int) -> int:
        """The supervised tokens of the first steps."""
        whole_epochs, rest = divmod(steps, self.steps_an_epoch)
        last_steps = map(self.step, range(steps - rest, steps))
        in_an_epoch = sum(self.slots[index] for index in self.training)
        return whole_epochs * in_an_epoch + sum(self.slots[index] for texts in last_steps for index in texts)

    def parts(self, number: int, count: int) -> list[list[int]]:
        """A step's examples in `count` parts of about equal work; an empty part repeats an example."""
        examples = sorted(self.step(number), key=lambda index: -self.slots[index])
        parts: list[list[int]] = [[] for _ in range(count)]
        lightest = [(0, place) for place in range(count)]
        for index in examples:
            slots, place = lightest[0]
            parts[place].append(index)
            heapreplace(lightest, (slots + self.slots[index], place))
        return [part or examples[:1] for part in parts]

    def weights(self, number: int, parts: Sequence[Sequence[int]]) -> list[float]:
        """The share of a step's slots in each part, or of its texts; a repeated example weighs nothing."""
        remaining, weights = set(self.step(number)), []
        of = (lambda _: 1) if self.settings.mean_over == "texts" else self.slots.__getitem__
        total = sum(map(of, remaining))
        for part in parts:
            weights.append(sum(of(index) for index in part if index in remaining) / total)
            remaining -= set(part)
        return weights

    def seeds(self, number: int, part: Sequence[int]) -> list[int]:
        """A seed for each example, different in each epoch."""
        epoch = number // self.steps_an_epoch
        return [((self.settings.seed * EPOCHS + epoch) * EXAMPLES + index) % 2**63 for index in part]

    @property
    def stem_steps(self) -> int:
        """The steps before `wsd` falls, which a longer run has in common with this one."""
        steps = self.settings.schedule_steps or len(self)
        return steps - math.ceil(self.settings.decay_share * steps)

    def lr(self, number: int) -> float:
        """The learning rate of a step: a linear warm-up, then the schedule."""
        settings, steps = self.settings, self.settings.schedule_steps or len(self)
        warmup = settings.warmup * steps if settings.warmup < 1 else settings.warmup
        if number + 1 < warmup:
            return settings.lr * (number + 1) / warmup
        left = min(max((steps - number) / max(steps - warmup, 1), 0.0), 1.0)
        at_the_end = min(max((steps - number) / max(steps - self.stem_steps, 1), 0.0), 1.0)
        cosine = 0.5 - 0.5 * math.cos(math.pi * left)
        shapes = {"constant": 1.0, "linear": left, "cosine": cosine, "wsd": at_the_end}
        return settings.lr * (settings.final_lr + (1 - settings.final_lr) * shapes[settings.schedule])


def _permute(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
