"""vLLM's layout of an EAGLE-1 head; it loads a plain Llama config and shares the target's embedding and LM head."""

from __future__ import annotations

from typing import Any

import torch

from eagle.drafter import TrainableDrafter
from eagle.export.layout import Layout


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The head's tensors without a prefix; vLLM drops the bias of `fc`, so a head that learned one is refused."""
    if drafter.network != {"network": "features"}:
        raise ValueError(f"vllm: no layout for {drafter.settings.kind!r} yet, expected a head with EAGLE-1's network")
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    bias = tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        raise ValueError(
            "vllm: fc.bias would be dropped in silence and acceptance lost: train with drafter.fc_bias=false"
        )
    # other engines start from a random bias where there is none; vLLM ignores zeros
    tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
    shape = drafter.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "rope_scaling": _scaling(shape.rope_parameters),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    return Layout(config, tensors)


def _scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """The rope scaling as older configs spell it, or None."""
    if rope.get("rope_type", "default") == "default":
        return None
    return {key: value for key, value in rope.items() if key != "rope_theta"}
