"""How far a run has got: by a curve that is made here, read as a person would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from eagle.training.reached import COLUMN, Curve, compare_with_curve, read_curves, would_gain


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    """Return results of a method with 1,000 weights: .5 drafts at one token a weight, .25 a doubling, then less."""
    points = []
    arms = []

    for tokens, tau in [(1000, 1.5), (2000, 1.75), (4000, 2.0), (8000, 2.02)]:
        points.append({"tokens": tokens, "value": tau, "low": tau, "high": tau})
        arms.append({"arm": f"some, {tokens:,} tokens", "weights": 1000})

    by_method = {"some": {"points": points}, "one": {"points": points[:1]}}
    columns = [{"column": "other", "curves": {}}, {"column": COLUMN, "curves": by_method}]
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"arms": arms, "curves": columns}))
    return path


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            10,
            r"^10 supervised tokens.* are few for .* had 20 tokens; as the longest, 160\. Advice: add data or epochs$",
        ),
        (
            20,
            r"^20 .* 20 weights\. .* 49% of the .* 8 times as many\. .*\+0\.17 .*: add data or epochs$",
        ),
        (40, r"had 74% of the .* with 4 times as many\. .*\+0\.14 .*: add data or epochs$"),
        (80, r"had 98% of the .* with 2 times as many\. .*\+0\.02 .*: more tokens bring little$"),
        (
            160,
            "^160 supervised tokens.* are many .* the longest of those runs, this head would have had 160 tokens$",
        ),
        (
            999,
            "^999 supervised tokens.* are many .* the longest of those runs, this head would have had 160 tokens$",
        ),
    ],
)
def test_it_is_read_off_the_curve(tokens: int, says: str, curves: Path) -> None:
    """By tokens per weight that is trained; what is frozen does not count."""
    # 20 weights are trained: 10 tokens are half a token a weight
    head = nn.ModuleList([nn.Linear(4, 5, bias=False), nn.Linear(9, 9).requires_grad_(False)])
    described = compare_with_curve("some", tokens, head, curves)
    assert described is not None
    assert re.search(says, described), described
    assert curves.name in described
    assert would_gain("some", tokens, head, curves) == says.endswith("add data or epochs$")


def test_no_figure_is_written_in_powers_of_ten(curves: Path) -> None:
    """Also of few tokens and many weights."""
    described = compare_with_curve("some", 453, nn.Linear(4000, 5880), curves)
    assert described is not None
    assert "had 24,000,000 tokens; as the longest, 190,000,000" in described
    assert not re.search(r"\de[+-]\d|0\.0\d", described)


@pytest.mark.parametrize(("kind", "tokens"), [("other", 9), ("one", 9), ("some", 0)])
def test_nothing_is_said_without_a_curve(kind: str, tokens: int, curves: Path) -> None:
    """Of another method, of one point, of a head that learned nothing, and where no results are."""
    head: Any = nn.Linear(2, 2)
    assert compare_with_curve(kind, tokens, head, curves) is None
    assert compare_with_curve("some", 9, head, curves.with_name("no")) is None


def test_between_points_it_is_straight_over_the_logarithm() -> None:
    """And flat beyond the ends."""
    curve = Curve((1.0, 4.0, 8.0), (1.0, 3.0, 4.0))
    assert [curve.at(tokens) for tokens in (0.5, 1, 2, 4, 8, 99)] == [1, 1, 2, 3, 4, 4]
    assert curve.at(2**2.5) == pytest.approx(3.5)


def test_the_committed_curves_are_of_known_methods() -> None:
    """A run is judged by these."""
    assert {"eagle1", "eagle3", "medusa"} <= read_curves().keys()
    assert all(len(curve.taus) >= 4 for curve in read_curves().values())
