"""Copy decoder blocks from a target, by the tensor names of Llama-like models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Weights = Callable[[str], Tensor]
"""A target's tensor by its name; KeyError or ValueError where it has none."""

# Tensors that blocks of other families have in addition to a Llama block's.
NON_LLAMA_TENSORS = (
    *(f"self_attn.{part}_proj.bias" for part in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.sinks",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    *(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")),
    "mlp.gate.weight",
)
KINDS = {"qk_norm": "self_attn.q_norm.weight", "qkv_bias": "self_attn.q_proj.bias"}
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INSTEAD = "take drafter.start=random where the method has it, or train a head that copies no blocks, as eagle3"


def copy_target_blocks(layers: Any, norm: nn.Module, weights: Weights, config: Any) -> None:
    """Fill Llama blocks with the target's last ones, and a norm with its final norm; refuse what is no Llama block."""
    first = config.num_hidden_layers - len(layers)
    for layer_index, block in enumerate(layers, start=first):
        copy_block(block, weights, f"model.layers.{layer_index}.", config)
    copy_tensor(norm.get_parameter("weight"), weights, "model.norm.weight", config)


def block_kind(weights: Weights, prefix: str) -> dict[str, bool]:
    """Return which tensors a target's block has in addition to a Llama block's, as keys of a head's shape."""
    return {
        kind: True
        for kind, name in KINDS.items()
        if find_tensor(weights, prefix + name) is not None
    }


def copy_block(block: nn.Module, weights: Weights, prefix: str, config: Any) -> None:
    """Fill a block with the target's tensors under a prefix; refuse a target's block that computes something else."""
    # families name it in two ways
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != "silu":
        raise ValueError(
            f"{config.model_type} has blocks of hidden_act {activation!r}, expected 'silu': {INSTEAD}"
        )
    parameters = dict(block.named_parameters())
    for name in NON_LLAMA_TENSORS:
        if name not in parameters and find_tensor(weights, prefix + name) is not None:
            raise ValueError(
                f"{config.model_type} has {prefix}{name}, which no Llama block has: {INSTEAD}"
            )
    for name, parameter in parameters.items():
        copy_tensor(parameter, weights, prefix + name, config)


def find_tensor(weights: Weights, name: str) -> Tensor | None:
    """Return a tensor of the target, or None if there is none of this name."""
    try:
        return weights(name)
    except (KeyError, ValueError):
        return None


@torch.no_grad()
def copy_tensor(part: Tensor, weights: Weights, name: str, config: Any) -> None:
    """Fill a parameter with the target's tensor of this name."""
    tensor = find_tensor(weights, name)
    if tensor is None or tensor.shape != part.shape or tensor.dtype not in PLAIN:
        got = "none" if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
        raise ValueError(
            f"{config.model_type} has no Llama blocks: {name} is {got}, expected {list(part.shape)}: {INSTEAD}"
        )
    part.copy_(tensor)
