"""The window of a head that reads long texts: the first rows of a text, and the latest."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

FUSED = 128  # rows and columns of a fused kernel's blocks


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Window:
    """A row sees its text's first `sinks` rows and the `recent` rows up to itself, drafted ones included.

    Rows keep their positions. A row that was drafted is never a sink.
    """

    sinks: int = Field(0, ge=0)
    recent: int = Field(64, ge=1)

    @property
    def most(self) -> int:
        """Rows that are kept of a text: when they are more, those that no later row sees are dropped."""
        return self.sinks + 2 * self.recent

    def hides(self, place: Any, row: Any, begin: Any, drafted: Any) -> Any:
        """Whether rows no longer see places of a text that begins at `begin`, beside so many rows of their own."""
        return (place <= row - (self.recent - drafted)) & (place >= begin + self.sinks)

    def columns(self, begin: int, first: int, end: int, drafted: int) -> list[slice]:
        """The columns of such a text that any row from `first` up to `end` sees."""
        near, sinks = max(first - (self.recent - drafted) + 1, begin), min(begin + self.sinks, end)
        if near <= sinks:
            return [slice(begin, end)]
        return [slice(begin, sinks), slice(near, end)] if self.sinks else [slice(near, end)]


def touched_blocks(low: Tensor, high: Tensor, count: int) -> Tensor:
    """[S / 128, count / 128], whether the columns from `low` up to `high`, of one row at least, meet the block."""
    blocks = torch.arange(len(low), device=low.device) // FUSED
    edges = low.new_zeros((len(low) - 1) // FUSED + 1, (count - 1) // FUSED + 2)
    some = (low < high).to(edges.dtype)
    edges.index_put_((blocks, low // FUSED), some, accumulate=True)
    edges.index_put_((blocks, (high - 1).clamp(min=0) // FUSED + 1), -some, accumulate=True)
    return edges.cumsum(1)[:, :-1] > 0
