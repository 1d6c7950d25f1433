"""Comparison files: every mistake in one is named before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparisons import small_comparison, written

from eval.comparison.compare_plan import Comparison, digest_of

ROOT = Path(__file__).parents[2]
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"seed": [0]}, "unknown key seed: did you mean seeds?"),
    "unknown key of an arm": (
        {"arms": {"a": {"untrainned": "ngram"}}},
        "unknown key arms.a.untrainned: did you mean un",
    ),
    "unknown recipe key": (
        {"recipe": {"train": {"learning_rate": 1}}},
        "unknown key train.learning_rate: did you mean lr",
    ),
    "unknown drafter key": (
        {"arms": {"a": {"recipe": {"drafter": {"kind": "hass", "tops": 1}}}}},
        "did you mean top",
    ),
    "no such method": (
        {"arms": {"a": {"recipe": {"drafter": {"kind": "eagle9"}}}}},
        "drafter.kind is 'eagle9'",
    ),
    "start that comes later": (
        {"arms": {"a": {"start": "b"}, "b": {}}},
        "arms.a.start is 'b', expected a trained arm",
    ),
    "start without a head": (
        {"arms": {"a": {"untrained": "ngram"}, "b": {"start": "a"}}},
        "arms.b.start is 'a'",
    ),
    "two budgets": (
        {"arms": {"a": {"tokens": 5, "seconds": 5}}},
        "arms.a has tokens and seconds, expected one",
    ),
    "an untrained arm's budget": (
        {"arms": {"a": {"untrained": "ngram", "tokens": 5}}},
        "expected no other key",
    ),
    "an unknown option": (
        {"arms": {"a": {"untrained": "ngram", "options": {"longst": 2}}}},
        "ngram has no option longst; did you mean longest",
    ),
    "options of a trained arm": (
        {"arms": {"a": {"options": {"longest": 2}}}},
        "arms.a is trained and has options",
    ),
    "other prompts": (
        {"arms": {"a": {"recipe": {"eval": {"count": 2}}}}},
        "arms.a.recipe names eval",
    ),
    "unknown pair": (
        {"compare": [["head", "tail"]]},
        "compare names 'tail', expected one of the arms: counts, head",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(mistake: str, tmp_path: Path) -> None:
    """With the place, and what was expected there."""
    values = small_comparison(tmp_path / "no target", tmp_path)
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:
        Comparison.load(written({**values, **changes}, tmp_path))
    assert message in str(error.value)


def test_options_decide_what_an_arm_is(tmp_path: Path) -> None:
    """Arms of one method with other options are measured each by itself; without any an arm is what it was."""
    arms = {"a": {"untrained": "ngram"}, "b": {"untrained": "ngram", "options": {"longest": 2}}}
    values = small_comparison(tmp_path / "no target", tmp_path)
    comparison = Comparison.load(written({**values, "arms": arms}, tmp_path))
    digests = {arm.digest for arm in comparison.arms.values()}
    assert len(digests) == 2 and digest_of(["ngram"], None, None) in digests


def test_shipped_comparisons_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their recipes too."""
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / "recipes/compare").glob("*.yaml")):
        assert Comparison.load(path).arms
