"""Suffix decoding: counts, matches and trees are those of a naive search, and what is remembered is what was said."""

from __future__ import annotations

from collections import Counter
from functools import partial
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

TEXTS = st.integers(1, 3).flatmap(
    lambda most: st.lists(st.integers(0, most), min_size=2, max_size=40)
)


def automaton(text: list[int], limit: int) -> Automaton:
    """Of a whole text."""
    made = Automaton(limit)
    for token in text:
        made.add(token)
    return made


def ends(text: list[int], string: list[int]) -> list[int]:
    """The places after every occurrence of a string."""
    size = len(string)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == string]


def state_of(known: Automaton, string: list[int]) -> int:
    """Where a string of the text leads."""
    state = 0
    for token in string:
        state = known.next[state][token]
    return state


def longest_end(text: list[int], string: list[int], limit: int, least: int) -> int:
    """How many tokens the longest end of a string has that the text holds so often."""
    sizes = range(min(limit, len(string)), 0, -1)
    return next((size for size in sizes if len(ends(text, string[-size:])) >= least), 0)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_counts_and_latest_places_are_exact_at_any_moment(text: list[int], limit: int) -> None:
    """After every token, of all strings of up to `limit` tokens; states that were parted included."""
    known = Automaton(limit)
    for end, token in enumerate(text, start=1):
        known.add(token)
        told = text[:end]
        for string in {
            tuple(told[i:j]) for i in range(end) for j in range(i + 1, min(i + limit, end) + 1)
        }:
            state, places = state_of(known, list(string)), ends(told, list(string))
            assert (known.counts[state], known.latest[state]) == (len(places), places[-1])
    assert len(known.next) <= 2 * len(text)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.integers(2, 6))
def test_matches_are_those_of_a_search(text: list[int], other: list[int], limit: int) -> None:
    """The longest end that occurred earlier, and the longest end of another text that occurs in this one."""
    known = automaton(text, limit)
    state, length = known.follow_end()
    assert length == longest_end(text, text, limit, 2)
    assert state == state_of(known, text[len(text) - length :])
    state = length = 0
    for end in range(len(other)):
        state, length = known.after(state, length, other[end])
        assert length == longest_end(text, other[: end + 1], limit, 1)
        assert state == state_of(known, other[end + 1 - length : end + 1])


def test_one_token_repeated_is_counted_too() -> None:
    """Each string ends nearly everywhere, and only those within the limit are counted: no step depends on the text."""
    known = automaton([7] * 3000, 8)
    assert [known.counts[state_of(known, [7] * size)] for size in (1, 8)] == [3000, 2993]
    assert max(known.counts[9:]) == 0


def followers(text: list[int], string: list[int]) -> Counter[int]:
    """What follows a string, by a search."""
    return Counter(text[end] for end in ends(text, string) if end < len(text))


def every_path(text: list[int], length: int, depth: int) -> dict[tuple[int, ...], float]:
    """All continuations of a text's last tokens, with how likely they are taken to be."""
    match, found = text[-length:], {}
    reach: list[tuple[tuple[int, ...], list[int], float]] = [((), match, 1.0)]
    while reach:
        path, string, likely = reach.pop()
        found[path] = likely * length / (length + len(path))
        if len(path) < depth:
            if not followers(text, string):
                string = match  # at the end of the text
            after = followers(text, string)
            reach += [
                ((*path, one), [*string, one], likely * after[one] / after.total()) for one in after
            ]
    return found


def pieces(text: list[int], cut: int) -> list[Committed]:
    """A text told in two pieces, or in one."""
    first = (
        [Committed(torch.tensor(text[:cut]), None, text[cut])] if 0 < cut < len(text) - 1 else []
    )
    rest = text[cut:-1] if first else text[:-1]
    return [*first, Committed(torch.tensor(rest, dtype=torch.long), None, text[-1])]


def told(drafter: SuffixDrafter, text: list[int], budget: Budget, cut: int = 0) -> DraftTree:
    """The tree behind the last token, of a request that begins with this text."""
    state = drafter.open()
    state.admit(0)
    trees = [state.propose({0: news}, {0: budget})[0] for news in pieces(text, cut)]
    state.release(0)
    return trees[-1]


@settings(max_examples=80, deadline=None)
@given(
    TEXTS,
    st.integers(0, 39),
    st.integers(2, 12),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_trees_hold_the_likeliest_continuations(
    text: list[int], cut: int, longest: int, depth: int, trust: int, nodes: int
) -> None:
    """Of all paths that a search finds no other is likelier, and each is as likely as the search says."""
    tree = told(SuffixDrafter(longest, trust), text, Budget(nodes, depth, 4), cut)
    levels = min(depth, longest // 2)
    length = longest_end(text, text, longest - levels, 2)
    known = every_path(text, length, levels) if length else {(): 1.0}
    kept = [tuple(tree.tokens[tree.path(node)].tolist()[1:]) for node in range(len(tree))]
    assert tree.likelihoods is not None and int(tree.tokens[0]) == text[-1]
    likely = [exp(value) for value in tree.likelihoods.tolist()]
    assert likely == pytest.approx([known[path] for path in kept], rel=1e-5)
    best = sorted(known.values(), reverse=True)[: min(nodes, trust * length) + 1]
    assert sorted(likely, reverse=True) == pytest.approx(best, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(0, 9), st.integers(0, 4), st.integers(0, 3))
def test_children_are_the_most_frequent_then_the_latest(
    text: list[int], nodes: int, depth: int, top_k: int
) -> None:
    """At the root, in this order; everywhere no more than the budget allows."""
    tree = told(SuffixDrafter(), text, Budget(nodes, depth, top_k))
    assert len(tree) - 1 <= nodes and max(tree.depths()) <= depth
    assert max(map(len, tree.children())) <= top_k
    match = text[len(text) - longest_end(text, text, 32 - depth, 2) :]
    after = followers(text, match)
    latest = {
        token: max(end for end in ends(text, match) if text[end : end + 1] == [token])
        for token in after
    }
    best = sorted(after, key=lambda token: (after[token], latest[token]), reverse=True)
    first = tree.tokens[tree.children()[0]].tolist()
    assert first == best[: len(first)]


ASK = partial(told, budget=Budget(3, 3, 3))
SAID = [20, 21, 22, 23, 24]


def drafted(tree: DraftTree) -> list[int]:
    """The tokens behind the root."""
    return tree.tokens.tolist()[1:]


def test_answers_are_remembered_and_prompts_are_not() -> None:
    """What was said before is drafted in the next request; what was asked is not; without `remember` neither is."""
    for remember, expected in ((0, []), (100, [22, 23, 24])):
        drafter = SuffixDrafter(remember=remember)
        ASK(drafter, [10, 11, 12, 13, *SAID], cut=4)
        assert drafted(ASK(drafter, [30, 20, 21])) == expected
        assert drafted(ASK(drafter, [30, 10, 11])) == []
        assert drafted(ASK(drafter, [30, 23, 24])) == []  # nothing was said after it


def test_the_longer_match_wins_and_at_a_tie_the_texts_own() -> None:
    """An earlier answer helps where the text itself knows less."""
    drafter = SuffixDrafter(remember=100)
    ASK(drafter, [1, *SAID], cut=1)
    assert drafted(ASK(drafter, [21, 50, 51, 52, 20, 21])) == [22, 23, 24]
    assert drafted(ASK(drafter, [20, 21, 50, 51, 52, 20, 21])) == [50, 51, 52]


def test_no_more_is_remembered_than_was_asked_for() -> None:
    """The newest answers stay, the oldest go; a memory without room for half an answer is empty."""
    drafter = SuffixDrafter(remember=20)
    for start in range(100, 200, 10):
        ASK(drafter, [1, *range(start, start + 5)], cut=1)
        assert len(drafter.memory) <= 20
        assert drafted(ASK(drafter, [1, start, start + 1])) == [start + 2, start + 3, start + 4]
    assert drafted(ASK(drafter, [1, 100, 101])) == []
    drafter = SuffixDrafter(remember=1)
    ASK(drafter, [1, *SAID], cut=1)
    assert drafted(ASK(drafter, [1, 20, 21])) == [] and drafter.memory == []


@pytest.mark.parametrize("wrong", [{"longest": 1}, {"trust": 0}, {"remember": -1}], ids=str)
def test_options_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    """Each says what was got and what is expected."""
    with pytest.raises(ValueError, match="expected"):
        SuffixDrafter(**wrong)
