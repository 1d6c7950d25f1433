"""A unigram table: the most frequent tokens, whatever the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle.drafters.lookup.counts import CountDrafter, Tables


class UnigramDrafter(CountDrafter):
    """Drafts tokens by their counted frequency."""

    kind = "unigram"

    def __init__(self, tables: Tables, device: torch.device | str = "cpu") -> None:
        super().__init__(tables, device)
        # [V] log-probs
        self.row = tables.unigram().log().float().to(device)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return log-probs [K, V] of what follows K tokens, the same for all of them."""
        return self.row.expand(len(tokens), -1)
