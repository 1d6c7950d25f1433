"""No drafting: one token per forward of the target. The baseline of every comparison."""

from __future__ import annotations

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree


class NoDrafter(Drafter):
    """Proposes nothing but the root, the token that the target has chosen and not yet read."""

    def begin(self, noise: Noise | None = None) -> NoDrafter:
        """Return itself: a sequence needs no state."""
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return a tree with only the root."""
        return DraftTree.chain([update.root])
