"""Adaptive draft length: each cycle uses the depths with the most expected tokens per second over all texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from eagle.core.arguments import check_call, positive_ints, prompt_rows, refuse_options, token_ids
from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Drafter
from eagle.core.sampling import Sampling, number, whole
from eagle.core.trace import Cycle
from eagle.core.tree import chain_paths
from eagle.decoding.acceptance import LEAST, Acceptance, Average
from eagle.decoding.allocate import Batch
from eagle.decoding.cycle_costs import PENDING, CycleCosts, count_nodes
from eagle.decoding.cycle_times import ROUNDS, draft_levels, measure_costs
from eagle.target.target import Target

BATCH_SIZES = (1, 2, 4, 8, 16)
FIRST = 5  # answers like the one ahead whose share of exploring a new policy may spend at once
SHORT = 50  # tokens that are counted on ahead: a text may end long before its limit
WRITTEN = 2.0  # tokens of a cycle with a draft, which tell the number of cycles ahead
ONLY = 0  # the number of a text by itself
GENERATION = ("sampling", "max_new_tokens", "stop", "max_tokens_in_cache")
HINT = "measure them with Goodput.measure(target, drafter, prompt, budget)"


class Goodput:
    """A policy, used in place of a `Budget`, that drafts the number of levels (or none) with the best speed.

    The rule is SmartSpec's (Liu et al. 2024, arXiv 2406.14066): maximise expected tokens per expected second of a
    cycle, from the cost of cycles and the recent rates at which each level was proposed and accepted, over all texts
    and for each. Before anything is known it drafts only where even a poor draft would pay. At most `share` of the time
    goes into exploring deeper levels: one more, and another as long as all explored ones are accepted. Statistics carry
    over from one request to the next.

    `draft[n]` and `read[n]` are the seconds of drafting n levels and of the rest of such a cycle, for one text; for
    several texts see `of_costs`. `memory` is the number of cycles over which averages are taken,
    `max_nodes` the most draft nodes of all texts in one forward.
    """

    def __init__(
        self,
        draft: Sequence[float],
        read: Sequence[float],
        budget: Budget | None = None,
        *,
        share: float = 0.005,
        memory: float = 100.0,
        max_nodes: int | None = None,
        costs: CycleCosts | None = None,
    ) -> None:
        for name, seconds in {"draft": draft, "read": read}.items():
            if not isinstance(seconds, Sequence) or isinstance(seconds, (str, bytes)):
                raise ValueError(f"{name} is {seconds!r}, expected a list of seconds of 0, 1, 2, ... levels: {HINT}")
            for figure in seconds:
                number(f"a figure of {name}", figure)
        share, memory = number("share", share), number("memory", memory)
        max_nodes = None if max_nodes is None else whole("max_nodes", max_nodes)
        if not isinstance(costs, (CycleCosts, type(None))):
            raise ValueError(f"costs is {costs!r:.60}, expected CycleCosts, as Goodput.measure makes them")
        if not isinstance(budget, (Budget, type(None))):
            raise ValueError(f"budget is {budget!r}, expected a Budget: as Budget(nodes=8, depth=4)")
        self.budget = budget or Budget.fixed(chain_paths(len(draft) - 1))
        self.nodes, depth = self.budget.nodes, self.budget.depth
        for name, seconds in {"draft": draft, "read": read}.items():
            if len(seconds) != depth + 1 or min(seconds) < 0:
                raise ValueError(
                    f"{name} holds {len(seconds)} figures from {min(seconds, default=0)} on, expected the seconds of "
                    f"0 to {depth} levels: {HINT}"
                )
        if not (read[0] > 0 and 0 <= share <= 1 and memory >= LEAST):
            raise ValueError(
                f"expected seconds to read the root, a share of 0 to 1, a memory of {LEAST:g} or more; got {read[0]}, "
                f"{share}, {memory}"
            )
        if max_nodes is not None and max_nodes < 0:
            raise ValueError(f"max_nodes is {max_nodes}, expected 0 or more draft nodes of all texts, or None")
        self.draft, self.read, self.max_nodes = list(draft), list(read), max_nodes
        self.costs = costs or CycleCosts.of_one(draft, read)
        self.exploration, self.memory = share, memory
        self.nodes_at = _nodes_at(self.budget)
        self.acceptance = Acceptance(depth, memory)
        self.spent = self.explored = 0.0  # seconds
        self.asked: dict[int, int] = {}  # levels of each text in this cycle
        self.context = 0  # of the longest text
        self.step = 1  # levels beyond the best that are explored next
        self.exploring = False

    @property
    def draw(self) -> Draw:
        """How children are drawn, the same in all its budgets."""
        return self.budget.draw

    @property
    def proposed(self) -> list[Average]:
        """How often each level was proposed when it was asked for, by all texts."""
        return self.acceptance.all.proposed

    @property
    def accepted(self) -> list[Average]:
        """How often each level was accepted when it was asked for and the one above was accepted, by all texts."""
        return self.acceptance.all.accepted

    @classmethod
    def of_costs(cls, costs: CycleCosts, budget: Budget, **options: Any) -> Goodput:
        """A policy with these costs; the options are those of the class."""
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
        max_nodes: int | None = None,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> Goodput:
        """A policy with costs from bare forwards, and from short generations that alternate between all draft depths.

        With several prompts, batches of 1, 2, 4, 8 and 16 texts (or `batch_sizes`) are measured, and the prompts take
        turns. Forwards are timed behind `contexts`, or behind the longest prompt; with `contexts` the prompts are
        repeated or cut to the first. The options are those of `generate`, the sampling and the limit one for all.
        The budget defaults to the drafter's, else a chain of eight. `clock` is by default one of CPU seconds.
        """
        rows = prompt_rows(prompt, None)
        prompts = [token_ids(prompt)] if rows is None else rows
        sizes: tuple[int, ...] = (1,) if rows is None else BATCH_SIZES
        sizes = sizes if batch_sizes is None else positive_ints("batch_sizes", batch_sizes)
        contexts = positive_ints("contexts", contexts) if contexts else ()
        max_nodes = None if max_nodes is None else whole("max_nodes", max_nodes)
        if not prompts:
            raise ValueError("the prompts are an empty list, expected at least one")
        tuned = drafter.budget if isinstance(drafter, Drafter) else None
        budget = budget or tuned or Budget.fixed(chain_paths(8))
        refuse_options(options.keys() - {*GENERATION}, GENERATION)
        check_call(target, drafter, options.get("sampling") or Sampling(), budget)
        if contexts:
            prompts = [(tokens * -(-contexts[0] // len(tokens)))[: contexts[0]] for tokens in prompts]
        costs, cycles = measure_costs(
            target,
            drafter,
            prompts,
            budget,
            options,
            contexts=contexts or (max(map(len, prompts)),),
            sizes=_rows_read(drafter, budget, max(sizes)),
            batch_sizes=sizes,
            batch_tokens=[1 + nodes for nodes in _nodes_at(budget)],
            rounds=ROUNDS,
            clock=clock,
        )
        drafts = {}
        if costs.rows(drafter, budget, PENDING) is None:  # no forwards have costs
            limit = {"limit": options["max_new_tokens"]} if "max_new_tokens" in options else {}
            drafts = {texts: draft_levels(each, budget.depth, **limit) for texts, each in cycles.items()}
        return cls.of_costs(CycleCosts.of_forwards(costs, drafter, budget, drafts), budget, max_nodes=max_nodes)

    measured = measure  # its name in earlier releases

    def check_request(self, samplings: Sequence[Sampling], texts: int) -> None:
        """Refuse a lossy rule, of which its rates of acceptance say nothing, and more texts than were measured."""
        if any(sampling.typical is not None for sampling in samplings):
            raise ValueError(
                "the policy forecasts exact verification, and Sampling.typical is lossy: leave one of them out"
            )
        self.costs.check_texts(texts)

    def forecast(self, texts: int = 1, context: int | None = None) -> list[tuple[float, float]]:
        """(expected tokens, expected seconds) of a cycle by the number of levels that each of so many texts drafts."""
        new_rows = range(-texts, 0)  # numbers that no text has, so that no rates of its own are known
        batch = self._batch(new_rows, self.context if context is None else context, [0.0] * texts)
        depths = [[level] * texts for level in range(self.budget.depth + 1)]
        return [(batch.tokens(levels), batch.seconds(levels)) for levels in depths]

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """The next cycle's budget of each text, at most `levels[row]` deep."""
        self.acceptance.keep_only(contexts)
        return self._share(levels, contexts)

    def within(self, levels: int) -> Budget:
        """The next cycle's budget of one text, at most `levels` deep."""
        return self._share({ONLY: levels}, {ONLY: self.context})[ONLY]

    def learn_rows(self, cycles: Mapping[int, Cycle]) -> None:
        """Update the rates of the requested levels and of these texts."""
        depths = {row: min(cycle.depth, self.asked[row]) for row, cycle in cycles.items()}
        self.context = max(cycle.context for cycle in cycles.values())
        costs = self.costs.at(len(cycles), self.context)
        self.spent += costs.drafting([self.asked[row] for row in cycles]) + costs.read[max(depths.values())]
        if self.exploring:
            deepest = max(self.asked.values())
            reached = any(self.asked[row] == deepest <= cycle.accepted for row, cycle in cycles.items())
            self.step = self.step + 1 if reached else 1
        for row, cycle in cycles.items():
            self.acceptance.learn(row, self.asked[row], cycle, depths[row])

    def learn(self, cycle: Cycle) -> None:
        """Update the rates after a cycle of one text."""
        self.learn_rows({ONLY: cycle})

    def _share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Choose each text's depth: usually the best one, sometimes a deeper one to explore."""
        unread = [contexts[row] - self.acceptance.read.get(row, 0) - PENDING for row in levels]
        starts = [self.costs.catch_up * max(tokens, 0) for tokens in unread]
        left = [max(min(tokens, SHORT), 1) for tokens in levels.values()]
        spread = [start * min(WRITTEN / tokens, 1) for start, tokens in zip(starts, left, strict=True)]
        batch = self._batch(levels, max(contexts.values()), spread)
        limits = [max(min(limit, self.budget.depth), 0) for limit in levels.values()]
        best = self._best(batch, limits)
        ahead = FIRST * max(left) * batch.costs.read[0]
        most = self.exploration * max(self.spent, ahead) - self.explored
        deeper, loss = self._deepen(batch, best, limits, starts, most)
        self.exploring, self.explored = deeper != best, self.explored + loss
        self.asked = dict(zip(levels, deeper, strict=True))
        return {row: self.budget.within(depth) for row, depth in self.asked.items()}

    def _batch(self, rows: Collection[int], context: int, starts: Iterable[float]) -> Batch:
        texts = zip(self.acceptance.forecasts(rows), starts, strict=True)
        return Batch([replace(text, start=start) for text, start in texts], self.costs.at(len(rows), context))

    def _deepen(
        self, batch: Batch, best: list[int], limits: Sequence[int], starts: Sequence[float], most: float
    ) -> tuple[list[int], float]:
        """Depths to explore, and the seconds that this is expected to lose; the best depths where `most` are too few.

        All texts go deeper, or half or a quarter of them: those whose drafts have the least to read first.
        """
        deepest = min(max(best) + self.step, self.budget.depth)
        rows = [row for row, limit in enumerate(limits) if max(best) < deepest <= limit]
        rows.sort(key=lambda row: starts[row])
        speed = batch.speed(best)
        for count in sorted({ceil(len(rows) / part) for part in (1, 2, 4)} - {0}, reverse=True):
            deeper = list(best)
            for row in rows[:count]:
                deeper[row] = deepest
            loss = batch.seconds(deeper) - batch.tokens(deeper) / speed
            loss += sum(starts[row] - batch.texts[row].start for row in rows[:count] if not best[row])
            if loss <= most and self._fits(deeper):
                return deeper, max(loss, 0.0)
        return best, 0.0

    def _best(self, batch: Batch, limits: list[int]) -> list[int]:
        """The depths with the most expected tokens per second, within the limit on nodes."""
        best = batch.best_levels(limits, self.budget.depth)
        if self.max_nodes is None or self._fits(best):
            return best
        every = [batch.best_levels(limits, deepest) for deepest in range(max(best) + 1)]
        return max((batch.trim(levels, self.nodes_at, self.max_nodes) for levels in every), key=batch.speed)

    def _fits(self, levels: Sequence[int]) -> bool:
        return self.max_nodes is None or sum(self.nodes_at[depth] for depth in levels) <= self.max_nodes


def goodput_budget(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    budget: Budget | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    **options: Any,
) -> Goodput:
    """A policy for prompts decoded in batches of these sizes, with costs at short and at long contexts."""
    lengths, room = [len(prompt) for prompt in prompts], options.get("max_new_tokens", 256)
    longest = max(max(lengths), min(lengths) + room)
    if target.max_positions is not None:
        longest = min(longest, target.max_positions - room)
    contexts = sorted({min(min(lengths), longest), longest})
    return Goodput.measure(target, drafter, [list(p) for p in prompts], budget, batch_sizes, contexts, **options)


def _nodes_at(budget: Budget) -> list[int]:
    """The nodes of full trees by levels."""
    return [count_nodes(budget.within(level)) for level in range(budget.depth + 1)]


def _rows_read(drafter: Drafter, budget: Budget, texts: int) -> set[int]:
    """The rows of the forwards of target and drafter, with one text and with so many."""
    drafted = {PENDING, *(drafter.forwards(budget) or ())}
    return {1, *drafted, *(texts * rows for rows in drafted), *(1 + nodes for nodes in _nodes_at(budget))}
