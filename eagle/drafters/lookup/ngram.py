"""Prompt lookup: copy what followed earlier occurrences of the text's last tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, get_args

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree

Pick = Literal["recent", "frequent"]
# Occurrences of an n-gram that are looked at, so that a long text takes no longer than a short one; 32 kept no more.
LATEST = 8


class NgramDrafter(Drafter):
    """Drafts copies of what followed earlier occurrences of the text's last n tokens, longest n first.

    A match of n tokens is trusted for `trust` * n more: on 32 prompts of three kinds that made decoding 1.12 to 1.16
    times faster in modelled time than always copying ten, for 0.02 to 0.07 tokens per step less. `pick` says which of
    several continuations is copied; up to `branches` that begin differently are copied, as far as the budget goes.
    """

    def __init__(
        self, longest: int = 4, shortest: int = 1, trust: int = 3, pick: Pick = "recent", branches: int = 1
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest}..{longest} tokens make no sense: expected 1 <= shortest <= longest"
            )
        if pick not in get_args(Pick) or min(trust, branches) < 1:
            raise ValueError(
                f"pick, trust and branches are {pick!r}, {trust} and {branches}, expected one of "
                f"{', '.join(get_args(Pick))}, and 1 or more"
            )
        self.trust, self.pick, self.branches = trust, pick, branches
        self.sizes = range(longest, shortest - 1, -1)

    def begin(self, noise: Noise | None = None) -> NgramText:
        """An empty text."""
        return NgramText(self)


class NgramText:
    """A text, and where its n-grams stand."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter, self.sizes = drafter, drafter.sizes
        self.text: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its latest occurrence
        self.before: dict[tuple[int, int], int] = {}  # n, such a place -> the one after the occurrence before

    def __deepcopy__(self, memo: Any) -> NgramText:
        """A copy with its own token list; the n-grams never change and are shared."""
        text = copy.copy(self)
        text.text, text.after, text.before = self.text.copy(), self.after.copy(), self.before.copy()
        return text

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Copies of at most `budget.nodes` tokens in all; the root alone where nothing matches."""
        self._read([*update.tokens.tolist(), update.root])
        paths: list[list[int]] = []
        left = budget.nodes
        for size, place in islice(self._find_matches(), min(self.drafter.branches, budget.top_k)):
            # a copy that reaches the end of the text goes on with itself, as in LZ77
            period, length = len(self.text) - place, min(left, budget.depth, self.drafter.trust * size)
            paths.append([self.text[place + step % period] for step in range(length)])
            left -= length
        return DraftTree.from_paths(update.root, paths)

    def _read(self, tokens: list[int]) -> None:
        """Append the tokens; the n-grams that end the text come into the index once something follows them."""
        text = self.text
        for token in tokens[1:] if text else tokens:  # the first is the last root
            end = len(text)
            for size in self.sizes:
                if size <= end:
                    gram = tuple(text[end - size :])
                    if gram in self.after:
                        self.before[size, end] = self.after[gram]
                    self.after[gram] = end
            text.append(token)

    def _find_matches(self) -> Iterator[tuple[int, int]]:
        """Matches whose continuations begin differently, the best first: their n, and the place behind each."""
        text, first_tokens = self.text, set()
        for size in self.sizes:
            places: Iterable[int] = self._places(size)
            if self.drafter.pick == "frequent":
                latest = list(islice(places, LATEST))
                times = Counter(text[place] for place in latest)
                places = sorted(latest, key=lambda place: -times[text[place]])  # of equals the latest first
            for place in islice(places, LATEST):
                if text[place] not in first_tokens:
                    first_tokens.add(text[place])
                    yield size, place

    def _places(self, size: int) -> Iterator[int]:
        """The continuations of earlier occurrences of the text's last n tokens, latest first."""
        place = self.after.get(tuple(self.text[-size:]))
        while place is not None:
            yield place
            place = self.before.get((size, place))
