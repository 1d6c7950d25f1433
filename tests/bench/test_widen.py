"""A widened model writes the small one's text, and all its weights are read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.widen import find_mlps, widen, widened_model
from tests.families import build, random_tokens


@torch.inference_mode()
def count_equal(
    model: Any, wide: Any, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[int, float]:
    """How many greedy answers of a model are the widened one's, and the largest relative difference of their logits.

    The widened model reads each answer in one forward; it writes that answer if it would choose each of its tokens.
    """
    equal, worst = 0, 0.0
    for prompt in prompts:
        options = {
            "max_new_tokens": new_tokens,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        logits = wide(text[:, :-1], logits_to_keep=new_tokens).logits[0]
        expected = model(text[:, :-1], logits_to_keep=new_tokens).logits[0]
        worst = max(worst, float((logits - expected).abs().max() / expected.abs().max()))
        equal += int(torch.equal(logits.argmax(-1), text[0, len(prompt) :]))
    return equal, worst


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_a_widened_model_gives_the_same_logits(model_type: str, tmp_path: Path) -> None:
    """Also after it was saved and loaded; its weights are as many as were asked for."""
    model = build(model_type)
    count = 3 * sum(weight.numel() for weight in model.parameters())
    wide = widened_model(model, count)
    assert sum(weight.numel() for weight in wide.parameters()) == pytest.approx(count, rel=0.02)
    wide.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([random_tokens(20, seed=1)])
    with torch.inference_mode():
        torch.testing.assert_close(
            loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5
        )
    assert count_equal(model, loaded, [random_tokens(8, seed=seed) for seed in range(4)], 6)[0] == 4


def test_new_neurons_read_random_weights_and_write_nothing() -> None:
    """None of those that read is zero: nothing could be skipped."""
    model = build("llama")
    before = [down.in_features for _, down in find_mlps(model)]
    assert len(before) == model.config.num_hidden_layers
    after = widen(model, 5 * sum(weight.numel() for weight in model.parameters()))
    for (ups, down), old in zip(find_mlps(model), before, strict=True):
        assert down.in_features == after > old
        assert all(up.weight[old:].ne(0).all() for up in ups)
        assert not down.weight[:, old:].any()


def test_a_planted_fault_is_seen() -> None:
    """One new neuron that writes changes the text."""
    model = build("llama")
    wide = widened_model(
        copy.deepcopy(model), 3 * sum(weight.numel() for weight in model.parameters())
    )
    with torch.no_grad():
        find_mlps(wide)[-1][1].weight[:, -1] = 1e4 * torch.arange(wide.config.hidden_size).cos()
    assert count_equal(model, wide, [random_tokens(8, seed=seed) for seed in range(4)], 6)[0] < 4


def test_what_cannot_be_widened_is_told() -> None:
    """A model with more weights than asked for, and one without MLPs."""
    with pytest.raises(ValueError, match="more than 10 weights already"):
        widen(build("llama"), 10)
    with pytest.raises(ValueError, match="no MLP was found"):
        widen(torch.nn.Linear(4, 4), 100)
