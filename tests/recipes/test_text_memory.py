"""The memory of a sequence is counted by what models keep, and agrees with their shapes and real caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle import Target
from eagle.core.verify import Choose, Sampling
from eagle.target.state import TargetState
from recipes import text_memory as module
from recipes.forecast import read_sizes, sizes_of
from recipes.text_memory import TextMemory, text_memory
from tests.recipes.test_recipes import SIZES

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MAMBA2 = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
# by hand: fp32 states of heads x key x value; convolutions of 4 in bf16 over queries, keys and values
DELTA_STATES = 4 * 4 * 8 * 16 + 2 * 4 * (2 * 2 * 8 + 4 * 16)
MAMBA2_STATES = 4 * 4 * 16 * 8 + 2 * 4 * (4 * 16 + 2 * 2 * 8)
# keys and values of a token in the one layer with attention
KEYS_AND_VALUES = 2 * 2 * 8 * 2
MODELS: dict[str, tuple[dict[str, Any], TextMemory | None]] = {
    "qwen3_5_text": (DELTA, TextMemory(3 * DELTA_STATES, KEYS_AND_VALUES)),
    "qwen3_next": (DELTA | EXPERTS, TextMemory(3 * DELTA_STATES, KEYS_AND_VALUES)),
    "nemotron_h": (MAMBA2, TextMemory(2 * MAMBA2_STATES, KEYS_AND_VALUES)),
    "llama": ({}, None),
    "gpt_oss": ({"num_local_experts": 4, "sliding_window": 4}, None),
}


def build(family: str, device: str = "meta") -> Any:
    """Return a small model of four layers in bf16."""
    config = AutoConfig.for_model(family, **SHAPE, **MODELS[family][0])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("family", MODELS)
def test_states_are_those_of_their_shapes(family: str) -> None:
    """The bytes are a sum by hand over layers; a model with keys and values alone has no states."""
    assert text_memory(build(family)) == MODELS[family][1]


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute of a cache's layer."""
    for part in value.values() if isinstance(value, dict) else [value]:
        if isinstance(part, torch.Tensor):
            yield part


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family, (_, expected) in MODELS.items() if expected])
def test_a_real_cache_takes_what_is_forecast(family: str) -> None:
    """After nine tokens a model's own cache holds the states once, and keys and values nine times."""
    model = build(family, "cpu")
    expected = MODELS[family][1]

    assert expected is not None

    held = 0
    for layer in model(torch.arange(9)[None], use_cache=True).past_key_values.layers:
        for value in vars(layer).values():
            held += sum(part.nbytes for part in find_tensors(value) if part.is_floating_point())

    assert held == expected.states + 9 * expected.token

    # this project's own cache keeps as much
    state = TargetState(Target(model), ())
    state.begin([1, 2, 3], Choose(Sampling()))
    assert state.cache.states is not None
    assert state.cache.states.state_bytes(0) == expected.states


def test_a_fault_in_what_is_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the states of convolutions, which are in bf16, are left out."""
    find = module.find_tensors

    def states_alone(value: Any, seen: Any) -> Iterator[torch.Tensor]:
        return (part for part in find(value, seen) if part.dtype == torch.float32)

    monkeypatch.setattr(module, "find_tensors", states_alone)
    assert text_memory(build("qwen3_5_text")) != MODELS["qwen3_5_text"][1]


def test_published_targets_keep_what_the_table_says() -> None:
    """By hand: Qwen3-Next has 36 layers of 32 states of 128 x 128, and 12 layers with 2 x 256 keys."""
    found = sizes_of("Qwen/Qwen3-Next-80B-A3B-Instruct").text
    convolutions = 2 * 4 * (2 * 16 + 32) * 128
    assert found == (36 * (4 * 32 * 128 * 128 + convolutions), 12 * 2 * 2 * 256 * 2)
    assert read_sizes(SIZES["Qwen/Qwen3-8B"]).text is None
