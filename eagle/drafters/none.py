"""No drafting: the target speaks one token per forward. The baseline of every comparison."""

from __future__ import annotations

from eagle.core.drafter import Budget, Committed, Noise
from eagle.core.tree import DraftTree


class NoDrafter:
    """Proposes nothing but the root."""

    taps: tuple[int, ...] = ()

    def begin(self, noise: Noise | None = None) -> None:
        """Nothing to forget."""

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """The tree of the root alone."""
        return DraftTree.chain([news.root])
