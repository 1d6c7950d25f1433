"""Share the prompts of one command among several processes, each with a target of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from eagle.data.features import world

Made = TypeVar("Made")


@dataclass(frozen=True)
class Processes:
    """This process among those of the command; without a launcher it is the only one."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that a launcher has started."""
        rank, count, _ = world()
        return cls(rank, count)

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes for all."""
        return self.rank == 0

    def share(self, make: Callable[[], Made]) -> Made:
        """Return a value that the first process makes, for all processes; they wait for it here."""
        if self.count == 1:
            return make()
        # the others' value is overwritten by the broadcast
        box = [make() if self.is_first else None]
        dist.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def part(self, items: Sequence[Made]) -> list[Made]:
        """Return the items that this process handles."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            world()[2]()


ALONE = Processes()
