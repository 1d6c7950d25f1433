"""Every causal type that transformers builds: its answers are the untouched model's, or it is refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from tests.every_type import TYPES
from tests.target.type_outcomes import RESULTS, outcome

KNOWN = json.loads(RESULTS.read_text())
PAGE = Path(__file__).parents[2] / "docs" / "lossless.md"
UNBUILT = 10  # types at most that transformers does not build small
SERVED = 170  # types at least that read trees
GROUPS = {
    "keeps nothing between": "keep nothing between forwards: every cycle would read the whole text",
    "fails under a tree's mask": "fail under a tree's mask and positions",
    "cannot be a target|hands on|no function of": "have no one stack of layers, or no state for each token alone",
}


def table() -> str:
    """What became of the types, by their means or by the reasons of their refusal, in Markdown."""
    rows: dict[str, list[str]] = {}
    worst: dict[str, float] = {}
    for model_type, found in KNOWN["types"].items():
        name = found.get("means", "").replace("; one text at a time", "")
        if found["outcome"] != "right":
            reason = next(
                (text for pattern, text in GROUPS.items() if re.search(pattern, found["why"])),
                found["why"],
            )
            name = (
                "not tried: transformers builds no small one"
                if found["outcome"] == "not built"
                else f"refused: {reason}"
            )
        worst[name] = max(worst.get(name, 0.0), found.get("worst", 0.0))
        rows.setdefault(name, []).append(
            model_type + (" (1)" if "one text" in found.get("means", "") else "")
        )
    lines = [
        f"| {name} | {len(types)} | {worst[name]:.0e} | {'all others' if name == 'mask' else ', '.join(types)} |"
        if worst[name]
        else f"| {name} | {len(types)} | | {', '.join(types)} |"
        for name, types in sorted(
            rows.items(), key=lambda row: (row[0] != "mask", not worst[row[0]], -len(row[1]))
        )
    ]
    return "\n".join(["| trees are read by | types | worst | which |", "|---|---|---|---|", *lines])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_answers_are_right_or_refused_in_words(model_type: str) -> None:
    """Branching trees at T = 0 and T = 1, alone and side by side, change nothing, or a sentence says why not."""
    found = outcome(model_type)
    print(model_type, found)
    assert found["outcome"] in ("right", "refused", "not built")
    if KNOWN["run"]["transformers"] == transformers.__version__:
        assert found["outcome"] == KNOWN["types"][model_type]["outcome"]


def test_nearly_every_type_is_served_and_the_page_says_how() -> None:
    """The page's table is that of the result file."""
    types = KNOWN["types"]
    if (
        KNOWN["run"]["transformers"] == transformers.__version__
    ):  # each release has types of its own
        assert set(types) == set(TYPES)
    outcomes = [found["outcome"] for found in types.values()]
    assert outcomes.count("right") >= SERVED
    assert outcomes.count("not built") <= UNBUILT
    assert table() in PAGE.read_text(), f"docs/lossless.md does not hold\n{table()}"
