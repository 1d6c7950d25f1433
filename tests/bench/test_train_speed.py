"""Both steps are measured on the same work; the pages show the result file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.steps import Work, llama
from bench.train_speed import ROOT, count_flops, cut_all, full_text, measure, table

CONFIG = llama(128, 64, 176, heads=4, key_heads=2)


def test_texts_have_answers() -> None:
    """Real ones, cut, without those whose answers are cut off."""
    texts: list[Any] = [(9, [[3, 9]]), (1, []), (2000, [[40, 1900]]), (8, [[0, 5]]), (8, [[0, 2]])]
    assert cut_all(texts, 1024) == [(9, [[3, 9]]), (1024, [[40, 1024]]), (8, [[2, 5]])]


def test_necessary_operations_are_those_of_a_loop_over_positions() -> None:
    """Keys of all tokens up to the last answer; queries, and what follows them, of supervised tokens alone."""
    width, mlp, vocab, key_width = 64, 176, 128, 32
    spans = [[2, 5], [7, 9]]
    total = 0
    for _ in range(8 - 1):  # slot i predicts token i + 2, and the last answer ends with token 8
        products = 2 * width * width  # fc: its output, and the gradient of its weights
        total += 2 * products + 3 * 2 * width * key_width
    for token in (2, 3, 4, 7, 8):
        attention = 2 * (token - 1) * width
        total += 3 * (2 * width * width + 3 * width * mlp + attention) + 3 * vocab * width
    assert count_flops(CONFIG, [(12, spans)]) == 2 * total


def test_the_short_table_shows_the_result_file() -> None:
    """Every row of EAGLE-1's short table of docs/benchmarks.md is a row of the result file."""
    rows = json.loads((ROOT / "docs/results/train_speed.json").read_text())["rows"]
    page = (ROOT / "docs/benchmarks.md").read_text()
    shown = [row for row in rows if row["texts"] == "real" and row["length"] == 1024]
    assert len(shown) == 4
    for row in shown:
        memory = row["ours_mb"] / row["published_mb"]
        assert (
            f"| {row['dtype']} | {row['vocab']:,} | {row['ratio']:.2f} | {memory:.2f} of it |"
            in page
        )


def test_the_printed_table_has_the_figures_of_the_page() -> None:
    """The page also holds the goals that were set, in brackets."""
    results = json.loads((ROOT / "docs/results/train_speed.json").read_text())
    page = (ROOT / "docs/measurements/training-speed.md").read_text()
    for line in table(results).splitlines()[2:-2]:
        begin = line[: line.index("**")]
        assert begin in page


@pytest.mark.slow
def test_both_steps_are_measured() -> None:
    """Both train the same weights, and a pass is over all batches."""
    batches = [[full_text(64), full_text(32)], [full_text(48)]]
    row = measure(Work(CONFIG, batches, {"kind": "eagle1"}, "bf16"), rounds=1)
    assert row.keys() == {"ours", "published", "ours_mb", "published_mb"}
    assert row["ours"] > 0 and row["published"] > 0
