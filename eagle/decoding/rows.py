"""The rows of a decoding batch: a row is one request, with its trace, its end, and its part of the drafter's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from eagle.core.arguments import check_unused
from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Committed, DraftState, Noise
from eagle.core.row_errors import FATAL, RowErrors
from eagle.core.sampling import to_int
from eagle.core.trace import Trace
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose

Observe = Callable[[TargetOutput, list[int], Choose], None]
"""Called after each forward of a row, with the target's output, the accepted nodes, and how the target chose."""
Errors = dict[int, Exception]
"""Row id -> the error that ends the row."""


@dataclass(slots=True)
class Row:
    """A request that waits to be decoded or is being decoded."""

    row_id: int
    trace: Trace
    stops: Stops
    limit: int  # the most tokens of the answer
    choose: Choose
    first: int | None = None  # the first token of the answer, if the caller knows it already
    draw: Draw | None = None  # how its drafts are chosen, the same in the whole request
    observe: Observe | None = None
    # what was committed since the drafter last proposed a tree: one update for each cycle
    pending: list[Committed] = field(default_factory=list)

    @contextmanager
    def fail_alone(self) -> Iterator[None]:
        """Return a context in which an error ends this row (request) and no other row of the batch."""
        try:
            yield
        except FATAL:
            # an error of the machine, such as a lack of memory: the next row would meet it as well
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End this row (request) with an error, which its trace keeps; nothing is raised."""
        self.trace.error = error
        self.trace.finish = "error"

    @property
    def is_running(self) -> bool:
        """Whether the answer has not ended yet."""
        return self.trace.finish == "running"

    @property
    def levels_left(self) -> int:
        """How many levels of a draft could still be accepted before the answer's token limit."""
        # each cycle also commits one token that the target adds after the accepted drafts
        return self.limit - len(self.trace.tokens) - 1

    def commit(self, new: list[int]) -> list[int]:
        """Append the new tokens that belong to the answer to its trace, and return them.

        If the answer has ended, `trace.finish` is set.

        Args:
            new: The tokens that the target has accepted or chosen in a cycle.
        """
        # the target may have accepted tokens after the limit or after a stop: they are no part of the answer
        trace = self.trace
        new = new[: self.limit - len(trace.tokens)]
        # end: how many new tokens belong to the answer, None (all) if no stop ends it
        end, trace.stop_string = self.stops.first_end(trace.tokens, new)
        new = new[:end]
        trace.tokens += new
        if end is not None:
            trace.finish = "stop"
        elif len(trace.tokens) == self.limit:
            trace.finish = "length"
        return new


def check_trace(trace: Trace, others: Iterable[Trace]) -> None:
    """Refuse a trace that holds an answer already, or that another row writes to.

    Args:
        trace: Where the answer of a new request would be written.
        others: The traces of all requests that have not ended.
    """
    check_unused(trace)
    if any(trace is other for other in others):
        raise ValueError("one trace is given for several prompts, expected a new Trace() for each")


def find_budget(budgets: Mapping[int, Budget], row_id: int) -> Budget:
    """Return the budget of a row (request); ValueError if the policy has given none for it."""
    budget = budgets.get(row_id)
    if not isinstance(budget, Budget):
        raise ValueError(
            f"the policy gave {budget!r} for row {row_id}, expected a Budget: an empty one drafts nothing"
        )
    return budget


def check_draw(draw: Draw | None, requested: Draw) -> Draw:
    """Return the `draw` of a row's budget for this cycle; ValueError if it differs from that of earlier cycles.

    `draw` decides which rule verifies. If a policy could change it by what was accepted, the output would be biased.

    Args:
        draw: Of the request so far, or as the policy announced it; None if neither is known.
        requested: Of the budget of this cycle.
    """
    # the noise was chosen when the request was added: sampled drafts had to be announced by then
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
    """Refuse a request that exceeds the most positions of a sequence that the target can read.

    Args:
        target: The target.
        prompt: The number of the prompt's tokens.
        new: The most tokens of its answer.
    """
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )


class RowDrafts:
    """The drafter's states of all rows, kept such that an error in one row ends that row alone.

    All rows share one `DraftState`, which drafts for them in a batch. If it raises an error that any row may have
    caused, each row gets a new state, and drafting row by row shows which row fails.
    """

    def __init__(
        self,
        open_state: Callable[[], DraftState],
        read_whole: Callable[[int, Committed], Committed],
    ) -> None:
        """Open the drafter's state that all rows (requests) of a decoding batch share until one of them fails.

        Args:
            open_state: Makes a new state.
            read_whole: Row id and update -> an update with all committed tokens of the row, for a state that has read
                none of them.
        """
        self.open_state = open_state
        self.read_whole = read_whole
        self.shared = open_state()  # the state that new rows join
        # row id -> its state: the shared one, or a state for this row alone
        self.states: dict[int, DraftState] = {}
        self.noises: dict[
            int, Noise | None
        ] = {}  # row id -> the target's noise; None if it is greedy
        # rows with a new state, which has read none of their tokens
        self.unread_rows: set[int] = set()

    def admit(self, row_id: int, noise: Noise | None) -> None:
        """Begin the sequence of a new row (request) in the drafter's shared state.

        Args:
            row_id: The row.
            noise: The target's sampling noise; None if it is greedy.
        """
        self.noises[row_id] = noise
        # set before the call, so that a row whose admission fails can be released
        self.states[row_id] = self.shared
        self.shared.admit(row_id, noise)

    def release(self, row_id: int, *, failed: bool = False) -> None:
        """Drop all that the drafter's state holds of a row (request) that has ended.

        Args:
            row_id: The row.
            failed: Whether an error has ended it. Its state may then be inconsistent, so errors of the clean-up are
                ignored.
        """
        del self.noises[row_id]
        self.unread_rows.discard(row_id)
        if not failed:
            self.states.pop(row_id).release(row_id)
            return
        with suppress(Exception):
            self.states.pop(row_id).release(row_id)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[dict[int, DraftTree], Errors]:
        """Return the draft trees by row id, and the errors of the rows that failed by row id.

        A row is one request of the batch. An error in one row ends that row alone.

        Args:
            updates: Row id -> the tokens that were committed since the row's last draft.
            budgets: Row id -> the limits on its tree; rows without an update are ignored.
        """
        trees: dict[int, DraftTree] = {}
        errors: Errors = {}
        # rows of one state draft in a batch; unless a row has failed, all rows share one state
        # id of the state -> row ids
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
        """Return the trees of rows (requests) that share one drafter state, and the errors of failed ones, by row id.

        After an error that may be any row's, each row gets a state of its own, and drafts again alone.

        Args:
            updates: Row id -> the tokens that were committed since the row's last draft.
            budgets: Row id -> the limits on its tree.
        """
        row_ids = list(updates)
        state = self.states[row_ids[0]]
        try:
            whole_updates = {row_id: self._complete(row_id, updates[row_id]) for row_id in row_ids}
            return dict(
                state.propose(whole_updates, {row_id: budgets[row_id] for row_id in row_ids})
            ), {}
        except RowErrors as failed:
            # the drafter itself knows which rows failed
            return failed.trees, failed.errors
        # an error of the machine, such as a lack of memory, is no row's
        except FATAL:
            raise
        except Exception as error:
            # the error has left the state unusable: its rows get new ones
            self._split(state)
            if len(row_ids) == 1:
                return {}, {row_ids[0]: error}
            # each row now has its own state: draft again, row by row, to see which row causes the error
            trees, errors = self.propose(updates, budgets)
            # no row or every row fails alone, so the error is not that of some rows: it ends the whole batch
            if not errors or not trees:
                raise
            return trees, errors

    def _complete(self, row_id: int, update: Committed) -> Committed:
        """Return the update that the drafter gets of a row (request): this one, or one with the whole sequence.

        A state that was made after an error is new, and has read no token of the row.
        """
        if row_id not in self.unread_rows:
            return update
        self.unread_rows.remove(row_id)
        return self.read_whole(row_id, update)

    def _split(self, state: DraftState) -> None:
        """Give each row (request) of a drafter state that raised an error a new state of its own.

        A new state has read no token: the row's next update must hold its whole sequence (`_complete`).
        """
        # the faulty state is not used again: rows that begin later share a new one
        if state is self.shared:
            self.shared = self.open_state()
        for row_id in [row_id for row_id, row_state in self.states.items() if row_state is state]:
            self.states[row_id] = self.open_state()
            self.states[row_id].admit(row_id, self.noises[row_id])
            self.unread_rows.add(row_id)


# how many tokens that print nothing may lie between the tokens of a stop string
SILENT_TOKENS = 16


class Stops:
    """The stop tokens and stop strings of a request."""

    def __init__(self, stop: Any, tokenizer: Any, vocab_size: int) -> None:
        """Sort the stops of a request into tokens and strings.

        Args:
            stop: A token id, a string, or several of them.
            tokenizer: The target's; only stop strings need it.
            vocab_size: V, the size of the target's vocabulary.
        """
        items = [_stop_item(item, vocab_size) for item in _as_items(stop)]  # token ids and strings
        self.tokens = {item for item in items if isinstance(item, int)}
        self.strings = [item for item in items if isinstance(item, str)]
        # The most tokens that a stop string can span: a token that prints anything prints at least one byte. Only so
        # many last tokens are decoded to find it.
        longest = max((len(string.encode()) for string in self.strings), default=0)
        self.max_span = longest + SILENT_TOKENS
        self.tokenizer = tokenizer
        if self.strings and tokenizer is None:
            raise ValueError(
                f"stop strings {self.strings} need a tokenizer: load the target with one, or pass ids"
            )

    def first_end(self, before: list[int], new: list[int]) -> tuple[int | None, str | None]:
        """Find where an answer ends.

        Args:
            before: The tokens of the answer so far.
            new: Tokens that follow it.

        Returns:
            How many of the new tokens belong to the answer, its end included (None: it goes on), and the stop string
            that ends it (None if a stop token does).
        """
        end = None
        for count, token in enumerate(new, start=1):
            if token in self.tokens:
                end = count
                break
        if not self.strings:
            return end, None
        # token by token, as the answer ends with the token that completes the stop string; a stop token may come first
        for count in range(1, len(new[:end]) + 1):
            last_tokens = (before + new[:count])[-self.max_span :]
            text = self.tokenizer.decode(last_tokens, skip_special_tokens=False)
            complete = [string for string in self.strings if string in text]
            if complete:
                # of several stop strings the one that begins first counts
                return count, min(complete, key=text.find)
        return end, None


def stops_for(target: Any, stop: Any) -> Stops:
    """Return the stop tokens and strings of a request.

    Args:
        target: The target, whose stop tokens hold where `stop` is None.
        stop: As `stop` of `generate`; or a `Stops`, which is returned.
    """
    if isinstance(stop, Stops):
        return stop
    if stop is None:
        # a generation config may name tokens that the vocabulary lacks
        stop = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
    return Stops(stop, target.tokenizer, target.vocab_size)


def stop_strings(stop: Any) -> list[str]:
    """Return the stop strings among the stop tokens and strings that a caller passed as `stop`."""
    if stop is None:
        return []
    return [item for item in _as_items(stop) if isinstance(item, str)]


def _as_items(stop: Any) -> list[Any]:
    """Return the items of the option `stop`, a list, tensor or array; a single string or number is one item."""
    # numbers of numpy and torch have __index__, too; so have their arrays of one element, which are lists here
    is_number = hasattr(type(stop), "__index__") and getattr(stop, "ndim", 0) == 0
    if isinstance(stop, str) or is_number:
        return [stop]
    try:
        return list(stop)
    except TypeError:
        raise ValueError(
            f"stop is {stop!r}, expected token ids and strings in a list, or one of them"
        ) from None


def _stop_item(item: Any, vocab_size: int) -> int | str:
    """Return an item of `stop` as a token id or a string; ValueError for anything else."""
    if isinstance(item, str):
        if not item:
            raise ValueError("stop holds an empty string, which every text ends with: leave it out")
        return item
    token = to_int(item)
    if token is None:
        raise ValueError(
            f"stop holds {item!r} of type {type(item).__name__}, expected token ids (whole numbers) and strings"
        )
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"stop holds the token id {token}, which no answer has: expected 0..{vocab_size - 1}"
        )
    return token
