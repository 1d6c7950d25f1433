"""Tables in the documents are those that the result files give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.broken_heads import table as broken_table
from bench.decode_speed import table as decode_table
from bench.distill import distill_table
from bench.drafters import drafters_table, own_table, tasks_table
from bench.extract_speed import table as extract_table
from bench.goodput import table as goodput_table
from bench.head_quality import curve as quality_curve
from bench.head_quality import table as quality_table
from bench.lookup_speed import kept_table, speed_table
from bench.loop_overhead import table as overhead_table
from bench.mask_templates import table as mask_table
from bench.methods_report import (
    ablations_table,
    curve_table,
    levels_table,
    methods_table,
    pairs_table,
    plot,
    seeds_table,
)
from bench.own_token import table as own_token_table
from bench.regenerated_data import table as regenerated_table
from bench.train_report import table as train_table
from bench.tree_kinds import draws_table, kinds_table
from bench.warm_start import table as warm_table
from eagle import DraftTree
from eval.draw import svg
from eval.engines import table as engines_table
from eval.report import markdown
from eval.results import ACCEPTANCE_LENGTH, SPEED_UP, Results, ends_in_loop

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
PLACED = [
    (page, file, text)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for file, text in TABLE.findall(page.read_text())
]


@pytest.mark.parametrize(("page", "file", "text"), PLACED, ids=lambda value: getattr(value, "name", "")[:20])
def test_a_table_is_the_result_files_own(page: Path, file: str, text: str) -> None:
    """What stands on the page is what `python -m eval.report FILE` prints."""
    assert text.strip() == markdown(ROOT / file).strip()


@pytest.mark.parametrize(
    ("page", "file", "table"),
    [
        ("speed.md", "decode_speed.json", decode_table),
        ("data.md", "extract_speed.json", extract_table),
        ("data.md", "mask_templates.json", mask_table),
        ("data.md", "regenerated_data.json", regenerated_table),
        ("serving.md", "engines.json", engines_table),
        ("serving.md", "broken_heads.json", broken_table),
        ("benchmarks.md", "train_speed.json", train_table),
        ("benchmarks.md", "head_quality.json", quality_table),
        ("benchmarks.md", "head_quality.json", quality_curve),
        ("benchmarks.md", "warm_start.json", warm_table),
        *(("drafters.md", "drafters.json", table) for table in (drafters_table, tasks_table, own_table)),
        *(("drafters.md", "lookup_speed.json", table) for table in (speed_table, kept_table)),
        ("drafters.md", "distill.json", distill_table),
        ("drafters.md", "goodput.json", goodput_table),
        ("trees.md", "tree_kinds.json", kinds_table),
        ("trees.md", "tree_kinds.json", draws_table),
        ("trees.md", "loop_overhead.json", overhead_table),
        *(("results.md", "methods.json", table) for table in (methods_table, pairs_table, seeds_table)),
        *(("results.md", "methods.json", table) for table in (levels_table, curve_table)),
        *(("results.md", "methods_own.json", table) for table in (methods_table, pairs_table, seeds_table)),
        *(("results.md", "methods_tiny.json", table) for table in (methods_table, pairs_table, levels_table)),
        *(("results.md", "methods_tiny.json", table) for table in (curve_table, ablations_table)),
        *(("results.md", "methods_long.json", table) for table in (methods_table, pairs_table)),
        ("results.md", "methods_before.json", ablations_table),
        *(("results.md", file, own_token_table) for file in ("own_token.json", "own_token_chat.json")),
    ],
)
def test_a_page_shows_the_result_file(page: str, file: str, table: Callable[[Any], str]) -> None:
    """The tables of the documents are what the benchmarks print for the committed results."""
    results = json.loads((ROOT / "docs/results" / file).read_text())
    assert table(results) in (ROOT / "docs" / page).read_text()


def test_the_picture_of_methods_is_the_result_files_own() -> None:
    """The curves on the page are those that the committed results give."""
    results = json.loads((ROOT / "docs/results/methods.json").read_text())
    assert plot(results) == (ROOT / "docs/images/methods.svg").read_text()


def test_groups_pool_cycles_and_compare_with_none() -> None:
    """Acceptance length is pooled over cycles, speed-up is against `none` at the same temperature."""
    common = {"temperature": 0.0, "identical": True, "loops": False}
    plain = {**common, "drafter": "none", "tokens": 11, "committed": 10, "cycles": 10, "seconds": 1.0}
    rows = [
        {**plain, "conversation": "a"},
        {**plain, "conversation": "b"},
        {**common, "conversation": "a", "drafter": "x", "tokens": 11, "committed": 10, "cycles": 4, "seconds": 0.5},
        {**common, "conversation": "b", "drafter": "x", "tokens": 21, "committed": 20, "cycles": 6, "seconds": 0.5},
    ]
    rows[-1]["identical"] = False
    none, other = Results(Path(), [], rows).groups()
    assert (none.estimate(ACCEPTANCE_LENGTH).value, none.estimate(SPEED_UP).value) == (1.0, 1.0)
    assert other.estimate(ACCEPTANCE_LENGTH).value == 3.0
    assert other.estimate(SPEED_UP).value == pytest.approx(32 / 11)
    assert (none.identical, none.differing, other.identical, other.differing) == (2, 0, 1, 1)


def test_newest_run_is_reported(tmp_path: Path) -> None:
    """Results are appended; the table shows the last run."""
    row = {"temperature": 0.0, "drafter": "none", "tokens": 2, "committed": 1, "cycles": 1, "seconds": 1.0}
    row |= {"identical": True, "loops": False}
    lines = [{"run": {"commit": "old"}}, {**row, "seconds": 9.0}, {"run": {"commit": "new"}}, row]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = markdown(tmp_path / "r.jsonl")
    assert "commit new" in table
    assert "old" not in table


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3] * 30, True),
        (list(range(64)), False),
        ([7] * 63, False),
        ([9, 9, *range(16), *range(16), *range(16), *range(16)], True),
        ([*range(17)] * 4, False),
    ],
)
def test_loops_are_seen(tokens: list[int], expected: bool) -> None:
    """A loop is a period of at most 16 over the last 64 tokens."""
    assert ends_in_loop(tokens) is expected


def test_a_drawing_escapes_what_the_model_said() -> None:
    """Text from a model cannot become markup."""
    tree = DraftTree.from_paths(1, [[2, 3], [4]])
    picture = svg(tree, ["<script>", "b", "c", "&d"], [0, 1], "<x>")
    assert "<script>" not in picture
    assert picture.count("<rect") == 6
