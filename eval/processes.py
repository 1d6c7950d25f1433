"""Several processes that share the prompts of one command, each with a target of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from eagle.training.launch import count_started

Made = TypeVar("Made")


@dataclass(frozen=True)
class Processes:
    """This process among those of the command; without a launcher it is the only one."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Processes:
        """Meet the others that a launcher has started; each takes an accelerator of its own, if there are any."""
        count, number = count_started()
        if count == 1:
            return cls()
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(number)
        if not dist.is_initialized():  # one may load or decode for long while the others wait
            dist.init_process_group("gloo", timeout=timedelta(days=1))
        return cls(dist.get_rank(), count)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.rank == 0

    def share(self, make: Callable[[], Made]) -> Made:
        """What the first process makes, for all of them; they meet here."""
        if self.count == 1:
            return make()
        box = [make() if self.is_first else None]
        dist.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def part(self, items: Sequence[Made]) -> list[Made]:
        """Those items that fall to this process."""
        return list(items[self.rank :: self.count])

    def leave(self) -> None:
        """Wait for the others, and part from them."""
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()


ALONE = Processes()
