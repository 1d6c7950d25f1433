"""Several drafters in turn: the first that has anything to say drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle.core.drafter import Budget, Committed, Drafter, Noise
from eagle.core.ownership import turn_of
from eagle.core.tree import DraftTree


class FirstOf:
    """Asks drafters in their order until one proposes more than the root: lookup first, a trained head behind it.

    The output keeps its law as long as silence follows from the committed text: a drafter that was silent for what it
    knows of the target's noise would choose between the two rules of verification by what they draw with.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("a list of drafters is empty: expected at least one, for none at all NoDrafter()")
        self.drafters = tuple(drafters)
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self.places = [[self.taps.index(tap) for tap in drafter.taps] for drafter in drafters]
        self.untold: list[list[Committed]] = [[] for _ in drafters]
        self.stream: object = None

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence."""
        self.stream = object()
        for drafter, untold in zip(self.drafters, self.untold, strict=True):
            with turn_of(drafter).take(self.stream):
                drafter.begin(noise)
            untold.clear()

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """The first tree that has more than a root; who is not asked hears the news when it is."""
        for untold, places in zip(self.untold, self.places, strict=True):
            untold.append(_of_taps(news, places))
        tree = DraftTree.chain([news.root])
        for drafter, untold in zip(self.drafters, self.untold, strict=True):
            told = Committed.joined(untold)
            untold.clear()
            with turn_of(drafter).hold(self.stream):
                tree = drafter.propose(told, budget)
            if len(tree) > 1:
                break
        return tree


def _of_taps(news: Committed, places: list[int]) -> Committed:
    """The same with some of the features."""
    features = news.features[:, places] if places and news.features is not None else None
    return replace(news, features=features)
