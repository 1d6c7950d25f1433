"""Recent rates at which each level of a draft was proposed and accepted, over all texts and for each text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from eagle.core.trace import Cycle

LEAST = 2.0  # least weight of an average, in cycles; with 8 a policy starts and adapts too slowly
GUESS = 0.1  # acceptance of a drafter of which nothing is known, as if of one cycle; a higher one is dear if it fails
PRIOR = 4.0  # cycles of its own after which a text's average weighs as much as that of all
OF_TEXT = 30.0  # cycles over which a text's own averages are taken, at most


class Average:
    """A running average of outcomes, at first a guess, whose weight decays while nothing is added."""

    __slots__ = ("is_guess", "least", "value", "weight")

    def __init__(self, guess: float, least: float = LEAST) -> None:
        self.value, self.weight, self.least, self.is_guess = guess, min(1.0, least), least, True

    def add(self, outcome: bool | None, memory: float) -> None:
        """Add the outcome of one more cycle; None if the cycle had none."""
        self.weight = max(self.weight * (1 - 1 / memory), min(self.weight, self.least))
        if outcome is not None:
            self.is_guess = False
            self.weight += 1
            self.value += (outcome - self.value) / self.weight

    def shrink_to(self, other: float) -> float:
        """This average, shrunk towards another in proportion to how little data it has."""
        return (self.weight * self.value + PRIOR * other) / (self.weight + PRIOR)


class Levels:
    """For each level: the rate of being proposed when requested, and of being accepted when its parent level was.

    A level that was never reached is taken to be like the level above.
    """

    def __init__(self, levels: int, memory: float, least: float = LEAST) -> None:
        self.memory = memory
        self.proposed = [Average(1.0, least) for _ in range(levels)]
        self.accepted = [Average(GUESS, least) for _ in range(levels)]

    def add(self, asked: int, cycle: Cycle, depth: int, texts: int = 1) -> None:
        """Add a cycle of a text that was asked for `asked` levels; levels cut off by its end are not rejected."""
        memory = self.memory * texts
        for level, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True)):
            wanted = level < asked
            proposed.add(depth > level if wanted else None, memory)
            accepted.add(cycle.accepted > level if wanted and cycle.accepted >= level else None, memory)
        for above, below in (*pairwise(self.proposed), *pairwise(self.accepted)):
            if below.is_guess:
                below.value = above.value


@dataclass(frozen=True)
class Forecast:
    """Expected tokens of one text's draft, by level."""

    reached: list[float]  # probability that the level is accepted
    proposed: list[float]  # that it is proposed, where it is asked for
    start: float = 0.0  # seconds of reading what was written since the last draft, spread over the cycles ahead


class Acceptance:
    """The rates of all texts together, and of each text being decoded."""

    def __init__(self, levels: int, memory: float) -> None:
        self.levels, self.memory = levels, memory  # in cycles, of however many texts
        self.all = Levels(levels, memory)
        self.rows: dict[int, Levels] = {}
        self.ends: dict[int, int] = {}  # where each text will go on
        self.read: dict[int, int] = {}  # tokens of each text that the drafter has read

    def keep_only(self, contexts: Mapping[int, int]) -> None:
        """Forget texts that are no longer decoded, and those whose row number now belongs to another text."""
        gone = [row for row, end in self.ends.items() if contexts.get(row) != end]
        for row in gone:
            del self.ends[row]
            self.rows.pop(row, None)
            self.read.pop(row, None)

    def forecasts(self, rows: Iterable[int]) -> list[Forecast]:
        """The forecast of each of these texts; a single text uses the rates of all texts."""
        rows = list(rows)
        return [self._forecast(self.rows.get(row) if len(rows) > 1 else None) for row in rows]

    def _forecast(self, of_text: Levels | None) -> Forecast:
        accepted = [average.value for average in self.all.accepted]
        proposed = [average.value for average in self.all.proposed]
        if of_text is not None:
            accepted = [mine.shrink_to(rate) for mine, rate in zip(of_text.accepted, accepted, strict=True)]
            proposed = [mine.shrink_to(rate) for mine, rate in zip(of_text.proposed, proposed, strict=True)]
        return Forecast(list(accumulate(accepted, mul)), proposed)

    def learn(self, row: int, asked: int, cycle: Cycle, depth: int) -> None:
        """Update the rates of a text and of all."""
        self.all.add(asked, cycle, depth, cycle.rows)
        if cycle.rows > 1:
            self.rows.setdefault(row, Levels(self.levels, min(self.memory, OF_TEXT), 0.0)).add(asked, cycle, depth)
        self.ends[row] = cycle.context + cycle.accepted + 1
        if asked:
            self.read[row] = cycle.context
