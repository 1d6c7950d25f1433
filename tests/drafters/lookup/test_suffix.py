"""Suffix decoding: counts, matches and trees are those of a naive search; answers are remembered."""

from __future__ import annotations

from collections import Counter
from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.drafters.lookup.suffix import Automaton, SuffixDrafter
from tests.enumerate_law import texts_of as paths_of

# two to four different tokens
SEQUENCES = st.integers(1, 3).flatmap(
    lambda largest: st.lists(st.integers(0, largest), min_size=2, max_size=40)
)

# -- what an automaton knows --------------------------------------------------------------------


def make_automaton(sequence: list[int], limit: int) -> Automaton:
    """Return the automaton of a whole sequence."""
    automaton = Automaton(limit)
    for token in sequence:
        automaton.add(token)
    return automaton


def ends(sequence: list[int], string: list[int]) -> list[int]:
    """Return the positions after every occurrence of a string, by a search."""
    size = len(string)
    stops = range(size, len(sequence) + 1)
    return [stop for stop in stops if sequence[stop - size : stop] == string]


def state_of(automaton: Automaton, string: list[int]) -> int:
    """Return the state that a string of the sequence leads to."""
    state = 0
    for token in string:
        state = automaton.next[state][token]
    return state


def longest_end(
    sequence: list[int],
    string: list[int],
    limit: int,
    occurrences: int,
) -> int:
    """Return the length of the string's longest suffix that the sequence holds so often."""
    for size in range(min(limit, len(string)), 0, -1):
        if len(ends(sequence, string[-size:])) >= occurrences:
            return size
    return 0


@settings(max_examples=60)
@given(SEQUENCES, SEQUENCES, st.integers(2, 6))
def test_matches_are_those_of_a_search(
    sequence: list[int],
    other: list[int],
    limit: int,
) -> None:
    """The longest suffix that occurred earlier, and that of another sequence that occurs here."""
    automaton = make_automaton(sequence, limit)
    state, length = automaton.match_end()
    assert length == longest_end(sequence, sequence, limit, 2)
    assert state == state_of(automaton, sequence[len(sequence) - length :])
    state = 0
    length = 0
    for end, token in enumerate(other, start=1):
        state, length = automaton.extend_match(state, length, token)
        assert length == longest_end(sequence, other[:end], limit, 1)
        assert state == state_of(automaton, other[end - length : end])


def test_a_repeated_token_is_counted_within_the_limit() -> None:
    """Longer strings are not counted, so that no step takes as long as the sequence."""
    automaton = make_automaton([7] * 3000, 8)
    counts = [automaton.counts[state_of(automaton, [7] * size)] for size in (1, 8)]
    assert counts == [3000, 2993]
    assert max(automaton.counts[9:]) == 0
    # a suffix automaton has at most two states a token
    assert len(automaton.next) <= 2 * 3000


# -- trees --------------------------------------------------------------------------------------


def followers(sequence: list[int], string: list[int]) -> Counter[int]:
    """Return the tokens that follow a string, by a search."""
    return Counter(sequence[end] for end in ends(sequence, string) if end < len(sequence))


def every_path(
    sequence: list[int],
    length: int,
    depth: int,
) -> dict[tuple[int, ...], float]:
    """Return all continuations of a sequence's last tokens, with their likelihoods."""
    match = sequence[-length:]
    found = {}
    pending: list[tuple[tuple[int, ...], list[int], float]] = [((), match, 1.0)]
    while pending:
        path, string, likelihood = pending.pop()
        # what lies further ahead is trusted less
        found[path] = likelihood * length / (length + len(path))
        if len(path) == depth:
            continue
        if not followers(sequence, string):
            # at the end of the sequence it goes on after the match
            string = match
        following = followers(sequence, string)
        for token, count in following.items():
            share = count / following.total()
            pending.append(((*path, token), [*string, token], likelihood * share))
    return found


def draft(
    drafter: SuffixDrafter,
    sequence: list[int],
    budget: Budget,
    cut: int = 0,
) -> DraftTree:
    """Return the tree after a whole request, whose first `cut` tokens are its prompt."""
    state = drafter.open()
    state.admit(0)
    start = 0
    for root in (cut, len(sequence) - 1):
        if start < root < len(sequence):
            tokens = torch.tensor(sequence[start:root], dtype=torch.long)
            tree = state.propose({0: Committed(tokens, None, sequence[root])}, {0: budget})[0]
            start = root
    state.release(0)
    assert isinstance(tree, DraftTree)
    return tree


@settings(max_examples=80)
@given(
    sequence=SEQUENCES,
    cut=st.integers(0, 39),
    longest=st.integers(2, 12),
    depth=st.integers(0, 4),
    trust=st.integers(1, 4),
    nodes=st.integers(0, 9),
)
def test_trees_hold_the_likeliest_continuations(
    sequence: list[int],
    cut: int,
    longest: int,
    depth: int,
    trust: int,
    nodes: int,
) -> None:
    """Each path is as likely as a search says, and no path that it finds is likelier."""
    tree = draft(
        SuffixDrafter(longest, trust),
        sequence,
        Budget(nodes, depth, 4),
        cut,
    )
    assert int(tree.tokens[0]) == sequence[-1]
    levels = min(depth, longest // 2)
    length = longest_end(sequence, sequence, longest - levels, 2)
    expected = every_path(sequence, length, levels) if length else {(): 1.0}
    assert tree.likelihoods is not None
    likelihoods = [exp(value) for value in tree.likelihoods.tolist()]
    assert likelihoods == pytest.approx([expected[path] for path in paths_of(tree)], rel=1e-5)
    # a match of so many tokens is worth at most `trust` nodes for each
    size = min(nodes, trust * length) + 1
    best = sorted(expected.values(), reverse=True)[:size]
    assert sorted(likelihoods, reverse=True) == pytest.approx(best, rel=1e-5)


@settings(max_examples=60)
@given(
    SEQUENCES,
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_children_are_the_most_frequent_then_the_latest(
    sequence: list[int],
    nodes: int,
    depth: int,
    top_k: int,
) -> None:
    """In this order at the root; no node has more children than the budget allows."""
    tree = draft(
        SuffixDrafter(),
        sequence,
        Budget(nodes, depth, top_k),
    )
    assert max(map(len, tree.children())) <= top_k
    length = longest_end(sequence, sequence, 32 - depth, 2)
    match = sequence[len(sequence) - length :]
    # later positions overwrite earlier ones
    latest = {sequence[end]: end for end in ends(sequence, match) if end < len(sequence)}
    counts = followers(sequence, match)
    best = sorted(
        counts,
        key=lambda token: (counts[token], latest[token]),
        reverse=True,
    )
    first = tree.tokens[tree.children()[0]].tolist()
    assert first == best[: len(first)]


# -- what is remembered of earlier requests -----------------------------------------------------

ANSWER = [20, 21, 22, 23, 24]


def draft_chain(
    drafter: SuffixDrafter,
    sequence: list[int],
    cut: int = 0,
) -> list[int]:
    """Return the drafted tokens after a request."""
    return draft(drafter, sequence, Budget(3, 3, 3), cut).tokens.tolist()[1:]


@pytest.mark.parametrize(("remember", "expected"), [(0, []), (100, [22, 23, 24])])
def test_answers_are_remembered_and_prompts_are_not(remember: int, expected: list[int]) -> None:
    """The next request drafts from earlier answers, if anything is remembered at all."""
    drafter = SuffixDrafter(remember=remember)
    assert drafter.remembers == (remember > 0)
    draft_chain(drafter, [10, 11, 12, 13, *ANSWER], cut=4)
    assert draft_chain(drafter, [30, 20, 21]) == expected
    assert draft_chain(drafter, [30, 10, 11]) == []
    # nothing follows the end of an answer
    assert draft_chain(drafter, [30, 23, 24]) == []


def test_the_longer_match_wins_and_at_a_tie_the_requests_own() -> None:
    """An earlier answer helps where the request itself knows less."""
    drafter = SuffixDrafter(remember=100)
    draft_chain(drafter, [1, *ANSWER], cut=1)
    assert draft_chain(drafter, [21, 50, 51, 52, 20, 21]) == [22, 23, 24]
    assert draft_chain(drafter, [20, 21, 50, 51, 52, 20, 21]) == [50, 51, 52]


def test_the_oldest_answers_are_forgotten_first() -> None:
    """The memory has a limit; one without room for half an answer stays empty."""
    drafter = SuffixDrafter(remember=20)
    for start in range(100, 200, 10):
        draft_chain(drafter, [1, *range(start, start + 5)], cut=1)
        assert len(drafter.memory) <= 20
        assert draft_chain(drafter, [1, start, start + 1]) == [start + 2, start + 3, start + 4]
    assert draft_chain(drafter, [1, 100, 101]) == []
    small = SuffixDrafter(remember=1)
    draft_chain(small, [1, *ANSWER], cut=1)
    assert small.memory == []


@pytest.mark.parametrize(
    "options",
    [{"longest": 1}, {"trust": 0}, {"remember": -1}],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Each error says what is expected."""
    with pytest.raises(ValueError, match="expected"):
        SuffixDrafter(**options)
