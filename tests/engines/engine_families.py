"""A Llama target and an MTP head as one model of a family whose MTP layers engines run, computing the same.

A dense layer becomes two equal experts, of which every token takes one, beside a shared one of zeros.
"""

# H width, L layers of the target

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.export import EXPORTERS

Tensors = dict[str, Tensor]
# keys of the target's config that stay
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
EXPERTS = {
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
}


def add_biases(tensors: Tensors, layers: int) -> None:
    """Add biases of zeros for queries, keys and values of the target, as Qwen2 has them."""
    for layer in range(layers):
        for part in "qkv":
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.zeros_like(tensors[f"{name}.weight"][:, 0])


def split_experts(tensors: Tensors, layers: int) -> None:
    """Add experts for the MTP layer and for the target's last one: these families have no MTP layer without."""
    for layer in (layers - 1, layers):
        prefix = f"model.layers.{layer}.mlp."
        for part in ("gate_proj", "up_proj", "down_proj"):
            weight = tensors.pop(f"{prefix}{part}.weight")
            for i in (0, 1):
                tensors[f"{prefix}experts.{i}.{part}.weight"] = weight.clone()
            tensors[f"{prefix}shared_experts.{part}.weight"] = torch.zeros_like(weight)

        width = tensors[f"model.layers.{layer}.input_layernorm.weight"].shape[0]
        tensors[f"{prefix}gate.weight"] = torch.zeros(2, width)
        tensors[f"{prefix}gate.e_score_correction_bias"] = torch.zeros(2)


def join_queries(tensors: Tensors, layers: int) -> None:
    """Add experts, and put the MTP layer's attention in one matrix: vLLM's loader splits latent attention alone."""
    split_experts(tensors, layers)
    name = f"model.layers.{layers}.self_attn."
    tensors[f"{name}qkv_proj.weight"] = torch.cat(
        [tensors.pop(f"{name}{part}_proj.weight") for part in "qkv"]
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A family's names, and what its config says beside a Llama's."""

    title: str
    layout: str  # the exporter whose names it has
    change: Callable[[Tensors, int], None]
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "mimo": Family(
        "MiMo", "mimo", add_biases, {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    ),
    "glm": Family(
        "GLM-4.5",
        "deepseek",
        split_experts,
        {
            **EXPERTS,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "use_qk_norm": False,
            "partial_rotary_factor": 1.0,
        },
    ),
    "deepseek": Family(
        "DeepSeek-V3",
        "deepseek",
        join_queries,
        {
            **EXPERTS,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            # no latent attention; its config takes no null for the rank
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        },
    ),
}


def write_model(
    drafter: TrainableDrafter,
    target_config: Any,
    target: Path,
    family: str,
    out: Path,
) -> None:
    """Write the target in a folder and its head to another folder, as that family's checkpoints are."""
    source = target_config.to_dict()
    kind = FAMILIES[family]
    if source["model_type"] != "llama":
        raise ValueError(
            f"{target} is a {source['model_type']}, expected a Llama: --family makes others of it"
        )

    layers = source["num_hidden_layers"]
    tensors: Tensors = {}
    for file in target.glob("*.safetensors"):
        tensors |= load_file(file)
    tensors |= EXPORTERS[kind.layout](drafter, target_config).tensors
    kind.change(tensors, layers)
    rotary = {**source["rope_parameters"], "partial_rotary_factor": 1.0}
    # DeepSeek's name for the width of a head
    head_dim = "v_head_dim" if family == "deepseek" else "head_dim"
    config = {
        **{key: source[key] for key in KEPT},
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "rope_parameters": rotary,
        "rope_theta": rotary["rope_theta"],
        "torch_dtype": "float32",
        head_dim: source["hidden_size"] // source["num_attention_heads"],
        "first_k_dense_replace": layers - 1,
        "moe_intermediate_size": source["intermediate_size"],
        **kind.config,
    }
    out.mkdir()
    for file in target.iterdir():
        if "token" in file.name or file.name in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(file, out)

    contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
