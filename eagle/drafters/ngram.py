"""Prompt lookup: what followed the last few tokens when they stood here before will follow them again."""

from __future__ import annotations

from eagle.drafter import Budget, Committed, Noise
from eagle.tree import DraftTree


class NgramDrafter:
    """Chains copied from the most recent earlier occurrence of the text's last n tokens, longest n first.

    A match of n tokens is trusted for `trust` * n more: on 32 prompts of three kinds that made decoding 1.12 to 1.16
    times faster in modelled time than always copying ten, for 0.02 to 0.07 tokens per step less.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, longest: int = 4, shortest: int = 1, trust: int = 3) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest}..{longest} tokens make no sense: expected 1 <= shortest <= longest"
            )
        self.trust = trust
        self.sizes = range(longest, shortest - 1, -1)
        self.begin()

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the text and where its n-grams stood."""
        self.text: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its most recent occurrence
        self.indexed = 0

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """A chain of at most `budget.nodes` tokens; the root alone where nothing matches."""
        self.text += news.tokens.tolist()
        self.text.append(news.root)  # certain, though not committed yet
        chain = self._continuation(self.text, min(budget.nodes, budget.depth))
        self.text.pop()
        return DraftTree.chain([news.root, *chain])

    def _continuation(self, text: list[int], length: int) -> list[int]:
        # the n-gram that ends the text is not indexed yet, so that it cannot match itself
        for end in range(self.indexed + 1, len(text)):
            for size in self.sizes:
                if size <= end:
                    self.after[tuple(text[end - size : end])] = end
        self.indexed = len(text) - 1
        for size in self.sizes:
            place = self.after.get(tuple(text[len(text) - size :])) if size < len(text) else None
            if place is not None:
                # a match that reaches the end is copied over itself, as in LZ77
                period = len(text) - place
                return [text[place + step % period] for step in range(min(length, self.trust * size))]
        return []
