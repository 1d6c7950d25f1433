"""The states of a text are counted by what models keep, and agree with their shapes and with what real caches hold."""

from __future__ import annotations

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

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
ATTENTION = {"num_key_value_heads": 2, "head_dim": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA2 = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
# by hand: fp32 states of heads x key x value, convolutions of 4 in bf16 over queries, keys and values; keys and values
STATES = 4 * 4 * 8 * 16 + 2 * 4 * (2 * 2 * 8 + 4 * 16)
KEYS_AND_VALUES = 2 * 2 * 8 * 2
MODELS: dict[str, tuple[dict[str, Any], TextMemory | None]] = {
    "qwen3_5_text": (DELTA | ATTENTION, TextMemory(3 * STATES, KEYS_AND_VALUES)),
    "qwen3_next": (DELTA | ATTENTION | EXPERTS, TextMemory(3 * STATES, KEYS_AND_VALUES)),
    "nemotron_h": (
        {
            **MAMBA2,
            **ATTENTION,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        },
        TextMemory(2 * (4 * 4 * 16 * 8 + 2 * 4 * (4 * 16 + 2 * 2 * 8)), KEYS_AND_VALUES),
    ),
    "llama": (ATTENTION, None),
    "gpt_oss": ({**ATTENTION, "num_local_experts": 4, "sliding_window": 4}, None),
}


def config_of(family: str) -> Any:
    """A small config of four layers."""
    return AutoConfig.for_model(family, **SHAPE, **MODELS[family][0], num_hidden_layers=4)


@pytest.mark.parametrize("family", MODELS)
def test_states_are_those_of_their_shapes(family: str) -> None:
    """As many bytes as a sum by hand of what each layer keeps; none where layers keep keys and values alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).eval()
    assert text_memory(model) == MODELS[family][1]


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, (_, text) in MODELS.items() if text])
def test_a_real_text_takes_what_is_forecast(family: str) -> None:
    """States once, keys and values by the token, in a model's cache after nine tokens; a text here holds as much."""
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).eval()
    cache = model(torch.arange(9)[None], use_cache=True).past_key_values
    parts = [
        part
        for layer in cache.layers
        for value in vars(layer).values()
        for part in tensors_of(value)
    ]
    text = MODELS[family][1]
    assert (
        text
        and sum(part.nbytes for part in parts if part.is_floating_point())
        == text.states + 9 * text.token
    )
    state = TargetState(Target(model), ())
    state.begin([1, 2, 3], Choose(Sampling()))
    assert state.cache.states is not None and state.cache.states.state_bytes(0) == text.states


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of one attribute of a cache's layer."""
    values = value.values() if isinstance(value, dict) else [value]
    return [part for part in values if isinstance(part, torch.Tensor)]


def test_a_fault_in_what_is_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the convolutions' states are left out, or what a layer shares is counted twice, the sum is another."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config_of("qwen3_5_text"), dtype=torch.bfloat16
        ).eval()
    find = module.find_tensors
    half = lambda value, seen: (part for part in find(value, seen) if part.dtype == torch.float32)  # noqa: E731
    twice = lambda value, seen: (part for part in find(value, seen) for _ in range(2))  # noqa: E731
    for fault in (half, twice):
        monkeypatch.setattr(module, "find_tensors", fault)
        assert text_memory(model) != MODELS["qwen3_5_text"][1]


def test_published_targets_keep_what_the_table_says() -> None:
    """By hand, of published shapes: Qwen3-Next has 36 layers of 32 states of 128 x 128, and 12 of 2 x 256 keys."""
    text = sizes_of("Qwen/Qwen3-Next-80B-A3B-Instruct").text
    assert text == (36 * (4 * 32 * 128 * 128 + 2 * 4 * (2 * 16 + 32) * 128), 12 * 2 * 2 * 256 * 2)
    assert read_sizes(SIZES["Qwen/Qwen3-8B"]).text is None
