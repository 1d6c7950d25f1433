"""The parts of a step: which texts each has, its batch, and what its loss counts in the step's."""

# N divisors

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Features, collate, gate_mask, run_ahead, trim_mask
from eagle.training.plan import Plan


class Part(NamedTuple):
    """A part of a step."""

    texts: Sequence[int]
    batch: Batch
    share: float  # the factor of its loss in the step's


class Dealer:
    """Deals each step's texts to processes and accumulated parts, so that their losses add up to the step's.

    A head that divides by something else than supervised slots is given the step's divisors with every batch. They
    follow from the texts' masks, which all processes know; but where texts are sampled within the step, or weights
    depend on the head's states, a process reads all of its parts first, and the divisors are summed over all processes.
    """

    def __init__(self, head: TrainableDrafter, features: Features, plan: Plan, rank: int, processes: int) -> None:
        self.head, self.plan = head, plan
        self.features: Any = features  # those that are written are told when
        self.rank, self.processes = rank, processes
        self.count = processes * plan.settings.accumulation
        self.by_text = plan.settings.mean_over == "texts"
        if self.by_text and self.count < plan.settings.batch_size:
            texts, parts = plan.settings.batch_size, self.count
            raise ValueError(
                f"train.mean_over=texts takes the mean of one text at a time, and the {texts} texts of a step lie in "
                f"{parts} parts: give train.accumulation={-(-texts // processes)}"
            )
        self.counts_batches = (head.counts_by_forward or features.sampled) and self.count > 1 and not self.by_text
        self.divisors_of = lru_cache(2)(self._divisors_of)

    def batches(self, first: int, pin: bool = False) -> Iterator[Batch]:
        """This process's batches from a step on, loaded ahead by a thread."""
        if (policy := self.plan.settings.on_policy) is not None:
            return self._batches_written(first, policy.every, pin)
        jobs = (
            partial(self.load, part, number, pin)
            for number in range(first, len(self.plan))
            for part in self._mine(number)
        )
        # a sharded target reads on all processes together, and must not do so while gradients are exchanged
        return (job() for job in jobs) if self.features.together else run_ahead(jobs)

    def _batches_written(self, first: int, every: int, pin: bool) -> Iterator[Batch]:
        """The batches of texts that are written with the head's drafts, those of `every` steps at once."""
        for start in range(first, len(self.plan), every):
            numbers = range(start, min(start + every, len(self.plan)))
            texts = [[index for part in self._mine(number) for index in part] for number in numbers]
            self.features.write(
                [(self.plan.settings.seed + number, part) for number, part in zip(numbers, texts, strict=True)]
            )
            for number in numbers:
                yield from (self.load(part, number, pin) for part in self._mine(number))

    def _mine(self, number: int) -> list[list[int]]:
        """The parts of a step that are this process's."""
        return self.plan.parts(number, self.count)[self.rank :: self.processes]

    def load(self, texts: Sequence[int], number: int | None = None, pin: bool = False) -> Batch:
        """The batch of a step's part; without a step's number, of texts that are held out, whatever the gate is."""
        examples, settings = self.features.read(texts), self.plan.settings
        if number is None:
            batch = collate(examples, self.features.taps)
        else:
            examples = [replace(example, loss_mask=gate_mask(example.loss_mask, settings.gate)) for example in examples]
            batch = collate(examples, self.features.taps, self.plan.seeds(number, texts))
            batch = replace(batch, progress=number / len(self.plan), divisors=self.divisors_of(number))
        return batch.pin_memory() if pin else batch

    def _divisors_of(self, number: int) -> tuple[float, ...] | None:
        """The head's divisors over all texts of a step; None where a batch's own are right or not known yet."""
        if self.counts_batches or self.count == 1 or self.by_text:
            return None
        texts, gate = self.plan.step(number), self.plan.settings.gate
        masks = [trim_mask(gate_mask(self.features.mask(index), gate)) for index in texts]
        return self.head.divisors(masks, self.plan.seeds(number, texts))

    def deal(
        self,
        number: int,
        batches: Iterator[Batch],
        count: Callable[[Batch], Tensor],
        add_up: Callable[[Tensor], Tensor],
    ) -> Iterator[Part]:
        """This process's parts of a step.

        `count` gives the divisor that only the head's forward knows, `add_up` sums over all processes.
        """
        supervised = self._supervised(number)
        parts = self.plan.parts(number, self.count)
        mine = slice(self.rank, None, self.processes)
        dealt = list(zip(parts[mine], self.plan.weights(number, parts)[mine], strict=True))
        if not self.counts_batches:
            for texts, weight in dealt:
                batch = next(batches)
                yield Part(texts, batch, supervised * (weight if batch.divisors is None else weight > 0))
            return
        read = [next(batches) for _ in dealt]
        rows = [self._count(batch, count) * (weight > 0) for batch, (_, weight) in zip(read, dealt, strict=True)]
        slots = [batch.slots * (weight > 0) for batch, (_, weight) in zip(read, dealt, strict=True)]
        counted = torch.cat([torch.stack(rows).sum(0), torch.tensor([sum(slots)], dtype=torch.float64)])
        *divisors, supervised_slots = add_up(counted).tolist()
        totals = tuple(divisors)
        is_mean = not self.head.counts_by_forward and self.head.divisors(read[0].masks, read[0].seeds) is None
        for batch, row, (texts, weight) in zip(read, rows, dealt, strict=True):
            if is_mean:
                yield Part(texts, batch, supervised * float(row) / max(totals[0], 1.0))
            else:
                drafts = batch.drafts and replace(batch.drafts, divisor=max(supervised_slots, 1.0))
                yield Part(texts, replace(batch, divisors=totals, drafts=drafts), supervised * (weight > 0))

    def _supervised(self, number: int) -> float:
        """What of a step's tokens is supervised, where its loss is divided by all of them."""
        if self.plan.settings.mean_over != "all":
            return 1.0
        texts = self.plan.step(number)
        return sum(self.plan.slots[index] for index in texts) / sum(len(self.features.mask(index)) for index in texts)

    def _count(self, batch: Batch, count: Callable[[Batch], Tensor]) -> Tensor:
        """[N], the divisors of one batch; of a mean, its supervised slots."""
        if self.head.counts_by_forward:
            return count(batch).double().cpu().reshape(1)
        return torch.tensor(self.head.divisors(batch.masks, batch.seeds) or (batch.slots,), dtype=torch.float64)
