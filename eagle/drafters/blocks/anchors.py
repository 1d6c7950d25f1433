"""The slots from which blocks are guessed: all supervised ones, or some sampled from each sequence."""

# A anchors, K levels, N tokens of all sequences, H hidden

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

    spans: Spans  # of the slots, among those of all sequences
    token_indices: Tensor  # [A], the index of each slot among all tokens
    reached: Tensor  # [A, K], whether all tokens up to the one that a level predicts are supervised

    @classmethod
    def everywhere(cls, batch: Batch, levels: int) -> Anchors:
        """Return all supervised slots."""
        return cls.sampled(batch, levels, max(batch.lengths, default=0))

    @classmethod
    def sampled(cls, batch: Batch, levels: int, max_anchors: int) -> Anchors:
        """Return at most `max_anchors` supervised slots of each sequence, sampled by its seed."""
        slots = []
        token_indices = []
        reached = []
        # by slot: slot i predicts token i + 2 first
        masks = [mask[2:] for mask in batch.masks]
        begin = 0
        for mask, seed, length in zip(masks, batch.seeds, batch.lengths, strict=True):
            anchors = draw_anchors(mask, seed, max_anchors)
            # an anchor's index among its sequence's slots and among all tokens, and the levels that count
            slots.append(anchors)
            token_indices.append(begin + anchors)
            reached.append(reached_levels(mask, anchors, levels))
            begin += length
        device = batch.tokens.device
        return cls(
            spans=Spans.at(slots, [len(mask) for mask in masks], device),
            token_indices=upload(torch.cat(token_indices), device),
            reached=upload(torch.cat(reached), device),
        )

    def tokens_at(self, batch: Batch, level: int) -> Tensor:
        """Return [A], the tokens that a level predicts (-1: the roots); those after a sequence have no weight."""
        return batch.tokens.index_select(0, batch.places_behind(self.token_indices, 2 + level))

    def tokens_of(self, batch: Batch) -> Tensor:
        """Return [A, K], the tokens that all levels predict."""
        levels = range(self.reached.shape[1])
        return torch.stack([self.tokens_at(batch, level) for level in levels], dim=1)

    def states_before(self, batch: Batch) -> Tensor:
        """Return [A, K, H], the target's states that predict the tokens of the levels."""
        target_hidden = batch.select_taps((-1,))[:, 0]
        ahead = torch.arange(1, 1 + self.reached.shape[1], device=target_hidden.device)
        # a level that is not reached has no weight, and its state may not be stored: it reads that of the first
        indices = self.token_indices[:, None] + torch.where(self.reached, ahead, 1)
        return target_hidden[indices.clamp(max=len(batch.tokens) - 1)]


def draw_anchors(mask: Tensor, seed: int, max_anchors: int) -> Tensor:
    """Return [A], at most `max_anchors` of one sequence's marked slots, in ascending order, sampled by its seed."""
    marked = mask.nonzero()[:, 0]
    if len(marked) <= max_anchors:
        return marked
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty_like(marked, dtype=torch.float64).uniform_(generator=generator).argsort()
    return marked[order[:max_anchors].sort().values]
