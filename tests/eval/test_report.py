"""Tables in the documents are those that the result files give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.llamacpp import table as llamacpp_table
from bench.machine import machine_line
from bench.rehearsal import table as rehearsal_table
from bench.speed_report import headline as speed_headline
from bench.speed_report import table as speed_table
from eval.comparison.compare_table import markdown as comparison_table
from eval.comparison.curves import curve_table
from eval.report import conclude, markdown, page
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, Results, ends_in_loop
from recipes.cards import card_table
from tests.core.compare_rules import law_table
from tests.core.compare_rules import table as rules_table
from tests.engines.compare_engines import table as engines_table
from tests.engines.engine_speed import table as engine_speed_table
from tests.engines.layout_sources import source_table
from tests.eval.jsonl_files import write_lines
from tests.newest import proven_table
from tests.recipes.training_memory import table as memory_table

ROOT = Path(__file__).parents[2]
# a table that eval.report prints stands between these marks
TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
PLACED = [
    (page, file, text)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for file, text in TABLE.findall(page.read_text())
]


def speed_machine(results: Any) -> str:
    """Return what tables of speed were measured on, which is printed below several of them."""
    return machine_line(results["machine"])


SPEED = (
    "smollm2_speed smollm2_mtbench smollm2_settings smollm2_threads "
    "qwen_speed speed_tables speed_drawn speed_batches speed_sizes speed_contexts"
)
# a page, the function that prints its tables, and their result files
SHOWN: list[tuple[str, Callable[[Any], str], str]] = [
    ("../README", speed_headline, "smollm2_speed"),
    ("measurements/decoding-speed", speed_table, SPEED),
    ("measurements/decoding-speed", speed_machine, SPEED),
    (
        "measurements/serving",
        engines_table,
        "engines engines_blocks engines_newest engines_smollm2",
    ),
    ("measurements/serving", llamacpp_table, "llamacpp_speed"),
    (
        "measurements/serving",
        engine_speed_table,
        "engine_speed_vllm engine_speed_openvino",
    ),
    ("measurements/trees", law_table, "rules"),
    ("measurements/trees", rules_table, "rules"),
    ("versions", source_table, "layout_sources"),
    ("versions", proven_table, "proven"),
    ("measurements/rehearsal", rehearsal_table, "rehearsal"),
    ("measurements/curves", curve_table, "compare_curves compare_means compare_controls"),
    ("measurements/curves", comparison_table, "compare_chosen"),
    ("measurements/on-policy", comparison_table, "compare_on_policy compare_on_policy_chat"),
    ("measurements/heads", comparison_table, "compare_heads compare_heads_chat"),
    (
        "measurements/blocks",
        comparison_table,
        "compare_blocks compare_blocks_chat compare_smollm2_blocks compare_smollm2_blocks16",
    ),
    ("measurements/blocks", speed_table, "blocks_speed"),
    ("measurements/blocks", speed_machine, "blocks_speed"),
    (
        "measurements/training-runs",
        comparison_table,
        "compare_smollm2 compare_smollm2_methods compare_smollm2_rest compare_smollm2_curve "
        "compare_smollm2_400k compare_smollm2_passes compare_smollm2_text compare_qwen_methods",
    ),
    ("measurements/methods", comparison_table, "compare_sources"),
    ("measurements/drafters", comparison_table, "compare_self"),
    ("measurements/data-preparation", comparison_table, "compare_stores compare_stores_chat"),
    ("measurements/long-context", comparison_table, "compare_window"),
    ("measurements/methods", comparison_table, "compare_tiny compare_hybrid compare_hybrid_llama"),
    ("measurements/images", comparison_table, "compare_seeing"),
    ("measurements/forecasts", memory_table, "memory"),
    ("measurements/forecasts", card_table, "cards"),
]
CASES = [(page, table, file) for page, table, files in SHOWN for file in files.split()]


@pytest.mark.parametrize(
    ("page", "file", "text"), PLACED, ids=lambda value: getattr(value, "name", "")[:20]
)
def test_a_table_is_the_result_files_own(page: Path, file: str, text: str) -> None:
    """What stands on the page is what `python -m eval.report FILE` prints."""
    assert text.strip() == markdown(ROOT / file).strip()


@pytest.mark.parametrize(("page", "table", "file"), CASES)
def test_a_page_shows_the_result_file(page: str, table: Callable[[Any], str], file: str) -> None:
    """The tables of the documents are what the benchmarks print for the committed results."""
    results = json.loads((ROOT / f"docs/results/{file}.json").read_text())
    assert table(results) in (ROOT / f"docs/{page}.md").read_text()


FROZEN = yaml.safe_load(Path(__file__).with_name("frozen_tables.yaml").read_text())
# numbers, with signs and thousands
FIGURE = re.compile(r"[-+−]?\d+(?:[.,]\d+)*")


def digest(text: str) -> str:
    """Return a short fingerprint."""
    return sha256(text.encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def table_digests() -> set[str]:
    """The digests of the figures in each table of the documents."""
    found = set()
    for path in ROOT.glob("docs/**/*.md"):
        for rows in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
            found.add(digest(" ".join(FIGURE.findall(rows))))
    return found


@pytest.mark.parametrize("file", FROZEN)
def test_frozen_tables_have_the_figures_of_their_result_file(
    file: str, table_digests: set[str]
) -> None:
    """A table whose program is gone keeps all of its figures, and so does its result file."""
    results = json.loads((ROOT / "docs/results" / file).read_text())
    assert digest(json.dumps(results, sort_keys=True)) == FROZEN[file]["file"]
    assert table_digests.issuperset(FROZEN[file]["tables"])


def make_row(drafter: str, cycles: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return an answer of 11 tokens, of which prefill gives the first."""
    return {
        "drafter": drafter,
        "conversation": "a",
        "temperature": 0.0,
        "identical": True,
        "loops": False,
        "tokens": 11,
        "committed": 10,
        "cycles": cycles,
        "seconds": seconds,
        **changes,
    }


def test_groups_pool_cycles_and_compare_with_none() -> None:
    """Acceptance length is pooled over cycles; speedup is over plain decoding at the same temperature."""
    # the second answer is longer, so that pooling is not the mean of both
    more = {
        "conversation": "b",
        "tokens": 21,
        "committed": 20,
        "identical": False,
    }
    rows = [
        make_row("none", 10, 1.0),
        make_row("none", 10, 1.0, conversation="b"),
        make_row("x", 4, 0.5),
        make_row("x", 6, 0.5, **more),
    ]
    none, other = Results(Path(), [], rows).groups()

    assert none.estimate(ACCEPTANCE_LENGTH).value == none.estimate(SPEED_UP).value == 1
    # 30 tokens in 10 cycles; 32 tokens a second against 11
    assert other.estimate(ACCEPTANCE_LENGTH).value == 3
    assert other.estimate(SPEED_UP).value == pytest.approx(32 / 11)
    assert (none.identical, none.differing) == (2, 0)
    assert (other.identical, other.differing) == (1, 1)


@pytest.mark.parametrize(
    ("cpu_seconds", "shown"), [((1.0, 0.4), True), ((2.0, 1.55), False), ((), False)]
)
def test_a_busy_machine_is_told_by_cpu_seconds(
    cpu_seconds: tuple[float, ...],
    shown: bool,
    tmp_path: Path,
) -> None:
    """If answers took longer than their CPU seconds, the speedup in CPU seconds is shown too."""
    rows = [make_row("none", 7, 2.0), make_row("x", 3, 1.6)]
    for row, seconds in zip(rows, cpu_seconds, strict=False):
        row["cpu_seconds"] = seconds
    path = write_lines(tmp_path / "r.jsonl", [{"run": {"commit": "c"}}, *rows])
    text = markdown(path)

    assert ("in CPU seconds |" in text) == shown
    assert (">in CPU seconds<" in page([path])) == shown
    # 2 s over 1.6 s by the clock, 1 s over 0.4 s of the CPU
    assert ("| 1.25 × | 2.50 × |" in text) == shown


def test_the_conclusion_names_the_fastest(tmp_path: Path) -> None:
    """By speedup at each temperature; where nothing helps, it says what to do."""
    rows = []
    for temperature, seconds in ((0.0, 0.5), (1.0, 1.6)):
        for name, taken in (("none", 1.0), ("x", seconds), ("y", 2 * seconds)):
            rows.append(make_row(name, 5, taken, temperature=temperature))
    path = write_lines(tmp_path / "r.jsonl", [{"run": {"commit": "c"}}, *rows])
    greedy, sampled = conclude(path).splitlines()
    assert greedy == "T = 0: fastest is x 2.00 ×, then y 1.00 ×"
    assert sampled.startswith(
        "T = 1: no drafter is faster than plain decoding (x 0.62 ×, y 0.31 ×)"
    )
    assert "eval.temperatures=[1]" in sampled


def test_newest_run_is_reported(tmp_path: Path) -> None:
    """Results are appended, and the table shows the last run."""
    lines = [
        {"run": {"commit": "old"}},
        make_row("none", 10, 9.0),
        {"run": {"commit": "new"}},
        make_row("none", 10, 1.0),
    ]
    table = markdown(write_lines(tmp_path / "r.jsonl", lines))

    assert "commit new" in table
    assert "old" not in table


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3] * 30, True),
        (list(range(64)), False),
        ([7] * 63, False),
        ([9, 9, *list(range(16)) * 4], True),
        (list(range(17)) * 4, False),
    ],
)
def test_loops_are_seen(tokens: list[int], expected: bool) -> None:
    """A loop is a period of at most 16 over the last 64 tokens."""
    assert ends_in_loop(tokens) is expected
