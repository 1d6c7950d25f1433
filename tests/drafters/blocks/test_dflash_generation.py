"""DFlash drafts what transformers' own DFlash generation drafts with the same weights."""

# B slots of a block, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from eagle import Budget, Target, generate
from eagle.drafters.blocks.dflash import DFlash

SLOTS = 5
# the draft model reads the outputs of these layers
LAYERS = (1, 2)
NEW_TOKENS = 40
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return a target with so few tokens that random drafts are often right."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=6,
        num_hidden_layers=4,
        initializer_range=0.3,
        eos_token_id=None,
        **SHAPE,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def assistant() -> Any:
    """Return a draft model of transformers with random weights, its norms' too."""
    config = MuseGlimmerAssistantConfig(
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        block_size=SLOTS,
        mask_token_id=5,
        target_layer_ids=list(LAYERS),
        **SHAPE,
    )
    torch.manual_seed(4)
    draft = MuseGlimmerAssistantModel(config).double().eval()
    for weight in draft.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        else:
            nn.init.constant_(weight, 1.3)
    return draft


def head_like(assistant: Any, target: Target) -> Any:
    """Return our head with the draft model's weights."""
    settings = DFlash.Settings(
        # a tap is a layer's input
        taps=tuple(layer + 1 for layer in LAYERS),
        blocks=2,
        slots=SLOTS,
        mask_token=5,
    )
    head = DFlash.for_target(settings, target.config, target.head).double()
    weights = {}
    for name, tensor in assistant.state_dict().items():
        name = name.replace("encoder.fc.", "fc.")
        name = name.replace("encoder.output_norm_enc.", "hidden_norm.")
        weights[name] = tensor
    head.load_state_dict(weights)
    return head.bind(target.head)


def own_cycles(model: Any, assistant: Any, prompt: Tensor) -> tuple[list[int], list[list[int]]]:
    """Return the answer by transformers, and the root and drafts of each of its cycles."""
    cycles: list[list[int]] = []

    def note(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = named.get("input_ids", args[0] if args else None)
        cycles.append(tokens[0].tolist())

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    written = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        assistant_model=assistant,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    hook.remove()
    # the first forward reads the prompt; nothing is drafted for the answer's last token
    drafted = [cycle for cycle in cycles[1:] if len(cycle) > 1]
    return written[0, len(prompt) :].tolist(), drafted


@pytest.mark.parametrize("length", [1, 19])
def test_drafts_are_those_of_transformers(length: int, model: Any, assistant: Any) -> None:
    """Token by token in every cycle, after a prompt of one token and of many."""
    prompt = torch.randint(6, (length,), generator=torch.Generator().manual_seed(length))
    answer, expected = own_cycles(model, assistant, prompt)
    target = Target(model)
    trace = generate(
        target,
        head_like(assistant, target),
        prompt,
        # longer, as our last drafts are as short as what is left of the answer
        max_new_tokens=NEW_TOKENS + SLOTS,
        budget=Budget(SLOTS - 1, SLOTS - 1, 1),
    )
    cycles = [cycle.tree.tokens.tolist() for cycle in trace.cycles]
    assert trace.tokens[: len(answer)] == answer
    assert cycles[: len(expected)] == expected
    # some drafts were accepted, and some were not
    assert 1 < len(expected) < len(answer) - 1
