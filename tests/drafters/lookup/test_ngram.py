"""Prompt lookup: what is copied is what a naive search through the text finds, and never more than the budget."""

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

TEXTS = st.lists(st.integers(0, 2), min_size=2, max_size=60)
PICKS = st.sampled_from(["recent", "frequent"])


def told(drafter: Any, text: list[int], cuts: set[int], budget: Budget) -> DraftTree:
    """The last tree, when the text is committed in pieces; its last token is the root."""
    draft, start, tree = drafter.begin(), 0, None
    for root in sorted({cut for cut in cuts if 0 < cut < len(text) - 1} | {len(text) - 1}):
        tree = draft.propose(
            Committed(torch.tensor(text[start:root], dtype=torch.long), None, text[root]), budget
        )
        start = root
    assert tree is not None
    return tree


def paths(tree: DraftTree) -> list[list[int]]:
    """The tokens on the way to every leaf, root not counted."""
    leaves = [node for node, children in enumerate(tree.children()) if not children]
    return [tree.tokens[tree.path(leaf)].tolist()[1:] for leaf in leaves if leaf]


def copied(text: list[int], place: int, length: int) -> list[int]:
    """So many tokens from a place on, of the text and then of the copy itself."""
    whole = list(text)
    for step in range(length):
        whole.append(whole[place + step])
    return whole[len(text) :]


def by_hand(text: list[int], drafter: NgramDrafter, budget: Budget) -> list[list[int]]:
    """The copies that a search through the whole text finds."""
    found: dict[int, list[int]] = {}
    left = budget.nodes
    for size in drafter.sizes:
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]][
            -LATEST:
        ]
        following = [text[end] for end in ends]
        if drafter.pick == "frequent":
            ends.sort(key=lambda end: (following.count(text[end]), end))
        for end in reversed(ends):
            if text[end] not in found and len(found) < min(drafter.branches, budget.top_k):
                length = min(left, budget.depth, drafter.trust * size)
                found[text[end]] = copied(text, end, length)
                left -= length
    return sorted(path for path in found.values() if path)


@settings(max_examples=150, deadline=None)
@given(
    TEXTS,
    st.sets(st.integers(1, 58)),
    PICKS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_what_is_copied_is_what_a_search_finds(
    text: list[int], cuts: set[int], pick: Any, branches: int, trust: int, nodes: int
) -> None:
    """However the text was told: the longest n first, the latest or most frequent continuation, wrapped at the end."""
    drafter, budget = NgramDrafter(3, 1, trust, pick, branches), Budget(nodes, 7, 2)
    tree = told(drafter, text, cuts, budget)
    assert sorted(paths(tree)) == by_hand(text, drafter, budget)
    assert int(tree.tokens[0]) == text[-1]


@settings(max_examples=60, deadline=None)
@given(TEXTS, PICKS, st.integers(1, 4), st.integers(0, 12), st.integers(0, 5), st.integers(0, 4))
def test_copies_stay_within_the_budget(
    text: list[int], pick: Any, branches: int, nodes: int, depth: int, top_k: int
) -> None:
    """Nodes, levels and children per node, whatever is asked for."""
    tree = told(
        NgramDrafter(pick=pick, branches=branches), text, set(), Budget(nodes, depth, top_k)
    )
    assert len(tree) - 1 <= nodes and max(tree.depths()) <= depth
    assert max(len(children) for children in tree.children()) <= min(top_k, branches)


def test_the_latest_and_the_most_frequent_differ() -> None:
    """After 1 came 2, 2 and 3: recent copies 3, frequent 2, and two branches both, the chosen one first."""
    text = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1]
    for pick, first, second in (
        ("recent", [3, 7, 1], [2, 8, 1]),
        ("frequent", [2, 8, 1], [3, 7, 1]),
    ):
        for branches, expected in ((1, [first]), (2, [first, second])):
            drafter: Any = NgramDrafter(pick=pick, branches=branches)  # type: ignore[arg-type]
            assert paths(told(drafter, text, {3}, Budget())) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"longest": 2, "shortest": 3},
        {"shortest": 0},
        {"pick": "first"},
        {"branches": 0},
        {"trust": 0},
    ],
    ids=str,
)
def test_options_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    """Each says what was got and what is expected."""
    with pytest.raises(ValueError, match="expected"):
        NgramDrafter(**wrong)
