"""Choose the draft depth of each row of a batch, from how often its levels were recently proposed and accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from eagle.core.trace import Cycle
from eagle.decoding.forward_costs import CostTable

# least weight of an average, in cycles; with 8 a policy starts and adapts too slowly
MIN_WEIGHT = 2.0
GUESS = 0.1  # acceptance of a drafter of which nothing is known, as if of one cycle; a higher one is dear if it fails
PRIOR = 4.0  # cycles of its own after which a row's average weighs as much as that of all
ROW_MEMORY = 30.0  # cycles over which a row's own averages are taken, at most
PRICE_ROUNDS = 8  # of raising the price of a second; two or three find what no further one changes


class Average:
    """A running average of outcomes, at first a guess, whose weight decays while nothing is added."""

    __slots__ = ("is_guess", "min_weight", "value", "weight")

    def __init__(self, guess: float, min_weight: float = MIN_WEIGHT) -> None:
        self.value = guess
        self.weight = min(1.0, min_weight)
        self.min_weight = min_weight
        self.is_guess = True

    def add(self, outcome: bool | None, memory: float) -> None:
        """Add one more cycle.

        Args:
            outcome: What happened in it; None if it says nothing.
            memory: The number of cycles that the average spans.
        """
        # exponential decay, but never below the least weight that there was
        self.weight = max(self.weight * (1 - 1 / memory), min(self.weight, self.min_weight))
        if outcome is not None:
            self.is_guess = False
            self.weight += 1
            self.value += (outcome - self.value) / self.weight

    def shrink_to(self, prior: float) -> float:
        """Return this average, shrunk towards another in proportion to how little data it has."""
        return (self.weight * self.value + PRIOR * prior) / (self.weight + PRIOR)


class Levels:
    """For each level: the rate of being proposed when requested, and of being accepted when its parent level was.

    A level that was never reached is taken to be like the level above.
    """

    def __init__(self, levels: int, memory: float, min_weight: float = MIN_WEIGHT) -> None:
        self.memory = memory
        self.proposed = [Average(1.0, min_weight) for _ in range(levels)]
        self.accepted = [Average(GUESS, min_weight) for _ in range(levels)]

    def add(self, asked: int, cycle: Cycle, depth: int, rows: int = 1) -> None:
        """Add a cycle of one row.

        Args:
            asked: The levels that it was asked for.
            cycle: What it accepted; levels that the answer's end cut off count as accepted.
            depth: The levels that it proposed.
            rows: The rows of the cycle, each of which is added.
        """
        # a cycle of many rows adds many outcomes: the average still spans as many cycles
        memory = self.memory * rows
        for level, (proposed, accepted) in enumerate(
            zip(self.proposed, self.accepted, strict=True)
        ):
            was_asked = level < asked
            proposed.add(depth > level if was_asked else None, memory)
            # acceptance of a level shows only where the level above was accepted
            accepted.add(
                cycle.accepted > level if was_asked and cycle.accepted >= level else None,
                memory,
            )
        # a level that was never reached follows the one above
        for above, below in (*pairwise(self.proposed), *pairwise(self.accepted)):
            if below.is_guess:
                below.value = above.value


@dataclass(frozen=True)
class Forecast:
    """Expected tokens of one row's draft, by level."""

    reached: list[float]  # probability that the level is accepted
    proposed: list[float]  # that it is proposed, where it is asked for
    start: float = 0.0  # seconds of reading what was written since the last draft, spread over the cycles ahead

    def limit(self, depth: int) -> Forecast:
        """Return the forecast without gains beyond a depth."""
        depth = max(depth, 0)
        beyond = [0.0] * (len(self.reached) - depth)
        return Forecast(
            [*self.reached[:depth], *beyond], [*self.proposed[:depth], *beyond], self.start
        )


class Acceptance:
    """The rates of all rows together, and of each row being decoded."""

    def __init__(self, levels: int, memory: float) -> None:
        self.levels = levels
        self.memory = memory  # in cycles, of however many rows
        self.all = Levels(levels, memory)
        self.rows: dict[int, Levels] = {}
        self.ends: dict[int, int] = {}  # where each row will go on
        self.read: dict[int, int] = {}  # tokens of each row that the drafter has read

    def keep_only(self, contexts: Mapping[int, int]) -> None:
        """Forget rows that are no longer decoded, and those whose number now belongs to another request."""
        gone = [row for row, end in self.ends.items() if contexts.get(row) != end]
        for row in gone:
            del self.ends[row]
            self.rows.pop(row, None)
            self.read.pop(row, None)

    def forecasts(self, rows: Iterable[int]) -> list[Forecast]:
        """Return the forecast of each of these rows; a single row uses the rates of all."""
        rows = list(rows)
        if len(rows) == 1:
            return [self._forecast(None)]
        return [self._forecast(self.rows.get(row)) for row in rows]

    def _forecast(self, of_row: Levels | None) -> Forecast:
        accepted = [average.value for average in self.all.accepted]
        proposed = [average.value for average in self.all.proposed]
        if of_row is not None:
            accepted = [
                own.shrink_to(rate) for own, rate in zip(of_row.accepted, accepted, strict=True)
            ]
            proposed = [
                own.shrink_to(rate) for own, rate in zip(of_row.proposed, proposed, strict=True)
            ]
        # a level is reached if all above it are accepted
        return Forecast(list(accumulate(accepted, mul)), proposed)

    def learn(self, row: int, asked: int, cycle: Cycle, depth: int) -> None:
        """Update the rates of a row and of all.

        Args:
            row: The row.
            asked: The levels that it was asked for.
            cycle: Its cycle.
            depth: The levels that it proposed, of those.
        """
        self.all.add(asked, cycle, depth, cycle.rows)
        if cycle.rows > 1:
            if row not in self.rows:
                self.rows[row] = Levels(self.levels, min(self.memory, ROW_MEMORY), 0.0)
            self.rows[row].add(asked, cycle, depth)
        self.ends[row] = cycle.context + cycle.accepted + 1
        if asked:
            self.read[row] = cycle.context


@dataclass(frozen=True)
class Batch:
    """The rows of a cycle: the forecast of each draft, and the cycle's cost."""

    forecasts: Sequence[Forecast]
    costs: CostTable

    def tokens(self, levels: Sequence[int]) -> float:
        """Return the expected tokens of a cycle in which row i drafts `levels[i]` levels."""
        # the target adds one token to each row, a level one more where it is accepted
        drafted = 0.0
        for forecast, depth in zip(self.forecasts, levels, strict=True):
            drafted += sum(forecast.reached[:depth])
        return len(levels) + drafted

    def seconds(self, levels: Sequence[int]) -> float:
        """Return the expected seconds: a forward of the target is as long as the longest tree that is proposed."""
        read = self.costs.read
        total = read[0] + self.costs.drafting(levels)
        total += sum(
            forecast.start for forecast, depth in zip(self.forecasts, levels, strict=True) if depth
        )
        for level in range(max(levels)):
            # the target reads this level unless every row that was asked for it stays silent
            drafting = [
                forecast
                for forecast, depth in zip(self.forecasts, levels, strict=True)
                if depth > level
            ]
            silent = prod(1 - forecast.proposed[level] for forecast in drafting)
            total += (1 - silent) * (read[level + 1] - read[level])
        return total

    def speed(self, levels: Sequence[int]) -> float:
        """Return the expected tokens per expected second."""
        return self.tokens(levels) / self.seconds(levels)

    def best_levels(self, limits: Sequence[int], deepest: int) -> list[int]:
        """Return the levels of each row, at most `deepest`, that give the most tokens per second.

        The ratio is maximised by Dinkelbach's method: at a price of a second the most tokens less their price, then
        the price that this choice itself brings. At a price a level's worth depends on how many rows reach it, best
        rows first, and no more than reach the one before: a small dynamic program, see `_count_rows`.

        Args:
            limits: Levels that each row may draft at most.
            deepest: The most levels of any row.
        """
        # rows that are worth most draft deepest: only how many draft a level is left to choose
        limited = [
            forecast.limit(limit) for forecast, limit in zip(self.forecasts, limits, strict=True)
        ]
        order = sorted(range(len(limited)), key=lambda row: -sum(limited[row].reached))
        ranked = Batch([limited[row] for row in order], self.costs)
        levels = [0] * len(order)
        for _ in range(PRICE_ROUNDS):
            # Dinkelbach: the price is the best ratio so far, and grows until nothing changes
            counts = ranked._count_rows(ranked.speed(levels), deepest)
            chosen = []
            for rank in range(len(order)):
                chosen.append(sum(count > rank for count in counts))
            if chosen == levels:
                break
            levels = chosen
        best = [0] * len(order)
        for rank, row in enumerate(order):
            best[row] = min(levels[rank], limits[row])
        return best

    def _count_rows(self, price: float, deepest: int) -> list[int]:
        """Return the number of rows that draft each level, maximising tokens minus `price` times seconds.

        Rows are ordered by worth, so that those that draft a level are the first. From the deepest level up, this finds
        for each limit on the number of rows the best number, given that deeper levels then choose theirs.
        """
        # choices[-1 - level][limit]: the number of rows that draft this level, at most `limit`
        choices: list[list[int]] = []
        # worth[limit]: what the levels below bring if at most `limit` rows draft them
        worth = [0.0] * (len(self.forecasts) + 1)
        for level in reversed(range(deepest)):
            level_worth = []
            level_choices = []
            best = worth[0]
            best_count = 0
            for count, gain in enumerate(self._gains(level, price)):
                if count and gain + worth[count] > best:
                    best = gain + worth[count]
                    best_count = count
                level_worth.append(best)
                level_choices.append(best_count)
            worth = level_worth
            choices.append(level_choices)
        # from the first level down: no more rows than reach the level above
        counts = []
        count = len(self.forecasts)
        for level_choices in reversed(choices):
            count = level_choices[count]
            counts.append(count)
        return counts

    def _gains(self, level: int, price: float) -> list[float]:
        """Return a level's tokens minus `price` times its seconds, by the number of rows that draft it."""
        draft = self.costs.draft
        read = self.costs.read[level + 1] - self.costs.read[level]
        gains = [0.0]
        tokens = 0.0
        start = 0.0
        silent = 1.0  # the probability that none of these rows proposes the level
        for count, forecast in enumerate(self.forecasts, start=1):
            tokens += forecast.reached[level]
            # a draft starts once, with its first level
            start += 0.0 if level else forecast.start
            silent *= 1 - forecast.proposed[level]
            drafting = draft[count][level + 1] - draft[count][level]
            gains.append(tokens - price * (start + drafting + (1 - silent) * read))
        return gains
