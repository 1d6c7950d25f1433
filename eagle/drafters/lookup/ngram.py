"""Prompt lookup: copy what followed earlier occurrences of the text's last tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
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
        self,
        longest: int = 4,
        shortest: int = 1,
        trust: int = 3,
        pick: Pick = "recent",
        branches: int = 1,
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
        self.trust = trust
        self.pick = pick
        self.branches = branches
        self.sizes = range(longest, shortest - 1, -1)

    def begin(self, noise: Noise | None = None) -> NgramText:
        """Return the state for a new sequence."""
        return NgramText(self)


class NgramText:
    """A sequence, and where its n-grams stand."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter = drafter
        self.sizes = drafter.sizes
        self.text: list[int] = []
        # from an n-gram to the position after its latest occurrence, and from n and such a position to the one before
        self.latest: dict[tuple[int, ...], int] = {}
        self.earlier: dict[tuple[int, int], int] = {}

    def __deepcopy__(self, memo: Any) -> NgramText:
        """Return a copy with its own tokens; the n-grams never change and are shared."""
        text = copy.copy(self)
        text.text = self.text.copy()
        text.latest = self.latest.copy()
        text.earlier = self.earlier.copy()
        return text

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return copies of at most `budget.nodes` tokens in all; the root alone where nothing matches."""
        self._read([*update.tokens.tolist(), update.root])
        paths: list[list[int]] = []
        nodes_left = budget.nodes
        for size, position in islice(
            self._find_matches(), min(self.drafter.branches, budget.top_k)
        ):
            length = min(nodes_left, budget.depth, self.drafter.trust * size)
            # a copy that gets to the end of the text goes on with itself, as in LZ77
            period = len(self.text) - position
            paths.append([self.text[position + step % period] for step in range(length)])
            nodes_left -= length
        return DraftTree.from_paths(update.root, paths)

    def _read(self, tokens: list[int]) -> None:
        """Append the tokens; the n-grams that end the text come into the index once something follows them."""
        text = self.text
        if text:
            # the first is the root of the last cycle, which the text has already
            tokens = tokens[1:]
        for token in tokens:
            end = len(text)
            for size in self.sizes:
                if size <= end:
                    # `latest` has the position after the n-gram, and `earlier` leads on to the one before it
                    gram = tuple(text[end - size :])
                    if gram in self.latest:
                        self.earlier[size, end] = self.latest[gram]
                    self.latest[gram] = end
            text.append(token)

    def _find_matches(self) -> Iterator[tuple[int, int]]:
        """Yield n and the position after each match, the best first; no two continuations begin alike."""
        text = self.text
        first_tokens = set()
        for size in self.sizes:
            positions = list(islice(self._positions(size), LATEST))
            if self.drafter.pick == "frequent":
                times = Counter(text[position] for position in positions)
                # of equals the latest first
                positions.sort(key=lambda position: -times[text[position]])
            for position in positions:
                if text[position] not in first_tokens:
                    first_tokens.add(text[position])
                    yield size, position

    def _positions(self, size: int) -> Iterator[int]:
        """Yield the continuations of earlier occurrences of the text's last n tokens, latest first."""
        position = self.latest.get(tuple(self.text[-size:]))
        while position is not None:
            yield position
            position = self.earlier.get((size, position))
