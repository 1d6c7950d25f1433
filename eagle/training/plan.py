"""Which examples a step reads, as a function of the seed and the step's index, and how they are dealt to processes."""

# N divisors of the head's loss

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Features, collate, gate_mask, run_ahead, trim_mask
from eagle.recipe import TrainSection

# The strides of seeds: more epochs and more examples than a run has, so that no two random draws share a seed.
EPOCHS = 1_000_003
EXAMPLES = 1_000_000_007


class Plan:
    """Which examples each step of a run reads, and its learning rate: a function of the data and the settings.

    Every process makes the same plan, and a resumed run makes it again. Steps are counted from 0, and an example is
    named by its index.
    """

    def __init__(self, slots: Sequence[int], settings: TrainSection) -> None:
        """Split the examples into those to train on and those that are held out for validation.

        Args:
            slots: The number of supervised tokens of each example. Examples without any are left out.
            settings: The section `train` of the recipe.
        """
        self.slots = slots
        self.settings = settings
        usable = [i for i, count in enumerate(slots) if count]
        self.unusable = len(slots) - len(usable)
        # at least one conversation is trained on
        held_out = min(math.ceil(settings.validation * len(usable)), len(usable) - 1)
        # a permutation of the usable examples, of which the first are held out
        order = _permute(len(usable), settings.seed * EPOCHS)
        self.validation = sorted(usable[i] for i in order[:held_out])
        self.training = sorted(usable[i] for i in order[held_out:])
        self.steps_an_epoch = math.ceil(len(self.training) / settings.batch_size)
        # the orders of two epochs are kept, as loading ahead may have begun the next one
        self.epoch = lru_cache(2)(self._order_of)

    def __len__(self) -> int:
        """Return the number of optimizer steps of the run.

        Steps are counted over all epochs, up to `train.max_steps`.
        """
        steps = self.settings.epochs * self.steps_an_epoch
        return min(steps, self.settings.max_steps or steps)

    def _order_of(self, epoch: int) -> list[int]:
        """Return the order of an epoch: a permutation of indices into `training`."""
        # + 1: seed * EPOCHS itself has decided which examples are held out
        return _permute(len(self.training), self.settings.seed * EPOCHS + 1 + epoch)

    def step(self, step: int) -> list[int]:
        """Return the indices of a step's examples, of all processes together; an epoch's last step may have fewer."""
        epoch, step_in_epoch = divmod(step, self.steps_an_epoch)
        start = step_in_epoch * self.settings.batch_size
        order = self.epoch(epoch)[start : start + self.settings.batch_size]
        return [self.training[i] for i in order]

    def learned(self, steps: int) -> int:
        """Return how many supervised tokens the first `steps` steps read, repeated ones included.

        It is for provenance and forecasts. A supervised token is one of an assistant's answer, from which the head
        learns.
        """
        whole_epochs, rest = divmod(steps, self.steps_an_epoch)
        tokens = whole_epochs * sum(self.slots[index] for index in self.training)
        for step in range(steps - rest, steps):
            tokens += sum(self.slots[index] for index in self.step(step))
        return tokens

    def parts(self, step: int, count: int) -> list[list[int]]:
        """Return a step's examples in `count` parts of about equally many supervised tokens, one part for each forward.

        Where a step has fewer examples than parts, a part that would be empty repeats an example: every process must
        run a forward. `weights` lets such a part count nothing.
        """
        examples = sorted(self.step(step), key=lambda index: -self.slots[index])
        parts: list[list[int]] = [[] for _ in range(count)]
        # greedy balancing: the longest example first, each to the part with the fewest tokens. `work` is a heap of
        # (supervised tokens so far, index of the part).
        work = [(0, i) for i in range(count)]
        for index in examples:
            slots, lightest = work[0]
            parts[lightest].append(index)
            heapreplace(work, (slots + self.slots[index], lightest))
        return [part or examples[:1] for part in parts]

    def weights(self, step: int, parts: Sequence[Sequence[int]]) -> list[float]:
        """Return the factor of each part's mean loss in the step's mean loss; the factors sum to 1.

        It is the part's share of the step's supervised tokens, or of its examples with `mean_over: texts`. An example
        counts in the first part that has it, so that a part which repeats one weighs nothing. A part is what one
        forward reads.

        Args:
            step: The step.
            parts: The indices of the examples of each part, of all processes.
        """
        by_sequence = self.settings.mean_over == "texts"
        remaining = {index: 1 if by_sequence else self.slots[index] for index in self.step(step)}
        total = sum(remaining.values())
        weights = []
        for part in parts:
            weights.append(sum(remaining.pop(index, 0) for index in part) / total)
        return weights

    def seeds(self, step: int, part: Sequence[int]) -> list[int]:
        """Return a seed for each example of a part (of one forward), for its noise and dropout; it differs by epoch.

        It does not depend on the part, so that a run with other processes draws the same.
        """
        epoch = step // self.steps_an_epoch
        # torch takes seeds below 2^63
        epoch_seed = self.settings.seed * EPOCHS + epoch
        return [(epoch_seed * EXAMPLES + index) % 2**63 for index in part]

    @property
    def stem_steps(self) -> int:
        """The number of steps before the learning rate of the schedule `wsd` (warm-up, stable, decay) falls.

        A longer run has these steps in common with this one, so it can start from their checkpoint (`train.stem`).
        """
        steps = self.settings.schedule_steps or len(self)
        return steps - math.ceil(self.settings.decay_share * steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up to `lr`, then the schedule, which ends at `final_lr`."""
        settings = self.settings
        # a recipe may name a schedule of another length than the run, as for a part of a longer run
        steps = settings.schedule_steps or len(self)
        warmup = settings.warmup
        # a warm-up below 1 is a share of the steps
        if warmup < 1:
            warmup *= steps
        if step + 1 < warmup:
            return settings.lr * (step + 1) / warmup
        # where the rate is between its end (0) and its peak (1); 1 for the schedule "constant"
        height = 1.0
        if settings.schedule == "linear":
            height = _share_left(step, steps, steps - warmup)
        elif settings.schedule == "cosine":
            height = 0.5 - 0.5 * math.cos(math.pi * _share_left(step, steps, steps - warmup))
        # warm-up, stable, decay: constant until the last `decay_share` of the steps, over which it falls linearly
        elif settings.schedule == "wsd":
            height = _share_left(step, steps, steps - self.stem_steps)
        return settings.lr * (settings.final_lr + (1 - settings.final_lr) * height)


def _share_left(step: int, steps: int, falling_steps: float) -> float:
    """Return which fraction of the last `falling_steps` steps is left: 1 before they begin, 0 after the last step.

    The learning rate falls by it.
    """
    return min(max((steps - step) / max(falling_steps, 1), 0.0), 1.0)


def _permute(count: int, seed: int) -> list[int]:
    """Return the numbers below `count` in a random order that the seed decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63)).tolist()


class Part(NamedTuple):
    """One forward and backward of a step: a process reads one part, or several in turn (accumulation)."""

    indices: Sequence[int]  # of its examples
    batch: Batch
    share: float  # the factor of its loss in the step's loss


class Dealer:
    """Deals each step's examples to processes and accumulated parts, so that their losses add up to the step's loss.

    A head whose loss is no mean over supervised tokens is given the step's divisors with every batch. They follow from
    the loss masks, which all processes know. But where answers are sampled within the step, or the loss's weights
    depend on the head's states, a process loads all of its parts first, and the divisors are summed over all processes.
    """

    def __init__(
        self, head: TrainableDrafter, features: Features, plan: Plan, rank: int, processes: int
    ) -> None:
        """Deal examples for one process.

        Args:
            head: The head that trains, which says by what numbers (divisors) its summed losses are divided.
            features: The source of examples.
            plan: The run's plan, the same in every process.
            rank: The index of this process.
            processes: How many processes there are.
        """
        self.head = head
        # Any, as only features of answers that are written with the head's drafts have the method `write`
        self.features: Any = features
        self.plan = plan
        self.rank = rank
        self.processes = processes
        # the forwards of a step over all processes, each of which reads one part of its examples
        self.part_count = processes * plan.settings.accumulation
        # whether each sequence has a mean of its own
        self.by_sequence = plan.settings.mean_over == "texts"
        if self.by_sequence and self.part_count < plan.settings.batch_size:
            count = plan.settings.batch_size
            raise ValueError(
                f"train.mean_over=texts takes the mean of one sequence at a time, and the {count} sequences of a step "
                f"lie in {self.part_count} parts: give train.accumulation={math.ceil(count / processes)}"
            )
        # whether a part's loss terms are known only once it is loaded, and the divisors need those of all other parts
        self.must_count_first = (
            (head.counts_by_forward or features.sampled)
            and self.part_count > 1
            and not self.by_sequence
        )
        # all parts of a step ask for them, and loading ahead asks for those of the next step
        self.divisors_of = lru_cache(2)(self._divisors_of)

    def batches(self, first: int, pin: bool = False) -> Iterator[Batch]:
        """Return this process's batches from step `first` on, in the order in which the training loop takes them.

        A thread loads them ahead where that is possible. With `pin` they lie in pinned memory, from which an
        accelerator copies while it computes.
        """
        policy = self.plan.settings.on_policy
        if policy is not None:
            return self._written_batches(first, policy.every, pin)
        jobs = self._load_jobs(first, pin)
        # a sharded target reads on all processes together, and must not do so while gradients are exchanged
        if self.features.together:
            return (job() for job in jobs)
        return run_ahead(jobs)

    def _load_jobs(self, first: int, pin: bool) -> Iterator[Callable[[], Batch]]:
        """Yield for each batch of this process, from step `first` on, a function that loads it.

        `pin` puts batches into pinned (page-locked) memory.
        """
        for step in range(first, len(self.plan)):
            for indices in self._rank_parts(step):
                yield partial(self.load, indices, step, pin)

    def _written_batches(self, first: int, every: int, pin: bool) -> Iterator[Batch]:
        """Yield batches for `train.on_policy`: the target first writes their answers with drafts of the head.

        The answers of `every` steps are written at once, with the head's weights of that time, so nothing is loaded
        ahead.
        """
        for start in range(first, len(self.plan), every):
            steps = range(start, min(start + every, len(self.plan)))
            written = []
            for step in steps:
                indices = list(chain.from_iterable(self._rank_parts(step)))
                # the loop seeds torch with the same number in this step, by which the answers are found again
                written.append((self.plan.settings.seed + step, indices))
            self.features.write(written)
            for step in steps:
                for indices in self._rank_parts(step):
                    yield self.load(indices, step, pin)

    def _rank_parts(self, step: int) -> list[list[int]]:
        """Return the parts of a step that this process computes, as indices of examples.

        A part is what one forward reads.
        """
        return self.plan.parts(step, self.part_count)[self.rank :: self.processes]

    def load(self, indices: Sequence[int], step: int | None = None, pin: bool = False) -> Batch:
        """Return the batch of a part's examples (those of one forward), on the host.

        Args:
            indices: The examples.
            step: The step that they are trained in; None for held-out examples, which are only measured.
            pin: Whether the batch is put in pinned memory.
        """
        examples = self.features.read(indices)
        if step is None:
            batch = collate(examples, self.features.taps)
        else:
            gate = self.plan.settings.gate
            # `train.gate` changes which tokens are learned, never those that are measured
            examples = [
                replace(example, loss_mask=gate_mask(example.loss_mask, gate))
                for example in examples
            ]
            batch = collate(examples, self.features.taps, self.plan.seeds(step, indices))
            # how much of the training is done, and the numbers that the whole step's loss terms are divided by
            batch = replace(batch, progress=step / len(self.plan), divisors=self.divisors_of(step))
        if pin:
            batch = batch.pin_memory()
        return batch

    def _divisors_of(self, step: int) -> tuple[float, ...] | None:
        """Return the step's divisors, by which the head divides its loss terms, from all examples of the step.

        None where each batch is divided by its own (a step is one part, or the loss is a mean over each sequence), and
        where the divisors must be counted first. A step may be split into several forwards, and its loss must not
        depend on the split.
        """
        if self.must_count_first or self.part_count == 1 or self.by_sequence:
            return None
        # all processes know all masks, so that nothing is exchanged
        indices = self.plan.step(step)
        gate = self.plan.settings.gate
        masks = [trim_mask(gate_mask(self.features.mask(index), gate)) for index in indices]
        return self.head.divisors(masks, self.plan.seeds(step, indices))

    def deal(
        self,
        step: int,
        batches: Iterator[Batch],
        count_divisor: Callable[[Batch], Tensor],
        sum_over_processes: Callable[[Tensor], Tensor],
    ) -> Iterator[Part]:
        """Yield this process's parts of a step, each with the factor of its loss. A part is what one forward reads.

        Args:
            step: The step.
            batches: This process's batches from this step on; as many are taken as it has parts.
            count_divisor: Returns a batch's divisor (the number of its loss terms) where only the head's forward knows
                it.
            sum_over_processes: Returns the sum of a tensor over all processes.
        """
        parts = self.plan.parts(step, self.part_count)
        # the factor of each part's mean loss in the step's mean loss; 0 for a part that only repeats an example
        weights = self.plan.weights(step, parts)[self.rank :: self.processes]
        # loaded one by one, each when its turn comes
        own_batches: Iterable[Batch] = islice(batches, len(weights))
        if self.must_count_first:
            own_batches, weights = self._count_first(
                list(own_batches), weights, count_divisor, sum_over_processes
            )
        supervised = self._supervised_share(step)
        own_parts = parts[self.rank :: self.processes]
        for indices, weight, batch in zip(own_parts, weights, own_batches, strict=True):
            # a loss that is divided by the step's divisors is a share of the step's loss already, so its factor is 1,
            # or 0 for a part that only repeats an example
            share = weight if batch.divisors is None else float(weight > 0)
            yield Part(indices, batch, supervised * share)

    def _count_first(
        self,
        batches: list[Batch],
        weights: list[float],
        count_divisor: Callable[[Batch], Tensor],
        sum_over_processes: Callable[[Tensor], Tensor],
    ) -> tuple[list[Batch], list[float]]:
        """Return this process's batches with the step's divisors; for a mean, the batches as they are and new weights.

        Args:
            batches: The batch of each part of this process.
            weights: The factor of each part; 0 for one that only repeats an example, and adds nothing.
            count_divisor: As in `deal`.
            sum_over_processes: As in `deal`.
        """
        # the N divisors of each part
        counts = []
        slots = 0
        for batch, weight in zip(batches, weights, strict=True):
            counts.append(self._count_divisors(batch, count_divisor) * (weight > 0))
            slots += batch.slots * (weight > 0)
        # one exchange for the divisors [N] and the number of supervised tokens
        sums = sum_over_processes(
            torch.cat([torch.stack(counts).sum(0), torch.tensor([slots], dtype=torch.float64)])
        )
        *divisors, step_slots = sums.tolist()
        # the loss is a mean over the supervised tokens of a part: it is weighted by their share in the step
        if (
            not self.head.counts_by_forward
            and self.head.divisors(batches[0].masks, batches[0].seeds) is None
        ):
            return batches, [float(count) / max(divisors[0], 1.0) for count in counts]
        with_divisors = []
        for batch in batches:
            # the loss on drafts is a mean over the step's supervised tokens, whatever the head's own loss is
            drafts = batch.drafts
            if drafts is not None:
                drafts = replace(drafts, divisor=max(step_slots, 1.0))
            with_divisors.append(replace(batch, divisors=tuple(divisors), drafts=drafts))
        return with_divisors, weights

    def _supervised_share(self, step: int) -> float:
        """Return the factor by which `train.mean_over: all` turns a mean over supervised tokens into one over all.

        It is the share of a step's tokens that are supervised; 1 for other means.
        """
        if self.plan.settings.mean_over != "all":
            return 1.0
        indices = self.plan.step(step)
        supervised = sum(self.plan.slots[index] for index in indices)
        return supervised / sum(len(self.features.mask(index)) for index in indices)

    def _count_divisors(self, batch: Batch, count_divisor: Callable[[Batch], Tensor]) -> Tensor:
        """Return the numbers [N] by which the head divides its loss terms on one batch, in float64.

        A head whose loss is a mean over supervised tokens has one: their number. They are summed over the batches of a
        step, whose loss they divide.
        """
        # only a forward tells
        if self.head.counts_by_forward:
            return count_divisor(batch).double().cpu().reshape(-1)
        divisors = self.head.divisors(batch.masks, batch.seeds) or (batch.slots,)
        return torch.tensor(divisors, dtype=torch.float64)
