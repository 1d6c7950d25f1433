"""A drafter's drafts for several texts, in which an error of one text leaves the others as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, DraftState, Noise
from eagle.core.row_errors import FATAL, RowErrors
from eagle.core.tree import DraftTree

Errors = dict[int, Exception]


class RowDrafts:
    """One drafter state for all rows, until it raises an error that may be any row's: then one state for each.

    `open_state` makes a state, and `whole_update(row, update)` is the update of a state that has read nothing.
    """

    def __init__(
        self, open_state: Callable[[], DraftState], whole_update: Callable[[int, Committed], Committed]
    ) -> None:
        self.open_state, self.whole_update = open_state, whole_update
        self.shared = open_state()
        self.states: dict[int, DraftState] = {}
        self.noises: dict[int, Noise | None] = {}
        self.unread: set[int] = set()  # rows whose state has not read their text

    def admit(self, row: int, noise: Noise | None) -> None:
        """Begin a row."""
        self.noises[row], self.states[row] = noise, self.shared
        self.shared.admit(row, noise)

    def release(self, row: int, *, failed: bool = False) -> None:
        """Release a row; what a failed one leaves behind may not be releasable."""
        del self.noises[row]
        self.unread.discard(row)
        with suppress(*(Exception,) if failed else ()):
            self.states.pop(row).release(row)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[dict[int, DraftTree], Errors]:
        """The trees of the rows, and the errors of those that failed."""
        trees: dict[int, DraftTree] = {}
        errors: Errors = {}
        groups: dict[int, list[int]] = {}
        for row in updates:
            groups.setdefault(id(self.states[row]), []).append(row)
        for rows in groups.values():
            state = self.states[rows[0]]
            try:
                row_updates = {row: self._read_up(row, updates[row]) for row in rows}
                trees |= state.propose(row_updates, {row: budgets[row] for row in rows})
            except RowErrors as failed:
                trees |= failed.trees
                errors |= failed.errors
            except FATAL:
                raise
            except Exception as error:
                self._part(state)
                if len(rows) == 1:
                    errors[rows[0]] = error
                    continue
                again, failures = self.propose({row: updates[row] for row in rows}, budgets)
                if not failures or not again:  # no row's own, or every row's
                    raise
                trees |= again
                errors |= failures
        return trees, errors

    def _read_up(self, row: int, update: Committed) -> Committed:
        """The row's update, of its whole text if its state has read nothing."""
        if row not in self.unread:
            return update
        self.unread.remove(row)
        return self.whole_update(row, update)

    def _part(self, state: DraftState) -> None:
        """Give each row of a state that raised an error a new state of its own."""
        if state is self.shared:
            self.shared = self.open_state()
        for row in [row for row, held in self.states.items() if held is state]:
            self.states[row] = self.open_state()
            self.states[row].admit(row, self.noises[row])
            self.unread.add(row)
