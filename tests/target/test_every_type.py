"""Every causal type that transformers builds: its answers are the untouched model's, or it is refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.every_type import TYPES
from tests.target.type_outcomes import RESULTS, find_outcome

STORED = json.loads(RESULTS.read_text())
IS_SAME_RELEASE = STORED["run"]["transformers"] == transformers.__version__
PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "lossless.md"
MAX_UNBUILT = 10  # types that transformers does not build small
MIN_SERVED = 170  # types that read trees
REASONS = {
    "keeps nothing between": "keep nothing between forwards: every cycle would read the whole text",
    "fails under a tree's mask": "fail under a tree's mask and positions",
    "cannot be a target|hands on|no function of": "have no one stack of layers, or no state for each token alone",
}


def describe(found: dict[str, Any]) -> str:
    """Return how a type's trees are read, or why they are not."""
    if found["outcome"] == "right":
        return found["means"].replace("; one sequence at a time", "")
    if found["outcome"] == "not built":
        return "not tried: transformers builds no small one"

    for pattern, reason in REASONS.items():
        # reasons differ in the type's name and numbers
        if re.search(pattern, found["why"]):
            return f"refused: {reason}"

    return f"refused: {found['why']}"


def make_table() -> str:
    """Return the page's table in Markdown: masks first, then the other modes by number of types, then refusals."""
    types: dict[str, list[str]] = {}
    worst: dict[str, float] = {}

    for model_type, found in STORED["types"].items():
        name = describe(found)
        # the page explains (1): one sequence at a time
        mark = " (1)" if "one sequence" in found.get("means", "") else ""
        types.setdefault(name, []).append(model_type + mark)
        worst[name] = max(worst.get(name, 0.0), found.get("worst", 0.0))

    lines = ["| trees are read by | types | worst | which |", "|---|---|---|---|"]

    for name in sorted(
        types, key=lambda name: (name != "mask", not worst[name], -len(types[name]))
    ):
        # refused types have no figure
        figure = f"{worst[name]:.0e} " if worst[name] else ""
        which = "all others" if name == "mask" else ", ".join(types[name])
        lines.append(f"| {name} | {len(types[name])} | {figure}| {which} |")

    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_answers_are_right_or_refused_in_words(model_type: str) -> None:
    """Branching trees at T = 0 and T = 1, alone and in batches, change nothing, or a sentence says why not."""
    outcome = find_outcome(model_type)["outcome"]
    assert outcome in ("right", "refused", "not built")
    # a newer transformers may mend or break a type
    if IS_SAME_RELEASE:
        assert outcome == STORED["types"][model_type]["outcome"]


def test_nearly_every_type_is_served_and_the_page_says_how() -> None:
    """The page's table is that of the result file."""
    if IS_SAME_RELEASE:  # each release has types of its own
        assert set(STORED["types"]) == set(TYPES)
    outcomes = [found["outcome"] for found in STORED["types"].values()]

    assert outcomes.count("right") >= MIN_SERVED
    assert outcomes.count("not built") <= MAX_UNBUILT
    assert make_table() in PAGE.read_text()
