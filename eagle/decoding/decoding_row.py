"""One text of a decoding: its trace, how it is sampled, where it ends, and the checks of what is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eagle.core.arguments import check_unused
from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Committed, Drafter
from eagle.core.row_errors import FATAL
from eagle.core.trace import Trace
from eagle.core.tree import TargetOutput
from eagle.core.verify import Choose, Sampling
from eagle.decoding.stops import Stops

Observe = Callable[[TargetOutput, list[int], Choose], None]
"""Told of each forward of a text: the target's output, the accepted nodes, and what chose after them."""


@dataclass(slots=True)
class Row:
    """A text that waits to be decoded or is being decoded."""

    number: int
    trace: Trace
    sampling: Sampling
    stops: Stops
    limit: int
    choose: Choose
    first: int | None = None  # the token after the prompt, where it is known
    draw: Draw | None = None  # how its drafts are drawn, the same in the whole text
    observe: Observe | None = None
    pending: list[Committed] = field(default_factory=list)  # since the drafter was asked last

    @contextmanager
    def fail_alone(self) -> Iterator[None]:
        """A context in which an error ends this text and no other."""
        try:
            yield
        except FATAL:
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End this text with an error, which its trace keeps."""
        self.trace.error, self.trace.finish = error, "error"

    @property
    def is_running(self) -> bool:
        """Whether the text goes on."""
        return self.trace.finish == "running"

    @property
    def left(self) -> int:
        """Draft levels that could still be committed before the answer's token limit."""
        return self.limit - len(self.trace.tokens) - 1

    def commit(self, new: list[int]) -> list[int]:
        """Append the new tokens that belong to the answer, and set `trace.finish` if it has ended."""
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
    """Refuse a trace that holds an answer, or that another text is written to."""
    check_unused(trace)
    if any(trace is other for other in others):
        raise ValueError("one trace is given for several prompts, expected a new Trace() for each")


def find_budget(budgets: Mapping[int, Budget], number: int) -> Budget:
    """A row's budget of those that a policy gave."""
    if not isinstance(budget := budgets.get(number), Budget):
        raise ValueError(f"the policy gave {budget!r} for row {number}, expected a Budget: an empty one drafts nothing")
    return budget


def check_draw(draw: Draw | None, asked: Draw) -> Draw:
    """The budget's `draw`; it must not change between cycles, or the verification rule would depend on drafts."""
    if draw is None and asked == "sampled":
        raise ValueError(
            "this policy asks for drafts that are 'sampled' without saying so beforehand: give it an attribute "
            "draw = 'sampled', and the same in all its budgets"
        )
    if draw not in (None, asked):
        raise ValueError(
            f"the policy asks for draw {asked!r}, expected {draw!r} in the whole request: a change that depends on "
            "what was drawn would bias the output; keep one draw per policy"
        )
    return asked


def check_confidence(budget: Budget, drafter: Drafter) -> None:
    """Refuse a budget with a confidence threshold if the drafter gives no confidence."""
    if budget.confidence is not None and not drafter.rates_nodes:
        raise ValueError(
            f"Budget.confidence is {budget.confidence}, and {type(drafter).__name__} cannot tell how likely a node is "
            "kept: leave it out, or draft with a head that learned to tell"
        )


def check_length(target: Any, prompt: int, new: int) -> None:
    """Refuse more tokens than the model has positions."""
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )
