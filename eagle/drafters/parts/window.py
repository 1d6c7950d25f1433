"""The window of a head that reads long sequences: the first rows of a sequence, and the latest."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Window:
    """Sliding-window attention with sinks, to bound the cost of long sequences.

    A row sees its sequence's first `sinks` rows and the `recent` latest rows up to itself, draft tokens included. Rows
    keep their positions. A draft token is never a sink.
    """

    sinks: int = Field(0, ge=0)
    recent: int = Field(64, ge=1)

    @property
    def most(self) -> int:
        """The most rows (tokens) of a sequence in the KV cache; beyond that, those that no later row sees are dropped.

        Dropping moves all later rows, so twice the recent rows are allowed before it is done.
        """
        return self.sinks + 2 * self.recent

    def hides(self, place: Any, row: Any, begin: Any, drafted: Any) -> Any:
        """Return whether a row (token) no longer sees an earlier row of its sequence: one neither recent nor a sink.

        All arguments are numbers or tensors that broadcast. The window bounds the cost of long sequences; sinks are a
        sequence's first tokens, which stay visible.

        Args:
            place: The index of the earlier row.
            row: The index of the row that attends.
            begin: The index of the sequence's first row.
            drafted: How many draft tokens the attending row sees besides its sequence. They count as recent rows, so
                fewer rows of the sequence are visible.
        """
        # the recent rows end at `row`, and draft tokens take up some of them
        is_old = place <= row - (self.recent - drafted)
        return is_old & (place >= begin + self.sinks)

    def columns(self, begin: int, first: int, end: int, drafted: int) -> list[slice]:
        """Return the keys (by index) that at least one of the rows (tokens) from `first` to before `end` sees.

        They are one slice, or two if there is a gap between the sinks and the recent rows.

        Args:
            begin: The index of the sequence's first row.
            first: The index of the first row that attends.
            end: The index after the last row that attends.
            drafted: How many draft tokens an attending row sees besides its sequence. They count as recent rows.
        """
        recent_start = max(first - (self.recent - drafted) + 1, begin)
        sinks_end = min(begin + self.sinks, end)
        # the recent rows follow the sinks without a gap
        if recent_start <= sinks_end:
            return [slice(begin, end)]
        recent = slice(recent_start, end)
        return [slice(begin, sinks_end), recent] if self.sinks else [recent]
