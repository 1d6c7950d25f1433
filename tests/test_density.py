"""The check of density counts as Python does, and fails on a planted excess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build import density

PACKED = """
def pack(a, b):
    one, other = a, b
    # a reason
    if (c := one) and other:
        return [[x for x in y] for y in c] if c else call(1, 2, 3, 4, 5)
"""


def test_counts_are_pythons() -> None:
    """Of tokens, comments and habits, in a source that has one of each."""
    counts, sizes = density.measure_source(PACKED)
    assert counts["tokens"] == sizes[0] == 53
    habits = ("comments", "nested comprehensions", "walruses", "tuple assignments", "ternaries")
    assert [counts[name] for name in (*habits, "calls with five arguments")] == [1] * 6
    assert counts["bare"] == 0


def test_a_long_function_without_a_comment_is_counted() -> None:
    """A comment inside of it is enough."""
    # fifty statements of five tokens
    body = "".join(f"    x = x + {i}\n" for i in range(50))
    assert density.measure_source(f"def add(x):\n{body}")[0]["bare"] == 1
    assert density.measure_source(f"def add(x):\n    # why\n{body}")[0]["bare"] == 0


def test_an_excess_fails_and_less_lowers_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder, the figure and the budget; figures that are better are written."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/packed.py").write_text(PACKED)
    figures = density.measure_folder(tmp_path / "code")
    goals = {"every folder": dict.fromkeys(figures, 0)}
    monkeypatch.setattr(density, "ROOT", tmp_path)
    monkeypatch.setattr(density, "BUDGETS", tmp_path / "budgets.json")

    def set_budget(tokens: int) -> None:
        budgets = {"code": {**figures, "tokens": tokens}}
        density.BUDGETS.write_text(json.dumps({"goals": goals, "budgets": budgets}))

    # one token too many, and then 17 fewer than allowed
    set_budget(52)
    with pytest.raises(SystemExit, match="code: tokens: got 53, the budget is 52"):
        density.main(["--write"])
    set_budget(70)
    density.main([])
    density.main(["--write"])
    assert json.loads(density.BUDGETS.read_text())["budgets"]["code"] == figures
