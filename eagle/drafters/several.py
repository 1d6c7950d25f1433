"""Several drafters in turn: the first that has a draft drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise, Reads
from eagle.core.ownership import turn_of
from eagle.core.tree import DraftTree


class FirstOf(Drafter):
    """Asks drafters in their order until one proposes more than the root: lookup first, a trained head behind it.

    The output keeps its distribution as long as silence follows from the committed text: a drafter that was silent for
    what it knows of the target's noise would choose between the two rules of verification by what they draw with.

    Which forwards a draft takes depends on who drafts, so that it costs the seconds that it took.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("a list of drafters is empty: expected at least one, for none at all NoDrafter()")
        self.drafters = tuple(drafters)
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        asked = [drafter.reads for drafter in drafters]
        self.reads = Reads(max(reads.choices for reads in asked), any(reads.view for reads in asked))
        self.places = [[self.taps.index(tap) for tap in drafter.taps] for drafter in drafters]
        self.pending: list[list[Committed]] = [[] for _ in drafters]
        self.stream: object = None

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence."""
        self.stream = object()
        for drafter, pending in zip(self.drafters, self.pending, strict=True):
            with turn_of(drafter).take(self.stream):
                drafter.begin(noise)
            pending.clear()

    def bind_target(self, view: Any) -> None:
        """Hand the view on to those who read one."""
        for drafter in self.drafters:
            if drafter.reads.view:
                drafter.bind_target(view)

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The first tree that has more than a root; a drafter that is not asked gets the update when it is."""
        for drafter, pending, places in zip(self.drafters, self.pending, self.places, strict=True):
            pending.append(_restrict(update, places, drafter.reads.choices))
        tree = DraftTree.chain([update.root])
        for drafter, pending in zip(self.drafters, self.pending, strict=True):
            joined = Committed.join(pending)
            pending.clear()
            with turn_of(drafter).hold(self.stream):
                tree = drafter.propose(joined, budget)
            if len(tree) > 1:
                break
        return tree


def _restrict(update: Committed, places: list[int], choices: int) -> Committed:
    """The update with the features at some places and so many choices alone."""
    features = update.features[:, places] if places and update.features is not None else None
    if update.choices is None or not choices:
        return replace(update, features=features, tree=None, choices=None)
    return replace(update, features=features, choices=update.choices[:, :choices])
