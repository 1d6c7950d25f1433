"""Time drafts and the rest of a cycle in short generations that alternate between all draft depths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.trace import Cycle, Trace
from eagle.decoding.cycle_costs import CycleCosts
from eagle.decoding.decode import stream
from eagle.target.target import Target

ROUNDS = 6  # of all numbers of levels, in every batch
SINGLE_ROUNDS = 30  # of one text, whose cycles are short
Medians = dict[int, list[float]]  # seconds by levels


def time_cycles(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    budget: Budget,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    options: dict[str, Any],
) -> CycleCosts:
    """Time cycles for each batch size, with the prompts repeated or cut to each context, if there are any."""
    sizes, places = tuple(sorted(set(batch_sizes))), tuple(sorted(set(contexts))) or (0,)
    tables = []
    for size in sizes:
        batches = [[_of_length(text, place) for text in _first(prompts, size)] for place in places]
        tables.append([_time_batch(target, drafter, batch, budget, options) for batch in batches])
    draft, read = (tuple(tuple(pair[kind] for pair in row) for row in tables) for kind in (0, 1))
    return CycleCosts(sizes, places, draft, read)


class _AllLevels:
    """A policy that asks for every draft depth in turn, the same for all texts."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nodes, self.draw = budget, budget.nodes, budget.draw
        self.levels: list[int] = []  # of each cycle

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Budgets of the next depth in turn."""
        self.levels.append(min(-len(self.levels) % (self.budget.depth + 1), *levels.values()))
        return dict.fromkeys(levels, self.within(self.levels[-1]))

    def within(self, levels: int) -> Budget:
        """A budget of the next depth in turn."""
        return self.budget.within(levels)


def _time_batch(
    target: Target, drafter: Drafter, prompts: list[list[int]], budget: Budget, options: dict[str, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of drafting and of the rest of a cycle with all these prompts, by levels."""
    turns, size = _AllLevels(budget), len(prompts)
    options = {"max_new_tokens": 256, "stop": [], **options}
    traces = [Trace([]) for _ in prompts]
    needed = max(ROUNDS, SINGLE_ROUNDS // size) * (budget.depth + 1)
    given: dict[str, Any] = {**options, "budget": turns, "timing": True, "batch_size": size, "trace": traces}
    steps: Any = stream(target, drafter, prompts, **given)
    for _ in steps:
        if len(turns.levels) > needed:
            break
    steps.close()
    for trace in traces:
        trace.checked()
    draft, read = _sort_seconds(traces, turns.levels)
    if len(draft) <= budget.depth:
        raise ValueError(
            f"{len(turns.levels)} cycles are too few to measure 0 to {budget.depth} levels: raise max_new_tokens, "
            f"which is {options['max_new_tokens']}"
        )
    return _interpolate(draft, budget.depth), _interpolate(read, budget.depth)


def _sort_seconds(traces: Sequence[Trace], levels: Sequence[int]) -> tuple[Medians, Medians]:
    """Seconds of drafting by requested levels, and of the rest by the deepest tree, from cycles with all texts."""
    draft, read = defaultdict(list), defaultdict(list)
    shared: dict[int, list[Cycle]] = defaultdict(list)
    for trace in traces:
        for cycle in trace.cycles:
            shared[cycle.number].append(cycle)
    for number, cycles in shared.items():
        seconds = cycles[0].seconds
        if cycles[0].rows == len(traces) and seconds is not None:
            draft[levels[number]].append(seconds["draft"])
            read[max(cycle.depth for cycle in cycles)].append(sum(seconds.values()) - seconds["draft"])
    return draft, read


def _first(prompts: list[list[int]], size: int) -> list[list[int]]:
    """The first `size` prompts, repeated if there are fewer."""
    return [prompts[number % len(prompts)] for number in range(size)]


def _of_length(tokens: list[int], length: int) -> list[int]:
    """Tokens repeated or cut to a length; unchanged if it is 0."""
    return (tokens * -(-length // len(tokens)))[:length] if length else tokens


def _interpolate(seconds: Medians, levels: int) -> tuple[float, ...]:
    """Median seconds of 0 to `levels` levels, interpolated linearly where nothing was measured."""
    measured = sorted(seconds)
    return tuple(np.interp(range(levels + 1), measured, [median(seconds[level]) for level in measured]).tolist())
