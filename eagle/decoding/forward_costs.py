"""The seconds of a decoding cycle: bare forwards by tokens, context and batch size, and the time outside of them.

The policy of draft lengths, the tuner and the report all take their seconds from here. `Costs.batch_size` is the batch
size of a table, and `rows` are the tokens that a forward of the drafter reads of one sequence.
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
# the tokens that a draft's first forward usually reads: one accepted token and the root
PENDING = 2
# costs of a cycle are computed once for contexts that differ by less than so many tokens
STEP = 64


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards, in tables of one row per context and one column per number of tokens read.

    A drafter's forward for several sequences costs as much as one of all their rows after that context.
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Table
    # of the drafter's first forward in a draft, over newly committed tokens: only the last token gets logits
    first: Table | None = None
    # of the drafter's later forwards, over a level of the tree: all tokens get logits
    level: Table | None = None
    # forwards[levels]: tokens that each forward after the first reads, for the drafter and budget that were measured;
    # None: ask the drafter
    forwards: Rows | None = field(default=None, kw_only=True)
    # unread[levels][accepted]: tokens that the first forward of the next draft reads; None: ask the drafter
    unread: Rows | None = field(default=None, kw_only=True)
    batch_size: int = field(default=1, kw_only=True)  # the batch size of the target's forwards
    # the costs of the target's forwards at larger batch sizes, smallest first
    batches: tuple[Costs, ...] = field(default=(), kw_only=True)
    # seconds for each token that the drafter's first forward reads, if it reads many
    catch_up: float = field(default=0.0, kw_only=True)
    # seconds outside the forwards: of a cycle, and of each forward of a draft
    outside: tuple[float, float] = field(default=(0.0, 0.0), kw_only=True)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Costs:
        """Return costs from their JSON, as `dataclasses.asdict` wrote it, with lists made tuples again."""
        fields = {key: _tuples(value) for key, value in values.items() if key != "batches"}
        # its name in results of earlier versions
        if "texts" in fields:
            fields["batch_size"] = fields.pop("texts")
        batches = tuple(cls.parse(batch) for batch in values.get("batches", ()))
        return cls(**fields, batches=batches)

    @property
    def by_batch_size(self) -> list[Costs]:
        """The costs at each measured batch size, smallest first: these, and those of `batches`."""
        return [self, *self.batches]

    def read(self, tokens: int, context: int, batch_size: int = 1) -> float:
        """Return the seconds of the target's forward, and of the cycle around it without drafting.

        Args:
            tokens: How many tokens of each sequence the forward reads.
            context: How many tokens precede them.
            batch_size: The number of sequences; seconds are interpolated between measured batch sizes.
        """
        sizes = []
        seconds = []
        for costs in self.by_batch_size:
            sizes.append(costs.batch_size)
            # outside[0]: the seconds of a cycle outside of its forwards
            seconds.append(costs._look_up(costs.target, tokens, context) + costs.outside[0])
        return interpolate(sizes, seconds, batch_size)

    def draft(self, rows: Sequence[int], context: int, batch_size: int = 1) -> float:
        """Return the seconds of a draft for all sequences of a batch; 0 where the drafter's forwards were not timed.

        Args:
            rows: Of each forward of the drafter, how many tokens of a sequence it reads.
            context: Tokens before them.
            batch_size: Sequences in the batch. A forward of the drafter costs as one over the tokens of all of them.
        """
        if self.first is None or self.level is None or not rows:
            return 0.0
        sizes = [costs.batch_size for costs in self.by_batch_size]
        # outside[1]: the seconds of the loop around each forward of the drafter
        outside = interpolate(sizes, [costs.outside[1] for costs in self.by_batch_size], batch_size)
        seconds = len(rows) * outside + self._look_up(self.first, rows[0] * batch_size, context)
        return seconds + sum(
            self._look_up(self.level, count * batch_size, context) for count in rows[1:]
        )

    def cycle(self, nodes: int, rows: Sequence[int], context: int, batch_size: int = 1) -> float:
        """Return the seconds of a cycle: a draft, a forward of the target over it, and the time outside of forwards.

        Args:
            nodes: Draft tokens of each sequence, the root not counted.
            rows: Of each forward of the drafter, how many tokens of a sequence it reads.
            context: How many tokens precede the draft.
            batch_size: The number of sequences.
        """
        return self.draft(rows, context, batch_size) + self.read(nodes + 1, context, batch_size)

    def rows(self, drafter: Drafter, budget: Budget, pending: int) -> tuple[int, ...] | None:
        """Return how many tokens of a sequence each forward of a draft reads, in order; None if none were timed.

        Args:
            drafter: Whose draft it is.
            budget: Of the draft; one that allows no drafts takes no forwards.
            pending: How many tokens the first forward reads: those that the drafter has not read yet.
        """
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
        """Yield for each cycle of a sequence how many tokens each forward of its draft read, as `rows` returns them.

        It asks which tokens the drafter had not read yet when the cycle began.

        Args:
            drafter: Whose drafts they are.
            budgets: Of each cycle, in order.
            outcomes: Of each cycle, how many levels were accepted and how many were drafted.
        """
        # the tokens that the draft's first forward reads: those that were committed since the last draft
        pending = 1
        for budget, (accepted, depth) in zip(budgets, outcomes, strict=True):
            yield self.rows(drafter, budget, pending)
            # without a draft the drafter reads nothing, and the accepted tokens and the root wait for the next draft
            if budget.is_empty:
                pending += accepted + 1
            elif self.unread is None:
                pending = drafter.unread(accepted, depth)
            else:
                pending = self.unread[depth][accepted]

    def _look_up(self, table: Table, size: int, context: int) -> float:
        """Return the seconds of a forward over `size` tokens after `context` tokens, interpolated in a measured table.

        Args:
            table: [context][size], the median seconds of such forwards.
            size: How many tokens the forward reads.
            context: How many tokens precede them.
        """
        # bilinear: along sizes, then along contexts
        at_size = [interpolate(self.sizes, row, size) for row in table]
        return interpolate(self.contexts, at_size, context)


def interpolate(points: Sequence[int], values: Sequence[float], point: float) -> float:
    """Interpolate linearly between values measured at ascending points, and extrapolate after the last point.

    Before the first point its value is returned. The result is at least 0.

    Args:
        points: Such as batch sizes, contexts or numbers of tokens.
        values: Such as seconds, one for each point.
        point: Where the value is wanted.
    """
    # no extrapolation before the first point: a forward over one token takes longer than a line would say
    if len(points) == 1 or point <= points[0]:
        return values[0]
    left = min(bisect_right(points, point), len(points) - 1) - 1
    weight = (point - points[left]) / (points[left + 1] - points[left])
    return max(values[left] + weight * (values[left + 1] - values[left]), 0.0)


def _tuples(value: Any) -> Any:
    """Return a value from JSON with its lists, also nested ones, as tuples, so that it can be hashed."""
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of drafting, and of the rest of a cycle, by batch size, context and levels.

    All rows of the batch draft equally many levels. Seconds are interpolated linearly between measured batch sizes and
    contexts, and extrapolated after the largest.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft: Grid  # [batch size][context][levels], of drafting
    read: Grid  # [batch size][context][levels of the tree], of the rest of the cycle
    # seconds of a draft for each token that its first forward reads beyond PENDING ones
    catch_up: float = 0.0

    @classmethod
    def of_one(cls, draft: Sequence[float], read: Sequence[float]) -> CycleCosts:
        """Return costs that do not depend on the context, for one sequence at a time.

        A policy for a single sequence needs no more.

        Args:
            draft: Seconds of drafting 0, 1, 2, ... levels.
            read: Seconds of the rest of a cycle with a tree of 0, 1, 2, ... levels.
        """
        # the only batch size is 1, and the only context, 0, stands for all
        return cls((1,), (0,), ((tuple(draft),),), ((tuple(read),),))

    @classmethod
    def of_forwards(
        cls,
        costs: Costs,
        drafter: Drafter,
        budget: Budget,
        drafts: Mapping[int, Sequence[float]],
    ) -> CycleCosts:
        """Return the costs of cycles with 0, 1, 2, ... levels of a budget, from those of bare forwards.

        Args:
            costs: Of the forwards, at all batch sizes and contexts that were measured.
            drafter: Its `forwards` says which forwards a draft takes.
            budget: The deepest draft.
            drafts: Batch size -> seconds of drafting 0, 1, 2, ... levels, for a drafter without timed forwards.
        """
        # by number of levels: the budget cut to it, the tokens that each forward of its draft reads (None if none were
        # timed), and the draft nodes of its full tree
        levels = [budget.within(level) for level in range(budget.depth + 1)]
        rows = [costs.rows(drafter, level_budget, PENDING) for level_budget in levels]
        nodes = [count_nodes(level_budget) for level_budget in levels]
        batch_sizes = tuple(batch.batch_size for batch in costs.by_batch_size)

        def draft_seconds(batch_size: int, context: int) -> tuple[float, ...]:
            """Return the seconds of drafting 0, 1, 2, ... levels for all sequences of a batch together."""
            seconds = []
            for level, forwards in enumerate(rows):
                if forwards is None:
                    seconds.append(drafts[batch_size][level])
                else:
                    seconds.append(costs.draft(forwards, context, batch_size))
            return tuple(seconds)

        def read_seconds(batch_size: int, context: int) -> tuple[float, ...]:
            """Return the seconds of the rest of a cycle, mainly the target's forward, for 0, 1, 2, ... levels."""
            # 1 + count: the root and the draft nodes
            return tuple(costs.read(1 + count, context, batch_size) for count in nodes)

        # one grid each: [batch size][context][levels]
        draft = []
        read = []
        for batch_size in batch_sizes:
            draft.append(tuple(draft_seconds(batch_size, context) for context in costs.contexts))
            read.append(tuple(read_seconds(batch_size, context) for context in costs.contexts))
        return cls(
            batch_sizes=batch_sizes,
            contexts=costs.contexts,
            draft=tuple(draft),
            read=tuple(read),
            catch_up=costs.catch_up,
        )

    def at(self, batch_size: int, context: int) -> CostTable:
        """Return the costs of a cycle of `batch_size` sequences, the longest of which has `context` tokens before it.

        ValueError if the batch size is above the only one that was measured.
        """
        self.check_batch_size(batch_size)
        # a rounded context, so that the cached table serves many cycles; with one measured context all costs are equal
        context = context // STEP * STEP if len(self.contexts) > 1 else 0
        return _make_table(self, batch_size, context)

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse a batch size above the measured one if only one was measured; two or more are extrapolated."""
        largest = self.batch_sizes[-1]
        if batch_size > largest and len(self.batch_sizes) == 1:
            raise ValueError(
                f"the policy knows what {largest} sequence{'s' * (largest > 1)} at a time cost{'s' * (largest == 1)}, "
                f"got a batch of {batch_size}: measure larger ones with "
                "Goodput.measure(target, drafter, prompts, batch_sizes=(1, 4))"
            )

    def interpolate(self, grid: Grid, batch_size: int, context: int) -> list[float]:
        """Return seconds by number of levels at a batch size and a context, interpolated between measured ones.

        Args:
            grid: [batch size][context][levels], measured seconds.
            batch_size: The number of sequences.
            context: The tokens of the longest one before the cycle.
        """
        # bilinear: along contexts, then along batch sizes
        by_size = []  # [batch size][levels]
        for table in grid:
            by_size.append(
                [
                    interpolate(self.contexts, seconds, context)
                    for seconds in zip(*table, strict=True)
                ]
            )
        return [
            interpolate(self.batch_sizes, seconds, batch_size)
            for seconds in zip(*by_size, strict=True)
        ]


@dataclass(frozen=True)
class CostTable:
    """Seconds of a cycle for a given number of rows, of which some may not draft."""

    draft: list[list[float]]  # [number of rows that draft][levels], of drafting
    read: list[float]  # [levels of the deepest tree], of the rest of the cycle

    def drafting(self, levels: Sequence[int]) -> float:
        """Return the seconds of a draft in which row i of the batch drafts `levels[i]` levels.

        Rows are the sequences of the batch. All of them pass a level together, in one forward of the drafter.
        """
        # each level costs what it costs for as many rows as reach it
        seconds = self.draft[len(levels)][0]
        for level in range(1, max(levels) + 1):
            count = sum(depth >= level for depth in levels)
            seconds += self.draft[count][level] - self.draft[count][level - 1]
        return seconds


@lru_cache(4096)
def _make_table(costs: CycleCosts, batch_size: int, context: int) -> CostTable:
    """Return the costs of a cycle of `batch_size` rows (sequences) after `context` tokens.

    It is cached, because every cycle of the policy needs one.
    """
    draft = [costs.interpolate(costs.draft, count, context) for count in range(1, batch_size + 1)]
    # without a row that drafts, drafting takes no time
    nothing = [0.0] * len(draft[0])
    return CostTable([nothing, *draft], costs.interpolate(costs.read, batch_size, context))


def count_nodes(budget: Budget) -> int:
    """Return the number of draft nodes of a full tree of this budget, the root not counted.

    The target reads so many tokens, and the root.
    """
    # a fixed tree, of which the depth may have been cut: the length of a path is its node's level
    if budget.paths is not None:
        return sum(len(path) <= budget.depth for path in budget.paths)
    # every node has top_k children, until the budget's nodes run out
    full = sum(budget.top_k**level for level in range(1, budget.depth + 1))
    return min(budget.nodes, full)
