"""Suffix decoding: draft what followed earlier occurrences of the sequence's longest repeated ending, by frequency."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, islice
from math import log

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise, PerSequenceState
from eagle.core.tree import DraftTree

SEAM = -1  # the mark after every remembered answer, equal to no token: no match goes across it

# Of a string with more continuations the first so many are compared, so that a long sequence takes no longer than a
# short one. On 180 answers of the bench target and of people that changed no acceptance length by more than 0.001; 16
# cost 0.004.
COMPARED = 32


class Automaton:
    """The suffix automaton of a growing sequence: all of its strings, with what follows them and how often they occur.

    Strings that end at the same positions share a state (Blumer et al. 1985), whose link leads to their longest suffix
    that also ends at other positions. Strings of up to `limit` tokens are counted, exactly at any moment.
    """

    def __init__(self, limit: int) -> None:
        """Begin with an empty sequence; strings of up to `limit` tokens are counted."""
        self.limit = limit
        # by state, of which 0 is that of the empty string:
        self.next: list[dict[int, int]] = []  # the state after each token that followed
        self.links: list[int] = []  # the suffix link
        self.lengths: list[int] = []  # of a state's longest string
        self.counts: list[int] = []  # how often its strings of at most `limit` tokens occurred
        self.latest: list[int] = []  # the position where its strings ended last
        # the state of the whole sequence, at first the empty string
        self.whole = self._add_state({}, length=0, count=0, latest=0)
        self.end = self.whole  # the state of its last `limit` tokens

    def add(self, token: int) -> None:
        """Append a token to the sequence, and count one more occurrence of its suffixes of at most `limit` tokens.

        This adds two states at most. Counting takes a step for each state on the chain of suffix links.
        """
        state = self.whole
        size = self.lengths[state] + 1
        # count 0: the last loop adds this occurrence
        new = self._add_state({}, length=size, count=0, latest=size)
        self.whole = new
        # add a transition to each ending of the sequence that this token has not followed before
        while token not in self.next[state]:
            self.next[state][token] = new
            if state == 0:
                break
            state = self.links[state]
        else:
            # the token has followed this ending before: the longest suffix of the new sequence that occurred earlier
            self.links[new] = self._split_state(state, token)
        # the last `limit` tokens: those before the new one are shortened to make room for it
        shortened = self.shorten(self.end, self.limit - 1)
        self.end = self.next[shortened][token]
        # all suffixes of the last `limit` tokens occurred once more
        state = self.end
        while state:
            self.counts[state] += 1
            self.latest[state] = size
            state = self.links[state]

    def match_end(self) -> tuple[int, int]:
        """Return state and length of the sequence's longest ending, up to `limit` tokens, that also occurs earlier.

        They are 0 and 0 if no ending does.
        """
        # the state of the whole sequence occurred only once
        state = self.links[self.end] if self.end == self.whole else self.end
        return state, min(self.lengths[state], self.limit)

    def extend_match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest ending of another sequence that occurs in this one.

        The length is at most `limit`; both are 0 if no ending occurs.

        Args:
            state: The state of that match before `token` was appended to the other sequence.
            length: The number of tokens of that match.
            token: The new last token of the other sequence.
        """
        # drop first tokens of the match until the rest was followed by this token
        while state and token not in self.next[state]:
            state = self.links[state]
            length = self.lengths[state]
        # state 0, the empty string, is left: the token is new to this sequence
        if token not in self.next[state]:
            return 0, 0
        # a match longer than `limit` loses its first tokens
        return self.shorten(self.next[state][token], self.limit), min(length + 1, self.limit)

    def shorten(self, state: int, length: int) -> int:
        """Return the state of the last `length` tokens of a string, whose state is given."""
        # the link leads to shorter endings: go on as long as these have `length` tokens
        while state and self.lengths[self.links[state]] >= length:
            state = self.links[state]
        return state

    def followers(self, state: int, max_count: int) -> list[tuple[float, int, int]]:
        """Return the tokens that most often followed a state's strings, most often first, ties by recency.

        Args:
            state: The state of the strings.
            max_count: The most tokens to return.

        Returns:
            For each of them its share of all tokens that followed, the token, and the state of the strings with it.
        """
        # one occurrence has no follower if the sequence ends with it
        is_end = self.latest[state] == self.lengths[self.whole]
        total = self.counts[state] - is_end
        compared = islice(self.next[state].items(), COMPARED)
        # the sort is by count, then by recency
        ranked = [
            (self.counts[child], self.latest[child], token, child) for token, child in compared
        ]
        best = sorted(ranked, reverse=True)[:max_count]
        # the end of a remembered answer is no token to draft
        return [(times / total, token, child) for times, _, token, child in best if token != SEAM]

    def _split_state(self, state: int, token: int) -> int:
        """Return the state whose longest string is that of `state` plus this token, which followed it before.

        If longer strings share that state, a new one is split off for this string and its suffixes.
        """
        shared = self.next[state][token]
        length = self.lengths[state] + 1
        if self.lengths[shared] == length:
            return shared
        split = self._add_state(
            dict(self.next[shared]), length, self.counts[shared], self.latest[shared]
        )
        self.links[split] = self.links[shared]
        self.links[shared] = split
        # shorter endings led to the shared state, too
        while self.next[state].get(token) == shared:
            self.next[state][token] = split
            state = self.links[state]
        return split

    def _add_state(self, follow: dict[int, int], length: int, count: int, latest: int) -> int:
        """Add a state that links to the empty string, and return its index.

        Args:
            follow: The state after each token that followed its strings.
            length: The tokens of its longest string.
            count: How often its strings occurred.
            latest: The position where they ended last.
        """
        self.next.append(follow)
        self.links.append(0)
        self.lengths.append(length)
        self.counts.append(count)
        self.latest.append(latest)
        return len(self.next) - 1


Node = tuple[int, int, float]  # token, parent, and log of how likely the path is


def likeliest(past: Automaton, match: int, length: int, depth: int, width: int) -> Iterator[Node]:
    """Yield (token, parent, log-likelihood) of the tree of what followed a match, likeliest nodes first.

    The first node is the root, whose token is SEAM. The likelihood of a path is how often its tokens followed one
    another in the past, times n / (n + d), the estimate that a match of n tokens goes on for d more. Of the bench
    target's greedy answers it went on for one more in 41, 61, 72, 78, 80 and 83% (n = 1 to 6, where the past had one
    continuation).

    Args:
        past: The automaton of the sequence that is searched.
        match: Its state for the match.
        length: The number of tokens of the match, n.
        depth: The levels of the tree.
        width: The most children of a node.
    """
    # Entries: -likelihood, so that the heap gives the likeliest first; the parent's node and the rank among its
    # children, which break ties; then parent, token, state and level. The first is the root, without a parent (-1).
    heap = [(-1.0, 0, 0, -1, SEAM, match, 0)]
    for node in count():
        if not heap:
            return
        minus_likelihood, _, _, parent, token, state, level = heappop(heap)
        yield token, parent, log(-minus_likelihood)
        if level == depth:
            continue
        # the factor of one level: over d levels the product is n / (n + d)
        minus_likelihood *= (length + level) / (length + level + 1)
        # a state that nothing follows is the end of the past, which ends with the match: go on with what followed the
        # match, as LZ77 copies a run over itself
        followers = past.followers(state if past.next[state] else match, width)
        for rank, (share, token, child) in enumerate(followers):
            heappush(heap, (minus_likelihood * share, node, rank, node, token, child, level + 1))


class SuffixDrafter(Drafter):
    """Drafts what followed a sequence's longest repeated ending (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    Strings of up to `longest` tokens are counted: a match, and a draft of at most half of them. A match of n tokens is
    trusted for `trust` * n nodes. With `remember` the answers of earlier requests are searched too, and the longer
    match is used, at a tie the sequence's own; beyond so many tokens only the newest half is remembered.
    """

    def __init__(self, longest: int = 32, trust: int = 3, remember: int = 0) -> None:
        """Set how strings are matched, and how much is remembered.

        Args:
            longest: The most tokens of a match and its draft together.
            trust: How many nodes are drafted for each token of a match.
            remember: How many tokens of earlier answers are searched, too.
        """
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
        self.remembers = remember > 0
        self.memory: list[int] = []  # the tokens of earlier answers, each of which ends with SEAM
        self.earlier = Automaton(longest)  # of these tokens, to search them

    def begin(self, noise: Noise | None = None) -> SuffixSequence:
        """Return the state for a new sequence; the target's noise is not needed, as counts rank the drafts."""
        return SuffixSequence(self)

    def open(self) -> PerSequenceState:
        """Return the state for several sequences; with `remember`, each is remembered when it ends."""
        return _Remembered(self) if self.remember else PerSequenceState(self)

    def remember_answer(self, answer: list[int]) -> None:
        """Add an answer to the sequences that later requests search; beyond `remember` tokens drop the oldest half."""
        self.memory += answer
        if len(self.memory) > self.remember:
            # an automaton cannot forget: a new one reads the newest half
            self.memory = self.memory[len(self.memory) - self.remember // 2 :]
            self.earlier = Automaton(self.longest)
            answer = self.memory
        for token in answer:
            self.earlier.add(token)


class SuffixSequence:
    """A sequence with its automaton, and its match in earlier answers."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.drafter = drafter
        self.automaton = Automaton(drafter.longest)  # of the prompt and the answer so far
        self.answer: list[int] = []  # the tokens after the prompt, the root included
        # the drafter may replace its automaton: the match below is in this one
        self.earlier = drafter.earlier
        self.match = (0, 0)  # state and length, in the earlier answers

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return a tree of the likeliest continuations within the budget; the root alone where nothing matches."""
        self._read([*update.tokens.tolist(), update.root])
        past = self.automaton
        state, length = past.match_end()
        # the longer match counts, at a tie the sequence's own
        if self.match[1] > length:
            past = self.earlier
            state, length = self.match
        # the match and the draft after it are one string, of which up to `longest` tokens are counted
        depth = min(budget.depth, self.drafter.longest // 2)
        length = min(length, self.drafter.longest - depth)
        nodes = min(budget.nodes, self.drafter.trust * length)
        tree = likeliest(
            past, past.shorten(state, length), length, depth, width=min(budget.top_k, nodes)
        )
        # the root and the likeliest nodes; a tree yields the root even without a match
        tokens, parents, likelihoods = zip(*islice(tree, nodes + 1), strict=True)
        # in place of SEAM, which stands for the root
        tree_tokens = torch.tensor([update.root, *tokens[1:]])
        return DraftTree(tree_tokens, torch.tensor(parents), likelihoods=torch.tensor(likelihoods))

    def _read(self, tokens: list[int]) -> None:
        """Append the tokens to the sequence; the first is its last root, except for a prompt."""
        # the sequence has that root already
        if self.answer:
            del tokens[0]
            self.answer += tokens
        else:
            # of the prompt's update only the root belongs to the answer
            self.answer = tokens[-1:]
        for token in tokens:
            self.automaton.add(token)
            if self.drafter.remember:
                self.match = self.earlier.extend_match(*self.match, token)


class _Remembered(PerSequenceState):
    """Sequences whose answers the drafter remembers when they end, for the drafts of later requests."""

    drafter: SuffixDrafter

    def release(self, row: int) -> None:
        """Release a row and remember its answer."""
        sequence = self.sequences.pop(row)
        assert isinstance(sequence, SuffixSequence)
        # a row that was released before its first draft has no answer
        if sequence.answer:
            self.drafter.remember_answer([*sequence.answer, SEAM])
