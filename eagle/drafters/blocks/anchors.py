"""The slots after which blocks are drafted: all supervised ones, or some sampled from each sequence."""

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
    """The slots after which blocks are drafted: slot i has the root i + 1, and its level d predicts token i + 2 + d."""

    spans: Spans  # the anchors among the slots of all sequences
    token_indices: Tensor  # [A], the index of each anchor among all tokens
    reached: (
        Tensor  # [A, K] bool, whether all tokens up to the one that a level predicts are supervised
    )

    @classmethod
    def everywhere(cls, batch: Batch, levels: int) -> Anchors:
        """Return all supervised slots as anchors, for validation."""
        return cls.sampled(batch, levels, max(batch.lengths, default=0))

    @classmethod
    def sampled(cls, batch: Batch, levels: int, max_anchors: int) -> Anchors:
        """Return at most `max_anchors` supervised slots of each sequence as anchors, sampled by the sequence's seed."""
        slots = []
        token_indices = []
        reached = []
        # by slot: slot i predicts token i + 2 first, so a sequence has two slots less than tokens
        masks = [mask[2:] for mask in batch.masks]
        begin = 0
        for mask, seed, length in zip(masks, batch.seeds, batch.lengths, strict=True):
            anchors = draw_anchors(mask, seed, max_anchors)
            # each anchor's index among its sequence's slots and among all tokens, and the levels that have a weight
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
        """Return [A], the tokens that a level predicts after each anchor; level -1 stands for the roots.

        After the end of a sequence they are arbitrary, as such levels have no weight.
        """
        indices = batch.places_behind(self.token_indices, 2 + level)
        return batch.tokens.index_select(0, indices)

    def tokens_of(self, batch: Batch) -> Tensor:
        """Return [A, K], the tokens that all levels predict after each anchor."""
        levels = range(self.reached.shape[1])
        return torch.stack([self.tokens_at(batch, level) for level in levels], dim=1)

    def states_before(self, batch: Batch) -> Tensor:
        """Return [A, K, H], the target's states that predict the same tokens as the levels, for a teacher."""
        target_hidden = batch.select_taps((-1,))[:, 0]
        # level d of slot i predicts token i + 2 + d, as the target does from its state i + 1 + d
        offsets = torch.arange(1, 1 + self.reached.shape[1], device=target_hidden.device)
        # the state of a level that is not reached may not be stored, and the level has no weight: take the first state
        indices = self.token_indices[:, None] + torch.where(self.reached, offsets, 1)
        return target_hidden[indices.clamp(max=len(batch.tokens) - 1)]


def draw_anchors(mask: Tensor, seed: int, max_anchors: int) -> Tensor:
    """Sample at most `max_anchors` of one sequence's marked slots, without replacement, in ascending order [A].

    Args:
        mask: [slots] bool, the slots to choose from, on the host.
        seed: The sequence's random seed.
        max_anchors: If there are not more marked slots than this, all are returned.
    """
    marked = mask.nonzero()[:, 0]
    if len(marked) <= max_anchors:
        return marked
    # sorting random numbers gives a random order
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty_like(marked, dtype=torch.float64).uniform_(generator=generator).argsort()
    return marked[order[:max_anchors].sort().values]
