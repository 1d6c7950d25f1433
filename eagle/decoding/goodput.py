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
# answers like the one ahead whose share of exploring a new policy may spend at once
FIRST_ANSWERS = 5
TOKENS_AHEAD = 50  # tokens that are counted on ahead: a request may end long before its limit
TOKENS_PER_CYCLE = 2.0  # with a draft, which tells the number of cycles ahead
ONLY = 0  # the number of a row by itself
GENERATION = ("sampling", "max_new_tokens", "stop", "max_tokens_in_cache")
HINT = "measure them with Goodput.measure(target, drafter, prompt, budget)"


class Goodput:
    """A policy, used in place of a `Budget`, that drafts the number of levels (or none) with the best speed.

    The rule is SmartSpec's (Liu et al. 2024, arXiv 2406.14066): maximise expected tokens per expected second of a
    cycle, from the cost of cycles and the recent rates at which each level was proposed and accepted, over all rows
    and for each. Before anything is known it drafts only where even a poor draft would pay. Statistics carry over from
    one request to the next.

    Args:
        draft: Seconds of drafting 0, 1, 2, ... levels, for one row; for several rows see `of_costs`.
        read: Seconds of the rest of such a cycle.
        budget: What the deepest draft is; by default a chain.
        share: The most of the time that goes into exploring deeper levels: one more, and another as long as all
            explored ones are accepted.
        memory: The number of cycles over which averages are taken.
        costs: In place of `draft` and `read`, for several rows.
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
        # refused in the order in which one check makes the next one possible
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
        self.draft = list(draft)
        self.read = list(read)
        self.costs = costs or CycleCosts.of_one(draft, read)
        self.exploration = share
        self.acceptance = Acceptance(depth, memory)
        self.spent = 0.0  # seconds of all cycles
        self.explored = 0.0  # seconds that exploring was expected to lose
        self.asked: dict[int, int] = {}  # levels of each row in this cycle
        self.context = 0  # of the longest row
        self.step = 1  # levels beyond the best that are explored next
        self.exploring = False

    @property
    def draw(self) -> Draw:
        """How children are chosen, the same in all its budgets."""
        return self.budget.draw

    @property
    def proposed(self) -> list[Average]:
        """How often each level was proposed when it was asked for, by all rows."""
        return self.acceptance.all.proposed

    @property
    def accepted(self) -> list[Average]:
        """How often each level was accepted when it was asked for and the one above was accepted, by all rows."""
        return self.acceptance.all.accepted

    @classmethod
    def of_costs(cls, costs: CycleCosts, budget: Budget, **options: Any) -> Goodput:
        """Return a policy with these costs; the options are those of the class."""
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
            batch_sizes: That are measured; with several prompts by default 1, 2, 4, 8 and 16.
            contexts: Lengths after which forwards are timed, by default that of the longest prompt. Prompts are
                repeated or cut to the first.
            clock: By default one of CPU seconds.
            options: Of `generate`, the sampling and the limit one for all.
        """
        rows = prompt_rows(prompt, None)
        prompts = [token_ids(prompt)] if rows is None else rows
        if batch_sizes is not None:
            batch_sizes = positive_ints("batch_sizes", batch_sizes)
        else:
            batch_sizes = (1,) if rows is None else BATCH_SIZES
        contexts = positive_ints("contexts", contexts) if contexts else ()
        if not prompts:
            raise ValueError("the prompts are an empty list, expected at least one")
        if budget is None:
            tuned = drafter.budget if isinstance(drafter, Drafter) else None
            budget = tuned or Budget.fixed(chain_paths(8))
        refuse_options(options.keys() - {*GENERATION}, GENERATION)
        check_call(target, drafter, options.get("sampling") or Sampling(), budget)
        if contexts:
            prompts = [_repeat(tokens, contexts[0]) for tokens in prompts]

        # forwards of all sizes that any level of the budget takes
        costs, cycles = measure_costs(
            target,
            drafter,
            prompts=prompts,
            budget=budget,
            options=options,
            contexts=contexts or (max(map(len, prompts)),),
            sizes=_rows_read(drafter, budget, max(batch_sizes)),
            batch_sizes=batch_sizes,
            batch_tokens=[1 + nodes for nodes in _nodes_by_level(budget)],
            rounds=ROUNDS,
            clock=clock,
        )
        drafts = {}
        if costs.rows(drafter, budget, PENDING) is None:  # no forwards have costs
            limit = {"limit": options["max_new_tokens"]} if "max_new_tokens" in options else {}
            for texts, timed in cycles.items():
                drafts[texts] = draft_levels(timed, budget.depth, **limit)
        return cls.of_costs(CycleCosts.of_forwards(costs, drafter, budget, drafts), budget)

    measured = measure  # its name in earlier releases

    def check_request(self, samplings: Sequence[Sampling], texts: int) -> None:
        """Refuse a lossy rule, of which its rates of acceptance say nothing, and more rows than were measured."""
        if any(sampling.typical is not None for sampling in samplings):
            raise ValueError(
                "the policy forecasts exact verification, and Sampling.typical is lossy: leave one of them out"
            )
        self.costs.check_texts(texts)

    def forecast(self, texts: int = 1, context: int | None = None) -> list[tuple[float, float]]:
        """Return (expected tokens, expected seconds) of a cycle by the number of levels that each row drafts."""
        # negative, as no row is, so that the rates of all rows are used
        new_rows = range(-texts, 0)
        batch = self._make_batch(
            new_rows, self.context if context is None else context, [0.0] * texts
        )
        forecasts = []
        for depth in range(self.budget.depth + 1):
            levels = [depth] * texts
            forecasts.append((batch.tokens(levels), batch.seconds(levels)))
        return forecasts

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Return the next cycle's budget of each row, at most `levels[row]` deep."""
        self.acceptance.keep_only(contexts)
        return self._choose_depths(levels, contexts)

    def within(self, levels: int) -> Budget:
        """Return the next cycle's budget of one row, at most `levels` deep."""
        return self._choose_depths({ONLY: levels}, {ONLY: self.context})[ONLY]

    def learn_rows(self, cycles: Mapping[int, Cycle]) -> None:
        """Update the rates of the requested levels and of these rows."""
        # a level beyond those asked for says nothing
        depths = {row: min(cycle.depth, self.asked[row]) for row, cycle in cycles.items()}
        self.context = max(cycle.context for cycle in cycles.values())
        costs = self.costs.at(len(cycles), self.context)
        self.spent += (
            costs.drafting([self.asked[row] for row in cycles]) + costs.read[max(depths.values())]
        )
        # explored levels that are all accepted call for deeper ones
        if self.exploring:
            deepest = max(self.asked.values())
            was_reached = any(
                self.asked[row] == deepest <= cycle.accepted for row, cycle in cycles.items()
            )
            self.step = self.step + 1 if was_reached else 1
        for row, cycle in cycles.items():
            self.acceptance.learn(row, self.asked[row], cycle, depths[row])

    def learn(self, cycle: Cycle) -> None:
        """Update the rates after a cycle of one row."""
        self.learn_rows({ONLY: cycle})

    def _choose_depths(
        self, levels: Mapping[int, int], contexts: Mapping[int, int]
    ) -> dict[int, Budget]:
        """Choose each row's depth: usually the best one, sometimes a deeper one to explore."""
        # what the drafter has not read of a row costs time at its next draft; spread over the cycles ahead, it counts
        # against drafting now
        starts = []
        spread = []
        for row, limit in levels.items():
            unread = contexts[row] - self.acceptance.read.get(row, 0) - PENDING
            start = self.costs.catch_up * max(unread, 0)
            starts.append(start)
            spread.append(start * min(TOKENS_PER_CYCLE / _tokens_ahead(limit), 1))
        batch = self._make_batch(levels, max(contexts.values()), spread)
        limits = [max(min(limit, self.budget.depth), 0) for limit in levels.values()]
        best = batch.best_levels(limits, self.budget.depth)

        # exploring may spend its share of the time so far, and at first that of a few answers ahead
        ahead = FIRST_ANSWERS * max(map(_tokens_ahead, levels.values())) * batch.costs.read[0]
        allowance = self.exploration * max(self.spent, ahead) - self.explored
        depths, loss = self._explore(batch, best, limits=limits, starts=starts, allowance=allowance)
        self.exploring = depths != best
        self.explored += loss
        self.asked = dict(zip(levels, depths, strict=True))
        return {row: self.budget.within(depth) for row, depth in self.asked.items()}

    def _make_batch(self, rows: Collection[int], context: int, starts: Iterable[float]) -> Batch:
        """Return the forecasts of these rows, with the seconds at which their drafts start."""
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
        """Return depths to explore, and the seconds that this is expected to lose.

        All rows go deeper, or half or a quarter of them: those whose drafts have the least to read first. Where the
        allowance is too small for any, these are the best depths.
        """
        deepest = min(max(best) + self.step, self.budget.depth)
        rows = [row for row, limit in enumerate(limits) if max(best) < deepest <= limit]
        rows.sort(key=lambda row: starts[row])
        speed = batch.speed(best)
        counts = {ceil(len(rows) / divisor) for divisor in (1, 2, 4)} - {0}
        for count in sorted(counts, reverse=True):
            deeper = list(best)
            for row in rows[:count]:
                deeper[row] = deepest
            # the time beyond what the best depths would take for as many tokens
            loss = batch.seconds(deeper) - batch.tokens(deeper) / speed
            # a row that would not draft now reads all that it has not read for this trial alone, of which the forecast
            # counts only one cycle's part
            loss += sum(
                starts[row] - batch.forecasts[row].start for row in rows[:count] if not best[row]
            )
            if loss <= allowance:
                return deeper, max(loss, 0.0)
        return best, 0.0


def _check_figures(name: str, seconds: Any) -> None:
    """Refuse what is no list of finite numbers."""
    if not isinstance(seconds, Sequence) or isinstance(seconds, (str, bytes)):
        raise ValueError(
            f"{name} is {seconds!r}, expected a list of seconds of 0, 1, 2, ... levels: {HINT}"
        )
    for figure in seconds:
        number(f"a figure of {name}", figure)


def _check_levels(name: str, seconds: Sequence[float], depth: int) -> None:
    """Refuse seconds of other levels than a budget has."""
    if len(seconds) != depth + 1 or min(seconds) < 0:
        raise ValueError(
            f"{name} holds {len(seconds)} figures from {min(seconds, default=0)} on, expected the seconds of "
            f"0 to {depth} levels: {HINT}"
        )


def _tokens_ahead(limit: int) -> int:
    """Return how many tokens of a row are counted on, given how many levels its limit leaves."""
    return max(min(limit, TOKENS_AHEAD), 1)


def _repeat(tokens: list[int], length: int) -> list[int]:
    """Return tokens, repeated or cut to a length."""
    times = -(-length // len(tokens))
    return (tokens * times)[:length]


def _nodes_by_level(budget: Budget) -> list[int]:
    """Return the nodes of full trees by levels."""
    return [count_nodes(budget.within(level)) for level in range(budget.depth + 1)]


def _rows_read(drafter: Drafter, budget: Budget, texts: int) -> set[int]:
    """Return the rows of the forwards of target and drafter, with one sequence and with so many."""
    rows = {PENDING, *(drafter.forwards(budget) or ())}
    of_batch = {texts * count for count in rows}
    of_target = {1 + nodes for nodes in _nodes_by_level(budget)}
    return {1} | rows | of_batch | of_target
