"""Heads turn whole vectors, whatever share of each a target turns, and however its rotary frequencies are scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle import Target, generate
from eagle.conformance.trial import make_head
from eagle.drafters.none import NoDrafter
from eagle.drafters.parts.decoder_block import Rotary, head_shape
from tests.families import COMMON, LLAMA3, YARN, draw_weights, random_tokens

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def config_of(model_type: str, kind: str) -> Any:
    """Return the config of a target that turns half of each vector."""
    rope = {**KINDS[kind], "partial_rotary_factor": 0.5}
    return AutoConfig.for_model(model_type, **{**COMMON, "rope_parameters": rope})


@pytest.mark.parametrize("head", ["eagle1", "eagle3", "dflash"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox"])
def test_heads_draft_for_targets_that_turn_a_part(model_type: str, kind: str, head: str) -> None:
    """Each kind of scaling; the answers are those of plain decoding."""
    config = config_of(model_type, kind)
    target = Target(draw_weights(AutoModelForCausalLM.from_config(config)).eval())
    drafter = make_head(head, target).bind(target.head)
    options: dict[str, Any] = {"max_new_tokens": 4, "stop": []}
    prompt = random_tokens(8, seed=1)
    expected = generate(target, NoDrafter(), prompt, **options).tokens
    assert generate(target, drafter, prompt, **options).tokens == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_tables_are_those_of_a_llama(kind: str) -> None:
    """With the same scaling, of the whole width."""
    config = config_of("stablelm", kind)
    shape = head_shape(config)
    sizes = {
        key: COMMON[key]
        for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    }
    llama = LlamaConfig(rope_parameters=KINDS[kind], **sizes)
    hidden, positions = torch.zeros(1, 5, 32), torch.arange(5)[None]
    tables = zip(
        Rotary(shape)(hidden, positions),
        LlamaRotaryEmbedding(llama)(hidden, positions),
        strict=True,
    )
    assert all(torch.equal(got, expected) for got, expected in tables)
