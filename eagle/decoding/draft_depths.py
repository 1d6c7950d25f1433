"""Choose the draft depth of each row of a batch, from how often its levels were recently proposed and accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from eagle.core.trace import Cycle
from eagle.decoding.forward_costs import CostTable

# the least weight of an average, in cycles; with 8 a policy starts and adapts too slowly
MIN_WEIGHT = 2.0
# the acceptance rate that a policy assumes of an unknown drafter, with the weight of one cycle; a higher one would cost
# much time if the drafter is poor
GUESS = 0.1
PRIOR = 4.0  # the number of cycles after which a row's average weighs as much as that of all rows
ROW_MEMORY = 30.0  # the most cycles over which a row's averages are taken
# the most iterations of Dinkelbach's method; two or three are enough in most cases
PRICE_ROUNDS = 8


class Average:
    """A running average of outcomes that decays exponentially; at first a guess.

    Args:
        guess: The value before anything is known.
        min_weight: The weight, in cycles, that the average keeps however long nothing is added.
    """

    __slots__ = ("is_guess", "min_weight", "value", "weight")

    def __init__(self, guess: float, min_weight: float = MIN_WEIGHT) -> None:
        """Begin with a guess of the rate, which weighs as much as one cycle, or `min_weight` if that is less."""
        self.value = guess
        self.weight = min(1.0, min_weight)
        self.min_weight = min_weight
        self.is_guess = True

    def add(self, outcome: bool | None, memory: float) -> None:
        """Add one decoding cycle to a running average of how often an event happens, such as a level's acceptance.

        Args:
            outcome: Whether the event happened in this cycle; None if the cycle does not tell.
            memory: The number of cycles that the average spans: each cycle, the weight of those before falls by a part
                of 1 / memory.
        """
        # the weight decays down to `min_weight`; a weight that is lower already stays
        self.weight = max(self.weight * (1 - 1 / memory), min(self.weight, self.min_weight))
        if outcome is not None:
            self.is_guess = False
            self.weight += 1
            self.value += (outcome - self.value) / self.weight

    def shrink_toward(self, prior: float) -> float:
        """Return this average, of one row (sequence), shrunk toward `prior`, the average of all rows.

        The fewer cycles the row has, the closer the result is to `prior`, which weighs as much as PRIOR cycles.
        """
        return (self.weight * self.value + PRIOR * prior) / (self.weight + PRIOR)


class Levels:
    """For each draft level two rates: how often it was proposed when requested, and accepted when the level above was.

    A level that was never reached has the rate of the level above it.
    """

    def __init__(self, levels: int, memory: float, min_weight: float = MIN_WEIGHT) -> None:
        """Begin with guesses: every requested level of a draft is proposed, and few are accepted.

        Args:
            levels: The levels of the deepest draft.
            memory: The number of cycles that averages span.
            min_weight: The weight, in cycles, that an average keeps however long nothing is added.
        """
        self.memory = memory
        self.proposed = [Average(1.0, min_weight) for _ in range(levels)]
        self.accepted = [Average(GUESS, min_weight) for _ in range(levels)]

    def add(self, requested: int, cycle: Cycle, depth: int, rows: int = 1) -> None:
        """Add the outcome of a cycle for one row.

        The rates are those at which each level of a draft is proposed when requested, and accepted when the level above
        was.

        Args:
            requested: How many levels the drafter was asked for.
            cycle: The row's cycle; levels that the answer's end cut off count as accepted.
            depth: How many levels the drafter proposed.
            rows: How many rows the cycle had. The caller adds each of them.
        """
        # a cycle of many rows adds as many outcomes, so the average must span more outcomes to span as many cycles
        memory = self.memory * rows
        for level, (proposed, accepted) in enumerate(
            zip(self.proposed, self.accepted, strict=True)
        ):
            was_requested = level < requested
            # None: a level that was not requested tells nothing
            proposed.add(depth > level if was_requested else None, memory)
            # a cycle tells of a level's acceptance only if it accepted the level above
            accepted.add(
                cycle.accepted > level if was_requested and cycle.accepted >= level else None,
                memory,
            )
        # a level that was never reached takes over the rate of the level above
        for above, below in (*pairwise(self.proposed), *pairwise(self.accepted)):
            if below.is_guess:
                below.value = above.value


@dataclass(frozen=True)
class Forecast:
    """What is expected of a draft of one row, by level."""

    path_probs: list[float]  # probability that the level, and so all levels above it, are accepted
    proposed: list[float]  # probability that the drafter proposes the level if it is requested
    # seconds that the drafter takes to read what it has not read of the row, spread over the cycles ahead
    start: float = 0.0

    def limit(self, depth: int) -> Forecast:
        """Return the forecast of a row (sequence) that may draft at most `depth` levels.

        Deeper levels get probability 0.
        """
        depth = max(depth, 0)
        beyond = [0.0] * (len(self.path_probs) - depth)  # probabilities of the deeper levels
        return Forecast(
            [*self.path_probs[:depth], *beyond], [*self.proposed[:depth], *beyond], self.start
        )


class Acceptance:
    """The rates of all rows together, and of each row that is being decoded."""

    def __init__(self, levels: int, memory: float) -> None:
        """Begin without statistics.

        Args:
            levels: The levels of the deepest draft.
            memory: The number of cycles, whatever their number of rows (sequences), over which averages are taken.
        """
        self.levels = levels
        self.memory = memory
        self.all_rows = Levels(levels, memory)
        self.rows: dict[int, Levels] = {}
        self.ends: dict[int, int] = {}  # the length of each row after its last cycle
        self.read_tokens: dict[int, int] = {}  # how many tokens of each row the drafter has read

    def keep_only(self, contexts: Mapping[int, int]) -> None:
        """Forget the rates of rows (sequences) that are no longer decoded.

        Args:
            contexts: Row id -> length of the sequence, of all rows of the next cycle.
        """
        # a row of another length than it ended with is a new request with an old row id
        gone = [row for row, end in self.ends.items() if contexts.get(row) != end]
        for row in gone:
            del self.ends[row]
            self.rows.pop(row, None)
            self.read_tokens.pop(row, None)

    def forecasts(self, rows: Iterable[int]) -> list[Forecast]:
        """Return what is expected of a draft of each of these rows, by level.

        The field `start`, seconds before the first level, stays 0: the caller knows it.

        Args:
            rows: Row ids. A row is one sequence of the batch. Rows of which nothing is known are forecast by the rates
                of all rows.
        """
        rows = list(rows)
        # the rates of a single row are those of all rows
        if len(rows) == 1:
            return [self._forecast(None)]
        return [self._forecast(self.rows.get(row)) for row in rows]

    def _forecast(self, row_levels: Levels | None) -> Forecast:
        """Return for each draft level the probability that it is accepted, and that it is proposed if requested.

        A level is accepted only with all levels above it.

        Args:
            row_levels: The rates of one row, of which few cycles are known: they are shrunk toward those of all rows.
                None takes the rates of all rows.
        """
        accepted = [average.value for average in self.all_rows.accepted]
        proposed = [average.value for average in self.all_rows.proposed]
        if row_levels is not None:
            accepted = [
                average.shrink_toward(rate)
                for average, rate in zip(row_levels.accepted, accepted, strict=True)
            ]
            proposed = [
                average.shrink_toward(rate)
                for average, rate in zip(row_levels.proposed, proposed, strict=True)
            ]
        # a rate of acceptance holds if the level above was accepted, so the rates down to a level are multiplied
        return Forecast(list(accumulate(accepted, mul)), proposed)

    def learn(self, row: int, requested: int, cycle: Cycle, depth: int) -> None:
        """Update the rates of a row (sequence), and those of all rows, after a cycle of draft and verification.

        Args:
            row: The row id.
            requested: How many levels the drafter was asked for.
            cycle: The outcome for this row: its tree and what was accepted.
            depth: How many of these levels the drafter proposed.
        """
        self.all_rows.add(requested, cycle, depth, cycle.rows)
        # the rates of a single row are those of all rows
        if cycle.rows > 1:
            if row not in self.rows:
                # no minimum weight: a row without data takes the rates of all rows
                self.rows[row] = Levels(self.levels, min(self.memory, ROW_MEMORY), min_weight=0.0)
            self.rows[row].add(requested, cycle, depth)
        # the root and the accepted tokens are in the target's cache now
        self.ends[row] = cycle.context + cycle.accepted + 1
        # a drafter that drafts has read the row up to the root
        if requested:
            self.read_tokens[row] = cycle.context


@dataclass(frozen=True)
class Batch:
    """The rows of a cycle: the forecast of each row's draft, and the costs of a cycle with this number of rows."""

    forecasts: Sequence[Forecast]
    costs: CostTable

    def tokens(self, levels: Sequence[int]) -> float:
        """Return the expected tokens that a cycle commits, over all rows, if row i drafts `levels[i]` levels."""
        # each row gets one token from the target, and one from each accepted level
        drafted = 0.0
        for forecast, depth in zip(self.forecasts, levels, strict=True):
            # path_probs[d]: the probability that level d, and so all levels above it, are accepted
            drafted += sum(forecast.path_probs[:depth])
        return len(levels) + drafted

    def seconds(self, levels: Sequence[int]) -> float:
        """Return the expected seconds of a cycle in which row (sequence) i drafts `levels[i]` levels.

        A forward of the target takes as long as the deepest proposed tree needs, as all rows are padded to it.
        """
        read = self.costs.read  # [levels of the deepest tree], seconds of a cycle beside drafting
        total = read[0] + self.costs.drafting(levels)
        total += sum(
            forecast.start for forecast, depth in zip(self.forecasts, levels, strict=True) if depth
        )
        for level in range(max(levels)):
            # the target reads this level unless no row proposes it; a drafter may propose less than requested
            drafting = [
                forecast
                for forecast, depth in zip(self.forecasts, levels, strict=True)
                if depth > level
            ]
            # the probability that none of these rows proposes the level
            silent = prod(1 - forecast.proposed[level] for forecast in drafting)
            # read[n]: seconds of the target's forward over a tree of n levels, so this is what level adds
            total += (1 - silent) * (read[level + 1] - read[level])
        return total

    def speed(self, levels: Sequence[int]) -> float:
        """Return the expected tokens per second of a cycle in which row (sequence) i drafts `levels[i]` levels."""
        return self.tokens(levels) / self.seconds(levels)

    def best_levels(self, limits: Sequence[int], deepest: int) -> list[int]:
        """Return how many levels each row (sequence) should draft for the most tokens per second, at most `deepest`.

        The ratio tokens / seconds is maximised by Dinkelbach's method: maximise tokens - price * seconds at a fixed
        price, take the ratio of this choice as the next price, and repeat. For a fixed price `_count_rows` finds the
        maximum by dynamic programming over the number of rows that draft each level.

        Args:
            limits: The most levels that each row may draft.
            deepest: The most levels of any row.
        """
        # Rows are sorted by their expected tokens, best first. The rows that draft a level are then always the first
        # ones, and only their number is left to choose.
        limited = [
            forecast.limit(limit) for forecast, limit in zip(self.forecasts, limits, strict=True)
        ]
        order = sorted(range(len(limited)), key=lambda row: -sum(limited[row].path_probs))
        ranked = Batch([limited[row] for row in order], self.costs)
        levels = [0] * len(order)
        for _ in range(PRICE_ROUNDS):
            # the price is the best ratio so far, and grows until the choice stays the same
            counts = ranked._count_rows(ranked.speed(levels), deepest)
            # a row drafts as many levels as there are counts that include it
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
        """Return how many rows draft each level, such that tokens - price * seconds is greatest.

        Rows are sorted, best first, so those that draft a level are the first ones. A level is drafted by no more rows
        than the level above. From the deepest level up, this finds for each limit on the number of rows the best number
        of rows, given that the deeper levels then choose theirs.

        Args:
            price: Tokens that a second must bring, in tokens per second.
            deepest: The most levels of any row.

        Returns:
            For each of the `deepest` levels, from the first, the number of rows that draft it.
        """
        # choices[-1 - level][limit]: the number of rows that draft this level, at most `limit`
        choices: list[list[int]] = []
        # worth[limit]: the tokens minus price of the deeper levels if at most `limit` rows draft them
        worth = [0.0] * (len(self.forecasts) + 1)
        for level in reversed(range(deepest)):
            level_worth = []
            level_choices = []
            best = worth[0]
            best_count = 0
            # gain: what this level brings if the first `count` rows draft it, and worth what the deeper levels then
            # bring
            for count, gain in enumerate(self._gains(level, price)):
                if count and gain + worth[count] > best:
                    best = gain + worth[count]
                    best_count = count
                level_worth.append(best)
                level_choices.append(best_count)
            worth = level_worth
            choices.append(level_choices)
        # from the first level down: the number of rows of a level is the limit of the next
        counts = []
        count = len(self.forecasts)
        for level_choices in reversed(choices):
            count = level_choices[count]
            counts.append(count)
        return counts

    def _gains(self, level: int, price: float) -> list[float]:
        """Return a level's expected tokens - price * seconds, if the first 0, 1, 2, ... rows (sequences) draft it.

        Args:
            level: Of the draft, from 0.
            price: Tokens that each second must bring, in tokens per second.
        """
        # draft[rows that draft][levels]: seconds of drafting; read: the further seconds of the target for this level
        draft = self.costs.draft
        read = self.costs.read[level + 1] - self.costs.read[level]
        gains = [0.0]
        tokens = 0.0
        start = 0.0
        silent = 1.0  # the probability that none of these rows proposes the level
        for count, forecast in enumerate(self.forecasts, start=1):
            tokens += forecast.path_probs[level]
            # the seconds at the start of a draft count once, with its first level
            start += 0.0 if level else forecast.start
            silent *= 1 - forecast.proposed[level]
            drafting = draft[count][level + 1] - draft[count][level]
            gains.append(tokens - price * (start + drafting + (1 - silent) * read))
        return gains
