"""What cycles of several texts cost: seconds by the number of texts, by levels, and by the longest text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Grid = tuple[tuple[tuple[float, ...], ...], ...]
STEP = 64  # tokens of context between which costs are not told apart


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of drafting, and of the rest of a cycle: `[batch size][context][levels]`, all texts as deep as the other.

    Between measured sizes and contexts costs are linear; beyond the largest batch they go on as they grew before.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft: Grid
    read: Grid

    @classmethod
    def of_one(cls, draft: Sequence[float], read: Sequence[float]) -> CycleCosts:
        """Costs of one text whatever its length."""
        return cls((1,), (0,), ((tuple(draft),),), ((tuple(read),),))

    def at(self, texts: int, context: int) -> CostTable:
        """The costs of a cycle of so many texts, of which the longest has `context` tokens."""
        largest = self.batch_sizes[-1]
        if texts > largest and len(self.batch_sizes) == 1:
            raise ValueError(
                f"the policy knows what {largest} text{'s' * (largest > 1)} at a time cost{'s' * (largest == 1)}, got "
                f"{texts} side by side: measure more with Goodput.measure(target, drafter, prompts, batch_sizes=(1, 4))"
            )
        return _table(self, texts, context // STEP * STEP if len(self.contexts) > 1 else 0)


@dataclass(frozen=True)
class CostTable:
    """Costs of a cycle of a certain number of texts."""

    draft: list[list[float]]  # [texts that draft, levels]
    read: list[float]  # [levels of the deepest tree], of all texts

    def drafting(self, levels: Sequence[int]) -> float:
        """Seconds of drafts of so many levels: each level costs what it does with the texts that reach it."""
        seconds, count = self.draft[len(levels)][0], len(levels)
        for level in range(1, max(levels) + 1):
            count = sum(depth >= level for depth in levels)
            seconds += self.draft[count][level] - self.draft[count][level - 1]
        return seconds


@lru_cache(4096)
def _table(costs: CycleCosts, texts: int, context: int) -> CostTable:
    draft = [[0.0] * len(costs.draft[0][0])]
    draft += [
        _line(costs.batch_sizes, _at_context(costs, costs.draft, context), count) for count in range(1, texts + 1)
    ]
    return CostTable(draft, _line(costs.batch_sizes, _at_context(costs, costs.read, context), texts))


def _at_context(costs: CycleCosts, grid: Grid, context: int) -> list[list[float]]:
    """[batch size][levels] at a context."""
    return [_line(costs.contexts, rows, context) for rows in grid]


def _line(places: Sequence[int], rows: Sequence[Sequence[float]], place: int) -> list[float]:
    """The row at a place: between its neighbours, beyond the last two on their line, before the first that one's."""
    if len(places) == 1 or place <= places[0]:
        return list(rows[0])
    right = next((i for i, known in enumerate(places) if known >= place), len(places) - 1)
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    before, after = np.asarray(rows[right - 1]), np.asarray(rows[right])
    return np.maximum(before + share * (after - before), 0.0).tolist()
