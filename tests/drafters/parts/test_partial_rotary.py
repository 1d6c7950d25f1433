"""Heads turn whole vectors, whatever share of each a target turns, and however its rotary frequencies are scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle import Target, generate
from eagle.conformance.trial import make_head
from eagle.drafters.parts.decoder_block import Rotary, head_shape
from tests.families import COMMON, LLAMA3, YARN, draw_weights, own_answer, random_tokens

SCALED = {"rope_theta": 10000.0, "factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", **SCALED},
    "dynamic": {"rope_type": "dynamic", **SCALED},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def config_of(model_type: str, kind: str) -> Any:
    """Return the config of a target that turns half of each vector."""
    rope = {**KINDS[kind], "partial_rotary_factor": 0.5}
    return AutoConfig.for_model(model_type, **{**COMMON, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("model_type", "kind", "head"),
    [
        ("stablelm", "default", "eagle1"),
        ("stablelm", "dynamic", "dflash"),
        ("gpt_neox", "yarn", "eagle3"),
        ("gpt_neox", "llama3", "eagle1"),
    ],
)
def test_heads_draft_for_targets_that_turn_a_part(
    model_type: str,
    kind: str,
    head: str,
) -> None:
    """The answers are the untouched model's."""
    config = config_of(model_type, kind)
    target = Target(draw_weights(AutoModelForCausalLM.from_config(config)).eval())
    drafter = make_head(head, target).bind(target.head)
    prompt = random_tokens(8, seed=1)
    trace = generate(target, drafter, prompt, max_new_tokens=4, stop=[])
    assert trace.tokens == own_answer(target.model, prompt, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_tables_are_those_of_a_llama(kind: str) -> None:
    """They have the target's scaling, and the whole width."""
    shape = head_shape(config_of("stablelm", kind))
    sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    # a head's blocks are Llama's, which turns everything
    llama = LlamaConfig(
        rope_parameters=KINDS[kind],
        **{key: COMMON[key] for key in sizes},
    )
    hidden = torch.zeros(1, 5, 32)
    positions = torch.arange(5)[None]
    tables = Rotary(shape)(hidden, positions)
    for table, expected in zip(
        tables,
        LlamaRotaryEmbedding(llama)(hidden, positions),
        strict=True,
    ):
        assert torch.equal(table, expected)
