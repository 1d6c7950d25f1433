"""Stream an answer to a terminal or a pipe, for the verbs that write one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TextIO

from eagle.core.drafter import Drafter
from eagle.core.trace import Spelling, Trace
from eagle.decoding.decode import stream
from eagle.recipe.plain_yaml import lay_over
from eagle.target.target import Target

GREEN = "\x1b[32m"
PLAIN = "\x1b[0m"
# control characters in an answer must not move the cursor or set a title
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Write = Callable[[str, bool], None]  # a piece of text, and whether it was drafted


@dataclass(frozen=True)
class TimedTrace:
    """An answer and the seconds that decoding it took; `prompt_seconds` of them until the first token."""

    trace: Trace
    seconds: float
    prompt_seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.trace.tokens) / self.seconds

    def __str__(self) -> str:
        """Return tokens, speed, forwards and acceptance length in a phrase."""
        return (
            f"{len(self.trace.tokens)} tokens, {self.speed:.1f} tokens/s; {len(self.trace.cycles)} forwards after the "
            f"prompt's, acceptance length {self.trace.acceptance_length:.2f}"
        )


def stream_text(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    write: Write,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> TimedTrace:
    """Decode an answer, writing each piece of its text as soon as it is complete, until it ends or `is_stopped`.

    A target keeps the KV cache of its last sequence and does not read a shared prefix again: where the prefill is to
    be timed, call `target.forget()` first.

    Args:
        target: The model that answers.
        drafter: What drafts for it.
        prompt: Token ids.
        write: Gets each piece of text, and whether its last token was drafted.
        is_stopped: Whether the user wants no more; asked before each forward.
        options: Further options of `eagle.decoding.decode.stream`, such as the sampling.
    """
    # turns tokens into text, and keeps back bytes that are no whole character yet
    spell = Spelling(target.tokenizer)
    trace = Trace([])
    seconds = 0.0
    prompt_seconds = 0.0
    # yields the new tokens of each forward, and writes them to `trace`
    cycles: Any = stream(target, drafter, prompt, trace=trace, **options)
    while trace.finish == "running" and not is_stopped():
        start = perf_counter()
        tokens = next(cycles)
        seconds += perf_counter() - start
        # the first tokens come with the prompt's forward
        if not prompt_seconds:
            prompt_seconds = seconds
        for token, is_drafted in zip(tokens, trace.drafted[-len(tokens) :], strict=True):
            text = spell(token)
            if text:
                write(text, is_drafted)
    cycles.close()
    # characters whose last token did not come
    rest = spell.rest()
    if rest:
        write(rest, False)
    return TimedTrace(trace, seconds, prompt_seconds)


def writer_to(out: TextIO, coloured: bool) -> Write:
    """Return a function that writes pieces of an answer to `out`, drafted ones in green if `coloured`.

    It takes a piece of text, and whether it was drafted. A terminal gets no control characters, as an answer must not
    move its cursor.
    """

    def write(text: str, is_drafted: bool) -> None:
        """Write a piece of text, and show it at once."""
        if out.isatty():
            text = text.translate(HARMLESS)
        out.write(f"{GREEN}{text}{PLAIN}" if is_drafted and coloured else text)
        out.flush()

    return write


def supports_colour(out: TextIO) -> bool:
    """Whether `out` is a terminal that shows colours, which its user has not switched off."""
    return (
        out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    )


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of a drafter from words KEY=VALUE, whose values are YAML."""
    options: dict[str, Any] = {}
    for pair in pairs:
        # sets the value in `options`
        lay_over(options, pair)
    return options
