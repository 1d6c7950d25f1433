"""The comparison of verification rules, by figures computed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from eagle.core.tree import DraftTree
from eagle.core.verify import sample_block, sample_tree
from tests.core import compare_rules
from tests.core.compare_rules import expect_accepted, expect_on_draft
from tests.enumerate_law import Rule

# both tokens after any text, as in the example of Sun et al. 2024
LAW = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
TARGET = []
for depth in range(3):
    shape = [2] * (depth + 1)
    TARGET.append(LAW.expand(shape))
DRAFT = [1 - law for law in TARGET[:2]]
# By token, 2/3 of first drafts are accepted, and 4/9 of second ones. By block, both drafts are kept with probability
# 1/4, 1, 1/2 or 1 after AA, AB, BA or BB, on average 5/9; of the rest, 1/9 keeps B of BA. By sample, 4/9 + 16/81.
EXPECTED = {
    "token": 10 / 9,
    "block": 11 / 9,
    "walk": 52 / 81,
    "bias": 0,
}
# accepted tokens of a draft of two by the block rule: AA is kept as a whole with probability 1/4, or not at all; of BA,
# B is kept in any case, and A with probability 1/2
BY_BLOCK = {
    (0, 0): 0.5,
    (0, 1): 2.0,
    (1, 0): 1.5,
    (1, 1): 2.0,
}


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (sample_block, set()),
        # planted faults
        (sample_tree, {"block"}),
        (partial(sample_tree, lenience=0.5), {"block", "bias"}),
    ],
)
def test_expected_tokens_are_those_computed_by_hand(
    rule: Rule,
    wrong: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a chain of two drafts; a wrong block rule has other figures."""
    monkeypatch.setitem(compare_rules.RULES, "block", rule)
    found = expect_accepted(TARGET, DRAFT, (1, 1))
    differing = set()
    for key, expected in EXPECTED.items():
        if abs(found[key] - expected) > 1e-12:
            differing.add(key)
    assert differing == wrong


@pytest.mark.parametrize(("first", "second"), BY_BLOCK)
def test_expectations_on_a_draft_are_those_computed_by_hand(first: int, second: int) -> None:
    """By token, each token is kept with min(1, p/q) if those before are; by block as the table above has it."""
    proposal = DRAFT[0]
    chain = DraftTree.chain([0, first, second])
    tree = replace(chain, draft_probs=proposal.expand(3, 2))
    ratios = LAW / proposal
    first_is_kept = min(1.0, float(ratios[first]))
    second_is_kept = min(1.0, float(ratios[second]))
    expected = first_is_kept * (1 + second_is_kept)

    by_token = expect_on_draft(sample_tree, tree, lambda node: LAW)
    assert by_token == pytest.approx(expected)

    by_block = expect_on_draft(sample_block, tree, lambda node: LAW)
    assert by_block == pytest.approx(BY_BLOCK[first, second])
