"""Several drafters in order: the first one with a draft is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, Drafter, DraftState, Noise, Reads
from eagle.core.row_errors import RowErrors
from eagle.core.tree import DraftTree
from eagle.device import upload

TOKEN = torch.long.itemsize


class FirstOf(Drafter):
    """Asks drafters in order until one proposes more than the root, for example lookup before a trained head.

    The output keeps its distribution if the committed text alone decides whether a drafter proposes: otherwise the
    target's noise would influence which verification rule is used.

    The forwards of a draft depend on the drafter used, so its cost is the measured time.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("a list of drafters is empty: expected at least one, for none at all NoDrafter()")
        self.drafters = tuple(drafters)
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        reads_of_each = [drafter.reads for drafter in drafters]
        view, texts = any(reads.view for reads in reads_of_each), any(reads.texts for reads in reads_of_each)
        self.reads = Reads(max(reads.choices for reads in reads_of_each), view, texts)
        self.rates_nodes = any(drafter.rates_nodes for drafter in drafters)
        self.places = [[self.taps.index(tap) for tap in drafter.taps] for drafter in drafters]

    def open(self) -> SeveralState:
        """A state with one state of each drafter."""
        return self.open_with(None)

    def open_with(self, texts: Any) -> SeveralState:
        """A state with one state of each drafter; those that read the target's texts get them."""
        states = [drafter.open_with(texts) if drafter.reads.texts else drafter.open() for drafter in self.drafters]
        return SeveralState(self, states)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """The states of all drafters, and tokens and features that wait until a drafter after the first is asked."""
        waiting = sum(TOKEN + len(drafter.taps) * column.tapped for drafter in self.drafters[1:])
        return tokens * waiting + sum(drafter.kept_bytes(tokens, column) for drafter in self.drafters)

    def bind_target(self, view: Any) -> None:
        """Pass the view to the drafters that read one."""
        for drafter in self.drafters:
            if drafter.reads.view:
                drafter.bind_target(view)


class SeveralState:
    """The states of several drafters, and for each the updates that it has not received yet."""

    def __init__(self, several: FirstOf, states: list[DraftState]) -> None:
        self.several, self.states = several, states
        self.pending: dict[int, list[list[Committed]]] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row for all drafters."""
        self.pending[row] = [[] for _ in self.states]
        for state in self.states:
            state.admit(row, noise)

    def fork(self, row: int, other: int) -> None:
        """Copy a row to a new one for all drafters."""
        self.pending[other] = [list(updates) for updates in self.pending[row]]
        for state in self.states:
            state.fork(row, other)

    def release(self, row: int) -> None:
        """Release a row for all drafters."""
        del self.pending[row]
        for state in self.states:
            state.release(row)

    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Each row's first tree with more than a root; a drafter that is not asked gets its updates later."""
        several, trees = self.several, {row: DraftTree.chain([update.root]) for row, update in updates.items()}
        errors: dict[int, Exception] = {}
        for number, (drafter, places) in enumerate(zip(several.drafters, several.places, strict=True)):
            for row, update in updates.items():
                self.pending[row][number].append(_restrict(update, places, drafter.reads.choices))
        for number, state in enumerate(self.states):
            rows = [row for row, tree in trees.items() if isinstance(tree, DraftTree) and len(tree) == 1]
            rows = [row for row in rows if row not in errors]  # what is no tree is refused later
            if not rows:
                break
            asked = {row: Committed.join(self.pending[row][number]) for row in rows}
            for row in rows:
                self.pending[row][number] = []
            try:
                trees |= state.propose(asked, {row: budgets[row] for row in rows})
            except RowErrors as failed:
                trees |= failed.trees
                errors |= failed.errors
        if errors:
            raise RowErrors({row: tree for row, tree in trees.items() if row not in errors}, errors)
        return trees


def _restrict(update: Committed, places: list[int], choices: int) -> Committed:
    """The update reduced to the features at `places` and to `choices` choices."""
    features = None
    if places and update.features is not None:
        features = update.features.index_select(1, upload(torch.tensor(places), update.features.device))
    if update.choices is None or not choices:
        return replace(update, features=features, tree=None, choices=None)
    return replace(update, features=features, choices=update.choices[:, :choices])
