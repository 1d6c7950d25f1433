"""What engines refuse or read otherwise, by their source: such heads are not written, the others rotate as trained."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import GlmConfig, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.core.drafter import TargetHead
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS

H = 32
V = 48
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
# with wider attention heads than hidden_size / num_attention_heads
WIDE = {**SIZES, "head_dim": 16}
THETA = {"rope_theta": 1e4}
LINEAR = {**THETA, "rope_type": "linear", "factor": 2.0}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    **THETA,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    **THETA,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
TARGETS: dict[str, PreTrainedConfig] = {
    "plain": LlamaConfig(**SIZES, rope_theta=5e5),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "dynamic": LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
    "yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "yarn, not truncated": LlamaConfig(**SIZES, rope_parameters={**YARN, "truncate": False}),
    "yarn, scaled": LlamaConfig(**SIZES, rope_parameters={**YARN, "attention_factor": 1.5}),
    "longrope": LlamaConfig(**SIZES, rope_parameters=LONG),
    "wide heads": LlamaConfig(**WIDE, rope_theta=5e5),
    # rotates half of each vector
    "glm": GlmConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**WIDE),
    # its YaRN is not truncated
    "gpt_oss": GptOssConfig(**WIDE),
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1", "fc_bias": False},
    "eagle3": {"kind": "eagle3", "draft_vocab": 40},
}
# targets whose heads an engine refuses, and a word of the refusal, by the engines' own code
SAFEAILAB = {
    "llama3": "llama3",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "yarn, not truncated": "yarn",
    "yarn, scaled": "yarn",
    "longrope": "longrope",
    "wide heads": "head_dim",
    "glm": "glm",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "yarn",
}
LONGROPE = {"longrope": "longrope"}
NO_DYNAMIC = {**LONGROPE, "dynamic": "dynamic"}
NO_TRUNCATE = {"yarn, not truncated": "truncate", "gpt_oss": "truncate"}
NO_FACTOR = {"yarn, scaled": "attention_factor"}
REFUSED: dict[str, dict[str, str]] = {
    "eagle": SAFEAILAB,
    "vllm": LONGROPE,
    "speculators": LONGROPE,
    "sglang": {**NO_DYNAMIC, **NO_FACTOR},
    "openvino": NO_DYNAMIC,
    "trtllm": {**NO_DYNAMIC, **NO_TRUNCATE, **NO_FACTOR},
    "llamacpp": {**NO_DYNAMIC, **NO_TRUNCATE, **NO_FACTOR},
    "portable": {**NO_DYNAMIC, **NO_TRUNCATE, **NO_FACTOR},
}


def head_for(kind: str, target: str) -> Any:
    """Return a random head, bound to a random embedding and LM head."""
    torch.manual_seed(0)
    target_head = TargetHead(torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False))
    settings = settings_of(KINDS[kind], "test")
    tokens = [torch.arange(40)]
    method = DRAFTERS[kind]
    return method.for_target(
        settings,
        TARGETS[target],
        target_head,
        tokens,
    ).bind(target_head)


def reference_refuses(config: dict[str, Any], target: Any) -> bool:
    """Return what SafeAILab/EAGLE (cb7e084) checks when it loads a head: targets, heads' widths, rotary scaling."""
    if target.model_type not in ("llama", "qwen2", "qwen3", "mixtral"):
        return True
    if config["hidden_size"] // config["num_attention_heads"] != config["head_dim"]:
        return True
    scaling = config["rope_scaling"]
    if scaling is None:
        return False
    return set(scaling) != {"type", "factor"} or scaling["type"] not in ("linear", "dynamic")


def compute_rotary(config: LlamaConfig) -> tuple[torch.Tensor, ...]:
    """Return the cosines and sines of the first positions, as transformers makes them of a config."""
    return LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(48)[None])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_written_for_those_engines_alone_that_read_it_right(
    kind: str, target: str
) -> None:
    """The frequencies that transformers makes of the written config are the head's own; refusals name the key."""
    head = head_for(kind, target)
    config = TARGETS[target]
    for engine, write in EXPORTERS.items():
        word = REFUSED.get(engine, {}).get(target)
        # a portable EAGLE-1 is for vLLM and SGLang alone, which read YaRN that is not truncated
        if (kind, engine, word) == ("eagle1", "portable", "truncate"):
            word = None
        try:
            written = write(head, config).config
        except ValueError as refusal:
            words = "|".join(filter(None, ["no layout", "no model without", word]))
            assert re.match(f"{engine}: .*({words})", str(refusal)), refusal
            continue
        assert word is None, engine
        assert engine != "eagle" or not reference_refuses(written, config)
        block = written.get("transformer_layer_config", written)
        assert block["head_dim"] == head.shape.head_dim
        # which would let vLLM rotate a part of each vector
        assert "partial_rotary_factor" not in str(block)
        expected = compute_rotary(head.shape)
        for ours, theirs in zip(
            expected, compute_rotary(LlamaConfig.from_dict(block)), strict=True
        ):
            assert torch.equal(ours, theirs), (engine, block["rope_scaling"])


@pytest.mark.parametrize(
    ("kind", "target", "engine", "words"),
    [
        ("eagle3", "llama3", "eagle", "'llama3'.*export to vllm"),
        ("eagle3", "wide heads", "eagle", "head_dim.*16.*32 / 4"),
        # fewer engines read EAGLE-1
        ("eagle1", "yarn, scaled", "sglang", r"attention_factor.*export to vllm \("),
        (
            "eagle3",
            "yarn, scaled",
            "sglang",
            r"attention_factor.*export to vllm or openvino or speculators \(",
        ),
    ],
)
def test_the_refusal_says_where_the_head_can_go(
    kind: str,
    target: str,
    engine: str,
    words: str,
) -> None:
    """By name, and only to engines that read the network."""
    with pytest.raises(ValueError, match=f"{engine}: .*{words}"):
        EXPORTERS[engine](head_for(kind, target), TARGETS[target])
