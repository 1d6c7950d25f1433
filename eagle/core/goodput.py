"""How far to draft, and whether at all: as far as makes the most tokens per second, learnt along the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from eagle.core.decode import Cycle, generate
from eagle.core.drafter import Budget, Drafter, Draw
from eagle.core.tree import chain_paths
from eagle.target.target import Target

LEAST = 2.0  # cycles that an old average still counts for; with 8 the policy starts and changes its mind too slowly


class Goodput:
    """Stands where a `Budget` does, and asks in every cycle for that many of its levels, or none, as pay best.

    The rule is SmartSpec's (Liu et al. 2024, arXiv 2406.14066) for one request at a time: most expected tokens per
    expected second, from what cycles cost and from how often each level was proposed and accepted of late. What lies
    deeper than that is tried now and then, for `share` of all time at most: one level more, and yet one more for as
    long as all that was tried is accepted. What was learnt stays from one request to the next.

    `draft` and `read` hold seconds by levels, from none to all: of asking the drafter, and of the rest of a cycle.
    `memory` is the number of cycles over which averages are taken.
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
        for name, seconds in (("draft", draft), ("read", read)):
            if not isinstance(seconds, Sequence) or isinstance(seconds, str):
                raise ValueError(
                    f"{name} is {seconds!r}, expected a list of the seconds of 0, 1, 2, ... levels: measure them with "
                    "Goodput.measured(target, drafter, prompt, budget)"
                )
        if not isinstance(budget, (Budget, type(None))):
            raise ValueError(f"budget is {budget!r}, expected a Budget: as Budget(nodes=8, depth=4)")
        self.budget = budget or Budget.fixed(chain_paths(len(draft) - 1))
        self.nodes, levels = self.budget.nodes, self.budget.depth
        for name, seconds in (("draft", draft), ("read", read)):
            if len(seconds) != levels + 1 or min(seconds) < 0:
                raise ValueError(
                    f"{name} holds {len(seconds)} figures from {min(seconds, default=0)} on, expected the seconds of "
                    f"0 to {levels} levels: measure them with Goodput.measured(target, drafter, prompt, budget)"
                )
        if not (read[0] > 0 and 0 <= share <= 1 and memory >= LEAST):
            raise ValueError(
                f"expected seconds to read the root, a share of 0 to 1, a memory of {LEAST:g} or more; got {read[0]}, "
                f"{share}, {memory}"
            )
        self.draft, self.read, self.share, self.memory = list(draft), list(read), share, memory
        # per level: was it proposed where it was asked for, was it accepted where the level above was; hopeful at first
        self.proposed = [_Average() for _ in range(levels)]
        self.accepted = [_Average() for _ in range(levels)]
        self.spent = self.tried = 0.0  # seconds
        self.asked, self.further, self.trying = 0, 1, False

    @property
    def draw(self) -> Draw:
        """How all its budgets draw."""
        return self.budget.draw

    @classmethod
    def measured(
        cls, target: Target, drafter: Drafter, prompt: Sequence[int], budget: Budget | None = None, **options: Any
    ) -> Goodput:
        """With the costs of one generation in which all numbers of levels take turns; options are `generate`'s.

        Without a budget it is the drafter's own, else a chain of eight. Reading what the drafter never proposed is
        taken to cost what lies next to it.
        """
        own = drafter.budget if isinstance(drafter, Drafter) else None  # `generate` refuses what is none
        budget = budget or own or Budget.fixed(chain_paths(8))
        turns = _InTurn(budget)
        options = {"max_new_tokens": 256, "stop": [], **options}
        cycles = generate(target, drafter, prompt, budget=turns, timing=True, **options).cycles
        draft: dict[int, list[float]] = defaultdict(list)
        read: dict[int, list[float]] = defaultdict(list)
        for asked, cycle in zip(turns.asked, cycles, strict=True):
            assert cycle.seconds is not None
            draft[asked].append(cycle.seconds["draft"])
            read[cycle.depth].append(sum(cycle.seconds.values()) - cycle.seconds["draft"])
        if len(draft) <= budget.depth:
            raise ValueError(
                f"{len(cycles)} cycles are too few to measure 0 to {budget.depth} levels: raise max_new_tokens, "
                f"which is {options['max_new_tokens']}"
            )
        return cls(_medians(draft, budget.depth), _medians(read, budget.depth), budget)

    def forecast(self) -> list[tuple[float, float]]:
        """Expected tokens and seconds of a cycle, by the number of levels asked for."""
        tokens = kept = 1.0
        read, found = self.read[0], [(1.0, self.read[0] + self.draft[0])]
        for level, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True), start=1):
            kept *= accepted.value
            tokens += kept
            read += proposed.value * (self.read[level] - self.read[level - 1])
            found.append((tokens, read + self.draft[level]))
        return found

    def within(self, levels: int) -> Budget:
        """The next cycle's budget, at most `levels` deep."""
        found = self.forecast()
        best = max(range(len(found)), key=lambda asked: found[asked][0] / found[asked][1])
        more = min(best + self.further, self.budget.depth)
        extra = found[more][1] - found[best][1]  # all that it can lose, for it accepts no less
        self.trying = best < more <= levels and self.tried + extra <= self.share * self.spent
        if self.trying:
            self.tried += extra
        self.asked = max(min(more if self.trying else best, levels), 0)
        return self.budget.within(self.asked)

    def learn(self, cycle: Cycle) -> None:
        """Count what was asked for alone: what the end of an answer cut off was not rejected."""
        depth = min(cycle.depth, self.asked)
        self.spent += self.draft[self.asked] + self.read[depth]
        if self.trying:
            self.further = self.further + 1 if cycle.accepted >= self.asked else 1
        for level, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True)):
            asked = level < self.asked
            proposed.add(depth > level if asked else None, self.memory)
            accepted.add(cycle.accepted > level if asked and cycle.accepted >= level else None, self.memory)


class _Average:
    """A running average that weighs less the longer nothing was added; it begins with the hope for the best."""

    __slots__ = ("value", "weight")

    def __init__(self) -> None:
        self.value, self.weight = 1.0, LEAST

    def add(self, seen: bool | None, memory: float) -> None:
        """One more cycle, in which it was seen to be so or not, or in which nothing was seen."""
        self.weight = max(self.weight * (1 - 1 / memory), LEAST)
        if seen is not None:
            self.weight += 1
            self.value += (seen - self.value) / self.weight


class _InTurn:
    """Asks for every number of levels in turn."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nodes, self.draw = budget, budget.nodes, budget.draw
        self.asked: list[int] = []

    def within(self, levels: int) -> Budget:
        """The next number of levels."""
        self.asked.append(min(-len(self.asked) % (self.budget.depth + 1), levels))
        return self.budget.within(self.asked[-1])

    def learn(self, cycle: Cycle) -> None:
        """Nothing."""


def _medians(seconds: dict[int, list[float]], levels: int) -> list[float]:
    """Of 0 to `levels` levels; what was not measured lies on the line between what was."""
    known = sorted(seconds)
    return np.interp(range(levels + 1), known, [median(seconds[level]) for level in known]).tolist()
