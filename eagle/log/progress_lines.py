"""How far long work has got, as lines of a log: outside a terminal, a bar would be shown at its end alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import IO

EVERY = 60.0  # seconds between two lines
PER_MINUTE, PER_HOUR = 60, 3600


class ProgressLines:
    """A line a minute with what is done, how fast, and the time left; and one at the end."""

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None,
        done: int = 0,
        *,
        note: Callable[[], str] = str,
        out: IO[str] | None = None,
        clock: Callable[[], float] = monotonic,
        every: float = EVERY,
    ) -> None:
        self.what, self.unit, self.total, self.note = what, unit, total, note
        self.done = self.first = done
        self.out, self.clock, self.every = out or sys.stderr, clock, every
        self.begun = clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tell_regularly, daemon=True)

    def __enter__(self) -> ProgressLines:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self._tell()

    def describe(self) -> str:
        """The line at this time."""
        seconds = self.clock() - self.begun
        speed = (self.done - self.first) / seconds if seconds > 0 else 0.0
        parts = [f"{self.what}: {describe_done(self.done, self.total)} {self.unit}"]
        if speed > 0:
            parts.append(describe_rate(speed, self.unit))
        parts.append(f"{describe_seconds(seconds)} elapsed")
        if speed > 0 and self.total is not None and self.done < self.total:
            parts.append(f"{describe_seconds((self.total - self.done) / speed)} left")
        if note := self.note():
            parts.append(note)
        return ", ".join(parts)

    def _tell_regularly(self) -> None:
        """Tell until the end, from a thread of its own: a single item may take longer than a minute."""
        while not self.ended.wait(self.every):
            self._tell()

    def _tell(self) -> None:
        print(self.describe(), file=self.out, flush=True)


def describe_done(done: int, total: int | None) -> str:
    """How much is done, of how much where that is known."""
    if total is None:
        return f"{done:,}"
    share = f" ({done / total:.0%})" if total else ""
    return f"{done:,} of {total:,}{share}"


def describe_rate(speed: float, unit: str) -> str:
    """A speed a second in figures that are read at a glance; of slow work a minute's, or an hour's."""
    value, per = speed, "s"
    if speed < 1:
        value, per = speed * PER_MINUTE, "min"
    if speed * PER_MINUTE < 1:
        value, per = speed * PER_HOUR, "h"
    digits = max(0, 2 - len(str(int(value))))
    return f"{value:,.{digits}f} {unit}/{per}"


def describe_seconds(seconds: float) -> str:
    """A duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
