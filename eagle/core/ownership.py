"""Targets and drafters serve one stream at a time: calls for another are refused, and threads wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any


class Turn:
    """The stream that an object serves, which is the one that began last, and the lock under which it runs."""

    def __init__(self, refusal: str) -> None:
        self.refusal, self.lock = refusal, RLock()
        self.stream: Any = None

    def __reduce__(self) -> Any:
        """Copies serve no stream yet; locks cannot be copied."""
        return Turn, (self.refusal,)

    @contextmanager
    def take(self, stream: Any) -> Iterator[None]:
        """Let a stream take over the object while the block holds its lock."""
        with self.lock:
            self.stream = stream
            yield

    @contextmanager
    def hold(self, stream: Any) -> Iterator[None]:
        """Hold the lock for a stream; ValueError if another one has begun since."""
        with self.lock:
            if self.stream is not stream:
                raise ValueError(self.refusal)
            yield


def turn_of(drafter: Any) -> Turn:
    """A drafter's turn, created on first use."""
    turn = getattr(drafter, "turn", None)
    if turn is None:
        turn = Turn(
            "another stream has begun on this drafter, and a drafter follows one text at a time: finish one stream "
            "before the next begins, or load a drafter for each"
        )
        with suppress(AttributeError):  # a drafter without attributes keeps no text either
            drafter.turn = turn
    return turn
