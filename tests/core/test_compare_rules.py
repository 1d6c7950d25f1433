"""The comparison of verification rules, by figures computed by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from eagle.core.verify import sample_block, sample_tree
from tests.core import compare_rules
from tests.core.compare_rules import Rows, compare_rows, expect_accepted
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


def test_metrics_are_pooled_and_paired() -> None:
    """Both prompts gain half a token a cycle, so that the interval has no width."""
    rows: dict[str, Rows] = {
        "token": {(0, 0): (20, 10, 40, 20), (1, 0): (60, 20, 90, 60)},
        "block": {(0, 0): (25, 10, 75, 25), (1, 0): (70, 20, 140, 70)},
    }
    figures = compare_rows(rows)["acceptance length"]
    assert figures["block"] == pytest.approx(95 / 30)
    assert figures["difference"] == pytest.approx((0.5, 0.5, 0.5))
