"""What a decoding cycle costs: bare forwards by rows, context and batch size, and what the loop takes beside them.

The policy of draft lengths, the tuner and the report all take their seconds from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter

Table = tuple[tuple[float, ...], ...]
Rows = tuple[tuple[int, ...], ...]
Grid = tuple[Table, ...]
PENDING = 2  # tokens that a draft's first forward reads, where little is accepted
STEP = 64  # costs of cycles are computed for every so many tokens of context


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards, in tables of one row per context and one column per number of tokens read.

    A drafter's forward for several sequences costs as much as one of all their rows after that context.
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Table
    # the drafter's over what was committed: right after the target, one row scored
    first: Table | None = None
    # the drafter's over a level of the tree: after a forward of its own, all rows scored
    level: Table | None = None
    # by levels: rows of each forward after a draft's first, of the drafter and budget that were measured
    forwards: Rows | None = field(default=None, kw_only=True)
    # by levels and accepted: rows of the next first forward
    unread: Rows | None = field(default=None, kw_only=True)
    texts: int = field(default=1, kw_only=True)  # that each forward of the target reads in a batch
    # the target's for larger batches, smallest first
    batches: tuple[Costs, ...] = field(default=(), kw_only=True)
    # of the drafter's first forward for each of many tokens
    catch_up: float = field(default=0.0, kw_only=True)
    # seconds outside the forwards: of a cycle, and of each forward of a draft
    outside: tuple[float, float] = field(default=(0.0, 0.0), kw_only=True)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Costs:
        """Return costs from JSON, as `dataclasses.asdict` gave it."""
        fields = {key: _tuples(value) for key, value in values.items() if key != "batches"}
        batches = tuple(cls.parse(batch) for batch in values.get("batches", ()))
        return cls(**fields, batches=batches)

    @property
    def by_texts(self) -> list[Costs]:
        """These costs and those of larger batches, smallest batch first."""
        return [self, *self.batches]

    def read(self, tokens: int, context: int, texts: int = 1) -> float:
        """Return the seconds of the target's forward of so many tokens of each sequence, and of the cycle around it."""
        sizes = []
        seconds = []
        for costs in self.by_texts:
            sizes.append(costs.texts)
            seconds.append(costs._look_up(costs.target, tokens, context) + costs.outside[0])
        return interpolate(sizes, seconds, texts)

    def draft(self, rows: Sequence[int], context: int, texts: int = 1) -> float:
        """Return the seconds of drafting; 0 where no costs are known.

        Args:
            rows: Tokens of each sequence that each forward of the drafter reads.
            context: Tokens of context.
            texts: Sequences in the batch.
        """
        if self.first is None or self.level is None or not rows:
            return 0.0
        sizes = [costs.texts for costs in self.by_texts]
        outside = interpolate(sizes, [costs.outside[1] for costs in self.by_texts], texts)
        seconds = len(rows) * outside + self._look_up(self.first, rows[0] * texts, context)
        return seconds + sum(
            self._look_up(self.level, count * texts, context) for count in rows[1:]
        )

    def cycle(self, nodes: int, rows: Sequence[int], context: int, texts: int = 1) -> float:
        """Return the seconds of a cycle that drafts `nodes` for each sequence in forwards of these `rows`."""
        return self.draft(rows, context, texts) + self.read(nodes + 1, context, texts)

    def rows(self, drafter: Drafter, budget: Budget, pending: int) -> tuple[int, ...] | None:
        """Return the rows of a draft's forwards, the first reading what is pending; None where they have no costs."""
        if budget.is_empty:
            return ()
        later = drafter.forwards(budget) if self.forwards is None else self.forwards[budget.depth]
        if later is None or self.first is None:
            return None
        return (pending, *later)

    def rows_along(
        self,
        drafter: Drafter,
        budgets: Iterable[Budget],
        outcomes: Iterable[tuple[int, int]],
    ) -> Iterator[tuple[int, ...] | None]:
        """Yield the `rows` of each of a sequence's drafts.

        Args:
            drafter: Whose drafts they are.
            budgets: Of each cycle.
            outcomes: How many levels were accepted, of how many that were drafted.
        """
        # what a draft's first forward reads: all that was committed since the last draft
        pending = 1
        for budget, (accepted, depth) in zip(budgets, outcomes, strict=True):
            yield self.rows(drafter, budget, pending)
            if budget.is_empty:
                pending += accepted + 1
            elif self.unread is None:
                pending = drafter.unread(accepted, depth)
            else:
                pending = self.unread[depth][accepted]

    def _look_up(self, table: Table, size: int, context: int) -> float:
        # bilinear: along sizes, then along contexts
        at_size = [interpolate(self.sizes, row, size) for row in table]
        return interpolate(self.contexts, at_size, context)


def interpolate(points: Sequence[int], values: Sequence[float], point: float) -> float:
    """Interpolate linearly between measured values, and extrapolate after the last point.

    The first value holds before the first point, and nothing is below 0.
    """
    # no extrapolation towards 0: a forward of one token costs more than a line would say
    if len(points) == 1 or point <= points[0]:
        return values[0]
    left = min(bisect_right(points, point), len(points) - 1) - 1
    weight = (point - points[left]) / (points[left + 1] - points[left])
    return max(values[left] + weight * (values[left + 1] - values[left]), 0.0)


def _tuples(value: Any) -> Any:
    """Return nested lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of drafting and of the rest of a cycle, `[batch size][context][levels]`, with equal depth in all rows.

    Costs are interpolated linearly between measured sizes and contexts, and extrapolated after the largest.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft: Grid
    read: Grid
    # seconds of a draft for each token that its first forward reads beyond PENDING ones
    catch_up: float = 0.0

    @classmethod
    def of_one(cls, draft: Sequence[float], read: Sequence[float]) -> CycleCosts:
        """Return the costs of one sequence of any length."""
        return cls((1,), (0,), ((tuple(draft),),), ((tuple(read),),))

    @classmethod
    def of_forwards(
        cls,
        costs: Costs,
        drafter: Drafter,
        budget: Budget,
        drafts: Mapping[int, Sequence[float]],
    ) -> CycleCosts:
        """Return the costs of a budget's levels by bare forwards, at all batch sizes and contexts that were measured.

        Args:
            costs: Of the forwards.
            drafter: Says which forwards a draft takes.
            budget: Whose levels these are.
            drafts: By batch size, the seconds of 0, 1, 2, ... levels, for drafts whose forwards have no costs.
        """
        levels = [budget.within(level) for level in range(budget.depth + 1)]
        rows = [costs.rows(drafter, level_budget, PENDING) for level_budget in levels]
        nodes = [count_nodes(level_budget) for level_budget in levels]
        batch_sizes = tuple(batch.texts for batch in costs.by_texts)

        def draft_seconds(texts: int, context: int) -> tuple[float, ...]:
            seconds = []
            for level, forwards in enumerate(rows):
                if forwards is None:
                    seconds.append(drafts[texts][level])
                else:
                    seconds.append(costs.draft(forwards, context, texts))
            return tuple(seconds)

        def read_seconds(texts: int, context: int) -> tuple[float, ...]:
            return tuple(costs.read(1 + count, context, texts) for count in nodes)

        # one grid each: [batch size][context][levels]
        draft = []
        read = []
        for texts in batch_sizes:
            draft.append(tuple(draft_seconds(texts, context) for context in costs.contexts))
            read.append(tuple(read_seconds(texts, context) for context in costs.contexts))
        return cls(
            batch_sizes=batch_sizes,
            contexts=costs.contexts,
            draft=tuple(draft),
            read=tuple(read),
            catch_up=costs.catch_up,
        )

    def at(self, texts: int, context: int) -> CostTable:
        """Return the costs of a cycle of `texts` rows, the longest of which has `context` tokens."""
        self.check_texts(texts)
        context = context // STEP * STEP if len(self.contexts) > 1 else 0
        return _make_table(self, texts, context)

    def check_texts(self, texts: int) -> None:
        """Refuse more rows at a time than the costs were measured for, where nothing can be extrapolated."""
        largest = self.batch_sizes[-1]
        if texts > largest and len(self.batch_sizes) == 1:
            raise ValueError(
                f"the policy knows what {largest} text{'s' * (largest > 1)} at a time cost{'s' * (largest == 1)}, got "
                f"{texts} side by side: measure more with Goodput.measure(target, drafter, prompts, batch_sizes=(1, 4))"
            )

    def interpolate(self, grid: Grid, texts: int, context: int) -> list[float]:
        """Return seconds by levels, between the batch sizes and contexts next to these."""
        # bilinear: along contexts, then along batch sizes
        by_size = []
        for table in grid:
            by_size.append(
                [
                    interpolate(self.contexts, seconds, context)
                    for seconds in zip(*table, strict=True)
                ]
            )
        return [
            interpolate(self.batch_sizes, seconds, texts) for seconds in zip(*by_size, strict=True)
        ]


@dataclass(frozen=True)
class CostTable:
    """Costs of a cycle for a given number of rows."""

    draft: list[list[float]]  # [rows that draft, levels]
    read: list[float]  # [levels of the deepest tree], of all rows

    def drafting(self, levels: Sequence[int]) -> float:
        """Return the seconds of drafting with these depths; a level costs by the number of rows that reach it."""
        # rows that stop early leave later levels to fewer rows
        seconds = self.draft[len(levels)][0]
        for level in range(1, max(levels) + 1):
            count = sum(depth >= level for depth in levels)
            seconds += self.draft[count][level] - self.draft[count][level - 1]
        return seconds


@lru_cache(4096)
def _make_table(costs: CycleCosts, texts: int, context: int) -> CostTable:
    """Return the costs of so many rows; every cycle asks, so tables are kept."""
    draft = [costs.interpolate(costs.draft, count, context) for count in range(1, texts + 1)]
    nothing = [0.0] * len(draft[0])
    return CostTable([nothing, *draft], costs.interpolate(costs.read, texts, context))


def count_nodes(budget: Budget) -> int:
    """Return the nodes of a full tree of this budget."""
    if budget.paths is not None:
        return sum(len(path) <= budget.depth for path in budget.paths)
    # every node has top_k children, until the budget's nodes run out
    full = sum(budget.top_k**level for level in range(1, budget.depth + 1))
    return min(budget.nodes, full)
