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
    """The slots after which training drafts blocks: the block of slot i begins with token i + 1, its root.

    Level d of the block, from 0 on, predicts token i + 2 + d. There are A anchors in all sequences and K levels.
    """

    spans: Spans  # the anchors as rows of attention among the slots of all sequences
    token_indices: Tensor  # [A], the index of each anchor among all tokens
    reached: (
        Tensor  # [A, K] bool, whether all tokens up to the one that a level predicts are supervised
    )

    @classmethod
    def everywhere(cls, batch: Batch, levels: int) -> Anchors:
        """Return all supervised slots as anchors, for validation.

        Args:
            batch: The sequences.
            levels: K, the number of levels of a block.
        """
        # no sequence has more slots than the longest has tokens, so none is left out; 0 if the batch is empty
        return cls.sampled(batch, levels, max(batch.lengths, default=0))

    @classmethod
    def sampled(cls, batch: Batch, levels: int, max_anchors: int) -> Anchors:
        """Return at most `max_anchors` supervised slots of each sequence as anchors, sampled by the sequence's seed.

        Args:
            batch: The sequences.
            levels: K, the number of levels of a block.
            max_anchors: The most anchors of one sequence; a sequence with fewer supervised slots has all of them.
        """
        slots = []
        token_indices = []
        reached = []
        # by slot: slot i predicts token i + 2 first, so a sequence has two slots less than tokens
        masks = [mask[2:] for mask in batch.masks]
        begin = 0  # the index of the sequence's first token among all tokens
        for mask, seed, length in zip(masks, batch.seeds, batch.lengths, strict=True):
            anchors = draw_anchors(mask, seed, max_anchors)
            # each anchor's index among its sequence's slots and among all tokens, and the levels that have a weight
            slots.append(anchors)
            # slot i of a sequence has the index of the sequence's token i
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
        """Return [A], the token that a level should predict after each of the A anchors.

        After the end of a sequence they are arbitrary, as such levels have no weight.

        Args:
            batch: The sequences.
            level: The level, from 0 on; -1 stands for the roots, the first tokens of the blocks.
        """
        # level d of slot i predicts token i + 2 + d
        indices = batch.places_behind(self.token_indices, 2 + level)
        return batch.tokens.index_select(0, indices)

    def tokens_of(self, batch: Batch) -> Tensor:
        """Return [A, K], the tokens that the K levels should predict after each of the A anchors, without the roots."""
        levels = range(self.reached.shape[1])
        return torch.stack([self.tokens_at(batch, level) for level in levels], dim=1)

    def states_before(self, batch: Batch) -> Tensor:
        """Return [A, K, H], the target's states that predict the same tokens as the levels: inputs of its LM head.

        A loss takes the target's probs from them, as those of the teacher.

        Args:
            batch: The sequences with the target's states [.., H], among them tap -1, the LM head's input.
        """
        target_hidden = batch.select_taps((-1,))[:, 0]
        # level d of slot i predicts token i + 2 + d, as the target does from its state i + 1 + d; offsets are 1 + d
        offsets = torch.arange(1, 1 + self.reached.shape[1], device=target_hidden.device)
        # the state of a level that is not reached may not be stored, and the level has no weight: take the first state
        indices = self.token_indices[:, None] + torch.where(self.reached, offsets, 1)

        return target_hidden[indices.clamp(max=len(batch.tokens) - 1)]


def draw_anchors(mask: Tensor, seed: int, max_anchors: int) -> Tensor:
    """Sample some of one sequence's marked slots as anchors, without replacement.

    Args:
        mask: [slots] bool, true at the slots to choose from, on the host.
        seed: The sequence's random seed.
        max_anchors: The most slots to return. If not more slots are marked, all of them are returned.

    Returns:
        The indices of the chosen slots in the sequence, in ascending order.
    """
    marked = mask.nonzero()[:, 0]
    if len(marked) <= max_anchors:
        return marked
    # the order that sorts random numbers is a random one, of which the first `max_anchors` are taken
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty_like(marked, dtype=torch.float64).uniform_(generator=generator).argsort()
    return marked[order[:max_anchors].sort().values]
