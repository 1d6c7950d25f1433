"""The state of heads with masks after the root: one forward over committed tokens and masks gives all levels."""

# B rows of text, K levels, H width

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.drafters.blocks.injected_state import grow_slots
from eagle.drafters.parts.text_state import TextState


class MaskedState(TextState):
    """Keys and values of many texts; those of the masks are written over by the tokens that are committed next."""

    head: Any

    @torch.inference_mode()
    def __init__(self, head: Any) -> None:
        super().__init__(head)
        masks = head.levels - 1
        self.masks = torch.full((masks,), head.settings.mask_token), head.mask_state().expand(masks, -1)
        self.levels = 1  # of the deepest draft that is asked for

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees whose levels are the states behind the root and the masks."""
        budgets = {row: budget.within(self.head.levels) for row, budget in budgets.items()}
        self.levels = max(1, *(0 if budgets[row].is_empty else budgets[row].depth for row in updates))
        rows, seeds, hidden = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_slots(self.head, seeds, hidden), strict=True))

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, K, H], the states of the levels behind each row's text."""
        tokens, states = self.masks
        return self._read_ahead(updates, (tokens[: self.levels - 1], states[: self.levels - 1]))
