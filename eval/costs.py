"""What forwards cost by themselves, outside of the decoding loop, and what recorded cycles cost at these prices."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import Budget
from eagle.core.verify import Choose, Sampling
from eagle.drafters.parts.blocks import Cache
from eagle.drafters.parts.growth import level_mask
from eagle.drafters.parts.unroll import UnrolledDrafter
from eagle.target.target import Target

CONTEXTS = (128, 512, 1024)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 26, 41, 61)  # small ones are not smooth: 3 rows may cost more than 4
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards, in tables of one row per context and one column per number of tokens read."""

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Table
    first: Table | None = None  # the head's over what was committed: right after the target, one row scored
    level: Table | None = None  # the head's over a level of the tree: after a forward of its own, all rows scored

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Costs:
        """From JSON, as `dataclasses.asdict` gave it."""
        return cls(**{key: _tuples(value) for key, value in values.items()})

    def read(self, tokens: int, context: int) -> float:
        """Seconds of the target's forward of so many tokens."""
        return self._between(self.target, tokens, context)

    def draft(self, rows: Sequence[int], context: int) -> float:
        """Seconds of the head's forwards in one cycle, of so many rows each; a drafter without a head takes none."""
        if self.first is None or self.level is None or not rows:
            return 0.0
        start, *levels = rows
        spent = sum(self._between(self.level, count, context) for count in levels)
        return self._between(self.first, start, context) + spent

    def cycle(self, nodes: int, rows: Sequence[int], context: int) -> float:
        """Seconds of a cycle that drafts `nodes` in head forwards of these `rows`, and reads them."""
        return self.draft(rows, context) + self.read(nodes + 1, context)

    def modelled(
        self, cycles: Iterable[dict[str, Any]], budget: Budget | None = None, limit: int | None = None
    ) -> float:
        """Seconds of one answer's recorded cycles, prefill excluded; no budget: nothing was drafted by a head.

        With the answer's limit of tokens, levels that were left out at its end are not charged.
        """
        total, untold, done = 0.0, 1, 1
        for cycle in cycles:
            here = None if budget is None else budget if limit is None else budget.within(limit - done - 1)
            asked = None if here is None or here.is_empty else here
            rows = () if asked is None else (untold, *level_rows(asked))
            total += self.cycle(cycle["nodes"], rows, cycle["context"])
            untold, done = cycle["accepted"] + 1 + (untold if asked is None else 0), done + cycle["committed"]
        return total

    def _between(self, table: Table, size: int, context: int) -> float:
        """Linear between measured sizes and contexts, and beyond them."""
        columns = [_line(self.sizes, row, size) for row in table]
        return max(_line(self.contexts, columns, context), 0.0)


def level_rows(budget: Budget) -> list[int]:
    """How many rows a head reads for each level of its tree after the first."""
    if budget.paths is not None:
        inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
        return [sum(len(path) == depth for path in inner) for depth in range(1, max(map(len, inner), default=0) + 1)]
    return [min(budget.top_k, budget.nodes)] * (budget.depth - 1) if min(budget.top_k, budget.nodes) else []


def bare_costs(
    target: Target,
    drafter: Any = None,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
) -> Costs:
    """Medians over rounds in which all take turns, so that the caches are as cold, and the machine as slow, for all."""
    sizes = tuple(sorted(set(sizes)))
    longest = (target.max_positions or max(contexts) + sizes[-1]) - sizes[-1]
    contexts = tuple(sorted({min(context, longest) for context in contexts}))
    head = drafter if isinstance(drafter, UnrolledDrafter) else None
    tables = [_at(target, head, context, sizes, rounds) for context in contexts]
    target.forget()
    return Costs(contexts, sizes, *(tuple(column) for column in zip(*tables, strict=True)))


def _at(
    target: Target, head: UnrolledDrafter | None, context: int, sizes: Sequence[int], rounds: int
) -> list[tuple[float, ...]]:
    """At one context: the target's medians by size, then the head's first and later forwards'."""
    target.begin([1] * context, Choose(Sampling()), room=sizes[-1])
    kinds: list[list[Callable[[], Any]]] = [[bare_read(target, size) for size in sizes]]
    if head is not None:
        kinds += [[bare_draft(head, context, size, scored) for size in sizes] for scored in (1, None)]
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up
        for place, forwards in enumerate(zip(*kinds, strict=True)):
            for kind, forward in enumerate(forwards):
                seconds = timed(forward, target.device)
                if number:
                    found[kind, place].append(seconds)
    return [tuple(median(found[kind, place]) for place in range(len(sizes))) for kind in range(len(kinds))]


def draft_seconds(cycles: Iterable[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Mean seconds of recorded drafts by nodes and depth, for drafters whose forwards have no bare costs.

    Not the median, as of several drafters in turn one may be far cheaper; without the slowest twentieth.
    """
    seconds_by_shape: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cycle in cycles:
        if "draft" in cycle.get("seconds", {}):
            seconds_by_shape[cycle["nodes"], cycle["depth"]].append(cycle["seconds"]["draft"])
    return {shape: mean(sorted(seconds)[: ceil(0.95 * len(seconds))]) for shape, seconds in seconds_by_shape.items()}


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock of CPU seconds, which other work leaves alone; for several threads or a device, of seconds that pass."""

    def synchronized() -> float:
        torch.accelerator.synchronize(device)
        return perf_counter()

    if device.type != "cpu":
        return synchronized
    return perf_counter if torch.get_num_threads() > 1 else process_time


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds that an action takes, by `clock_of` the device."""
    now = clock_of(device)
    start = now()
    action()
    return now() - start


def bare_read(target: Target, size: int) -> Callable[[], Any]:
    """The model's own forward of so many tokens behind the text in the target's cache, under the reader's attention."""
    start, device = len(target.text), target.device
    positions = list(range(start, start + size))
    inputs = {
        "input_ids": torch.ones(1, size, dtype=torch.long, device=device),
        "position_ids": torch.tensor([positions], device=device),
        "attention_mask": target.masks(start, positions, None),
        "past_key_values": target.cache,
    }

    @torch.inference_mode()
    def run() -> Any:
        return target.reader.model(**inputs)

    return run


def bare_draft(head: Any, context: int, size: int, scored: int | None) -> Callable[[], Any]:
    """A head's own forward of so many rows behind so much text, the last `scored` of them (or all) made into logits."""
    (frozen,), cache = head.frozen, Cache()
    weight, every = head.fc.weight, context + size  # of whatever is fused
    tokens = torch.ones(1, every, dtype=torch.long, device=weight.device)
    features = torch.zeros(1, every, head.shape.hidden_size, device=weight.device, dtype=weight.dtype)
    positions = torch.arange(every, device=weight.device)[None]
    chain = torch.ones(size, size, dtype=torch.bool, device=weight.device).tril()
    mask = level_mask(context, chain, weight.dtype)

    def rows(start: int, end: int, mask: Tensor | None) -> Tensor:
        cache.length = start
        part = slice(start, end)
        return head.read(tokens[:, part], features[:, part], positions[:, part], mask, cache, frozen)

    with torch.inference_mode():
        rows(0, context, None)

    @torch.inference_mode()
    def run() -> Any:
        return head.law(rows(context, every, mask)[0, -(scored or size) :], frozen)

    return run


def _line(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """The value at a place, on the straight line through the two measured ones next to it."""
    if len(places) == 1:
        return values[0]
    left = min(max(bisect_right(places, place) - 1, 0), len(places) - 2)
    share = (place - places[left]) / (places[left + 1] - places[left])
    return values[left] + share * (values[left + 1] - values[left])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
