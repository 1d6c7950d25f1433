"""Seconds that a decoding cycle takes, by the number of texts, draft levels and longest text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Grid = tuple[tuple[tuple[float, ...], ...], ...]
STEP = 64  # tokens of context between which costs are not told apart


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of drafting and of the rest of a cycle, `[batch size][context][levels]`, with equal depth for all texts.

    Costs are interpolated linearly between measured sizes and contexts, and extrapolated beyond the largest batch.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft: Grid
    read: Grid

    @classmethod
    def of_one(cls, draft: Sequence[float], read: Sequence[float]) -> CycleCosts:
        """Costs of one text of any length."""
        return cls((1,), (0,), ((tuple(draft),),), ((tuple(read),),))

    def at(self, texts: int, context: int) -> CostTable:
        """The costs of a cycle of `texts` texts, the longest of which has `context` tokens."""
        self.check_texts(texts)
        return _table(self, texts, context // STEP * STEP if len(self.contexts) > 1 else 0)

    def check_texts(self, texts: int) -> None:
        """Refuse more texts at a time than the costs can be told of."""
        largest = self.batch_sizes[-1]
        if texts > largest and len(self.batch_sizes) == 1:
            raise ValueError(
                f"the policy knows what {largest} text{'s' * (largest > 1)} at a time cost{'s' * (largest == 1)}, got "
                f"{texts} side by side: measure more with Goodput.measure(target, drafter, prompts, batch_sizes=(1, 4))"
            )


@dataclass(frozen=True)
class CostTable:
    """Costs of a cycle for a given number of texts."""

    draft: list[list[float]]  # [texts that draft, levels]
    read: list[float]  # [levels of the deepest tree], of all texts

    def drafting(self, levels: Sequence[int]) -> float:
        """Seconds of drafting with these depths; a level costs as much as the number of texts that reach it."""
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
    """The row at a place: interpolated, extrapolated from the last two rows, or the first row before all places."""
    if len(places) == 1 or place <= places[0]:
        return list(rows[0])
    right = next((i for i, known in enumerate(places) if known >= place), len(places) - 1)
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    before, after = np.asarray(rows[right - 1]), np.asarray(rows[right])
    return np.maximum(before + share * (after - before), 0.0).tolist()
