"""DFlash drafts what transformers' own DFlash generation drafts with the same weights, in every cycle of an answer."""

# B slots of a block, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.drafters.test_several import Heard

SLOTS, LAYERS = 5, (1, 2)  # outputs of which layers the draft reads
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
Cycles = list[list[int]]
"""The root and the drafts that the target reads in each cycle."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A target with so few tokens that random drafts are often right."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=6,
        num_hidden_layers=4,
        rope_parameters=ROPE,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        eos_token_id=None,
        **SIZES,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def assistant() -> Any:
    """A draft model of transformers, with random weights and gains."""
    config = MuseGlimmerAssistantConfig(
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        rope_parameters=ROPE,
        rms_norm_eps=1e-5,
        block_size=SLOTS,
        mask_token_id=5,
        target_layer_ids=[*LAYERS],
        **SIZES,
    )
    torch.manual_seed(4)
    draft = MuseGlimmerAssistantModel(config).double().eval()
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(
                torch.randn_like(weight) * weight.shape[-1] ** -0.5
                if weight.ndim > 1
                else weight + 0.3
            )
    return draft


@contextmanager
def watch(model: nn.Module) -> Iterator[Cycles]:
    """All that the target reads."""
    cycles: Cycles = []

    def note(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = named.get("input_ids", args[0] if args else None)
        cycles.append(tokens[0].tolist())

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield cycles
    hook.remove()


def head_like(assistant: Any, target: Target) -> Any:
    """Our head with the draft model's weights."""
    settings = DFlash.Settings(
        taps=tuple(layer + 1 for layer in LAYERS),
        blocks=2,
        slots=SLOTS,
        mask_token=5,
        intermediate_size=None,
    )
    head = DFlash.for_target(settings, target.config, target.head).double()
    renamed = {}
    for name, tensor in assistant.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    head.load_state_dict(renamed)
    return head.bind(target.head)


def own_cycles(model: Any, assistant: Any, prompt: Tensor, new: int) -> tuple[list[int], Cycles]:
    """The answer by transformers, and what its target read of drafts; none is made for an answer's last token."""
    with watch(model) as cycles:
        written = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            assistant_model=assistant,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=new,
            pad_token_id=0,
        )
    return written[0, len(prompt) :].tolist(), [cycle for cycle in cycles[1:] if len(cycle) > 1]


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_those_of_transformers(seed: int, model: Any, assistant: Any) -> None:
    """Token by token in every cycle, of prompts of one token and of many; some drafts are kept and some are not."""
    prompt = torch.randint(6, (1 + 9 * seed,), generator=torch.Generator().manual_seed(seed))
    answer, theirs = own_cycles(model, assistant, prompt, 40)
    target = Target(model)
    drafter = Heard(head_like(assistant, target))
    trace = generate(
        target, drafter, prompt, max_new_tokens=40 + SLOTS, budget=Budget(SLOTS - 1, SLOTS - 1, 1)
    )
    ours = [tree.tokens.tolist() for tree in drafter.trees][: len(theirs)]
    assert trace.tokens[: len(answer)] == answer
    assert ours == theirs
    assert 1 < len(theirs) < len(answer) - 1  # drafts were kept
