"""What answers cost: tokens read and written, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic


@dataclass(slots=True)
class Usage:
    """Answers and their tokens since the first was asked for."""

    answers: int = 0
    tokens_read: int = 0
    tokens_written: int = 0
    uncounted: int = 0  # answers whose tokens the server does not tell
    begun: float = field(default_factory=monotonic)

    @classmethod
    def total(cls, parts: Sequence[Usage]) -> Usage:
        """Return the usage of several servers together, since the first of them was asked."""
        whole = cls(begun=min(part.begun for part in parts))
        for part in parts:
            whole.answers += part.answers
            whole.tokens_read += part.tokens_read
            whole.tokens_written += part.tokens_written
            whole.uncounted += part.uncounted
        return whole

    def add(self, tokens_read: int, tokens_written: int) -> None:
        """Count an answer."""
        self.answers += 1
        self.tokens_read += tokens_read
        self.tokens_written += tokens_written
        self.uncounted += tokens_written == 0

    def speed(self) -> float:
        """Tokens written in a second."""
        return self.tokens_written / max(monotonic() - self.begun, 1e-9)

    def note(self) -> str:
        """Return the costs so far, as they stand beside a progress bar."""
        return f"{shorten(self.tokens_read)} tokens in, {shorten(self.tokens_written)} out, {shorten(self.speed())}/s"

    def summary(self) -> str:
        """Return the costs of a run."""
        untold = f"; {self.uncounted} without a count of tokens" if self.uncounted else ""
        tokens = f"{self.tokens_read:,} tokens in, {self.tokens_written:,} out, {self.speed():,.1f} tokens/s"
        return f"{self.answers:,} answers: {tokens}{untold}"


def shorten(count: float) -> str:
    """Return a count in four characters or so."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}" if count >= 100 else f"{count:.3g}"
