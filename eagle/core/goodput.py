"""Adaptive draft length: in each cycle the number of levels with the most expected tokens per second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from eagle.core.budget import Budget, Draw
from eagle.core.decode import generate
from eagle.core.drafter import Drafter
from eagle.core.trace import Cycle
from eagle.core.tree import chain_paths
from eagle.target.target import Target

LEAST = 2.0  # least weight of an average, in cycles; with 8 the policy starts and adapts too slowly


class Goodput:
    """A policy, used in place of a `Budget`, that drafts as many of its levels (or none) as pay best.

    The rule is SmartSpec's (Liu et al. 2024, arXiv 2406.14066) for one request at a time: the most expected tokens per
    expected second, by the cost of cycles and by how often each level was proposed and accepted recently. Deeper
    levels are explored for at most `share` of all time: one level more, and another one while everything explored is
    accepted. Statistics carry over from one request to the next.

    `draft[n]` and `read[n]` are the seconds of drafting n levels and of the rest of such a cycle. `memory` is the
    number of cycles over which averages are taken.
    """

    def __init__(
        self,
        draft: Sequence[float],
        read: Sequence[float],
        budget: Budget | None = None,
        *,
        share: float = 0.005,
        memory: float = 100.0,
    ) -> None:
        hint = "measure them with Goodput.measure(target, drafter, prompt, budget)"
        costs = {"draft": draft, "read": read}
        for name, seconds in costs.items():
            if not isinstance(seconds, Sequence) or isinstance(seconds, str):
                raise ValueError(f"{name} is {seconds!r}, expected a list of seconds of 0, 1, 2, ... levels: {hint}")
        if not isinstance(budget, (Budget, type(None))):
            raise ValueError(f"budget is {budget!r}, expected a Budget: as Budget(nodes=8, depth=4)")
        self.budget = budget or Budget.fixed(chain_paths(len(draft) - 1))
        self.nodes, levels = self.budget.nodes, self.budget.depth
        for name, seconds in costs.items():
            if len(seconds) != levels + 1 or min(seconds) < 0:
                raise ValueError(
                    f"{name} holds {len(seconds)} figures from {min(seconds, default=0)} on, expected the seconds of "
                    f"0 to {levels} levels: {hint}"
                )
        if not (read[0] > 0 and 0 <= share <= 1 and memory >= LEAST):
            raise ValueError(
                f"expected seconds to read the root, a share of 0 to 1, a memory of {LEAST:g} or more; got {read[0]}, "
                f"{share}, {memory}"
            )
        self.draft, self.read, self.share, self.memory = list(draft), list(read), share, memory
        # per level: its rate of being proposed when asked for, and accepted when the level above was; 1 at first
        self.proposed = [_Average() for _ in range(levels)]
        self.accepted = [_Average() for _ in range(levels)]
        self.spent = self.explored = 0.0  # seconds
        self.levels = 0  # asked for in this cycle
        self.step = 1  # levels beyond the best that are explored next
        self.exploring = False

    @property
    def draw(self) -> Draw:
        """How children are drawn, the same in all its budgets."""
        return self.budget.draw

    @classmethod
    def measure(
        cls, target: Target, drafter: Drafter, prompt: Sequence[int], budget: Budget | None = None, **options: Any
    ) -> Goodput:
        """A policy with costs from one generation, in which all numbers of levels take turns; options are `generate`'s.

        The budget defaults to the drafter's, else a chain of eight. Depths that were never read cost what their
        neighbours do.
        """
        tuned = drafter.budget if isinstance(drafter, Drafter) else None  # `generate` refuses what is no drafter
        budget = budget or tuned or Budget.fixed(chain_paths(8))
        turns = _AllLevels(budget)
        options = {"max_new_tokens": 256, "stop": [], **options}
        cycles = generate(target, drafter, prompt, budget=turns, timing=True, **options).cycles
        draft: dict[int, list[float]] = defaultdict(list)
        read: dict[int, list[float]] = defaultdict(list)
        for levels, cycle in zip(turns.levels, cycles, strict=True):
            assert cycle.seconds is not None
            draft[levels].append(cycle.seconds["draft"])
            read[cycle.depth].append(sum(cycle.seconds.values()) - cycle.seconds["draft"])
        if len(draft) <= budget.depth:
            raise ValueError(
                f"{len(cycles)} cycles are too few to measure 0 to {budget.depth} levels: raise max_new_tokens, "
                f"which is {options['max_new_tokens']}"
            )
        return cls(_interpolate(draft, budget.depth), _interpolate(read, budget.depth), budget)

    measured = measure  # its name in earlier releases

    def forecast(self) -> list[tuple[float, float]]:
        """(expected tokens, expected seconds) of a cycle, by the number of levels asked for."""
        tokens = reached = 1.0
        read = self.read[0]
        cycles = [(1.0, read + self.draft[0])]
        for level, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True), start=1):
            reached *= accepted.value
            tokens += reached
            read += proposed.value * (self.read[level] - self.read[level - 1])
            cycles.append((tokens, read + self.draft[level]))
        return cycles

    def within(self, levels: int) -> Budget:
        """The next cycle's budget, at most `levels` deep."""
        cycles = self.forecast()
        best = max(range(len(cycles)), key=lambda number: cycles[number][0] / cycles[number][1])
        deeper = min(best + self.step, self.budget.depth)
        extra = cycles[deeper][1] - cycles[best][1]  # the most that it can lose, for it accepts no less
        self.exploring = best < deeper <= levels and self.explored + extra <= self.share * self.spent
        if self.exploring:
            self.explored += extra
        self.levels = max(min(deeper if self.exploring else best, levels), 0)
        return self.budget.within(self.levels)

    def learn(self, cycle: Cycle) -> None:
        """Update the rates of the levels that were asked for; levels cut off by the answer's end were not rejected."""
        depth = min(cycle.depth, self.levels)
        self.spent += self.draft[self.levels] + self.read[depth]
        if self.exploring:
            self.step = self.step + 1 if cycle.accepted >= self.levels else 1
        for level, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True)):
            asked = level < self.levels
            proposed.add(depth > level if asked else None, self.memory)
            accepted.add(cycle.accepted > level if asked and cycle.accepted >= level else None, self.memory)


class _Average:
    """A running average of outcomes, 1 at first, whose weight decays while nothing is added."""

    __slots__ = ("value", "weight")

    def __init__(self) -> None:
        self.value, self.weight = 1.0, LEAST

    def add(self, outcome: bool | None, memory: float) -> None:
        """One more cycle with this outcome, None if it had none."""
        self.weight = max(self.weight * (1 - 1 / memory), LEAST)
        if outcome is not None:
            self.weight += 1
            self.value += (outcome - self.value) / self.weight


class _AllLevels:
    """A policy that asks for every number of levels in turn."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nodes, self.draw = budget, budget.nodes, budget.draw
        self.levels: list[int] = []

    def within(self, levels: int) -> Budget:
        """A budget of the next number of levels."""
        self.levels.append(min(-len(self.levels) % (self.budget.depth + 1), levels))
        return self.budget.within(self.levels[-1])

    def learn(self, cycle: Cycle) -> None:
        """Ignore the outcome."""


def _interpolate(seconds: dict[int, list[float]], levels: int) -> list[float]:
    """Median seconds of 0 to `levels` levels, interpolated linearly where none was measured."""
    known = sorted(seconds)
    return np.interp(range(levels + 1), known, [median(seconds[level]) for level in known]).tolist()
