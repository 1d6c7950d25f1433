"""What engines refuse or read otherwise, by their source: such heads are not written, the others turn as trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GlmConfig, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.core.drafter import TargetHead
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS

H, V, LAYERS = 32, 48, 12
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
TARGETS: dict[str, PreTrainedConfig] = {
    "plain": LlamaConfig(**SIZES, rope_theta=5e5),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "dynamic": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "yarn whose bounds are not rounded": LlamaConfig(
        **SIZES, rope_parameters={**YARN, "truncate": False}
    ),
    "yarn of another size": LlamaConfig(**SIZES, rope_parameters={**YARN, "attention_factor": 1.5}),
    "longrope": LlamaConfig(**SIZES, rope_parameters=LONG),
    "wide heads": LlamaConfig(**{**SIZES, "head_dim": 16}, rope_theta=5e5),
    "half of a vector turns": GlmConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**{**SIZES, "head_dim": 16}),
    "gpt_oss": GptOssConfig(**{**SIZES, "head_dim": 16}),
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1", "fc_bias": False},
    "eagle3": {"kind": "eagle3", "draft_vocab": 40},
}
REFUSED = {  # of the engines that have a layout for the head: by which word
    ("eagle", "llama3"): "llama3",
    ("eagle", "linear"): "linear",
    ("eagle", "dynamic"): "dynamic",
    ("eagle", "yarn"): "yarn",
    ("eagle", "yarn whose bounds are not rounded"): "yarn",
    ("eagle", "yarn of another size"): "yarn",
    ("eagle", "longrope"): "longrope",
    ("eagle", "wide heads"): "head_dim",
    ("eagle", "half of a vector turns"): "glm",
    ("eagle", "qwen3_moe"): "qwen3_moe",
    ("eagle", "gpt_oss"): "yarn",
    **{
        (engine, "longrope"): "longrope"
        for engine in (
            "vllm",
            "sglang",
            "trtllm",
            "openvino",
            "llamacpp",
            "speculators",
            "portable",
        )
    },
    **{
        (engine, "dynamic"): "dynamic"
        for engine in ("sglang", "trtllm", "openvino", "llamacpp", "portable")
    },
    **{
        (engine, target): "truncate"
        for engine in ("trtllm", "llamacpp")
        for target in ("yarn whose bounds are not rounded", "gpt_oss")
    },
    **{
        (engine, "yarn of another size"): "attention_factor"
        for engine in ("sglang", "trtllm", "llamacpp", "portable")
    },
    ("portable", "yarn whose bounds are not rounded"): "truncate",
    ("portable", "gpt_oss"): "truncate",
}
BY_VLLM_AND_SGLANG = {
    "yarn whose bounds are not rounded",
    "gpt_oss",
}  # all that a portable EAGLE-1 is for


def head_for(kind: str, target: str) -> Any:
    """A random head, bound to a random embedding and LM head."""
    torch.manual_seed(0)
    config, settings = TARGETS[target], settings_of(KINDS[kind], "test")
    frozen = TargetHead(torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False))
    return DRAFTERS[kind].for_target(settings, config, frozen, [torch.arange(40)]).bind(frozen)


def reference_refuses(config: dict[str, Any], target: Any) -> bool:
    """What SafeAILab/EAGLE (cb7e084) checks when it loads a head: targets, heads' widths, rotary scaling."""
    scaling = config["rope_scaling"]
    return (
        target.model_type not in ("llama", "qwen2", "qwen3", "mixtral")
        or config["hidden_size"] // config["num_attention_heads"] != config["head_dim"]
        or (
            scaling is not None
            and (set(scaling) != {"type", "factor"} or scaling["type"] not in ("linear", "dynamic"))
        )
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_written_for_those_engines_alone_that_read_it_right(
    kind: str, target: str
) -> None:
    """The frequencies that transformers makes of the written config are the head's own; refusals name the key."""
    head, config = head_for(kind, target), TARGETS[target]
    positions = torch.arange(48)[None]
    for engine, layout in EXPORTERS.items():
        word = REFUSED.get((engine, target))
        if kind == "eagle1" and engine == "portable" and target in BY_VLLM_AND_SGLANG:
            word = None
        try:
            written = layout(head, config).config
        except ValueError as error:
            assert str(error).startswith(f"{engine}: "), error
            assert (
                "no layout" in str(error)
                or "no model without" in str(error)
                or (word and word in str(error))
            ), error
            continue
        assert word is None, (engine, target)
        assert engine != "eagle" or not reference_refuses(written, config)
        block = written.get("transformer_layer_config", written)
        read = LlamaRotaryEmbedding(LlamaConfig.from_dict(block))
        own = LlamaRotaryEmbedding(head.shape)
        assert block["head_dim"] == head.shape.head_dim
        assert "partial_rotary_factor" not in str(block), (
            engine
        )  # vLLM would turn a part of each vector
        for mine, its in zip(
            own(torch.ones(1), positions), read(torch.ones(1), positions), strict=True
        ):
            assert torch.equal(mine, its), (engine, target, block["rope_scaling"])


def test_the_refusal_says_where_the_head_can_go() -> None:
    """By name, with what the engine knows."""
    with pytest.raises(ValueError, match=r"eagle: .*'llama3'.*export to vllm"):
        EXPORTERS["eagle"](head_for("eagle3", "llama3"), TARGETS["llama3"])
    with pytest.raises(ValueError, match=r"eagle: .*head_dim.*16.*32 / 4"):
        EXPORTERS["eagle"](head_for("eagle3", "wide heads"), TARGETS["wide heads"])
