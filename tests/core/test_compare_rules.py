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
TARGET = [torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand([2] * d + [2]) for d in range(3)]
DRAFT = [1 - law for law in TARGET[:2]]
# By token, 2/3 of first drafts are accepted, and 4/9 of second ones. By block, both drafts are kept with probability
# 1/4, 1, 1/2 or 1 after AA, AB, BA or BB, on average 5/9; of the rest, 1/9 keeps B of BA. By sample, 4/9 + 16/81.
EXPECTED = {"token": 10 / 9, "block": 11 / 9, "walk": 52 / 81, "bias": 0}


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
    assert {key for key in EXPECTED if abs(found[key] - EXPECTED[key]) > 1e-12} == wrong


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_expectations_on_a_draft_are_those_computed_by_hand(first: int, second: int) -> None:
    """By token, each token is kept with min(1, p/q) if those before are; by block as the table above has it."""
    law = TARGET[0]
    proposal = DRAFT[0]
    tree = replace(DraftTree.chain([0, first, second]), draft_probs=proposal.expand(3, 2))
    kept = [min(1.0, float(law[token] / proposal[token])) for token in (first, second)]
    expected = expect_on_draft(sample_tree, tree, lambda node: law)
    assert expected == pytest.approx(kept[0] * (1 + kept[1]))
    # AA is kept as a whole with probability 1/4, or not at all; of BA, B is kept in any case, and A with 1/2
    by_block = {(0, 0): 0.5, (0, 1): 2.0, (1, 0): 1.5, (1, 1): 2.0}
    found = expect_on_draft(sample_block, tree, lambda node: law)
    assert found == pytest.approx(by_block[first, second])
