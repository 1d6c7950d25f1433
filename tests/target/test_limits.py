"""What a model does beyond thousands of tokens is tried by a short text, and so found out before a long one is read."""

from __future__ import annotations

from typing import Any

import pytest

from eagle.target.trees import read_modes
from eagle.target.trees.read_modes import OFFSETS
from tests.own_answers import cached_steps
from tests.target.test_masks import EXACT, build_small
from tests.target.test_means import Own, assert_own
from tests.target.test_positions import COUNTING, checked_reader
from tests.tree_rounds import worst_difference

FAR = 64  # farther than the check's own prompt reaches here
MODELS: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **COUNTING["llama4_text"],
        "floor_scale": FAR,
        "attention_chunk_size": FAR,
    },  # 8,192 in real ones
    "moshi": {
        "sliding_window": FAR
    },  # 3,000; its cache applies it, and its forward over a text does not
    "gemma3_text": {"sliding_window": FAR},
}


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt of a check may reach the limits."""
    monkeypatch.setattr(read_modes, "LONGEST_PROBE", 16)


def test_steps_that_forget_beyond_a_far_limit_are_the_truth() -> None:
    """As `generate` takes them, which the forward over a text is not."""
    assert checked_reader(build_small("moshi", **MODELS["moshi"])).follows_steps


@pytest.mark.parametrize("model_type", ["llama4_text", "gemma3_text"])
def test_texts_beyond_a_far_limit_are_read_right(model_type: str) -> None:
    """Trees on both sides of the limit equal plain forwards, and the config is what it was."""
    model = build_small(model_type, **MODELS[model_type])
    reader = checked_reader(model)
    extra = {"llama4_text": OFFSETS}.get(model_type)
    assert extra is None or extra in reader.mode.extras
    assert reader.original.config.to_dict() == model.config.to_dict()
    for length in (FAR - 4, FAR + 20):
        assert worst_difference(model, reader, (length,)) < EXACT


@pytest.mark.parametrize("model_type", ["llama4_text", "moshi"])
def test_a_far_limit_that_is_not_tried_is_seen(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a mask alone seems to do, and texts beyond the limit are read wrong."""
    monkeypatch.setattr(read_modes, "NEAR", 10**9)
    model = build_small(model_type, **MODELS[model_type])
    reader = checked_reader(model)
    assert reader.mode.describe() == "mask"
    assert (
        max(worst_difference(model, reader, (length,)) for length in (FAR - 4, FAR + 20))
        > 100 * EXACT
    )


@pytest.mark.slow
def test_steps_go_on_beyond_the_chunks_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """xLSTM reads prompts of more than 16 tokens in chunks here, in real ones of more than 16,384: as its own steps do.

    Its forward without a cache rounds the states between chunks to bf16, which is nobody's truth.
    """
    bench = Own("xlstm", max_inference_chunksize=16)
    monkeypatch.setattr(bench, "logits", lambda: cached_steps(bench.model))
    requests = bench.draw(6, seed=1, longest=60, least=8)
    assert any(len(request.prompt) > 32 for request in requests)
    for kind in ("trees", "eagle3"):
        assert_own(bench, kind, requests, 3)
