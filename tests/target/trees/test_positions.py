"""Models that count positions by themselves, and models that do something else beyond thousands of tokens.

They count by tables by position (ALiBi), or by lengths of the cache as offsets. What lies beyond thousands of tokens is
tried with a short prompt and lowered limits, and so found out before a long one is read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle.target.reader import TreeReader
from eagle.target.trees import positions, read_modes
from eagle.target.trees.read_modes import OFFSETS, ORIGIN, TABLES
from tests.own_answers import cached_steps
from tests.target.trees.test_masks import COUNTING, EXACT, build_small
from tests.target.trees.test_means import Own, assert_own
from tests.tree_rounds import make_reader, read_plainly, worst_difference

TABLED: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True},
}


def make_checked(model: Any) -> TreeReader:
    """Return a reader that has found its mode for sequences alone and in batches."""
    reader = make_reader(model)
    reader.check(rows=2)
    return reader


@pytest.mark.quick("bloom")
@pytest.mark.parametrize("model_type", TABLED)
def test_a_table_is_indexed_by_position(model_type: str) -> None:
    """Siblings get one entry of the stock table; the model itself keeps its own."""
    model = build_small(model_type, **TABLED[model_type])
    reader = make_checked(model)

    assert TABLES in reader.mode.extras
    # MPT's table has no row for each sequence
    assert reader.reads_rows == (model_type != "mpt")

    tokens = list(range(3, 20))
    # a table is patched while a tree is read, and put back
    before = read_plainly(model, tokens)
    lengths = (21, 15, 30) if reader.reads_rows else (21,)

    assert worst_difference(model, reader, lengths) < EXACT
    assert torch.equal(read_plainly(reader.original, tokens), before)


@pytest.mark.quick("1-llama4_text")
@pytest.mark.parametrize("model_type", COUNTING)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_counting_model_gets_the_distance_to_its_count(model_type: str, pieces: int) -> None:
    """Its check tells that masks alone are not enough, and that sequences are read one by one."""
    model = build_small(model_type, **COUNTING[model_type])
    reader = make_checked(model)
    assert OFFSETS in reader.mode.extras
    assert reader.reads_rows is False
    assert worst_difference(model, reader, (21,), pieces) < EXACT


def test_two_distances_are_refused() -> None:
    """The model adds one length for all sequences."""
    reader = make_checked(build_small("llama4_text", **COUNTING["llama4_text"]))
    places = torch.tensor([[5, 6], [9, 10]])
    forward = positions.TokenPositions([5, 9], places, 2, None, reader.masks)
    with pytest.raises(ValueError, match="they are read one by one"):
        _ = forward.query_offsets


def test_a_column_in_place_of_a_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: a table by the order of columns, a length for an offset, and a chunk that is never left."""
    bloom = build_small("bloom")
    llama = build_small("llama4_text", **COUNTING["llama4_text"])
    by_table = make_checked(bloom)
    by_offset = make_checked(llama)

    def place_in_order(starts: Any, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.arange(max(starts) + positions.shape[1]).repeat(len(starts), 1)

    monkeypatch.setattr(positions, "place_columns", place_in_order)

    assert worst_difference(bloom, by_table) > 100 * EXACT

    with monkeypatch.context() as patch:
        lengths = property(lambda self: self.starts[0])
        patch.setattr(positions.TokenPositions, "query_offsets", lengths)
        assert worst_difference(llama, by_offset) > 100 * EXACT

    monkeypatch.undo()
    monkeypatch.setattr(by_offset.masks, "chunk", None)

    assert worst_difference(llama, by_offset) > 100 * EXACT


@pytest.mark.quick("roberta")
@pytest.mark.parametrize("model_type", ["roberta", "xmod"])
def test_a_sequence_begins_at_the_models_own_first_position(model_type: str) -> None:
    """These begin after their padding index when they count by themselves, and not when they are given 0."""
    model = build_small(model_type)
    reader = make_checked(model)

    assert ORIGIN in reader.mode.extras
    assert reader.first_position == 1
    assert not reader.follows_steps
    assert worst_difference(model, reader, (21, 15, 30)) < EXACT


def test_large_states_are_read_in_the_same_way() -> None:
    """What a check tolerates is relative to a state's size."""
    model = build_small("llama")
    plain = make_checked(model)
    with torch.no_grad():
        model.base_model.norm.weight *= 1e4
    assert make_checked(model).mode == plain.mode


@pytest.mark.slow
def test_a_window_that_only_a_models_cache_applies_is_followed() -> None:
    """Its config names one of 8 tokens, which its own forwards see beyond, and its steps do not."""
    reader = make_checked(build_small("moshi"))
    assert reader.follows_steps
    assert reader.mode.whole


# -- limits far beyond a short prompt ----------------------------------------------------------------------------------

FAR = 64  # farther than the check's own prompt reaches here
LIMITED: dict[str, dict[str, Any]] = {
    # 8,192 in real ones
    "llama4_text": {**COUNTING["llama4_text"], "floor_scale": FAR, "attention_chunk_size": FAR},
    # 3,000; its cache applies it, and its forward over a sequence does not
    "moshi": {"sliding_window": FAR},
    "gemma3_text": {"sliding_window": FAR},
}


@pytest.fixture
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no prompt of a check reach the limits."""
    monkeypatch.setattr(read_modes, "LONGEST_PROBE", 16)


def test_steps_that_forget_beyond_a_far_limit_are_the_truth(short_probe: None) -> None:
    """As `generate` takes them, which the forward over a sequence is not."""
    assert make_checked(build_small("moshi", **LIMITED["moshi"])).follows_steps


@pytest.mark.parametrize("model_type", ["llama4_text", "gemma3_text"])
def test_sequences_beyond_a_far_limit_are_read_right(model_type: str, short_probe: None) -> None:
    """Trees on both sides of the limit equal plain forwards, and the config is what it was."""
    model = build_small(model_type, **LIMITED[model_type])
    reader = make_checked(model)
    assert (OFFSETS in reader.mode.extras) == (model_type == "llama4_text")
    assert reader.original.config.to_dict() == model.config.to_dict()

    for length in (FAR - 4, FAR + 20):
        assert worst_difference(model, reader, (length,)) < EXACT


def test_a_far_limit_that_is_not_tried_is_seen(
    short_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: without the trial a mask alone seems to do, and what lies beyond the limit is read wrong."""
    monkeypatch.setattr(read_modes, "NEAR", 10**9)
    model = build_small("llama4_text", **LIMITED["llama4_text"])
    reader = make_checked(model)

    assert reader.mode.describe() == "mask"
    # this prompt's trees cross the limit
    assert worst_difference(model, reader, (FAR - 4,)) > 100 * EXACT


@pytest.mark.slow
def test_steps_go_on_beyond_the_chunks_of_a_prompt(
    short_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xLSTM reads prompts of more than 16 tokens in chunks here, in real ones of more than 16,384: as its own steps do.

    Its forward without a cache rounds the states between chunks to bf16, which is nobody's truth.
    """
    bench = Own("xlstm", max_inference_chunksize=16)
    monkeypatch.setattr(bench, "logits", lambda: cached_steps(bench.model))
    requests = bench.draw(6, seed=1, longest=60, least=8)
    assert any(len(request.prompt) > 32 for request in requests)
    assert_own(bench, "trees", requests, batch_size=3)
