"""Choose the draft depth of each text of a batch that maximises expected tokens per expected second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from eagle.decoding.acceptance import Forecast
from eagle.decoding.cycle_costs import CostTable

ROUNDS = 8  # of raising the price of a second; two or three find what no further one changes


@dataclass(frozen=True)
class Batch:
    """The texts of a cycle: the forecast of each draft, and the cycle's cost."""

    texts: Sequence[Forecast]
    costs: CostTable

    def tokens(self, levels: Sequence[int]) -> float:
        """Expected tokens of a cycle in which text i drafts `levels[i]` levels."""
        return len(levels) + sum(sum(text.reached[:depth]) for text, depth in zip(self.texts, levels, strict=True))

    def seconds(self, levels: Sequence[int]) -> float:
        """Expected seconds: a forward of the target is as long as the longest tree that is proposed."""
        read = self.costs.read
        total = read[0] + self.costs.drafting(levels)
        total += sum(text.start for text, depth in zip(self.texts, levels, strict=True) if depth)
        for level in range(max(levels)):
            drafting = [text for text, depth in zip(self.texts, levels, strict=True) if depth > level]
            silent = prod(1 - text.proposed[level] for text in drafting)
            total += (1 - silent) * (read[level + 1] - read[level])
        return total

    def speed(self, levels: Sequence[int]) -> float:
        """Expected tokens per expected second."""
        return self.tokens(levels) / self.seconds(levels)

    def best_levels(self, limits: Sequence[int], deepest: int) -> list[int]:
        """Levels of each text, at most `deepest`, then cut to each one's limit.

        The ratio is maximised by Dinkelbach's method: at a price of a second the most tokens less their price, then
        the price that this choice itself brings. At a price a level's worth depends on how many texts reach it, best
        texts first, and no more than reach the one before: a small dynamic program, see `_counts`.
        """
        limited = [_limit(text, limit) for text, limit in zip(self.texts, limits, strict=True)]
        order = sorted(range(len(limited)), key=lambda row: -sum(limited[row].reached))
        first = Batch([limited[row] for row in order], self.costs)
        levels = [0] * len(order)
        for _ in range(ROUNDS):
            before, counts = levels, first._counts(first.speed(levels), deepest)
            levels = [sum(count > rank for count in counts) for rank in range(len(order))]
            if levels == before:
                break
        chosen = dict(zip(order, levels, strict=True))
        return [min(chosen[row], limits[row]) for row in range(len(order))]

    def _counts(self, price: float, deepest: int) -> list[int]:
        """The number of texts that draft each level, maximising tokens minus `price` times seconds."""
        choices: list[list[int]] = []  # by level from the deepest, by the most texts there may be: the best number
        worth = [0.0] * (len(self.texts) + 1)  # of this level and those below it, by the most texts there may be
        for level in reversed(range(deepest)):
            bests, best, numbers, number = [], worth[0], [], 0
            for count, gain in enumerate(self._gains(level, price)):
                if count and gain + worth[count] > best:
                    best, number = gain + worth[count], count
                bests.append(best)
                numbers.append(number)
            worth = bests
            choices.append(numbers)
        counts, most = [], len(self.texts)
        for numbers in reversed(choices):
            most = numbers[most]
            counts.append(most)
        return counts

    def _gains(self, level: int, price: float) -> list[float]:
        """The gain of a level by the number of texts that draft it."""
        read, draft = self.costs.read[level + 1] - self.costs.read[level], self.costs.draft
        gains, tokens, start, silent = [0.0], 0.0, 0.0, 1.0
        for count, text in enumerate(self.texts, start=1):
            tokens += text.reached[level]
            start += 0.0 if level else text.start
            silent *= 1 - text.proposed[level]
            gains.append(tokens - price * (start + draft[count][level + 1] - draft[count][level] + (1 - silent) * read))
        return gains

    def trim(self, levels: Sequence[int], nodes: Sequence[int], most: int) -> list[int]:
        """Drop the levels with the fewest expected tokens per node until all trees together have at most `most` nodes.

        `nodes[n]` is the number of nodes of a tree of n levels.
        """
        levels = list(levels)
        while sum(nodes[depth] for depth in levels) > most:
            rows = [row for row, depth in enumerate(levels) if depth]
            worst = min(rows, key=lambda row: self._per_node(row, levels[row], nodes))
            levels[worst] -= 1
        return levels

    def _per_node(self, row: int, depth: int, nodes: Sequence[int]) -> float:
        """Expected tokens per node of a text's last level."""
        added = nodes[depth] - nodes[depth - 1]
        return self.texts[row].reached[depth - 1] / added if added else float("inf")


def _limit(text: Forecast, limit: int) -> Forecast:
    """The forecast without gains beyond the limit; a single text is cut at the limit afterwards instead."""
    if limit >= len(text.reached):
        return text
    limit = max(limit, 0)
    beyond = [0.0] * (len(text.reached) - limit)
    return Forecast([*text.reached[:limit], *beyond], [*text.proposed[:limit], *beyond], text.start)
