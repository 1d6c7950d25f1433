"""The linear layers of a new head start from torch's numbers, or from those of published trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eagle.drafters import DRAFTERS, settings_of
from tests.unrolled_heads import SHAPE, frozen_head

FROZEN = frozen_head(torch.float32)
DSPARK = {"kind": "dspark", "blocks": 1, "rank": 64}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "kind": "eagle3",
        "lm_head": "random",
        "queries": "random",
    },
    "peagle": {"kind": "peagle", "blocks": 2},
    "dspark, gated": {**DSPARK, "markov": "gated"},
    "dspark, domino": {**DSPARK, "markov": "domino", "gru_size": 64},
}


def new_head(drafter: dict[str, Any]) -> Any:
    """Return a head as training begins with it."""
    settings = settings_of(drafter, "test")
    torch.manual_seed(0)
    return DRAFTERS[settings.kind].for_target(settings, SHAPE, FROZEN)


@pytest.mark.parametrize("name", HEADS)
def test_linear_layers_start_as_transformers_draws_them(name: str) -> None:
    """The numbers are those of its `_init_weights`, one layer after the other; what is the target's stays."""
    head = new_head({**HEADS[name], "linears": "normal"})
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    expected = {}
    for key, module in new_head(HEADS[name]).named_modules():
        if isinstance(module, nn.Linear):
            PreTrainedModel._init_weights(model, module)
            expected[key] = module
    assert expected
    modules = dict(head.named_modules())
    for key, module in expected.items():
        if key == "lm_head" and name != "eagle3":
            assert torch.equal(modules[key].weight, FROZEN.weight)
        # half of these rows are copies of the keys'
        elif not (name == "peagle" and key == "layers.0.self_attn.q_proj"):
            assert torch.equal(modules[key].weight, module.weight), key
            assert module.bias is None or not modules[key].bias.any()


@pytest.mark.parametrize("name", ["eagle3", "dspark, domino"])
def test_torch_draws_them_by_default(name: str) -> None:
    """Recipes that were written before the key start as they did: nothing further is drawn."""
    explicit = new_head({**HEADS[name], "linears": "uniform"})
    state = torch.get_rng_state()
    head = new_head(HEADS[name])
    assert torch.equal(torch.get_rng_state(), state)
    for weight, expected in zip(head.parameters(), explicit.parameters(), strict=True):
        assert torch.equal(weight, expected)
