"""What a decoding cycle costs: bare forwards by rows, context and number of texts, and what the loop takes beside them.

The policy of draft lengths, the tuner and the report all take their seconds from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter

Table = tuple[tuple[float, ...], ...]
Rows = tuple[tuple[int, ...], ...]  # of each forward that a draft takes after its first


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards, in tables of one row per context and one column per number of tokens read.

    A drafter's forward for several texts costs as much as one of all their rows behind a text of that context.
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Table
    first: Table | None = None  # the drafter's over what was committed: right after the target, one row scored
    level: Table | None = None  # the drafter's over a level of the tree: after a forward of its own, all rows scored
    forwards: Rows | None = field(default=None, kw_only=True)  # by levels, of the drafter and budget that were measured
    unread: Rows | None = field(default=None, kw_only=True)  # by levels and accepted: rows of the next first forward
    texts: int = field(default=1, kw_only=True)  # that each forward of the target reads side by side
    batches: tuple[Costs, ...] = field(default=(), kw_only=True)  # the target's with more texts, fewest first
    catch_up: float = field(default=0.0, kw_only=True)  # of the drafter's first forward for each of many tokens
    outside: tuple[float, float] = field(
        default=(0.0, 0.0), kw_only=True
    )  # of the forwards: a cycle, a draft's forward

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Costs:
        """From JSON, as `dataclasses.asdict` gave it."""
        fields = {key: _tuples(value) for key, value in values.items() if key != "batches"}
        return cls(**fields, batches=tuple(cls.parse(batch) for batch in values.get("batches", ())))

    def read(self, tokens: int, context: int, texts: int = 1) -> float:
        """Seconds of the target's forward of so many tokens of each of so many texts, and of the cycle around it."""
        sizes = [self, *self.batches]
        seconds = [each._of(each.target, tokens, context) + each.outside[0] for each in sizes]
        return line([each.texts for each in sizes], seconds, texts)

    def draft(self, rows: Sequence[int], context: int, texts: int = 1) -> float:
        """Seconds of a draft in forwards of so many rows of each of so many texts; nothing where no costs are known."""
        if self.first is None or self.level is None or not rows:
            return 0.0
        sizes, (start, *levels) = [self, *self.batches], rows
        seconds = len(rows) * line([each.texts for each in sizes], [each.outside[1] for each in sizes], texts)
        seconds += self._of(self.first, start * texts, context)
        return seconds + sum(self._of(self.level, count * texts, context) for count in levels)

    def cycle(self, nodes: int, rows: Sequence[int], context: int, texts: int = 1) -> float:
        """Seconds of a cycle that drafts `nodes` for each text in forwards of these `rows`, and reads them."""
        return self.draft(rows, context, texts) + self.read(nodes + 1, context, texts)

    def rows(self, drafter: Drafter, budget: Budget, pending: int) -> tuple[int, ...] | None:
        """Rows of a draft's forwards, the first reading what is pending; None where they have no costs here."""
        if budget.is_empty:
            return ()
        levels = drafter.forwards(budget) if self.forwards is None else self.forwards[budget.depth]
        return None if levels is None or self.first is None else (pending, *levels)

    def rows_along(
        self, drafter: Drafter, budgets: Iterable[Budget], outcomes: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, ...] | None]:
        """The `rows` of each of a text's drafts, by its budgets, and what was accepted of how many levels."""
        pending = 1
        for budget, (accepted, depth) in zip(budgets, outcomes, strict=True):
            yield self.rows(drafter, budget, pending)
            if budget.is_empty:
                pending += accepted + 1
            else:
                pending = drafter.unread(accepted, depth) if self.unread is None else self.unread[depth][accepted]

    def _of(self, table: Table, size: int, context: int) -> float:
        return line(self.contexts, [line(self.sizes, row, size) for row in table], context)


def line(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Linear between the measured values next to a place and beyond the last; the first before all, nothing below 0."""
    if len(places) == 1 or place <= places[0]:
        return values[0]
    left = min(bisect_right(places, place), len(places) - 1) - 1
    share = (place - places[left]) / (places[left + 1] - places[left])
    return max(values[left] + share * (values[left + 1] - values[left]), 0.0)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
