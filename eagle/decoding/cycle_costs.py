"""Seconds that a decoding cycle takes, by the number of texts, draft levels and longest text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.decoding.forward_costs import Costs, line

Grid = tuple[tuple[tuple[float, ...], ...], ...]
STEP = 64  # tokens of context between which costs are not told apart
PENDING = 2  # tokens that a draft's first forward reads, where little is accepted


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of drafting and of the rest of a cycle, `[batch size][context][levels]`, with equal depth for all texts.

    Costs are interpolated linearly between measured sizes and contexts, and extrapolated beyond the largest.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft: Grid
    read: Grid
    catch_up: float = 0.0  # seconds of a draft for each token that its first forward reads beyond PENDING ones

    @classmethod
    def of_one(cls, draft: Sequence[float], read: Sequence[float]) -> CycleCosts:
        """Costs of one text of any length."""
        return cls((1,), (0,), ((tuple(draft),),), ((tuple(read),),))

    @classmethod
    def of_forwards(
        cls, costs: Costs, drafter: Drafter, budget: Budget, drafts: Mapping[int, Sequence[float]]
    ) -> CycleCosts:
        """Costs of a budget's levels by bare forwards, at all numbers of texts and contexts that were measured.

        Drafts whose forwards have no costs take the seconds of their levels in `drafts`, by number of texts.
        """
        asked = [budget.within(level) for level in range(budget.depth + 1)]
        rows, nodes = [costs.rows(drafter, here, PENDING) for here in asked], [count_nodes(here) for here in asked]

        def draft_and_read(texts: int, context: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
            draft = [
                drafts[texts][level] if forwards is None else costs.draft(forwards, context, texts)
                for level, forwards in enumerate(rows)
            ]
            return tuple(draft), tuple(costs.read(1 + count, context, texts) for count in nodes)

        sizes = tuple(each.texts for each in (costs, *costs.batches))
        grid = [[draft_and_read(texts, context) for context in costs.contexts] for texts in sizes]
        draft, read = (tuple(tuple(pair[kind] for pair in row) for row in grid) for kind in (0, 1))
        return cls(sizes, costs.contexts, draft, read, costs.catch_up)

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


def count_nodes(budget: Budget) -> int:
    """The nodes of a full tree of this budget."""
    if budget.paths is not None:
        return sum(len(path) <= budget.depth for path in budget.paths)
    return min(budget.nodes, sum(budget.top_k**level for level in range(1, budget.depth + 1)))


@lru_cache(4096)
def _table(costs: CycleCosts, texts: int, context: int) -> CostTable:
    draft = [_line(costs, costs.draft, count, context) for count in range(1, texts + 1)]
    return CostTable([[0.0] * len(draft[0]), *draft], _line(costs, costs.read, texts, context))


def _line(costs: CycleCosts, grid: Grid, texts: int, context: int) -> list[float]:
    """[levels], between the sizes and contexts next to these."""
    at_context = [[line(costs.contexts, level, context) for level in zip(*rows, strict=True)] for rows in grid]
    return [line(costs.batch_sizes, level, texts) for level in zip(*at_context, strict=True)]
