"""Both training steps are measured on the same work; the pages show the result file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.steps import Work, llama
from bench.train_speed import ROOT, count_flops, cut_all, full_text, measure, table

HIDDEN = 64
MLP = 176
VOCAB = 128
KEY_WIDTH = 32  # two of four heads have keys
CONFIG = llama(VOCAB, HIDDEN, MLP, heads=4, key_heads=2)


def test_sequences_are_cut_and_keep_their_answers() -> None:
    """Without those whose answers are cut off."""
    # the length of each, and the spans of its answers
    texts: list[Any] = [
        (9, [[3, 9]]),
        (1, []),
        (2000, [[40, 1900]]),
        (8, [[0, 5]]),
        (8, [[0, 2]]),
    ]
    assert cut_all(texts, 1024) == [(9, [[3, 9]]), (1024, [[40, 1024]]), (8, [[2, 5]])]


def test_necessary_operations_are_those_of_a_loop_over_positions() -> None:
    """Keys of all tokens up to the last answer; queries and MLPs of supervised tokens alone."""
    total = 0
    # slot i predicts token i + 2, and the last answer ends with token 8
    for _ in range(7):
        # fc needs its output and the gradient of its weights, keys and values all three products
        total += 2 * (2 * HIDDEN * HIDDEN) + 3 * (2 * HIDDEN * KEY_WIDTH)
    for token in (2, 3, 4, 7, 8):
        attention = 2 * (token - 1) * HIDDEN
        block = 2 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP + attention
        total += 3 * block + 3 * VOCAB * HIDDEN
    assert count_flops(CONFIG, [(12, [[2, 5], [7, 9]])]) == 2 * total


def test_the_pages_show_the_result_file() -> None:
    """The short table of docs/benchmarks.md, and the whole one of the measurements."""
    results = json.loads((ROOT / "docs/results/train_speed.json").read_text())
    rows = []
    for row in results["rows"]:
        if row["texts"] == "real" and row["length"] == 1024:
            rows.append(row)
    assert len(rows) == 4
    short = (ROOT / "docs/benchmarks.md").read_text()
    for row in rows:
        memory = row["ours_mb"] / row["published_mb"]
        sizes = f"| {row['dtype']} | {row['vocab']:,} |"
        assert f"{sizes} {row['ratio']:.2f} | {memory:.2f} of it |" in short
    page = (ROOT / "docs/measurements/training-speed.md").read_text()
    for line in table(results).splitlines()[2:-2]:
        # the page goes on with the goals that were set, in brackets
        assert line[: line.index("**")] in page


@pytest.mark.slow
def test_both_steps_are_measured() -> None:
    """Both train the same weights, and a pass is over all batches."""
    batches = [[full_text(64), full_text(32)], [full_text(48)]]
    row = measure(Work(CONFIG, batches, {"kind": "eagle1"}, "bf16"), rounds=1)
    assert row.keys() == {"ours", "published", "ours_mb", "published_mb"}
    assert row["ours"] > 0
    assert row["published"] > 0
