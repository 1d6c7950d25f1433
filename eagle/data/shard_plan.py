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


def group_texts(shared: Sequence[int]) -> list[list[int]]:
    """The numbers of texts of which each but the first shares tokens with the one before it."""
    groups: list[list[int]] = []
    for number, count in enumerate(shared):
        if count:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def plan_shards(
    lengths: Sequence[int], batch_tokens: int, shard_tokens: int, shared: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """The batches, grouped into shards of about `shard_tokens` tokens; depends only on the lengths.

    Texts that share tokens with the one before them, so many each, are in one batch with it.
    """
    shared = [0] * len(lengths) if shared is None else shared
    groups = group_texts(shared)
    new = [sum(lengths[number] - shared[number] for number in group) for group in groups]
    shards: list[list[list[int]]] = []
    filled = shard_tokens
    for grouped in make_batches(new, batch_tokens):
        batch = [number for group in grouped for number in groups[group]]
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


class RowPlaces:
    """Where in its shard the rows of each text are; the first `shared` are those of the text before it."""

    def __init__(self, plan: StoredPlan, counts: Tensor, shared: Tensor) -> None:
        self.counts, self.shared = counts, shared
        self.starts, self.totals = plan.place_rows(counts - shared)

    def __getitem__(self, number: int) -> list[tuple[int, int]]:
        """The first row and the end of each piece of a text, in their order."""
        places, stop = list[tuple[int, int]](), int(self.counts[number])
        while True:
            first = int(self.shared[number])
            if first < stop or not first:
                start = int(self.starts[number]) - first
                places.append((start + first, start + stop))
                stop = first
            if not first:
                return places[::-1]
            number -= 1
