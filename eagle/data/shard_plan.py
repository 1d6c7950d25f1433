"""Which examples a shard holds, in which batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Plan = Sequence[list[list[int]]]  # shards of batches of example numbers


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Example numbers, longest first, in batches that fill at most `batch_tokens` slots with their padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def plan_shards(lengths: Sequence[int], batch_tokens: int, shard_tokens: int) -> list[list[list[int]]]:
    """The batches, grouped into shards of about `shard_tokens` tokens; depends only on the lengths."""
    shards: list[list[list[int]]] = []
    filled = shard_tokens
    for batch in make_batches(lengths, batch_tokens):
        if filled >= shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(batch)
        filled += sum(lengths[number] for number in batch)
    return shards


class StoredPlan(Sequence[list[list[int]]]):
    """A plan in the tensors of a store, which take a few bytes an example; shards become lists when they are asked for.

    `order` are the example numbers, `batch_sizes` how many each batch has, `shard_batches` how many batches each shard.
    """

    def __init__(self, order: Tensor, batch_sizes: Tensor, shard_batches: Tensor) -> None:
        self.order = order
        self.batch_sizes = batch_sizes
        self.batch_ends = shard_batches.cumsum(0)
        self.ends = batch_sizes.cumsum(0)[self.batch_ends - 1]  # of the shards, in `order`

    @classmethod
    def tensors_of(cls, plan: Plan) -> dict[str, Tensor]:
        """The tensors of a plan by their names."""
        batches = [batch for shard in plan for batch in shard]
        return {
            "order": torch.tensor([number for batch in batches for number in batch]),
            "batch_sizes": torch.tensor([len(batch) for batch in batches]),
            "shard_batches": torch.tensor([len(shard) for shard in plan]),
        }

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, shard: int) -> list[list[int]]:  # type: ignore[override]
        if not -len(self) <= shard < len(self):
            raise IndexError(shard)
        shard %= len(self)
        sizes = self.batch_sizes[self.batch_ends[shard - 1] if shard else 0 : self.batch_ends[shard]]
        numbers = self.order[self.ends[shard - 1] if shard else 0 : self.ends[shard]]
        return [batch.tolist() for batch in numbers.split(sizes.tolist())]

    @property
    def shards(self) -> Tensor:
        """[N], the shard of each example."""
        sizes = self.ends.diff(prepend=self.ends.new_zeros(1))
        shards = torch.empty(len(self.order), dtype=torch.int32)
        shards[self.order] = torch.arange(len(self), dtype=torch.int32).repeat_interleave(sizes)
        return shards

    def place_rows(self, counts: Tensor) -> tuple[Tensor, list[int]]:
        """[N], where the rows of each example begin in its shard if it has so many, and the rows of every shard."""
        ends = counts[self.order].long().cumsum(0)
        shard_ends = ends[self.ends - 1]
        sizes = shard_ends.diff(prepend=shard_ends.new_zeros(1))
        starts = torch.empty(len(self.order), dtype=torch.int32)
        before = (shard_ends - sizes)[self.shards[self.order]]
        starts[self.order] = (ends - counts[self.order] - before).int()
        return starts, sizes.tolist()
