"""Slots in blocks that are read together: all of a block see their text up to the last of them, and of it no more."""

# N slots of all texts, A blocks, k slots of each, M texts

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.spans import Spans


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """Blocks that each end at a supervised slot, among all slots of the texts; a slot guesses k tokens past its root.

    The slot of level 0 is a block's first, and guesses the token behind the root of the last.
    """

    spans: Spans  # of the last slots
    slots: Tensor  # [k, A], which slots they are; those before a text's begin are its first
    reached: Tensor  # [k, A], whether all tokens up to the one that a slot guesses are supervised
    texts: Tensor  # [A], which text a block is of
    order: Tensor  # [A], in which the whole blocks of a text are glanced at; far behind all where a block is not whole
    run: Tensor  # [A], how many slots of a block are then glanced at: its first, and never all
    supervised: Tensor  # [M], slots of each text that are supervised

    @classmethod
    def everywhere(cls, batch: Batch, size: int) -> SlotBlocks:
        """A block that ends at each supervised slot."""
        return cls._of(batch, size, [0] * len(batch.lengths), 1, _draws(batch))

    @classmethod
    def side_by_side(cls, batch: Batch, size: int) -> SlotBlocks:
        """Blocks that share no slot, one of which ends at a supervised slot of each text that its seed decides."""
        firsts, draws = [], _draws(batch)
        for mask, draw in zip(batch.loss_mask.split(batch.lengths), draws, strict=True):
            last = mask[2:][size - 1 :].nonzero()[:, 0]  # fewer slots make no block
            drawn = int(last[int(torch.randint(len(last), (), generator=draw))]) if len(last) else 0
            firsts.append(size - 1 + drawn % size)
        return cls._of(batch, size, firsts, size, draws)

    @classmethod
    def _of(cls, batch: Batch, size: int, firsts: list[int], stride: int, draws: list[torch.Generator]) -> SlotBlocks:
        device, begin = batch.tokens.device, 0
        masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
        slots, reached, texts, order, run = (list[Tensor]() for _ in range(5))
        levels = torch.arange(size)[:, None]
        for number, (mask, first, draw) in enumerate(zip(masks, firsts, draws, strict=True)):
            last = first + stride * mask[first::stride].nonzero()[:, 0]
            slots.append(begin + (last + levels - (size - 1)).clamp(min=0))
            reached.append(F.pad(mask, (0, size))[last + levels].long().cumprod(0).bool())
            texts.append(torch.full_like(last, number))
            whole = reached[-1][-1]
            order.append(torch.full_like(last, sum(batch.lengths)))
            order[-1][whole] = torch.randperm(int(whole.sum()), generator=draw)
            run.append(torch.randint(1, size, last.shape, generator=draw))
            begin += len(mask)
        columns = [torch.cat(slots, 1), torch.cat(reached, 1), *map(torch.cat, (texts, order, run))]
        columns.append(torch.tensor([int(mask.sum()) for mask in masks]))
        return cls(Spans.of(masks, device, stride, firsts), *(upload(column, device) for column in columns))

    def weights(self, counted: Tensor) -> Tensor:
        """[k, A], what each slot weighs of those that count: a text weighs what is supervised of it, their sum is 1."""
        share = self.supervised / self.sum_by_text(counted).clamp(min=1) / self.supervised.sum().clamp(min=1)
        return counted * share.index_select(0, self.texts)

    def glance(self, wrong: Tensor, share: float) -> Tensor:
        """[k, A], slots that shall read their answers: on average such a share of those that guess wrong [k, A].

        A slot's answer has read those of the slots before it in its block, and tells them theirs. So the slots are the
        first of a block, and all that see their own answer are among them.
        """
        size = len(wrong)
        blocks = (self.sum_by_text(wrong) * (share * 2 / size)).floor()  # a run is half as long as a block on average
        glanced = self.order < blocks.index_select(0, self.texts)
        return glanced & (torch.arange(size, device=wrong.device)[:, None] < self.run)

    def sum_by_text(self, marked: Tensor) -> Tensor:
        """[M], how many slots of each text are marked [k, A]."""
        counts = torch.zeros(len(self.supervised), device=marked.device)
        return counts.index_add_(0, self.texts, marked.sum(0).to(counts.dtype))


def drafted_mask(batch: Batch, size: int) -> Tensor:
    """[N], the supervised tokens behind a root that so many slots stand before, itself included."""
    masks = batch.loss_mask.split(batch.lengths)
    return torch.cat([mask & (torch.arange(len(mask)) > size) for mask in masks])


def _draws(batch: Batch) -> list[torch.Generator]:
    """What draws for each text."""
    return [torch.Generator().manual_seed(seed) for seed in batch.seeds]
