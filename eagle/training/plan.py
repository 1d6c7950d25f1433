"""Which examples a step reads, as a function of the seed and the step's number, and how they are dealt to processes."""

# N divisors

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Features, collate, gate_mask, run_ahead, trim_mask
from eagle.recipe import TrainSection

# more than a run has, so that no two draws share a seed
EPOCHS = 1_000_003
EXAMPLES = 1_000_000_007


class Plan:
    """The steps of a run over examples with `slots` supervised tokens each; examples without any are left out."""

    def __init__(self, slots: Sequence[int], settings: TrainSection) -> None:
        self.slots = slots
        self.settings = settings
        usable = [i for i, count in enumerate(slots) if count]
        self.unusable = len(slots) - len(usable)
        # at least one conversation is learned from
        held_out = min(math.ceil(settings.validation * len(usable)), len(usable) - 1)
        order = _permute(len(usable), settings.seed * EPOCHS)
        self.validation = sorted(usable[i] for i in order[:held_out])
        self.training = sorted(usable[i] for i in order[held_out:])
        self.steps_an_epoch = math.ceil(len(self.training) / settings.batch_size)
        self.epoch = lru_cache(2)(self._order_of)

    def __len__(self) -> int:
        steps = self.settings.epochs * self.steps_an_epoch
        return min(steps, self.settings.max_steps or steps)

    def _order_of(self, epoch: int) -> list[int]:
        # the first draw of the seed splits off what is held out
        return _permute(len(self.training), self.settings.seed * EPOCHS + 1 + epoch)

    def step(self, number: int) -> list[int]:
        """Return the examples of a step."""
        epoch, step_in_epoch = divmod(number, self.steps_an_epoch)
        start = step_in_epoch * self.settings.batch_size
        order = self.epoch(epoch)[start : start + self.settings.batch_size]
        return [self.training[i] for i in order]

    def learned(self, steps: int) -> int:
        """Return the supervised tokens of the first steps."""
        whole_epochs, rest = divmod(steps, self.steps_an_epoch)
        tokens = whole_epochs * sum(self.slots[index] for index in self.training)
        for number in range(steps - rest, steps):
            tokens += sum(self.slots[index] for index in self.step(number))
        return tokens

    def parts(self, number: int, count: int) -> list[list[int]]:
        """Return a step's examples in `count` parts of about equal work; an empty part repeats an example."""
        examples = sorted(self.step(number), key=lambda index: -self.slots[index])
        parts: list[list[int]] = [[] for _ in range(count)]
        # the longest first, each to the part with the least work
        work = [(0, i) for i in range(count)]
        for index in examples:
            slots, lightest = work[0]
            parts[lightest].append(index)
            heapreplace(work, (slots + self.slots[index], lightest))
        return [part or examples[:1] for part in parts]

    def weights(self, number: int, parts: Sequence[Sequence[int]]) -> list[float]:
        """Return the share of a step's slots in each part, or of its texts; a repeated example weighs nothing."""
        by_text = self.settings.mean_over == "texts"
        remaining = {index: 1 if by_text else self.slots[index] for index in self.step(number)}
        total = sum(remaining.values())
        weights = []
        for part in parts:
            weights.append(sum(remaining.pop(index, 0) for index in part) / total)
        return weights

    def seeds(self, number: int, part: Sequence[int]) -> list[int]:
        """Return a seed for each example, different in each epoch."""
        epoch = number // self.steps_an_epoch
        epoch_seed = self.settings.seed * EPOCHS + epoch
        return [(epoch_seed * EXAMPLES + index) % 2**63 for index in part]

    @property
    def stem_steps(self) -> int:
        """Return the steps before `wsd` falls, which a longer run has in common with this one."""
        steps = self.settings.schedule_steps or len(self)
        return steps - math.ceil(self.settings.decay_share * steps)

    def lr(self, number: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then the schedule."""
        settings = self.settings
        steps = settings.schedule_steps or len(self)
        warmup = settings.warmup
        # below 1 it is a share of the steps
        if warmup < 1:
            warmup *= steps
        if number + 1 < warmup:
            return settings.lr * (number + 1) / warmup
        height = 1.0
        if settings.schedule == "linear":
            height = _share_left(number, steps, steps - warmup)
        elif settings.schedule == "cosine":
            height = 0.5 - 0.5 * math.cos(math.pi * _share_left(number, steps, steps - warmup))
        elif settings.schedule == "wsd":
            height = _share_left(number, steps, steps - self.stem_steps)
        return settings.lr * (settings.final_lr + (1 - settings.final_lr) * height)


def _share_left(number: int, steps: int, falling_steps: float) -> float:
    """Return what is left of the last steps, in which the rate falls: 1 before them, 0 after the last."""
    return min(max((steps - number) / max(falling_steps, 1), 0.0), 1.0)


def _permute(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63)).tolist()


class Part(NamedTuple):
    """A part of a step."""

    texts: Sequence[int]
    batch: Batch
    share: float  # the factor of its loss in the step's


class Dealer:
    """Deals each step's texts to processes and accumulated parts, so that their losses add up to the step's.

    A head that divides by something else than supervised slots is given the step's divisors with every batch. They
    follow from the texts' masks, which all processes know. But where texts are sampled within the step, or weights
    depend on the head's states, a process reads all of its parts first, and the divisors are summed over all processes.
    """

    def __init__(
        self, head: TrainableDrafter, features: Features, plan: Plan, rank: int, processes: int
    ) -> None:
        self.head = head
        self.features: Any = features  # those of written texts have `write`
        self.plan = plan
        self.rank = rank
        self.processes = processes
        self.count = processes * plan.settings.accumulation
        self.by_text = plan.settings.mean_over == "texts"
        if self.by_text and self.count < plan.settings.batch_size:
            texts = plan.settings.batch_size
            raise ValueError(
                f"train.mean_over=texts takes the mean of one text at a time, and the {texts} texts of a step lie in "
                f"{self.count} parts: give train.accumulation={math.ceil(texts / processes)}"
            )
        self.counts_batches = (
            (head.counts_by_forward or features.sampled) and self.count > 1 and not self.by_text
        )
        self.divisors_of = lru_cache(2)(self._divisors_of)

    def batches(self, first: int, pin: bool = False) -> Iterator[Batch]:
        """Return this process's batches from a step on, loaded ahead by a thread."""
        policy = self.plan.settings.on_policy
        if policy is not None:
            return self._written_batches(first, policy.every, pin)
        jobs = self._load_jobs(first, pin)
        # a sharded target reads on all processes together, and must not do so while gradients are exchanged
        if self.features.together:
            return (job() for job in jobs)
        return run_ahead(jobs)

    def _load_jobs(self, first: int, pin: bool) -> Iterator[Callable[[], Batch]]:
        """Yield a job that loads each of this rank's batches, from step `first` on."""
        for step in range(first, len(self.plan)):
            for texts in self._rank_batches(step):
                yield partial(self.load, texts, step, pin)

    def _written_batches(self, first: int, every: int, pin: bool) -> Iterator[Batch]:
        """Yield the batches of texts that are written with the head's drafts, those of `every` steps at once."""
        for start in range(first, len(self.plan), every):
            steps = range(start, min(start + every, len(self.plan)))
            written = []
            for step in steps:
                texts = list(chain.from_iterable(self._rank_batches(step)))
                written.append((self.plan.settings.seed + step, texts))
            self.features.write(written)
            for step in steps:
                for texts in self._rank_batches(step):
                    yield self.load(texts, step, pin)

    def _rank_batches(self, step: int) -> list[list[int]]:
        """Return the batches of a step that this process computes."""
        return self.plan.parts(step, self.count)[self.rank :: self.processes]

    def load(self, texts: Sequence[int], number: int | None = None, pin: bool = False) -> Batch:
        """Return the batch of a step's part; without a step's number, of held-out texts, whatever the gate is."""
        examples = self.features.read(texts)
        if number is None:
            batch = collate(examples, self.features.taps)
        else:
            gate = self.plan.settings.gate
            # the gate decides what is learned, not what is measured
            examples = [
                replace(example, loss_mask=gate_mask(example.loss_mask, gate))
                for example in examples
            ]
            batch = collate(examples, self.features.taps, self.plan.seeds(number, texts))
            batch = replace(
                batch, progress=number / len(self.plan), divisors=self.divisors_of(number)
            )
        if pin:
            batch = batch.pin_memory()
        return batch

    def _divisors_of(self, number: int) -> tuple[float, ...] | None:
        """Return the head's divisors over all texts of a step; None where a batch's own are right or not known yet."""
        if self.counts_batches or self.count == 1 or self.by_text:
            return None
        # all processes know the masks, so that nothing is exchanged
        texts = self.plan.step(number)
        gate = self.plan.settings.gate
        masks = [trim_mask(gate_mask(self.features.mask(index), gate)) for index in texts]
        return self.head.divisors(masks, self.plan.seeds(number, texts))

    def deal(
        self,
        number: int,
        batches: Iterator[Batch],
        count: Callable[[Batch], Tensor],
        add_up: Callable[[Tensor], Tensor],
    ) -> Iterator[Part]:
        """Yield this process's parts of a step.

        Args:
            number: The step.
            batches: This process's batches from the step on.
            count: Returns the divisor that only the head's forward knows.
            add_up: Sums over all processes.
        """
        parts = self.plan.parts(number, self.count)
        weights = self.plan.weights(number, parts)[self.rank :: self.processes]
        own_parts = parts[self.rank :: self.processes]
        supervised = self._supervised_share(number)
        if self.counts_batches:
            own_batches = [next(batches) for _ in own_parts]
            yield from self._deal_counted(
                own_parts, weights, own_batches, supervised, count=count, add_up=add_up
            )
            return
        for texts, weight in zip(own_parts, weights, strict=True):
            batch = next(batches)
            # a loss that is divided by the step's divisors is a share already; what is repeated still weighs nothing
            share = weight if batch.divisors is None else float(weight > 0)
            yield Part(texts, batch, supervised * share)

    def _deal_counted(
        self,
        parts: Sequence[Sequence[int]],
        weights: Sequence[float],
        batches: Sequence[Batch],
        supervised: float,
        *,
        count: Callable[[Batch], Tensor],
        add_up: Callable[[Tensor], Tensor],
    ) -> Iterator[Part]:
        """Yield parts whose divisors are known once all processes have read theirs."""
        counts = []
        slots = 0
        for batch, weight in zip(batches, weights, strict=True):
            counts.append(self._count(batch, count) * (weight > 0))
            slots += batch.slots * (weight > 0)
        # one exchange for all: the divisors [N], and the supervised slots
        sums = add_up(
            torch.cat([torch.stack(counts).sum(0), torch.tensor([slots], dtype=torch.float64)])
        )
        *divisors, step_slots = sums.tolist()
        is_mean = (
            not self.head.counts_by_forward
            and self.head.divisors(batches[0].masks, batches[0].seeds) is None
        )
        for texts, weight, batch, own_count in zip(parts, weights, batches, counts, strict=True):
            if is_mean:
                yield Part(texts, batch, supervised * float(own_count) / max(divisors[0], 1.0))
                continue
            drafts = batch.drafts
            if drafts is not None:
                drafts = replace(drafts, divisor=max(step_slots, 1.0))
            batch = replace(batch, divisors=tuple(divisors), drafts=drafts)
            yield Part(texts, batch, supervised * (weight > 0))

    def _supervised_share(self, number: int) -> float:
        """Return what of a step's tokens is supervised, where its loss is divided by all of them."""
        if self.plan.settings.mean_over != "all":
            return 1.0
        texts = self.plan.step(number)
        return sum(self.plan.slots[index] for index in texts) / sum(
            len(self.features.mask(index)) for index in texts
        )

    def _count(self, batch: Batch, count: Callable[[Batch], Tensor]) -> Tensor:
        """Return [N], the divisors of one batch; of a mean, its supervised slots."""
        if self.head.counts_by_forward:
            return count(batch).double().cpu().reshape(1)
        divisors = self.head.divisors(batch.masks, batch.seeds) or (batch.slots,)
        return torch.tensor(divisors, dtype=torch.float64)
