"""Several drafters in order: the first one with a draft is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, Drafter, DraftState, Noise, Reads
from eagle.core.row_errors import RowErrors
from eagle.core.tree import DraftTree
from eagle.device import upload

TOKEN_BYTES = torch.long.itemsize


class FirstOf(Drafter):
    """Asks drafters in order until one proposes more than the root, for example lookup before a trained head.

    The root is the token that the target has chosen and not yet read. The output keeps its distribution if the
    committed sequence alone decides whether a drafter proposes: otherwise the target's sampling noise would influence
    which verification rule is used.

    The forwards of a draft depend on the drafter used, so its cost is the measured time.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """Take the drafters in the order in which they are asked; together they read all that any of them reads."""
        if not drafters:
            raise ValueError(
                "a list of drafters is empty: expected at least one, for none at all NoDrafter()"
            )
        self.drafters = tuple(drafters)
        # each tap once, in the order in which they are first asked for
        taps: dict[int, None] = {}
        for drafter in drafters:
            taps |= dict.fromkeys(drafter.taps)
        self.taps = tuple(taps)
        self.reads = Reads(
            choices=max(drafter.reads.choices for drafter in drafters),
            view=any(drafter.reads.view for drafter in drafters),
            kv_cache=any(drafter.reads.kv_cache for drafter in drafters),
            states=any(drafter.reads.states for drafter in drafters),
            followers=max(drafter.reads.followers for drafter in drafters),
        )
        self.rates_nodes = any(drafter.rates_nodes for drafter in drafters)

    def open(self) -> SeveralState:
        """Return a state with one state of each drafter, if none of them drafts on the target's own cache rows."""
        return self.open_with(None)

    def open_with(self, sequences: Any) -> SeveralState:
        """Return a state with one state of each drafter; those that draft on the target's cache get `sequences`.

        `sequences` are the rows of the target's KV cache (`TargetSequences`), None if no drafter asks for them.
        """
        states = [
            drafter.open_with(sequences) if drafter.reads.kv_cache else drafter.open()
            for drafter in self.drafters
        ]
        return SeveralState(self, states)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of all states, and of the updates that wait until a drafter after the first is asked.

        Args:
            tokens: The length of the sequence, the tokens of a draft included.
            column: The bytes that one token takes in the target, among them those of its state at one tap.
        """
        total = sum(drafter.kept_bytes(tokens, column) for drafter in self.drafters)
        for drafter in self.drafters[1:]:
            total += tokens * (TOKEN_BYTES + len(drafter.taps) * column.tapped)
        return total

    def bind_target(self, view: Any) -> None:
        """Pass the view, the target's layers, to the drafters that draft with them."""
        for drafter in self.drafters:
            if drafter.reads.view:
                drafter.bind_target(view)


class SeveralState:
    """The states of several drafters for a batch, and for each drafter the updates that it has not received yet.

    An update has the tokens that the target has committed in one cycle, with its states.
    """

    def __init__(self, several: FirstOf, states: list[DraftState]) -> None:
        self.several = several
        self.states = states
        # by row (a sequence of the batch), then by drafter: its updates, oldest first
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

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return each row's first tree with more than a root; a drafter that is not asked gets its updates later.

        Args:
            updates: By row, what the target has committed since the last call.
            budgets: By row, the limits on its tree.

        Raises:
            RowErrors: If some rows fail; it has the trees of the others.
        """
        # every drafter's updates are kept until it is asked, reduced to what it reads
        for index, drafter in enumerate(self.several.drafters):
            # where this drafter's taps are among the taps of all
            tap_indices = [self.several.taps.index(tap) for tap in drafter.taps]
            for row, update in updates.items():
                self.pending[row][index].append(_restrict(update, tap_indices, drafter.reads))
        trees = {row: DraftTree.chain([update.root]) for row, update in updates.items()}
        errors: dict[int, Exception] = {}
        for index, state in enumerate(self.states):
            # rows without a draft so far; a value that is no tree is refused later, by the decoding loop
            rows = [
                row
                for row, tree in trees.items()
                if row not in errors and isinstance(tree, DraftTree) and len(tree) == 1
            ]
            if not rows:
                break
            # the drafter may have missed several cycles of a row
            joined = {row: Committed.join(self.pending[row][index]) for row in rows}
            for row in rows:
                self.pending[row][index] = []
            # a row that fails ends alone, and the others go on
            try:
                trees |= state.propose(joined, {row: budgets[row] for row in rows})
            except RowErrors as failed:
                trees |= failed.trees
                errors |= failed.errors
        if errors:
            raise RowErrors({row: tree for row, tree in trees.items() if row not in errors}, errors)
        return trees


def _restrict(update: Committed, tap_indices: list[int], reads: Reads) -> Committed:
    """Return an update with what one drafter reads: its taps, and as many choices and followers as it asks for.

    Args:
        update: What the target has committed in one cycle, with all that any drafter reads.
        tap_indices: Where this drafter's taps are among the L taps of the features [T, L, D].
        reads: What else this drafter reads: the target's best tokens after each node of the last tree (choices), its
            states there, and the likely next tokens of all tokens that it has read (followers).
    """
    features = _select_taps(update.features, tap_indices)
    states = _select_taps(update.states, tap_indices) if reads.states else None
    choices = None
    if update.choices is not None and reads.choices:
        choices = update.choices[:, : reads.choices]
    followers = update.followers if reads.followers else None
    if followers is not None:
        followers = followers._replace(likeliest=followers.likeliest[:, : reads.followers])
    # the tree only says to which nodes the choices and states belong
    tree = update.tree if choices is not None or states is not None else None
    return replace(
        update, features=features, tree=tree, choices=choices, states=states, followers=followers
    )


def _select_taps(features: Tensor | None, tap_indices: list[int]) -> Tensor | None:
    """Return the states [T, len(tap_indices), D] of T tokens at some taps, from those [T, L, D] at all L taps.

    None if there are no states, or none of the taps is asked for.
    """
    if features is None or not tap_indices:
        return None
    return features.index_select(1, upload(torch.tensor(tap_indices), features.device))
