"""Attention that orders, pools or compresses its columns by itself, over paths with copies of its cache."""

from __future__ import annotations

from typing import Any

import pytest

from eagle.target.trees.attention_rows import AttentionRows
from eagle.target.trees.read_modes import ROWS
from tests.target.test_masks import EXACT, build_small
from tests.target.test_positions import checked_reader
from tests.tree_rounds import worst_difference


@pytest.fixture(scope="module")
def local() -> Any:
    """A model whose local attention takes a fixed band of its rows."""
    return build_small("gpt_neo", attention_types=[[["global", "local"], 2]])


@pytest.mark.parametrize("pieces", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_attention_by_the_order_of_rows_reads_trees(local: Any, pieces: int) -> None:
    """Its check takes it off the mask; several rounds of trees equal plain forwards, beyond its window of 8."""
    reader = checked_reader(local)
    assert ROWS in reader.mode.extras
    assert worst_difference(local, reader, (21,), pieces) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("length", [21, 140])
def test_compressed_columns_read_trees(length: int, pieces: int) -> None:
    """Every 4 and every 128 tokens become a column, of which the best 8 are attended to, besides a window of 8."""
    model = build_small("deepseek_v4")
    reader = checked_reader(model)
    assert ROWS in reader.mode.extras
    assert worst_difference(model, reader, (length,), pieces) < EXACT


def test_a_siblings_cache_is_seen(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that goes on from a cache with another's columns in it gives other states."""
    reader = checked_reader(local)
    run = AttentionRows.run

    def rolled(self: AttentionRows, inputs: Any, state: Any, paths: Any, projections: Any) -> Any:
        output, state = run(self, inputs, state, paths, projections)
        if ("layer", 0) in state:
            state["layer", 0].keys = state["layer", 0].keys.roll(1, dims=2)
        return output, state

    monkeypatch.setattr(AttentionRows, "run", rolled)
    assert worst_difference(local, reader) > 100 * EXACT


def test_texts_of_other_lengths_run_apart(local: Any) -> None:
    """The attention of each runs by itself, all else side by side."""
    reader = checked_reader(local)
    assert reader.reads_rows
    assert worst_difference(local, reader, (21, 15, 30)) < EXACT
