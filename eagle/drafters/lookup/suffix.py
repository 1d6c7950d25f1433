"""Suffix decoding: draft what followed earlier occurrences of the text's longest repeated ending, by frequency."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, islice
from math import log

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, EachText, Noise
from eagle.core.tree import DraftTree

SEAM = -1  # what every remembered answer ends with: equal to no token

# Of a string with more continuations the first so many are compared, so that a long text takes no longer than a short
# one. On 180 answers of the bench target and of people that changed no acceptance length by more than 0.001; 16 cost
# 0.004.
COMPARED = 32


class Automaton:
    """The suffix automaton of a growing text: all of its strings, with what follows them and how often they occur.

    Strings that end at the same places share a state (Blumer et al. 1985), whose link leads to their longest suffix
    that ends at further places. Strings of up to `limit` tokens are counted, exactly at any moment.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.next: list[dict[int, int]] = []
        self.links: list[int] = []
        self.lengths: list[int] = []  # of a state's longest string
        self.counts: list[int] = []
        self.latest: list[int] = []  # the place where its strings ended last
        self.whole = self._state({}, 0, 0, 0)  # the state of all the text
        self.end = self.whole  # the state of its last `limit` tokens

    def add(self, token: int) -> None:
        """Append a token to the text, and count one more occurrence of its suffixes of at most `limit` tokens.

        This adds two states at most. Counting takes a step for each state on the chain of suffix links.
        """
        state = self.whole
        size = self.lengths[state] + 1
        # count 0: the last loop adds this occurrence
        new = self._state({}, length=size, count=0, latest=size)
        self.whole = new
        # every ending of the text that has not been followed by this token now is
        while token not in self.next[state]:
            self.next[state][token] = new
            if state == 0:
                break
            state = self.links[state]
        else:
            # the longest suffix of the new text that occurred before
            self.links[new] = self._exactly(state, token)
        # the last `limit` tokens: those before the new one are shortened to make room for it
        shortened = self.shorten(self.end, self.limit - 1)
        self.end = self.next[shortened][token]
        # all suffixes of the last `limit` tokens occurred once more
        state = self.end
        while state:
            self.counts[state] += 1
            self.latest[state] = size
            state = self.links[state]

    def follow_end(self) -> tuple[int, int]:
        """Return state and length of the longest ending of the text, up to `limit` tokens, that also occurs earlier."""
        state = self.links[self.end] if self.end == self.whole else self.end
        return state, min(self.lengths[state], self.limit)

    def after(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of another text's longest known ending after a token, from those before it."""
        while state and token not in self.next[state]:
            state = self.links[state]
            length = self.lengths[state]
        if token not in self.next[state]:
            return 0, 0
        return self.shorten(self.next[state][token], self.limit), min(length + 1, self.limit)

    def shorten(self, state: int, length: int) -> int:
        """Return the state of a string in this state when all but its last `length` tokens are dropped."""
        while state and self.lengths[self.links[state]] >= length:
            state = self.links[state]
        return state

    def followers(self, state: int, most: int) -> list[tuple[float, int, int]]:
        """Return the most frequent successors of a state's strings (ties: most recent): share, token and state."""
        # nothing follows the end of the text
        is_end = self.latest[state] == self.lengths[self.whole]
        total = self.counts[state] - is_end
        compared = islice(self.next[state].items(), COMPARED)
        ranked = [
            (self.counts[child], self.latest[child], token, child) for token, child in compared
        ]
        best = sorted(ranked, reverse=True)[:most]
        return [(times / total, token, child) for times, _, token, child in best if token != SEAM]

    def _exactly(self, state: int, token: int) -> int:
        """Return the state of a state's longest string plus this token, split from longer strings that shared it."""
        shared = self.next[state][token]
        length = self.lengths[state] + 1
        if self.lengths[shared] == length:
            return shared
        split = self._state(
            dict(self.next[shared]), length, self.counts[shared], self.latest[shared]
        )
        self.links[split] = self.links[shared]
        self.links[shared] = split
        while self.next[state].get(token) == shared:
            self.next[state][token] = split
            state = self.links[state]
        return split

    def _state(self, follow: dict[int, int], length: int, count: int, latest: int) -> int:
        self.next.append(follow)
        self.links.append(0)
        self.lengths.append(length)
        self.counts.append(count)
        self.latest.append(latest)
        return len(self.next) - 1


Node = tuple[int, int, float]  # token, parent, and log of how likely the path is


def likeliest(past: Automaton, match: int, length: int, depth: int, width: int) -> Iterator[Node]:
    """Yield (token, parent, log-likelihood) of the tree of what followed a match, likeliest nodes first.

    `match` is the automaton's state for the match, which has `length` tokens.
    The first node is the root, whose token is SEAM. A path is as likely as its tokens followed one another in the past,
    times n / (n + d): so likely a match of n tokens is taken to go on for d more. Of the bench target's greedy answers
    it went on for one more in 41, 61, 72, 78, 80 and 83% (n = 1 to 6, where the past knew one continuation).
    """
    # minus the likelihood, so that a heap gives the likeliest; place and rank break ties
    # entries: -likelihood, place and rank, then parent, token, state and level of the node
    heap = [(-1.0, 0, 0, -1, SEAM, match, 0)]
    for place in count():
        if not heap:
            return
        minus_likelihood, _, _, parent, token, state, level = heappop(heap)
        yield token, parent, log(-minus_likelihood)
        if level == depth:
            continue
        # one level's factor: over d levels their product is n / (n + d)
        minus_likelihood *= (length + level) / (length + level + 1)
        # a state without followers is the end of the past, which ends with the match: it goes on with what followed the
        # match, as LZ77 copies a run over itself
        followers = past.followers(state if past.next[state] else match, width)
        for rank, (share, token, child) in enumerate(followers):
            heappush(heap, (minus_likelihood * share, place, rank, place, token, child, level + 1))


class SuffixDrafter(Drafter):
    """Trees of what followed the text's longest repeated ending (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    Strings of up to `longest` tokens are counted: a match, and a draft of at most half of them. A match of n tokens is
    trusted for `trust` * n nodes. With `remember` the answers of earlier requests are searched too, and the longer
    match is used, at a tie the text's own; beyond so many tokens only the newest half is remembered.
    """

    def __init__(self, longest: int = 32, trust: int = 3, remember: int = 0) -> None:
        if longest < 2:
            raise ValueError(
                f"longest is {longest}, expected 2 or more: a matched token and one drafted behind it"
            )
        if trust < 1 or remember < 0:
            raise ValueError(
                f"trust is {trust} and remember {remember}, expected 1 or more and 0 (nothing) or more"
            )
        self.longest = longest
        self.trust = trust
        self.remember = remember
        self.memory: list[int] = []
        self.earlier = Automaton(longest)

    def begin(self, noise: Noise | None = None) -> SuffixText:
        """Return the state for a new sequence."""
        return SuffixText(self)

    def open(self) -> EachText:
        """Return the state for several sequences; with `remember`, each is remembered when it ends."""
        return _Remembered(self) if self.remember else EachText(self)

    def keep(self, answer: list[int]) -> None:
        """Remember an answer."""
        self.memory += answer
        if len(self.memory) > self.remember:
            # an automaton cannot forget: a new one reads the newest half
            self.memory = self.memory[len(self.memory) - self.remember // 2 :]
            self.earlier = Automaton(self.longest)
            answer = self.memory
        for token in answer:
            self.earlier.add(token)


class SuffixText:
    """A sequence with its automaton, and its match in earlier answers."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.drafter = drafter
        self.text = Automaton(drafter.longest)
        self.answer: list[int] = []
        self.earlier = drafter.earlier
        self.match = (0, 0)  # state and length, in the earlier answers

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return the likeliest continuations within the budget; the root alone where nothing matches."""
        self._read([*update.tokens.tolist(), update.root])
        past = self.text
        state, length = past.follow_end()
        if self.match[1] > length:
            past = self.earlier
            state, length = self.match
        # strings of up to `longest` tokens are counted: the match and what is drafted after it
        depth = min(budget.depth, self.drafter.longest // 2)
        length = min(length, self.drafter.longest - depth)
        nodes = min(budget.nodes, self.drafter.trust * length)
        tree = likeliest(
            past, past.shorten(state, length), length, depth, width=min(budget.top_k, nodes)
        )
        tokens, parents, likelihoods = zip(*islice(tree, nodes + 1), strict=True)
        tree_tokens = torch.tensor([update.root, *tokens[1:]])
        return DraftTree(tree_tokens, torch.tensor(parents), likelihoods=torch.tensor(likelihoods))

    def _read(self, tokens: list[int]) -> None:
        """Append the tokens to the text; the first is its last root, except for a prompt."""
        if self.answer:
            del tokens[0]
            self.answer += tokens
        else:
            self.answer = tokens[-1:]
        for token in tokens:
            self.text.add(token)
            if self.drafter.remember:
                self.match = self.earlier.after(*self.match, token)


class _Remembered(EachText):
    """Sequences whose answers the drafter remembers."""

    drafter: SuffixDrafter

    def release(self, row: int) -> None:
        """Release a row and remember its answer."""
        text = self.texts.pop(row)
        assert isinstance(text, SuffixText)
        if text.answer:
            self.drafter.keep([*text.answer, SEAM])
