"""A widened model gives the small one's logits, and reads all its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.widen import count_weights, find_mlps, widen, widened_model
from tests.families import build, random_tokens


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    """Return a model's logits of a random sequence."""
    logits: Tensor = model(torch.tensor([random_tokens(20, seed=1)])).logits
    return logits


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_a_widened_model_gives_the_same_logits(model_type: str, tmp_path: Path) -> None:
    """Also from disk; it has as many weights as were asked for."""
    model = build(model_type)
    # so many that every MLP grows by much
    count = 3 * count_weights(model)
    wide = widened_model(model, count)
    assert count_weights(wide) == pytest.approx(count, rel=0.02)
    wide.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(
        logits_of(loaded),
        logits_of(model),
        rtol=1e-5,
        atol=1e-5,
    )
    # the comparison fails if one new neuron writes
    _, down = find_mlps(wide)[-1]
    with torch.no_grad():
        down.weight[:, -1] = 1e4 * torch.arange(wide.config.hidden_size).cos()
    assert not torch.allclose(
        logits_of(wide),
        logits_of(model),
        rtol=1e-5,
        atol=1e-5,
    )


def test_new_neurons_read_random_weights_and_write_nothing() -> None:
    """None of the weights that read is zero, so that nothing could be skipped."""
    model = build("llama")
    widths = [down.in_features for _, down in find_mlps(model)]
    assert len(widths) == model.config.num_hidden_layers
    new_width = widen(model, 5 * count_weights(model))
    for (ups, down), width in zip(find_mlps(model), widths, strict=True):
        assert down.in_features == new_width > width
        assert all(up.weight[width:].ne(0).all() for up in ups)
        assert not down.weight[:, width:].any()


def test_what_cannot_be_widened_is_refused() -> None:
    """A model with more weights than asked for, and one without MLPs."""
    with pytest.raises(ValueError, match="more than 10 weights already"):
        widen(build("llama"), 10)
    with pytest.raises(ValueError, match="no MLP was found"):
        widen(torch.nn.Linear(4, 4), 100)
