"""The rows of a decoding: one row is one request, with its trace, its end, and its share of a drafter's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from eagle.core.arguments import check_unused
from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Committed, DraftState, Noise
from eagle.core.row_errors import FATAL, RowErrors
from eagle.core.trace import Trace
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose
from eagle.decoding.stops import Stops

Observe = Callable[[TargetOutput, list[int], Choose], None]
"""Told of each forward of a row: the target's output, the accepted nodes, and what chose after them."""
Errors = dict[int, Exception]


@dataclass(slots=True)
class Row:
    """A request that waits to be decoded or is being decoded."""

    row_id: int
    trace: Trace
    stops: Stops
    limit: int
    choose: Choose
    first: int | None = None  # the token after the prompt, where the caller knows it
    draw: Draw | None = None  # how its drafts are chosen, the same in the whole request
    observe: Observe | None = None
    pending: list[Committed] = field(default_factory=list)  # since the drafter was asked last

    @contextmanager
    def fail_alone(self) -> Iterator[None]:
        """Return a context in which an error ends this row and no other."""
        try:
            yield
        except FATAL:
            # of the machine: the next row would meet it as well
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End this row with an error, which its trace keeps."""
        self.trace.error = error
        self.trace.finish = "error"

    @property
    def is_running(self) -> bool:
        """Whether the row goes on."""
        return self.trace.finish == "running"

    @property
    def left(self) -> int:
        """Draft levels that could still be committed before the answer's token limit."""
        return self.limit - len(self.trace.tokens) - 1

    def commit(self, new: list[int]) -> list[int]:
        """Append the new tokens that belong to the answer, and set `trace.finish` if it has ended."""
        # tokens after the limit or the end were verified, too, but are no part of the answer
        trace = self.trace
        new = new[: self.limit - len(trace.tokens)]
        end, trace.stop_string = self.stops.first_end(trace.tokens, new)
        new = new[:end]
        trace.tokens += new
        if end is not None:
            trace.finish = "stop"
        elif len(trace.tokens) == self.limit:
            trace.finish = "length"
        return new


def check_trace(trace: Trace, others: Iterable[Trace]) -> None:
    """Refuse a trace that holds an answer, or that another row writes to."""
    check_unused(trace)
    if any(trace is other for other in others):
        raise ValueError("one trace is given for several prompts, expected a new Trace() for each")


def find_budget(budgets: Mapping[int, Budget], row_id: int) -> Budget:
    """Return a row's budget of those that a policy gave."""
    budget = budgets.get(row_id)
    if not isinstance(budget, Budget):
        raise ValueError(
            f"the policy gave {budget!r} for row {row_id}, expected a Budget: an empty one drafts nothing"
        )
    return budget


def check_draw(draw: Draw | None, requested: Draw) -> Draw:
    """Return the budget's `draw`; it must not change between cycles, or drafts would decide which rule verifies."""
    if draw is None and requested == "sampled":
        raise ValueError(
            "this policy asks for drafts that are 'sampled' without saying so beforehand: give it an attribute "
            "draw = 'sampled', and the same in all its budgets"
        )
    if draw not in (None, requested):
        raise ValueError(
            f"the policy asks for draw {requested!r}, expected {draw!r} in the whole request: a change that depends on "
            "what was drawn would bias the output; keep one draw per policy"
        )
    return requested


def check_length(target: Any, prompt: int, new: int) -> None:
    """Refuse more tokens than the model has positions."""
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )


class RowDrafts:
    """One drafter state for all rows, until it raises an error that may be any row's: then one state for each.

    Args:
        open_state: Makes a state.
        read_whole: Row id and update -> the update for a state that has read nothing of the row.
    """

    def __init__(
        self,
        open_state: Callable[[], DraftState],
        read_whole: Callable[[int, Committed], Committed],
    ) -> None:
        self.open_state = open_state
        self.read_whole = read_whole
        self.shared = open_state()
        self.states: dict[int, DraftState] = {}
        self.noises: dict[int, Noise | None] = {}
        self.unread: set[int] = set()  # rows whose state has read nothing of them

    def admit(self, row_id: int, noise: Noise | None) -> None:
        """Begin a row."""
        self.noises[row_id] = noise
        # set before the call, so that a row whose admission fails can be released
        self.states[row_id] = self.shared
        self.shared.admit(row_id, noise)

    def release(self, row_id: int, *, failed: bool = False) -> None:
        """Release a row; what a failed one leaves behind may not be releasable."""
        del self.noises[row_id]
        self.unread.discard(row_id)
        if not failed:
            self.states.pop(row_id).release(row_id)
            return
        with suppress(Exception):
            self.states.pop(row_id).release(row_id)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[dict[int, DraftTree], Errors]:
        """Return the trees of the rows, and the errors of those that failed."""
        trees: dict[int, DraftTree] = {}
        errors: Errors = {}
        # rows of one state draft together; most often all do
        groups: dict[int, list[int]] = {}
        for row_id in updates:
            groups.setdefault(id(self.states[row_id]), []).append(row_id)
        for row_ids in groups.values():
            group_updates = {row_id: updates[row_id] for row_id in row_ids}
            group_trees, group_errors = self._propose_group(group_updates, budgets)
            trees |= group_trees
            errors |= group_errors
        return trees, errors

    def _propose_group(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[dict[int, DraftTree], Errors]:
        """Return trees and errors of rows that share a state."""
        row_ids = list(updates)
        state = self.states[row_ids[0]]
        try:
            whole_updates = {row_id: self._complete(row_id, updates[row_id]) for row_id in row_ids}
            return dict(
                state.propose(whole_updates, {row_id: budgets[row_id] for row_id in row_ids})
            ), {}
        except RowErrors as failed:
            return failed.trees, failed.errors
        except FATAL:
            raise
        except Exception as error:
            self._split(state)
            if len(row_ids) == 1:
                return {}, {row_ids[0]: error}
            # which row is to blame shows when each drafts in a state of its own
            trees, errors = self.propose(updates, budgets)
            if not errors or not trees:  # no row's error, or every row's
                raise
            return trees, errors

    def _complete(self, row_id: int, update: Committed) -> Committed:
        """Return the row's update, of its whole sequence if its state has read nothing."""
        if row_id not in self.unread:
            return update
        self.unread.remove(row_id)
        return self.read_whole(row_id, update)

    def _split(self, state: DraftState) -> None:
        """Give each row of a state that raised an error a new state of its own."""
        # rows that begin later share a state again
        if state is self.shared:
            self.shared = self.open_state()
        for row_id in [row_id for row_id, row_state in self.states.items() if row_state is state]:
            self.states[row_id] = self.open_state()
            self.states[row_id].admit(row_id, self.noises[row_id])
            self.unread.add(row_id)
