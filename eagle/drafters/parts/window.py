"""The window of a head that reads long sequences: the first rows of a sequence, and the latest."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Window:
    """A row sees its sequence's first `sinks` rows and the `recent` rows up to itself, drafted ones included.

    Rows keep their positions. A row that was drafted is never a sink.
    """

    sinks: int = Field(0, ge=0)
    recent: int = Field(64, ge=1)

    @property
    def most(self) -> int:
        """Rows that are kept of a sequence: when they are more, those that no later row sees are dropped."""
        return self.sinks + 2 * self.recent

    def hides(self, place: Any, row: Any, begin: Any, drafted: Any) -> Any:
        """Return whether the row that reads no longer sees another row of its sequence.

        Args:
            place: The row that may be hidden; like the others a number or a tensor.
            row: The row that reads.
            begin: The first row of the sequence.
            drafted: How many rows of its own it sees, which take their part of the latest.
        """
        is_old = place <= row - (self.recent - drafted)
        return is_old & (place >= begin + self.sinks)

    def columns(self, begin: int, first: int, end: int, drafted: int) -> list[slice]:
        """Return the columns that rows from `first` up to `end` see, of a sequence that begins at `begin`."""
        recent_start = max(first - (self.recent - drafted) + 1, begin)
        sinks_end = min(begin + self.sinks, end)
        # the two ranges meet
        if recent_start <= sinks_end:
            return [slice(begin, end)]
        recent = slice(recent_start, end)
        return [slice(begin, sinks_end), recent] if self.sinks else [recent]
