"""Adaptive draft length: each cycle uses the depths with the most expected tokens per second over all rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from eagle.core.arguments import (
    check_call,
    positive_ints,
    prompt_rows,
    refuse_options,
    token_ids,
)
from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Drafter
from eagle.core.sampling import Sampling, number
from eagle.core.trace import Cycle
from eagle.core.tree import chain_paths
from eagle.decoding.cycle_times import ROUNDS, draft_levels, measure_costs
from eagle.decoding.draft_depths import MIN_WEIGHT, Acceptance, Average, Batch
from eagle.decoding.forward_costs import PENDING, CycleCosts, count_nodes
from eagle.target.target import Target

BATCH_SIZES = (1, 2, 4, 8, 16)
# a new policy may spend at once what it may explore in the time of so many answers like the present one
FIRST_ANSWERS = 5
# the most tokens of a row that are expected to follow: a request may end long before its limit
TOKENS_AHEAD = 50
TOKENS_PER_CYCLE = 2.0  # assumed of cycles with a draft, to estimate how many cycles follow
ONLY = 0  # the row id where there is a single row
GENERATION = ("sampling", "max_new_tokens", "stop", "max_tokens_in_cache")
HINT = "measure them with Goodput.measure(target, drafter, prompt, budget)"


class Goodput:
    """A policy, used in place of a `Budget`, that drafts the number of levels (or none) with the best speed.

    The rule is SmartSpec's (Liu et al. 2024, arXiv 2406.14066): maximise expected tokens per expected second of a
    cycle, from the cost of cycles and the recent rates at which each level was proposed and accepted, over all rows
    and for each. Before anything is known it drafts only where even a poor draft would pay. Statistics carry over from
    one request to the next.
    """

    def __init__(
        self,
        draft: Sequence[float],
        read: Sequence[float],
        budget: Budget | None = None,
        *,
        share: float = 0.005,
        memory: float = 100.0,
        costs: CycleCosts | None = None,
    ) -> None:
        """Make a policy that chooses the draft depth of each cycle, without statistics yet.

        Args:
            draft: Seconds of drafting 0, 1, 2, ... levels, for one row; for several rows see `of_costs`.
            read: Seconds of the rest of a cycle with a tree of 0, 1, 2, ... levels.
            budget: The deepest draft; by default a chain.
            share: The most of the time, from 0 to 1, that may go into exploring levels deeper than the best ones: one
                level deeper, and one more as long as all explored levels are accepted.
            memory: The number of cycles over which averages are taken.
            costs: The costs for several rows, in place of `draft` and `read`. A row is one sequence of the batch.
        """
        # the order matters: each check relies on those before it
        _check_figures("draft", draft)
        _check_figures("read", read)
        share = number("share", share)
        memory = number("memory", memory)
        if not isinstance(costs, (CycleCosts, type(None))):
            raise ValueError(
                f"costs is {costs!r:.60}, expected CycleCosts, as Goodput.measure makes them"
            )
        if not isinstance(budget, (Budget, type(None))):
            raise ValueError(
                f"budget is {budget!r}, expected a Budget: as Budget(nodes=8, depth=4)"
            )
        self.budget = budget or Budget.fixed(chain_paths(len(draft) - 1))
        depth = self.budget.depth
        _check_levels("draft", draft, depth)
        _check_levels("read", read, depth)
        if not (read[0] > 0 and 0 <= share <= 1 and memory >= MIN_WEIGHT):
            raise ValueError(
                f"expected seconds to read the root, a share of 0 to 1, a memory of {MIN_WEIGHT:g} or more; got "
                f"{read[0]}, {share}, {memory}"
            )
        self.nodes = self.budget.nodes
        self.draft = list(draft)  # seconds by levels, of one row
        self.read = list(read)
        self.costs = costs or CycleCosts.of_one(draft, read)
        self.exploration = share
        self.acceptance = Acceptance(depth, memory)
        self.spent = 0.0  # expected seconds of all cycles so far
        self.explored = 0.0  # seconds that exploring was expected to lose so far
        self.requested: dict[int, int] = {}  # row id -> levels that it drafts in this cycle
        self.context = 0  # the length of the longest row in the last cycle
        self.explore_step = 1  # how many levels deeper than the best depth the next trial is
        self.exploring = False  # whether this cycle is a trial of deeper levels

    @property
    def draw(self) -> Draw:
        """How the children of a node are chosen where the target samples (`Budget.draw`); the same in all its budgets.

        The decoding loop asks for it before the first budget.
        """
        return self.budget.draw

    @property
    def proposed(self) -> list[Average]:
        """For each draft level, the average of how often the drafter proposed it when asked for, over all sequences."""
        return self.acceptance.all_rows.proposed

    @property
    def accepted(self) -> list[Average]:
        """For each draft level, the average of how often it was accepted when requested, over all sequences.

        Only cycles count that accepted the level above.
        """
        return self.acceptance.all_rows.accepted

    @classmethod
    def of_costs(cls, costs: CycleCosts, budget: Budget, **options: Any) -> Goodput:
        """Return a policy with these costs; the options are `share` and `memory` of the class.

        Args:
            costs: Seconds by batch size, context and levels.
            budget: The deepest draft.
        """
        # the class also wants the seconds of one row: those at the first batch size and context
        return cls(costs.draft[0][0], costs.read[0][0], budget, costs=costs, **options)

    @classmethod
    def measure(
        cls,
        target: Target,
        drafter: Drafter,
        prompt: Any,
        budget: Budget | None = None,
        batch_sizes: Sequence[int] | None = None,
        contexts: Sequence[int] = (),
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> Goodput:
        """Return a policy with costs from bare forwards, and from short generations that take all depths in turn.

        Args:
            target: The target.
            drafter: Any drafter.
            prompt: One, or several that take turns, as in `generate`.
            budget: The deepest draft; by default the drafter's, else a chain of eight.
            batch_sizes: The batch sizes to measure: by default 1, or 1, 2, 4, 8 and 16 with several prompts.
            contexts: How many tokens precede the timed forwards; by default as many as the longest prompt has.
                Otherwise prompts are repeated or cut to the first of these lengths.
            clock: By default one of CPU seconds (`clock_of`).
            options: Options of `generate`, with one sampling and one limit for all prompts.
        """
        prompts = prompt_rows(prompt, None)
        usual_sizes: Sequence[int] = BATCH_SIZES
        if prompts is None:
            prompts = [token_ids(prompt)]
            usual_sizes = (1,)
        if not prompts:
            raise ValueError("the prompts are an empty list, expected at least one")
        batch_sizes = positive_ints(
            "batch_sizes", usual_sizes if batch_sizes is None else batch_sizes
        )
        if contexts:
            contexts = positive_ints("contexts", contexts)
            # the short generations then have the first of these contexts
            prompts = [_repeat(tokens, contexts[0]) for tokens in prompts]
        else:
            contexts = (max(map(len, prompts)),)
        if budget is None:
            tuned = drafter.budget if isinstance(drafter, Drafter) else None
            budget = tuned or Budget.fixed(chain_paths(8))
        refuse_options(options.keys() - {*GENERATION}, GENERATION)
        check_call(target, drafter, options.get("sampling") or Sampling(), budget)

        # bare forwards are timed at every number of tokens that a cycle of this budget can read
        costs, cycles = measure_costs(
            target,
            drafter,
            prompts=prompts,
            budget=budget,
            options=options,
            contexts=contexts,
            sizes=_rows_read(drafter, budget, max(batch_sizes)),
            batch_sizes=batch_sizes,
            batch_tokens=[1 + nodes for nodes in _nodes_by_level(budget)],
            rounds=ROUNDS,
            clock=clock,
        )
        # a drafter without forwards that can be timed: its costs are those of whole drafts in short generations
        drafts = {}  # batch size -> seconds of drafting 0, 1, 2, ... levels
        if costs.rows(drafter, budget, PENDING) is None:
            limit = {"limit": options["max_new_tokens"]} if "max_new_tokens" in options else {}
            for batch_size, timed in cycles.items():
                drafts[batch_size] = draft_levels(timed, budget.depth, **limit)
        return cls.of_costs(CycleCosts.of_forwards(costs, drafter, budget, drafts), budget)

    measured = measure  # its name in earlier releases

    def check_request(self, samplings: Sequence[Sampling], batch_size: int) -> None:
        """Refuse a request that the policy cannot serve: typical acceptance, or a larger batch than was measured.

        The forecasts assume exact verification. Typical acceptance is lossy, and has other rates.

        Args:
            samplings: Of each request.
            batch_size: The most rows of a batch.
        """
        if any(sampling.typical is not None for sampling in samplings):
            raise ValueError(
                "the policy forecasts exact verification, and Sampling.typical is lossy: leave one of them out"
            )
        self.costs.check_batch_size(batch_size)

    def forecast(
        self, batch_size: int = 1, context: int | None = None
    ) -> list[tuple[float, float]]:
        """Return (expected tokens, expected seconds) of a cycle, if each row drafts 0, 1, 2, ... levels.

        Args:
            batch_size: The number of rows.
            context: The length of the longest row; by default that of the last cycle.
        """
        # row ids that no row has: rows without data of their own use the rates of all rows
        new_rows = range(-batch_size, 0)
        batch = self._make_batch(
            new_rows, self.context if context is None else context, [0.0] * batch_size
        )
        forecasts = []
        for depth in range(self.budget.depth + 1):
            levels = [depth] * batch_size
            forecasts.append((batch.tokens(levels), batch.seconds(levels)))
        return forecasts

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Return the next cycle's budget of each row, at most `levels[row]` deep.

        The decoding loop calls it before each draft. A row is one sequence of the batch.

        Args:
            levels: Row id -> the most levels that it may draft.
            contexts: Row id -> the length of its sequence.
        """
        self.acceptance.keep_only(contexts)
        return self._choose_depths(levels, contexts)

    def within(self, levels: int) -> Budget:
        """Return the next cycle's budget for a single sequence, at most `levels` deep; `share` does so for several."""
        return self._choose_depths({ONLY: levels}, {ONLY: self.context})[ONLY]

    def learn_rows(self, cycles: Mapping[int, Cycle]) -> None:
        """Learn from the cycle of these rows: rates of acceptance, the time spent, and how deep to explore next.

        A row is one sequence of the batch.

        Args:
            cycles: Row id -> the row's tree and what was accepted, for the rows that have not failed.
        """
        # levels beyond those that were requested are not counted
        depths = {row: min(cycle.depth, self.requested[row]) for row, cycle in cycles.items()}
        self.context = max(cycle.context for cycle in cycles.values())
        costs = self.costs.at(len(cycles), self.context)
        self.spent += (
            costs.drafting([self.requested[row] for row in cycles])
            + costs.read[max(depths.values())]
        )
        # if a row accepted all levels of a trial, the next trial is one level deeper
        if self.exploring:
            deepest = max(self.requested.values())
            was_reached = any(
                self.requested[row] == deepest <= cycle.accepted for row, cycle in cycles.items()
            )
            self.explore_step = self.explore_step + 1 if was_reached else 1
        for row, cycle in cycles.items():
            self.acceptance.learn(row, self.requested[row], cycle, depths[row])

    def learn(self, cycle: Cycle) -> None:
        """Learn from a cycle of a single sequence: its tree and what was accepted; `learn_rows` does so for several."""
        self.learn_rows({ONLY: cycle})

    def _choose_depths(
        self, levels: Mapping[int, int], contexts: Mapping[int, int]
    ) -> dict[int, Budget]:
        """Return each row's (sequence's) budget: usually of the best depth, sometimes of a deeper one to explore.

        Args:
            levels: Row id -> the most levels that it may draft.
            contexts: Row id -> the length of its sequence.
        """
        # The drafter must first read what it has not read of a row. This takes time only once, so the seconds are
        # spread over the cycles that are expected to follow. Every draft reads PENDING tokens, which the costs contain.
        starts = []  # of each row, all of these seconds
        spread = []  # of each row, the part of this cycle
        for row, limit in levels.items():
            unread = contexts[row] - self.acceptance.read_tokens.get(row, 0) - PENDING
            start = self.costs.catch_up * max(unread, 0)
            starts.append(start)
            spread.append(start * min(TOKENS_PER_CYCLE / _tokens_ahead(limit), 1))
        batch = self._make_batch(levels, max(contexts.values()), spread)
        limits = [max(min(limit, self.budget.depth), 0) for limit in levels.values()]
        best = batch.best_levels(limits, self.budget.depth)

        # exploring may lose its share of the time so far, or at first of the time that a few answers will take without
        # drafts (read[0] for each token)
        ahead = FIRST_ANSWERS * max(map(_tokens_ahead, levels.values())) * batch.costs.read[0]
        allowance = self.exploration * max(self.spent, ahead) - self.explored
        depths, loss = self._explore(batch, best, limits=limits, starts=starts, allowance=allowance)
        self.exploring = depths != best
        self.explored += loss
        self.requested = dict(zip(levels, depths, strict=True))
        return {row: self.budget.within(depth) for row, depth in self.requested.items()}

    def _make_batch(self, rows: Collection[int], context: int, starts: Iterable[float]) -> Batch:
        """Return what drafts of these rows (sequences) are expected to bring, and the costs of a cycle of so many rows.

        Args:
            rows: Row ids.
            context: The length of the longest row.
            starts: Of each row the seconds that the drafter first needs to read committed tokens.
        """
        forecasts = self.acceptance.forecasts(rows)
        started = [
            replace(forecast, start=start)
            for forecast, start in zip(forecasts, starts, strict=True)
        ]
        return Batch(started, self.costs.at(len(rows), context))

    def _explore(
        self,
        batch: Batch,
        best: list[int],
        limits: Sequence[int],
        starts: Sequence[float],
        allowance: float,
    ) -> tuple[list[int], float]:
        """Return the depths of a trial of deeper levels, and the seconds that it is expected to lose.

        All rows draft deeper, or half of them, or a quarter, as the allowance permits. Rows come first whose drafter
        has the fewest tokens to read before it can draft. If no trial is within the allowance, the best depths are
        returned. Exploring tells how often levels are accepted that would otherwise never be tried. A row is one
        sequence of the batch.

        Args:
            batch: Forecasts and costs of the rows.
            best: Of each row the best depth.
            limits: Of each row the most levels that it may draft.
            starts: Of each row the seconds that the drafter takes to read what it has not read.
            allowance: The most seconds that a trial may lose.
        """
        # the depth of the trial, and the rows that may draft as deep, those with the least to read first
        deepest = min(max(best) + self.explore_step, self.budget.depth)
        rows = [row for row, limit in enumerate(limits) if max(best) < deepest <= limit]
        rows.sort(key=lambda row: starts[row])
        speed = batch.speed(best)
        # all of these rows, half of them, a quarter; without rows there is no trial
        counts = {ceil(len(rows) / divisor) for divisor in (1, 2, 4)} - {0}
        for count in sorted(counts, reverse=True):
            deeper = list(best)
            for row in rows[:count]:
                deeper[row] = deepest
            # the seconds beyond those that the best depths would take for as many tokens
            loss = batch.seconds(deeper) - batch.tokens(deeper) / speed
            # For a row that would not draft now, the drafter reads everything only for this trial. The forecast counts
            # one cycle's part of these seconds, so the rest is added.
            loss += sum(
                starts[row] - batch.forecasts[row].start for row in rows[:count] if not best[row]
            )
            if loss <= allowance:
                return deeper, max(loss, 0.0)
        return best, 0.0


def _check_figures(name: str, seconds: Any) -> None:
    """Refuse the argument `name` of `Goodput`, seconds by number of draft levels, if it is no list of numbers."""
    if not isinstance(seconds, Sequence) or isinstance(seconds, (str, bytes)):
        raise ValueError(
            f"{name} is {seconds!r}, expected a list of seconds of 0, 1, 2, ... levels: {HINT}"
        )
    for figure in seconds:
        number(f"a figure of {name}", figure)


def _check_levels(name: str, seconds: Sequence[float], depth: int) -> None:
    """Refuse an argument `name` of `Goodput` whose seconds are negative, or not one for each of 0 to `depth` levels."""
    if len(seconds) != depth + 1 or min(seconds) < 0:
        raise ValueError(
            f"{name} holds {len(seconds)} figures from {min(seconds, default=0)} on, expected the seconds of "
            f"0 to {depth} levels: {HINT}"
        )


def _tokens_ahead(limit: int) -> int:
    """Return how many tokens of a sequence are expected to follow, at least 1; `limit` is what may still follow."""
    # a request may end long before its limit; 0 would be a divisor
    return max(min(limit, TOKENS_AHEAD), 1)


def _repeat(tokens: list[int], length: int) -> list[int]:
    """Return exactly `length` tokens, as a prompt of that length, by repeating or cutting these."""
    # rounded up
    times = -(-length // len(tokens))
    return (tokens * times)[:length]


def _nodes_by_level(budget: Budget) -> list[int]:
    """Return how many draft nodes a full tree of this budget has, if it is cut to 0, 1, 2, ... levels."""
    return [count_nodes(budget.within(level)) for level in range(budget.depth + 1)]


def _rows_read(drafter: Drafter, budget: Budget, batch_size: int) -> set[int]:
    """Return the numbers of tokens that forwards of target and drafter may read in one cycle, which are to be timed.

    Args:
        drafter: Whose forwards are timed.
        budget: The deepest draft.
        batch_size: The largest batch size: a drafter's forward for a batch costs as one over the tokens of all rows.
    """
    # the first forward of a draft usually reads PENDING tokens
    of_drafter = {PENDING, *(drafter.forwards(budget) or ())}
    of_batch = {batch_size * count for count in of_drafter}
    # the target reads the root and the nodes
    of_target = {1 + nodes for nodes in _nodes_by_level(budget)}
    return {1} | of_drafter | of_batch | of_target
