"""What the linear layers of a new head start from: torch's own numbers, or those of published trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eagle.drafters import DRAFTERS, settings_of
from tests.unrolled_heads import SHAPE, frozen_head

FROZEN = frozen_head(torch.float32)

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3", "lm_head": "random", "queries": "random"},
    "peagle": {"kind": "peagle", "blocks": 2},
    "dflash": {"kind": "dflash", "blocks": 1},
    "dspark, gated": {"kind": "dspark", "blocks": 1, "rank": 64, "markov": "gated"},
    "dspark, rnn": {"kind": "dspark", "blocks": 1, "rank": 64, "markov": "rnn"},
    "dspark, domino": {
        "kind": "dspark",
        "blocks": 1,
        "rank": 64,
        "markov": "domino",
        "gru_size": 64,
    },
}


def new_head(drafter: dict[str, Any]) -> Any:
    """A head as training begins with it."""
    settings = settings_of(drafter, "test")
    torch.manual_seed(0)
    return DRAFTERS[settings.kind].for_target(settings, SHAPE, FROZEN)


@pytest.mark.parametrize("name", HEADS)
def test_linear_layers_start_as_transformers_draws_them(name: str) -> None:
    """The numbers of its `_init_weights`, drawn one layer after the other; only what is the target's stays so."""
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
    bare = new_head(HEADS[name])
    drawn = {key: part for key, part in bare.named_modules() if isinstance(part, nn.Linear)}
    for part in drawn.values():
        PreTrainedModel._init_weights(model, part)
    targets = {} if name.startswith("eagle3") else {"lm_head": FROZEN.weight}
    ours = dict(head.named_modules())
    assert drawn
    for key, part in drawn.items():
        if key in targets:
            assert torch.equal(ours[key].weight, targets[key])
        elif not (
            name == "peagle" and key == "layers.0.self_attn.q_proj"
        ):  # half of its rows are of the keys
            assert torch.equal(ours[key].weight, part.weight), key
            assert part.bias is None or torch.equal(ours[key].bias, torch.zeros_like(part.bias))


@pytest.mark.parametrize("name", HEADS)
def test_torch_draws_them_unless_told(name: str) -> None:
    """As a head of the bare class, whatever was learned before the key was there; nothing further is drawn."""
    told = new_head({**HEADS[name], "linears": "uniform"})
    state = torch.get_rng_state()
    head = new_head(HEADS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(one, other)
        for one, other in zip(head.parameters(), told.parameters(), strict=True)
    )
    torch.manual_seed(0)
    bare = dict(type(head)(head.settings, head.shape).named_parameters())
    unlike = {key for key, part in head.named_parameters() if not torch.equal(part, bare[key])}
    assert unlike <= {"lm_head.weight", "layers.0.self_attn.q_proj.weight"}
