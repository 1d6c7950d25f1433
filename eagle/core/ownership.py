"""One text at a time: which stream an object serves, so that another one is refused and threads wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any


class Turn:
    """The stream that began last on an object; calls for any other are refused, and only one runs at once."""

    def __init__(self, refusal: str) -> None:
        self.refusal, self.lock = refusal, RLock()
        self.stream: Any = None

    def __reduce__(self) -> Any:
        """A copy is nobody's yet: locks cannot be copied."""
        return Turn, (self.refusal,)

    @contextmanager
    def beginning(self, stream: Any) -> Iterator[None]:
        """While open, this stream begins; the one before has lost its turn."""
        with self.lock:
            self.stream = stream
            yield

    @contextmanager
    def of(self, stream: Any) -> Iterator[None]:
        """While open, nothing else runs; refused if another stream has begun since."""
        with self.lock:
            if self.stream is not stream:
                raise ValueError(self.refusal)
            yield


def turn_of(drafter: Any) -> Turn:
    """A drafter's turn, which it gets when it is asked for the first time."""
    turn = getattr(drafter, "turn", None)
    if turn is None:
        turn = Turn(
            "another stream has begun on this drafter, and a drafter follows one text at a time: finish one stream "
            "before the next begins, or load a drafter for each"
        )
        with suppress(AttributeError):  # what takes no attribute keeps no text either
            drafter.turn = turn
    return turn
