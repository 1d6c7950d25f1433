"""No drafting: the target speaks one token per forward. The baseline of every comparison."""

from __future__ import annotations

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree


class NoDrafter(Drafter):
    """Proposes nothing but the root."""

    def begin(self, noise: Noise | None = None) -> NoDrafter:
        """Itself: nothing is kept of a text."""
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The tree of the root alone."""
        return DraftTree.chain([update.root])
