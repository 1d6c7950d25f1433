"""When a server may be asked: one that fails rests, for longer each time, and then gets one request as a trial."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from data_prep.servers.transport import Failure, Kind
from eagle.core.noise import mix64

# Seconds before something is asked again, doubled each time.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
# Seconds of pause that a server is granted.
LONGEST_PAUSE = 3600.0
# Failures of single requests in a row, after which the server is suspected too.
IN_A_ROW = 3

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait: first * 2^(n - 1) before the n-th repetition, less up to half by the run's seed."""

    seed: int
    first: float = FIRST_WAIT

    def seconds(self, key: int, repetition: int) -> float:
        """Return the wait of the thing with this key."""
        share = mix64(mix64(self.seed) ^ mix64(key % 2**64) + repetition) / 2**64
        return min(LONGEST_WAIT, self.first * 2.0 ** min(repetition - 1, 60)) * (1 - share / 2)


def persist(ask: Callable[[], Result], attempts: int, backoff: Backoff) -> Result:
    """Return what `ask` gives, asked again while that may help; a server that hangs is not waited for twice."""
    for repetition in range(1, attempts + 1):
        try:
            return ask()
        except Failure as failure:
            if failure.kind in (Kind.REFUSED, Kind.SILENT) or repetition == attempts:
                raise
            time.sleep(max(min(failure.pause, LONGEST_PAUSE), backoff.seconds(0, repetition)))
    raise AssertionError("attempts are at least 1")


@dataclass(slots=True)
class Health:
    """What a server's latest replies say about it."""

    attempts: int  # rests in a row after which nothing is expected of it
    patience: int  # requests in a row that it may refuse
    backoff: Backoff
    failures: int = 0  # in a row
    rests: int = 0  # in a row
    rested_at: float = -inf
    rest_until: float = -inf
    on_trial: bool = False
    was_away: bool = False  # so that it may have been started anew, with another model
    latest: str = ""  # why the latest failed request did
    reasons: dict[str, int] = field(default_factory=dict)  # failures of the whole run by kind

    def ready_in(self, now: float) -> float:
        """Return the seconds until it may be asked; infinity while one request is on trial."""
        return inf if self.on_trial else max(0.0, self.rest_until - now)

    @property
    def is_given_up(self) -> bool:
        """Return whether nothing is expected of it, though it is tried now and then as long as others answer."""
        return self.rests >= self.attempts

    def begin(self) -> bool:
        """Note that a request is on its way; return whether it is a trial."""
        self.on_trial = self.rests > 0
        return self.on_trial

    def answered(self) -> bool:
        """Note an answer; return whether that is news. A pause that the server asked for stays."""
        was_away = self.was_away
        self.failures = self.rests = 0
        self.on_trial = self.was_away = False
        return was_away

    def failed(self, failure: Failure, began: float, now: float) -> str | None:
        """Note a failed request, and rest if that is due; return what is news: that the server is away for long."""
        self.failures += 1
        self.latest = str(failure)
        self.reasons[failure.kind.value] = self.reasons.get(failure.kind.value, 0) + 1
        lost = failure.kind in (Kind.AWAY, Kind.SILENT)
        refuses = failure.kind is Kind.REFUSED
        due = self.failures >= (self.patience if refuses else IN_A_ROW)
        if lost or due or failure.kind is Kind.BUSY:
            self._rest(failure, began, now)
        if refuses and due:
            self.rests = self.attempts
        is_news = (lost and not self.was_away) or (
            failure.pause > LONGEST_WAIT and self.rested_at == now
        )
        self.was_away |= lost
        if not is_news:
            return None
        return f"{failure}. The server is asked again in {self.rest_until - now:.0f} s"

    def _rest(self, failure: Failure, began: float, now: float) -> None:
        """Rest; of requests that were on their way together, all count as one."""
        pause = min(failure.pause, LONGEST_PAUSE)
        if began >= self.rested_at:
            self.rests += 1
            self.rested_at = now
            pause = max(pause, self.backoff.seconds(self.rests, self.rests))
        self.rest_until = max(self.rest_until, now + pause)
