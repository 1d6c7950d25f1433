"""Drafting with a target's first layers, on the target's own keys and values of the texts."""

# B rows of text, K nodes of one level, R of all levels with the root, D target width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise, Reads
from eagle.core.tree import DraftTree
from eagle.drafters.parts.growth import grow_rows, level_rows
from eagle.drafters.parts.scoring import Seed


def exit_layer(layers: int | None, most: int) -> int:
    """The number of layers that draft, at most `most`; by default a third of the target's."""
    chosen = max(most // 3, 1) if layers is None else layers
    if not 1 <= chosen <= most:
        raise ValueError(f"layers is {layers}, expected 1 to {most}: so many of this target's layers can draft")
    return chosen


class ExitDrafter(Drafter):
    """Drafts with the target's first layers and a head on their output; it has no cache of its own.

    Every draft begins with a forward over the root; the target has read the accepted tokens.
    """

    reads = Reads(view=True, texts=True)
    layers: int | None = None
    view: Any = None

    def exit_logits(self, hidden: Tensor, view: Any) -> Tensor:
        """[.., V], from what the last of these layers left [.., D]: the target's final norm and LM head."""
        logits: Tensor = view.logits(hidden)
        return logits

    def bind_target(self, view: Any) -> None:
        """Take the target's layers."""
        exit_layer(self.layers, len(view))
        self.view = view

    def open_with(self, texts: Any) -> ExitState:
        """The state for several texts drafted together."""
        view = texts.view
        return ExitState(texts, exit_layer(self.layers, len(view)), lambda hidden: self.exit_logits(hidden, view))

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """The root alone."""
        return 1

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """The layers over so many rows behind so much text, in a cache of its own."""
        view, cache = self.view, self.view.new_cache()
        hidden = view.embed(torch.ones(1, context + rows, dtype=torch.long))
        positions, layers = torch.arange(context + rows)[None], exit_layer(self.layers, len(view))
        if context:
            cache.aim([0], commits=True)
            view.read(hidden[:, :context], positions[:, :context], None, cache, 0, layers)
        cache.length = context

        @torch.inference_mode()
        def run() -> Tensor:
            cache.aim([0])
            states = view.read(hidden[:, context:], positions[:, context:], None, cache, 0, layers)
            return self.exit_logits(states[0, -scored:], view)

        return run


class ExitState:
    """The noise of each text; everything else is in the target's state."""

    def __init__(self, texts: Any, layers: int, logits: Callable[[Tensor], Tensor]) -> None:
        self.texts, self.layers, self.logits = texts, layers, logits
        self.noises: dict[int, Noise | None] = {}
        self.confirmed: dict[int, int] = {}  # tokens, the root not counted

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row], self.confirmed[row] = noise, 0

    def fork(self, row: int, other: int) -> None:
        """Nothing to copy: the rows are the target's."""
        raise ValueError("drafts over the target's own rows cannot follow a text that goes on in two ways")

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.confirmed[row]

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from what the layers make of the roots."""
        trees: dict[int, DraftTree] = {}
        for rows in self.texts.groups(list(updates)):
            seeds = []
            for row in rows:
                self.confirmed[row] += len(updates[row].tokens)
                budget = _fit_columns(budgets[row], self.texts.room(row))
                seeds.append(Seed(updates[row].root, self.confirmed[row] + 1, budget, self.noises[row]))
            trees |= dict(zip(rows, self._grow(rows, seeds), strict=True))
        return trees

    def _grow(self, rows: list[int], seeds: list[Seed]) -> list[DraftTree]:
        """The trees of rows that may share a forward."""
        depths = [0]  # of the root, which every draft reads first, and of the nodes read behind it

        def read(rows_read: list[int], tokens: Tensor, seen: Tensor | None) -> Tensor:
            return self.logits(self.texts.ahead(rows_read, tokens, depths, seen, self.layers))

        def level(depth: int, numbers: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            if depth == 1:  # trees of another budget grow behind the same roots
                del depths[1:]
            depths.extend([depth] * tokens.shape[1])
            return read([rows[number] for number in numbers], tokens, F.pad(seen, (1, 0), value=True))

        first = read(rows, torch.tensor([[seed.root] for seed in seeds]), None)
        return grow_rows(seeds, first[:, 0], level)


def _fit_columns(budget: Budget, room: float) -> Budget:
    """The budget, as deep as the rows of its draft fit in so many columns."""
    while not budget.is_empty and 1 + sum(level_rows(budget)) > room:
        budget = budget.within(budget.depth - 1)
    return budget
