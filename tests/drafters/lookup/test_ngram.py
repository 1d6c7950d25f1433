"""Prompt lookup: what is copied is what a naive search through the sequence finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.drafters.lookup.ngram import LATEST, NgramDrafter

# three tokens, so that most n-grams occur more than once
SEQUENCES = st.lists(st.integers(0, 2), min_size=2, max_size=60)


def draft(
    drafter: Any,
    sequence: list[int],
    cuts: set[int],
    budget: Budget,
) -> DraftTree:
    """Return the last tree of a sequence committed in pieces; its last token is the root."""
    last = len(sequence) - 1
    roots = sorted({*(cut for cut in cuts if 0 < cut < last), last})
    text = drafter.begin()
    start = 0
    for root in roots:
        tokens = torch.tensor(sequence[start:root], dtype=torch.long)
        tree = text.propose(Committed(tokens, None, sequence[root]), budget)
        start = root
    assert isinstance(tree, DraftTree)
    return tree


def leaf_paths(tree: DraftTree) -> list[list[int]]:
    """Return the tokens from the root's child to every leaf."""
    children = tree.children()
    # the root alone is no copy
    leaves = [node for node in range(1, len(tree)) if not children[node]]
    return [tree.tokens[tree.path(leaf)].tolist()[1:] for leaf in leaves]


def copy_from(
    sequence: list[int],
    position: int,
    length: int,
) -> list[int]:
    """Return the tokens from a position on, of the sequence and then of the copy itself."""
    whole = list(sequence)
    # what is copied may run into the copy itself, as in "abcabc"
    for step in range(length):
        whole.append(whole[position + step])
    return whole[len(sequence) :]


def search(
    sequence: list[int],
    drafter: NgramDrafter,
    budget: Budget,
) -> list[list[int]]:
    """Return the copies that a search through the whole sequence finds."""
    copies: dict[int, list[int]] = {}
    left = budget.nodes
    for size in drafter.sizes:
        # the positions after earlier occurrences of the last n tokens
        ends = []
        for end in range(size, len(sequence)):
            if sequence[end - size : end] == sequence[-size:]:
                ends.append(end)
        # of a frequent n-gram the drafter looks at the latest alone
        ends = ends[-LATEST:]
        if drafter.pick == "frequent":
            following = [sequence[end] for end in ends]
            ends.sort(key=lambda end: (following.count(sequence[end]), end))
        # the latest or most frequent first; a token is copied from one place only
        for end in reversed(ends):
            is_full = len(copies) >= min(drafter.branches, budget.top_k)
            if sequence[end] not in copies and not is_full:
                length = min(left, budget.depth, drafter.trust * size)
                copies[sequence[end]] = copy_from(sequence, end, length)
                left -= length
    return sorted(copy for copy in copies.values() if copy)


@settings(max_examples=150)
@given(
    sequence=SEQUENCES,
    cuts=st.sets(st.integers(1, 58)),
    pick=st.sampled_from(["recent", "frequent"]),
    branches=st.integers(1, 4),
    trust=st.integers(1, 3),
    budget=st.builds(
        Budget,
        st.integers(0, 12),
        st.integers(0, 7),
        st.integers(0, 4),
    ),
)
def test_what_is_copied_is_what_a_search_finds(
    sequence: list[int],
    cuts: set[int],
    pick: Any,
    branches: int,
    trust: int,
    budget: Budget,
) -> None:
    """However the sequence is committed: the longest n first, within every budget."""
    drafter = NgramDrafter(3, 1, trust, pick=pick, branches=branches)
    tree = draft(drafter, sequence, cuts, budget)
    assert sorted(leaf_paths(tree)) == search(sequence, drafter, budget)
    assert int(tree.tokens[0]) == sequence[-1]


@pytest.mark.parametrize(
    ("pick", "expected"),
    [("recent", [[3, 7, 1], [2, 8, 1]]), ("frequent", [[2, 8, 1], [3, 7, 1]])],
)
def test_the_latest_and_the_most_frequent_differ(pick: Any, expected: list[list[int]]) -> None:
    """After 1 came 2, 2 and 3; two branches hold both, the preferred one first."""
    sequence = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1]
    for branches in (1, 2):
        drafter = NgramDrafter(pick=pick, branches=branches)
        assert leaf_paths(draft(drafter, sequence, {3}, Budget())) == expected[:branches]


@pytest.mark.parametrize(
    "options",
    [
        {"longest": 2, "shortest": 3},
        {"shortest": 0},
        {"pick": "first"},
        {"branches": 0},
        {"trust": 0},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Each error says what is expected."""
    with pytest.raises(ValueError, match="expected"):
        NgramDrafter(**options)
