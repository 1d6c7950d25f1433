"""Tables in the documents are those that the result files give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from bench.machine import machine_line
from bench.rehearsal import table as rehearsal_table
from bench.speed_report import headline as speed_headline
from bench.speed_report import table as speed_table
from eval.comparison.compare_table import markdown as comparison_table
from eval.comparison.curves import curve_table
from eval.report import markdown, page
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, Results, ends_in_loop
from recipes.cards import card_table
from tests.doctor.broken_heads import table as broken_table
from tests.engines.compare_engines import table as engines_table
from tests.engines.layout_sources import source_table
from tests.newest import proven_table
from tests.recipes.training_memory import table as memory_table

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
PLACED = [
    (page, file, text)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for file, text in TABLE.findall(page.read_text())
]


SPEED_FILES = [f"speed_{name}.json" for name in ("tables", "drawn", "batches", "sizes", "contexts")]


def speed_machine(results: Any) -> str:
    """What tables of speed were made on, which stands below several of them."""
    return machine_line(results["machine"])


@pytest.mark.parametrize(
    ("page", "file", "text"), PLACED, ids=lambda value: getattr(value, "name", "")[:20]
)
def test_a_table_is_the_result_files_own(page: Path, file: str, text: str) -> None:
    """What stands on the page is what `python -m eval.report FILE` prints."""
    assert text.strip() == markdown(ROOT / file).strip()


@pytest.mark.parametrize(
    ("page", "file", "table"),
    [
        ("../README.md", "speed_tables.json", speed_headline),
        *(("measurements/decoding-speed.md", file, speed_table) for file in SPEED_FILES),
        *(("measurements/decoding-speed.md", file, speed_machine) for file in SPEED_FILES),
        ("measurements/serving.md", "engines.json", engines_table),
        ("measurements/serving.md", "engines_newest.json", engines_table),
        ("versions.md", "layout_sources.json", source_table),
        ("versions.md", "proven.json", proven_table),
        ("measurements/serving.md", "broken_heads.json", broken_table),
        ("measurements/rehearsal.md", "rehearsal.json", rehearsal_table),
        ("measurements/curves.md", "compare_curves.json", curve_table),
        ("measurements/curves.md", "compare_means.json", curve_table),
        ("measurements/curves.md", "compare_chosen.json", comparison_table),
        ("measurements/curves.md", "compare_controls.json", curve_table),
        ("measurements/on-policy.md", "compare_on_policy.json", comparison_table),
        ("measurements/on-policy.md", "compare_on_policy_chat.json", comparison_table),
        ("measurements/heads.md", "compare_heads.json", comparison_table),
        ("measurements/heads.md", "compare_heads_chat.json", comparison_table),
        ("measurements/blocks.md", "compare_blocks.json", comparison_table),
        ("measurements/blocks.md", "compare_blocks_chat.json", comparison_table),
        ("papers.md", "compare_sources.json", comparison_table),
        ("measurements/drafters.md", "compare_self.json", comparison_table),
        ("measurements/data-preparation.md", "compare_stores.json", comparison_table),
        ("measurements/data-preparation.md", "compare_stores_chat.json", comparison_table),
        ("measurements/long-context.md", "compare_window.json", comparison_table),
        ("measurements/methods.md", "compare_tiny.json", comparison_table),
        ("measurements/methods.md", "compare_hybrid.json", comparison_table),
        ("measurements/methods.md", "compare_hybrid_llama.json", comparison_table),
        ("recipes.md", "memory.json", memory_table),
        ("guides/model-that-sees.md", "compare_seeing.json", comparison_table),
        ("recipes.md", "cards.json", card_table),
    ],
)
def test_a_page_shows_the_result_file(page: str, file: str, table: Callable[[Any], str]) -> None:
    """The tables of the documents are what the benchmarks print for the committed results."""
    results = json.loads((ROOT / "docs/results" / file).read_text())
    assert table(results) in (ROOT / "docs" / page).read_text()


# digests of result files and of the figures in the tables that the programs of their commits made of them
FROZEN = {
    "regenerated_data.json": "1ca0bc922488 / 4c20210eaafb",
    "head_quality.json": "df3fc5d5078c / c3ec1c0921c5 559c0e72a2d2",
    "warm_start.json": "cfd80fae47ee / 251d42204252",
    "drafters.json": "ce3bb20ee341 / 6e1196c66090 e378f93b60c6 9e654d45ec0a",
    "lookup_speed.json": "bc50b5417109 / 77a949dabdb5 746b4710ef9b",
    "distill.json": "6eb1e55ac93b / de9d1e7bc29f",
    "goodput.json": "b18724e230ec / b22c92eaed62",
    "tree_kinds.json": "cbdbf2ea876d / 11841a00e50a c7e285513654 8b8a9666fa2e",
    "methods.json": "40b8aa5ed6a5 / 25e155ac261c 4efe07642230 b3a819522b5d 907d47f30109 ad8608aa75e4",
    "methods_own.json": "6b81f66d226c / a32acf443e49 a787dce78ff8 59aafa272c54",
    "methods_tiny.json": "0178a0a5239d / 43b83e07e225 b60c86117b2e 745979698a31 fce46bc1a5d3 cecb40823cd2",
    "methods_long.json": "cd9e3cd6dbf3 / 47b9c16dcfdf 9cc9bf115f68",
    "methods_before.json": "2153789d6c93 / 99bcadf9c08e",
    "own_token.json": "42ae0ed41cad / 8c6fb78e3be2",
    "own_token_chat.json": "bdd1f93a8f3e / 8e693e7248b4",
    "draft_time.json": "914d22440098 / 2636b1aad5b9",
    "beam_search.json": "b1c592c7e692 / 18485f61c586",
    "goodput_batches.json": "3120b520c227 / a2ba991a16ce",
    "sparse_kv.json": "092bf4c0e5cf / 5d07b11711a0",
    "mask_templates.json": "c71e91cc7f83 / 37fea1d6eccb",
    "loop_overhead.json": "4ea55c34d7f5 / 2a70a3298cfc",
    "lookahead.json": "0b20974a0439 / 54ef779201f9",
    "batch_speed.json": "ac4cfccf98d0 / 1ea3d08c100d 5fbb5a17e82e 0933a3077af8",
    "hybrid_speed.json": "f3348e9b7476 / 07030a05ffd8 4f473a26bed5 aa35cb2ee939 f837446317ac",
    "packed.json": "7ae5298a4373 / 291dc0af90d8 e829fe00c1fb",
    "cost_growth.json": "79dde1ae4248 / 7fd32fe912f2 87734c3de067",
    "extract_speed.json": "e6896c26db3e / 4b64915fd5b9",
    "read_speed.json": "9b15b88529b1 / ba98ebbc8cd9",
    "shared_prefixes.json": "adb1456f3f47 / 00c1b61f1338",
    "drift.json": "80ef2961a9bd / 00f6830e41ab",
    "quantised.json": "6fe7540d08f8 / 55bde2b93fed",
    "adapters.json": "4bb8b16c170a / 4e6df044507b",
    "seeing_vllm.json": "4cfe037b99d9 / 828795f07124",
    "decode_speed.json": "db04fa86faca / cb3351e9eb1f",
    "block_speed.json": "89d407f0f7cf / ac5b78e247bd",
    "unroll_speed.json": "c43a5b86ca11 / 0a7bad9d68d9 a7e03e0f6048 284593cd72a4",
    "level_speed.json": "2f11d1ac44c1 / 2a269ff48cfe",
    "train_speed.json": "177a69ed223e / 5984d029848a f70480229aad",
    # the summary and the goals alone: the other tables are still made
    "speed_tables.json": "bd2df1612ee2 / e2d74720f1a4 52b3a3368f55",
    "speed_batches.json": "ed9f54bd874a / f17c9365b54d",
}
FIGURE = re.compile(r"[-+−]?\d+(?:[.,]\d+)*")


def digest(text: str) -> str:
    """A short fingerprint."""
    return sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("file", FROZEN)
def test_frozen_tables_have_the_figures_of_their_result_file(file: str) -> None:
    """A table whose program is gone keeps all of its figures, and so does the file that it was made of."""
    pages = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/**/*.md")))
    digests = {
        digest(" ".join(FIGURE.findall(table)))
        for table in re.findall(r"(?:^\|.*\n)+", pages, re.MULTILINE)
    }
    of_file, _, of_tables = FROZEN[file].partition(" / ")
    results = json.loads((ROOT / "docs/results" / file).read_text())
    assert digest(json.dumps(results, sort_keys=True)) == of_file
    assert set(of_tables.split()) <= digests


def test_groups_pool_cycles_and_compare_with_none() -> None:
    """Acceptance length is pooled over cycles, speed-up is against `none` at the same temperature."""
    common = {"temperature": 0.0, "identical": True, "loops": False}
    plain = {
        **common,
        "drafter": "none",
        "tokens": 11,
        "committed": 10,
        "cycles": 10,
        "seconds": 1.0,
    }
    rows = [
        {**plain, "conversation": "a"},
        {**plain, "conversation": "b"},
        {
            **common,
            "conversation": "a",
            "drafter": "x",
            "tokens": 11,
            "committed": 10,
            "cycles": 4,
            "seconds": 0.5,
        },
        {
            **common,
            "conversation": "b",
            "drafter": "x",
            "tokens": 21,
            "committed": 20,
            "cycles": 6,
            "seconds": 0.5,
        },
    ]
    rows[-1]["identical"] = False
    none, other = Results(Path(), [], rows).groups()
    assert (none.estimate(ACCEPTANCE_LENGTH).value, none.estimate(SPEED_UP).value) == (1.0, 1.0)
    assert other.estimate(ACCEPTANCE_LENGTH).value == 3.0
    assert other.estimate(SPEED_UP).value == pytest.approx(32 / 11)
    assert (none.identical, none.differing, other.identical, other.differing) == (2, 0, 1, 1)


@pytest.mark.parametrize(
    ("cpu_seconds", "shown"), [((1.0, 0.4), True), ((2.0, 1.55), False), ((), False)]
)
def test_a_busy_machine_is_told_by_cpu_seconds(
    cpu_seconds: tuple[float, ...], shown: bool, tmp_path: Path
) -> None:
    """Where answers took longer than their CPU seconds, the speed-up in these stands beside that of the clock."""
    common = {
        "temperature": 0.0,
        "identical": True,
        "loops": False,
        "conversation": "a",
        "tokens": 8,
        "committed": 7,
    }
    plain: dict[str, Any] = {**common, "drafter": "none", "cycles": 7, "seconds": 2.0}
    head = {**common, "drafter": "x", "cycles": 3, "seconds": 1.6}
    for row, seconds in zip((plain, head), cpu_seconds, strict=False):
        row["cpu_seconds"] = seconds
    (tmp_path / "r.jsonl").write_text(
        "\n".join(map(json.dumps, [{"run": {"commit": "c"}}, plain, head]))
    )
    text, html = markdown(tmp_path / "r.jsonl"), page([tmp_path / "r.jsonl"])
    assert ("in CPU seconds |" in text, ">in CPU seconds<" in html) == (shown, shown)
    assert (
        "| 1.25 × | 2.50 × |" in text
    ) == shown  # 2 s over 1.6 s by the clock, 1 s over 0.4 s of the CPU


def test_newest_run_is_reported(tmp_path: Path) -> None:
    """Results are appended; the table shows the last run."""
    row = {
        "temperature": 0.0,
        "drafter": "none",
        "tokens": 2,
        "committed": 1,
        "cycles": 1,
        "seconds": 1.0,
    }
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
