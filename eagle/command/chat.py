"""A conversation in the terminal, with the drafted part of each answer in green."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from eagle.command.answering import (
    TimedTrace,
    Write,
    parse_options,
    stream_text,
    supports_colour,
    writer_to,
)
from eagle.core.drafter import Drafter
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.device import choose_threads
from eagle.formats.checkpoint import check_drafter, load_drafter
from eagle.target.target import Target

HELP = """\
/plain           answer without drafts; the conversation stays
/draft           answer with drafts again
/temperature X   sample from now on; 0 takes the likeliest token
/system TEXT     set the system message; without a text, remove it
/reset           forget the conversation; the system message stays
/help            show this
/quit            leave, as Ctrl-D does
Ctrl-C stops an answer, and what was said of it stays. Twice, it leaves.
A line that begins with a space is no command."""


@dataclass
class Pace:
    """Tokens of all answers that were written in one way, and their seconds; without prompts and first tokens."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float | None:
        """Tokens per second; None before any."""
        return self.tokens / self.seconds if self.tokens else None

    def add(self, answer: TimedTrace) -> None:
        """Count an answer."""
        # the prompt's forward and its token are not counted, as they cost the same with drafts and without
        self.tokens += sum(cycle.committed for cycle in answer.trace.cycles)
        self.seconds += answer.seconds - answer.prompt_seconds


class Chat:
    """A conversation with a target, whose answers are drafted, or plain while `drafts` is off."""

    def __init__(
        self, target: Target, drafter: Drafter, sampling: Sampling, max_new_tokens: int
    ) -> None:
        self.target = target
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        # by whether answers are drafted: the drafter, and the tokens and seconds of the answers so far
        self.drafters = {True: drafter, False: load_drafter("none", target)}
        self.paces = {True: Pace(), False: Pace()}
        self.drafts = True  # whether the next answer is drafted
        self.system: list[dict[str, Any]] = []  # one message, or none
        self.turns: list[dict[str, Any]] = []  # messages of the user and the target, in turn

    def answer(
        self, question: str, write: Write, is_stopped: Callable[[], bool] = lambda: False
    ) -> TimedTrace:
        """Stream the answer to a question; both join the conversation, which an error leaves as it was.

        The whole conversation is printed by the chat template each time, since templates may rewrite earlier turns. The
        target reads what is new in it.

        Args:
            question: The user's message.
            write: Gets each piece of the answer's text, and whether it was drafted.
            is_stopped: Whether the user has stopped the answer.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        try:
            prompt = self.target.chat([*self.system, *turns])
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses these messages: {error}; /system without a text removes the system "
                "message, /reset forgets the conversation"
            ) from None
        # an answer ends at the model's last position, so some must be left
        room = self.target.room(prompt)
        if not room:
            raise ValueError(
                f"the conversation has come to {len(prompt)} tokens, and this model has {self.target.max_positions} "
                "positions, which leaves none for an answer: /reset forgets the conversation, and a shorter question "
                "may fit"
            )
        answer = stream_text(
            self.target,
            self.drafters[self.drafts],
            prompt,
            write,
            is_stopped=is_stopped,
            sampling=self.sampling,
            max_new_tokens=min(self.max_new_tokens, room),
        )
        self.turns = [*turns, {"role": "assistant", "content": answer.trace.text}]
        self.paces[self.drafts].add(answer)
        return answer

    def describe(self, answer: TimedTrace) -> str:
        """Return a line on the last answer: tokens per forward, speed, and the gain of drafts where both were timed.

        If it was drafted, its speed is compared with that of all plain answers of this session, else with that of all
        drafted ones.
        """
        trace = answer.trace
        pace = Pace()
        pace.add(answer)
        text = f"{len(trace.tokens)} tokens, {len(trace.cycles)} forwards after the prompt's"
        if pace.speed is not None:
            text += f": τ = {trace.acceptance_length:.2f}, {pace.speed:.0f} tokens/s"
            text += self._compare(pace.speed, self.paces[not self.drafts].speed)
        if trace.finish == "running":
            return f"{text}; stopped"
        if trace.finish == "length":
            is_at_limit = len(trace.tokens) == self.max_new_tokens
            limit = "--max-new-tokens" if is_at_limit else "the model's last position"
            return f"{text}; cut off at {limit}"
        return text

    def _compare(self, speed: float, other_speed: float | None) -> str:
        """Return a phrase that compares an answer's speed with the other way of decoding, once both were timed.

        Args:
            speed: Tokens per second of this answer, drafted or plain as `drafts` says.
            other_speed: Tokens per second of all answers of the other way; None before any.
        """
        if other_speed is None:
            return "; /plain answers without drafts, to compare" if self.drafts else ""
        if self.drafts:
            return f", {speed / other_speed:.2f} × as fast as without drafts ({other_speed:.0f})"
        return f"; with drafts {other_speed / speed:.2f} × as fast ({other_speed:.0f})"

    def command(self, line: str) -> str:
        """Obey a line that begins with `/`, except /quit; return the message that confirms it."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest and name in ("/help", "/plain", "/draft", "/reset"):
            raise ValueError(
                f"{name} got {rest!r}, expected nothing behind it: ask on a line of its own"
            )
        if name == "/help":
            return HELP
        if name == "/plain":
            self.drafts = False
            return "without drafts from here on; the conversation stays"
        if name == "/draft":
            self.drafts = True
            return "with drafts from here on; the conversation stays"
        if name == "/reset":
            self.turns = []
            return "the conversation is forgotten" + (
                "; the system message stays" if self.system else ""
            )
        if name == "/system":
            self.system = [{"role": "system", "content": rest}] if rest else []
            return "the system message is set" if rest else "there is no system message"
        if name == "/temperature":
            try:
                self.sampling = replace(self.sampling, temperature=float(rest))
            except ValueError:  # of a word, or a negative number
                raise ValueError(
                    f"/temperature got {rest!r}, expected a number: 0 (greedy) or more"
                ) from None
            return f"temperature {self.sampling.temperature:g}"
        raise ValueError(
            f"there is no command {name}: /help lists them; text that begins with / needs a space before"
        )


@contextmanager
def noting_interrupt() -> Iterator[Callable[[], bool]]:
    """Catch the first Ctrl-C in the block, and yield a function that says whether it came.

    So a Ctrl-C stops an answer and not the program; a second one raises KeyboardInterrupt.
    """
    received: list[int] = []

    def note(signal_number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: note it, and let the next one raise KeyboardInterrupt."""
        received.append(signal_number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, handler)


def read_lines() -> Iterator[str]:
    """Yield the lines that a user types at a prompt, or that are piped in, until the input ends."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    # gives `input` keys to edit a line and to bring back earlier ones
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # as shells do: a new line
            print()
            continue
        yield line


def converse(chat: Chat, write: Write) -> None:
    """Answer lines and obey commands until the input ends or /quit; print an error that a user can mend, and go on."""
    for line in read_lines():
        if line.partition(" ")[0] == "/quit":
            return
        with noting_interrupt() as is_stopped:
            try:
                if line.startswith("/"):
                    print(chat.command(line), file=sys.stderr)
                elif line.strip():
                    answer = chat.answer(line.strip(), write, is_stopped)
                    print(flush=True)
                    print(chat.describe(answer), file=sys.stderr)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)


def talk(args: argparse.Namespace) -> None:
    """Talk with a target in the terminal, as the arguments of `eagle generate` ask."""
    sampling = Sampling(args.temperature, seed=args.seed)
    # a wrong drafter is refused before the target is loaded
    options = parse_options(args.option)
    check_drafter(args.drafter, options)
    target = Target.load(args.target, dtype=args.dtype or "auto")
    drafter = load_drafter(args.drafter, target, **options)
    chat = Chat(target, drafter, sampling, args.max_new_tokens)
    warm_up(chat)
    coloured = supports_colour(sys.stdout)
    if sys.stdin.isatty():
        green = ", and drafted text is green" if coloured else ""
        print(f"/help lists commands, Ctrl-D leaves{green}", file=sys.stderr)
    # in a conversation Ctrl-C stops an answer or a line, and not the command as in other verbs
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        converse(chat, writer_to(sys.stdout, coloured))
    finally:
        signal.signal(signal.SIGINT, handler)


def warm_up(chat: Chat) -> None:
    """Choose the number of threads, and run both ways of decoding once, so that first answers are timed fairly."""
    target = chat.target
    prompt = target.chat("Hello")
    if target.device.type == "cpu":
        choose_threads(partial(generate, target, chat.drafters[False], prompt, max_new_tokens=2))
    for drafter in chat.drafters.values():
        generate(target, drafter, prompt, max_new_tokens=8)
    # the first answer must not find a prefix of its prompt in the cache
    target.forget()
