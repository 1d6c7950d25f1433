"""The slots from which blocks are guessed: all supervised ones, or some drawn from each text."""

# A anchors, K levels, N tokens of all texts

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.divisors import reached_levels
from eagle.drafters.parts.spans import Spans


@dataclass(frozen=True, slots=True)
class Anchors:
    """Slots whose next token is the root of a block: level d of slot i predicts token i + 2 + d."""

    spans: Spans  # of the slots, among those of all texts
    places: Tensor  # [A], of the slots among all tokens
    reached: Tensor  # [A, K], whether all tokens up to the one that a level names are supervised

    @classmethod
    def everywhere(cls, batch: Batch, levels: int) -> Anchors:
        """All supervised slots."""
        return cls.drawn(batch, levels, max(batch.lengths, default=0))

    @classmethod
    def drawn(cls, batch: Batch, levels: int, most: int) -> Anchors:
        """At most `most` supervised slots of each text, drawn by its seed."""
        slots, places, reached, begin = list[Tensor](), list[Tensor](), list[Tensor](), 0
        masks = [mask[2:] for mask in batch.masks]
        for mask, seed, length in zip(masks, batch.seeds, batch.lengths, strict=True):
            slots.append(draw_anchors(mask, seed, most))
            places.append(begin + slots[-1])
            reached.append(reached_levels(mask, slots[-1], levels))
            begin += length
        device = batch.tokens.device
        spans = Spans.at(slots, [len(mask) for mask in masks], device)
        return cls(spans, upload(torch.cat(places), device), upload(torch.cat(reached), device))

    def tokens_at(self, batch: Batch, level: int) -> Tensor:
        """[A], the tokens that a level predicts (-1: the roots); places beyond a text have no weight."""
        return batch.tokens.index_select(0, batch.places_behind(self.places, 2 + level))

    def tokens_of(self, batch: Batch) -> Tensor:
        """[A, K], the tokens that all levels predict."""
        return torch.stack([self.tokens_at(batch, level) for level in range(self.reached.shape[1])], dim=1)

    def states_before(self, batch: Batch) -> Tensor:
        """[A, K, H], the target's states that predict the tokens of the levels."""
        true, levels = batch.select_taps((-1,))[:, 0], self.reached.shape[1]
        ahead = torch.arange(1, 1 + levels, device=true.device)
        # a level that is not reached counts for nothing, and its state may not be kept: it reads that of the first
        places = self.places[:, None] + torch.where(self.reached, ahead, 1)
        return true[places.clamp(max=len(batch.tokens) - 1)]


def draw_anchors(mask: Tensor, seed: int, most: int) -> Tensor:
    """[A], at most `most` marked slots of a text's mask, drawn by its seed."""
    marked = mask.nonzero()[:, 0]
    if len(marked) <= most:
        return marked
    drawn = torch.empty_like(marked, dtype=torch.float64)
    order = drawn.uniform_(generator=torch.Generator().manual_seed(seed)).argsort()
    return marked[order[:most].sort().values]
