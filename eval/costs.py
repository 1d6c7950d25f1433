"""Costs of bare forwards, timed outside of the decoding loop, and modelled seconds of recorded cycles."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.parts.growth import level_rows
from eagle.target.state import TargetState
from eagle.target.target import Target

CONTEXTS = (128, 512, 1024)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 26, 41, 61)  # small ones are not smooth: 3 rows may cost more than 4
Table = tuple[tuple[float, ...], ...]
Rows = tuple[tuple[int, ...], ...]  # of each forward that a draft takes after its first
Shape = tuple[int, int]  # nodes and levels of a tree


class _GrowsTrees(Drafter):
    """The drafter of stored rows, as far as modelled time needs it: a head that grows its trees."""

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level after the first."""
        return level_rows(budget)


GROWS_TREES = _GrowsTrees()


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards, in tables of one row per context and one column per number of tokens read."""

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Table
    first: Table | None = None  # the drafter's over what was committed: right after the target, one row scored
    level: Table | None = None  # the drafter's over a level of the tree: after a forward of its own, all rows scored
    forwards: Rows | None = field(default=None, kw_only=True)  # by levels, of the drafter and budget that were measured
    unread: Rows | None = field(default=None, kw_only=True)  # by levels and accepted: rows of the next first forward
    texts: int = field(default=1, kw_only=True)  # that each forward of the target reads side by side
    batches: tuple[Costs, ...] = field(default=(), kw_only=True)  # the target's with more texts, fewest first

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Costs:
        """From JSON, as `dataclasses.asdict` gave it."""
        fields = {key: _tuples(value) for key, value in values.items() if key != "batches"}
        return cls(**fields, batches=tuple(cls.parse(batch) for batch in values.get("batches", ())))

    def read(self, tokens: int, context: int, texts: int = 1) -> float:
        """Seconds of the target's forward of so many tokens of each of so many texts."""
        sizes = [self, *self.batches]
        seconds = [each._between(each.target, tokens, context) for each in sizes]
        return max(_line([each.texts for each in sizes], seconds, texts), 0.0)

    def draft(self, rows: Sequence[int], context: int) -> float:
        """Seconds of the drafter's forwards in one cycle, of so many rows each; nothing where none are known."""
        if self.first is None or self.level is None or not rows:
            return 0.0
        start, *levels = rows
        spent = sum(self._between(self.level, count, context) for count in levels)
        return self._between(self.first, start, context) + spent

    def cycle(self, nodes: int, rows: Sequence[int], context: int) -> float:
        """Seconds of a cycle that drafts `nodes` in forwards of these `rows`, and reads them."""
        return self.draft(rows, context) + self.read(nodes + 1, context)

    def model_seconds(
        self,
        cycles: Iterable[dict[str, Any]],
        budget: Budget | None = None,
        limit: int | None = None,
        drafter: Drafter = GROWS_TREES,
        drafts: Mapping[Shape, float] | None = None,
    ) -> float:
        """Seconds of one answer's recorded cycles, prefill excluded; no budget: nothing was drafted by forwards.

        Drafts whose forwards have no costs take the seconds of their shape in `drafts`. With the answer's limit of
        tokens, levels that were left out at its end are not charged.
        """
        total, pending, done = 0.0, 1, 1
        for cycle in cycles:
            step_budget = None if budget is None else budget if limit is None else budget.within(limit - done - 1)
            is_drafted = step_budget is not None and not step_budget.is_empty
            rows = self.rows(drafter, step_budget, pending) if step_budget is not None and is_drafted else None
            shape = cycle["nodes"], cycle["depth"]
            recorded = drafts.get(shape, 0.0) if drafts and is_drafted and rows is None else 0.0
            total += self.cycle(cycle["nodes"], rows or (), cycle["context"]) + recorded
            left = self.rows_left(drafter, cycle["accepted"], cycle["depth"])
            pending = left if is_drafted else pending + cycle["accepted"] + 1
            done += cycle["committed"]
        return total

    def rows(self, drafter: Drafter, budget: Budget, pending: int) -> tuple[int, ...] | None:
        """Rows of a draft's forwards, the first reading what is pending; None where they have no costs here."""
        levels = drafter.forwards(budget) if self.forwards is None else self.forwards[budget.depth]
        return None if levels is None or self.first is None else (pending, *levels)

    def rows_left(self, drafter: Drafter, accepted: int, depth: int) -> int:
        """Rows that the next draft reads first, after `accepted` of a tree of `depth` levels were."""
        return drafter.unread(accepted, depth) if self.unread is None else self.unread[depth][accepted]

    def _between(self, table: Table, size: int, context: int) -> float:
        """Linear between measured sizes and contexts, and beyond them."""
        columns = [_line(self.sizes, row, size) for row in table]
        return max(_line(self.contexts, columns, context), 0.0)


def bare_costs(
    target: Target,
    drafter: Drafter | None = None,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
    batch_sizes: Sequence[int] = (1,),
    batch_tokens: Sequence[int] | None = None,
) -> Costs:
    """Median costs; all forwards take turns in every round, so all see the same caches and the same machine.

    Of batches of more than one text the target's forwards alone, of `batch_tokens` tokens a text (by default `sizes`),
    at the shortest and the longest context.
    """
    sizes = tuple(sorted(set(sizes)))
    longest = (target.max_positions or max(contexts) + sizes[-1]) - sizes[-1]
    contexts = tuple(sorted({min(context, longest) for context in contexts}))
    tables = [_at(target, drafter or NoDrafter(), context, sizes, rounds) for context in contexts]
    ends, tokens = tuple(sorted({contexts[0], contexts[-1]})), tuple(sorted(set(batch_tokens or sizes)))
    batches = []
    for texts in sorted(set(batch_sizes) - {1}):
        table = tuple(_at(target, NoDrafter(), context, tokens, rounds, texts)[0] for context in ends)
        batches.append(Costs(ends, tokens, table, texts=texts))
    costs = Costs(contexts, sizes, *(tuple(column) for column in zip(*tables, strict=True)))
    return replace(costs, batches=tuple(batches))


def _at(
    target: Target, drafter: Drafter, context: int, sizes: Sequence[int], rounds: int, texts: int = 1
) -> list[tuple[float, ...]]:
    """At one context: the target's medians by size, then those of the drafter's first and later forwards, if any."""
    state = target.open()
    for row in range(texts):
        state.admit(row, [1] * context, room=sizes[-1])
    while state.prompts:
        state.read_prompts()
    kinds: list[list[Callable[[], Any]]] = [[bare_read(state, size) for size in sizes]]
    for every in (False, True):  # the first forward makes the last row into logits, the later ones all
        probes = [drafter.probe(context, size, size if every else 1) for size in sizes]
        kinds += [[probe for probe in probes if probe is not None]] if probes[0] is not None else []
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up
        for place, forwards in enumerate(zip(*kinds, strict=True)):
            for kind, forward in enumerate(forwards):
                seconds = time_action(forward, target.device)
                if number:
                    times[kind, place].append(seconds)
    return [tuple(median(times[kind, place]) for place in range(len(sizes))) for kind in range(len(kinds))]


def draft_seconds(cycles: Iterable[dict[str, Any]]) -> dict[Shape, float]:
    """Mean seconds of recorded drafts by nodes and depth, for drafters whose forwards have no bare costs.

    Not the median, as of several drafters in turn one may be far cheaper; without the slowest twentieth.
    """
    seconds_by_shape: dict[Shape, list[float]] = defaultdict(list)
    for cycle in cycles:
        if "draft" in cycle.get("seconds", {}):
            seconds_by_shape[cycle["nodes"], cycle["depth"]].append(cycle["seconds"]["draft"])
    return {shape: mean_of_most(seconds) for shape, seconds in seconds_by_shape.items()}


def mean_of_most(seconds: Sequence[float]) -> float:
    """The mean without the slowest twentieth."""
    return mean(sorted(seconds)[: ceil(0.95 * len(seconds))])


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock of CPU seconds, which other processes do not affect; of wall seconds for several threads or a device."""

    def synchronized() -> float:
        torch.accelerator.synchronize(device)
        return perf_counter()

    if device.type != "cpu":
        return synchronized
    return perf_counter if torch.get_num_threads() > 1 else process_time


def time_action(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds that an action takes, by `clock_of` the device."""
    now = clock_of(device)
    start = now()
    action()
    return now() - start


def bare_read(state: TargetState, size: int) -> Callable[[], Any]:
    """The model's own forward of so many tokens behind the texts of a state, under the reader's attention."""
    target, count = state.target, len(state.rows)
    starts = state.cache.lengths[:count]
    positions = torch.tensor(starts)[:, None] + torch.arange(size)
    inputs = {
        "input_ids": torch.ones(count, size, dtype=torch.long, device=target.device),
        "position_ids": positions.to(target.device),
        "attention_mask": target.masks(starts, positions, None),
        "past_key_values": state.cache,
    }

    @torch.inference_mode()
    def run() -> Any:
        state.cache.aim(range(count))
        return target.reader.model(**inputs)

    return run


def _line(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Linear interpolation between the two measured values next to a place."""
    if len(places) == 1:
        return values[0]
    left = min(max(bisect_right(places, place) - 1, 0), len(places) - 2)
    share = (place - places[left]) / (places[left + 1] - places[left])
    return values[left] + share * (values[left + 1] - values[left])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
