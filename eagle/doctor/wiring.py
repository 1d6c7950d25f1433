"""A head under examination with its inputs, and the operations that the doctor needs."""

# N tokens of all sequences, S slots, D tokens that can be drafted

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Wiring:
    """A head, the embedding and LM head that it borrows from the target, and the shifts of its inputs."""

    head: Any
    target_head: TargetHead
    token_back: int = 0  # by how many positions the token is read too early
    state_back: int = 0  # and the state
    recurrent: bool = True  # whether a level reads the token that the level before has drafted
    levels: int = 3  # of the chain that is examined
    needs_more: bool = False  # whether it was trained on so few tokens that more would bring much

    def draft_levels(self, batch: Batch, count: int) -> list[tuple[Tensor, Logits]]:
        """Return for each of `count` levels the head's states [S, ..] at all S supervised slots, and its LM head.

        A slot is a position from which the head drafts; level 1 is its first drafted token. Tokens and states of the
        batch are shifted first, as `token_back` and `state_back` say.
        """
        tokens = _shift_back(batch.tokens, batch.lengths, self.token_back)
        features = _shift_back(batch.features, batch.lengths, self.state_back)
        shifted = replace(batch, tokens=tokens, features=features)
        return list(self.head.draft_levels(shifted, self.target_head, count))

    @torch.no_grad()
    def reads_drafts(self, batch: Batch) -> bool:
        """Whether level 2 reads the token drafted by level 1; heads that guess all levels at once do not."""
        tokens = batch.tokens.clone()
        # change the token that level 1 drafts to 0 or 1: the states of level 2 change only if it reads that token
        # the first supervised token, which the first slot's level 1 drafts
        first_draft = batch.loss_mask.nonzero()[0, 0]
        tokens[first_draft] = 1 - tokens[first_draft].clamp(max=1)
        levels = self.draft_levels(batch, 2)
        if len(levels) < 2:
            return False
        changed_levels = self.draft_levels(replace(batch, tokens=tokens), 2)
        states, _ = levels[1]
        changed_states, _ = changed_levels[1]
        return not torch.equal(states[0], changed_states[0])


def _shift_back(rows: Tensor, lengths: tuple[int, ...], count: int) -> Tensor:
    """Return [N, ..], at each position of a sequence the row of `count` positions before; its first rows stay.

    Args:
        rows: [N, ..], tokens or states of all sequences, concatenated.
        lengths: The number of rows of each sequence.
        count: The number of positions.
    """
    if count == 0:
        return rows
    shifted = []
    for seq in rows.split(lengths):
        shifted += [seq[:count], seq[:-count]]
    return torch.cat(shifted)


def draft_ids(head: Any) -> Tensor | None:
    """Return [D], the token id of each of a head's D logits; None for a head that drafts the whole vocabulary."""
    d2t = dict(head.named_buffers()).get("d2t")
    if d2t is None:
        return None
    # d2t holds for each row the offset of its token from the row's index
    return d2t + torch.arange(len(d2t), device=d2t.device)


def find_tensors(head: Any, ending: str) -> list[str]:
    """Return the names of the parameters and buffers that end in the dotted name `ending`, such as "fc.weight"."""
    names = [name for name, _ in head.named_parameters()]
    names += [name for name, _ in head.named_buffers()]
    return [name for name in names if f".{name}".endswith(f".{ending}")]
