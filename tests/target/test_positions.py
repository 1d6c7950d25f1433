"""Models that count positions by themselves: tables by position (ALiBi), and lengths of the cache as offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eagle.target.reader import TreeReader
from eagle.target.trees import positions
from eagle.target.trees.read_modes import OFFSETS, ORIGIN, TABLES
from tests.target.test_masks import EXACT, build_small
from tests.tree_rounds import make_reader, read_plainly, worst_difference

SHIFTED = ["data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"]
TABLED = {"bloom": {}, "mpt": {}, "falcon": {"alibi": True}}
COUNTING = {
    # the scale of attention grows with every other token here
    "llama4_text": {
        "floor_scale": 2,
        "attn_scale": 0.5,
        "no_rope_layers": [1, 0, 1, 0],
        "first_k_dense_replace": 4,
    },
    "inkling_text": {},
}


def checked_reader(model: Any) -> TreeReader:
    """A reader that has found its means for texts alone and side by side."""
    reader = make_reader(model)
    reader.check(rows=2)
    return reader


@pytest.mark.parametrize(
    "model_type",
    [
        "bloom",
        pytest.param("mpt", marks=pytest.mark.slow),
        pytest.param("falcon", marks=pytest.mark.slow),
    ],
)
def test_a_table_is_indexed_by_position(model_type: str) -> None:
    """Siblings get one entry of the stock table; the model itself keeps its own."""
    model = build_small(model_type, **TABLED[model_type])
    reader = checked_reader(model)
    assert TABLES in reader.mode.extras
    assert reader.reads_rows == (model_type != "mpt")  # whose table has no row a text
    text = list(range(3, 20))
    before = read_plainly(model, text)
    for lengths in [(21,), (21, 15, 30)] if reader.reads_rows else [(21,)]:
        assert worst_difference(model, reader, lengths, pieces=1) < EXACT
    assert torch.equal(read_plainly(reader.original, text), before)


@pytest.mark.parametrize(
    "model_type", ["llama4_text", pytest.param("inkling_text", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("pieces", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_counting_model_gets_the_distance_to_its_count(model_type: str, pieces: int) -> None:
    """Its check tells that masks alone are not enough, and that texts are read one by one."""
    model = build_small(model_type, **COUNTING[model_type])
    reader = checked_reader(model)
    assert OFFSETS in reader.mode.extras and reader.reads_rows is False
    assert worst_difference(model, reader, (21,), pieces) < EXACT


def test_a_column_in_place_of_a_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a table by the order of columns, or a length for an offset, states are others."""
    bloom, llama = build_small("bloom"), build_small("llama4_text", **COUNTING["llama4_text"])
    readers = [checked_reader(bloom), checked_reader(llama)]

    def in_order(starts: Sequence[int], positions: torch.Tensor, held: Any = None) -> torch.Tensor:
        return torch.arange(max(starts) + positions.shape[1]).repeat(len(starts), 1)

    monkeypatch.setattr(positions, "place_columns", in_order)
    assert worst_difference(bloom, readers[0]) > 100 * EXACT
    monkeypatch.setattr(
        positions.TokenPositions, "query_offsets", property(lambda places: places.starts[0])
    )
    assert worst_difference(llama, readers[1]) > 100 * EXACT


def test_a_chunk_that_is_not_left_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that attend within chunks of 8 tokens give other states if they see all 21."""
    llama = build_small("llama4_text", **COUNTING["llama4_text"])
    reader = checked_reader(llama)
    monkeypatch.setattr(reader.masks, "chunk", None)
    assert worst_difference(llama, reader) > 100 * EXACT


@pytest.mark.parametrize(
    "model_type", ["roberta", *(pytest.param(t, marks=pytest.mark.slow) for t in SHIFTED)]
)
def test_a_text_begins_at_the_models_own_first_position(model_type: str) -> None:
    """These begin behind their padding index when they count by themselves, and not when they are given 0."""
    model = build_small(model_type)
    reader = checked_reader(model)
    assert ORIGIN in reader.mode.extras and reader.origin == 1 and not reader.follows_steps
    assert worst_difference(model, reader, (21, 15, 30)) < EXACT


@pytest.mark.slow
def test_a_window_that_only_a_models_cache_applies_is_followed() -> None:
    """Its config names one of 8 tokens, which its own forwards see beyond, and its steps do not."""
    reader = checked_reader(build_small("moshi"))
    assert reader.follows_steps and reader.mode.whole
