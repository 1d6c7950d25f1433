"""Copy decoder blocks from a target, by the tensor names of Llama-like models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Weights = Callable[[str], Tensor]
"""A target's tensor by its name; KeyError or ValueError where it has none."""

# Tensors that a block of another model family may have in addition to those of a Llama block.
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
# those that a head's block can have too: the key of a head's shape, and a tensor by which it is recognised
KINDS = {"qk_norm": "self_attn.q_norm.weight", "qkv_bias": "self_attn.q_proj.bias"}
PLAIN = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
)  # dtypes of weights that are not packed
# the end of error messages
INSTEAD = "take drafter.start=random where the method has it, or train a head that copies no blocks, as eagle3"


def copy_target_blocks(layers: Any, norm: nn.Module, weights: Weights, config: Any) -> None:
    """Copy the target's last blocks and its final norm to a head's blocks and norm, in place.

    ValueError if the target's blocks are not Llama blocks.

    Args:
        layers: The head's K blocks, which become the target's last K.
        norm: The head's norm.
        weights: Returns a target's tensor by its name.
        config: The target's config.
    """
    first = config.num_hidden_layers - len(layers)
    for layer_index, block in enumerate(layers, start=first):
        copy_block(block, weights, f"model.layers.{layer_index}.", config)
    copy_tensor(norm.get_parameter("weight"), weights, "model.norm.weight", config)


def block_kind(weights: Weights, prefix: str) -> dict[str, bool]:
    """Return which additions to a Llama block a target's block has: "qk_norm" and "qkv_bias", each with the value True.

    They are keys of a head's shape, by which its blocks are made with these additions. `prefix` begins the names of the
    block's tensors. The head then starts from the block's weights.
    """
    return {
        kind: True
        for kind, name in KINDS.items()
        if find_tensor(weights, prefix + name) is not None
    }


def copy_block(block: nn.Module, weights: Weights, prefix: str, config: Any) -> None:
    """Copy the target's block whose tensor names begin with `prefix` to a head's block, in place.

    ValueError if the target's block computes something else than the head's.

    Args:
        block: A Llama block of the head.
        weights: Returns a target's tensor by its name.
        prefix: Begins the names, as "model.layers.31.".
        config: The target's config.
    """
    # model families have the activation under one of two names
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != "silu":
        raise ValueError(
            f"{config.model_type} has blocks of hidden_act {activation!r}, expected 'silu': {INSTEAD}"
        )
    parameters = dict(block.named_parameters())
    for name in NON_LLAMA_TENSORS:
        # a tensor that the head's block has no place for would change what the target's block computes
        if name not in parameters and find_tensor(weights, prefix + name) is not None:
            raise ValueError(
                f"{config.model_type} has {prefix}{name}, which no Llama block has: {INSTEAD}"
            )
    for name, parameter in parameters.items():
        copy_tensor(parameter, weights, prefix + name, config)


def find_tensor(weights: Weights, name: str) -> Tensor | None:
    """Return the target's tensor of this name, or None if the target has no such tensor.

    `weights` returns the target's tensor by its name, and raises KeyError or ValueError where it has none.
    """
    try:
        return weights(name)
    except (KeyError, ValueError):
        return None


@torch.no_grad()
def copy_tensor(parameter: Tensor, weights: Weights, name: str, config: Any) -> None:
    """Copy the target's tensor of this name to a parameter in place.

    ValueError if it is missing, has another shape, or is packed by quantization. `weights` returns a target's tensor by
    its name, and `config` is the target's, for the message.
    """
    tensor = find_tensor(weights, name)
    if tensor is None or tensor.shape != parameter.shape or tensor.dtype not in PLAIN:
        got = "none" if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
        raise ValueError(
            f"{config.model_type} has no Llama blocks: {name} is {got}, expected {list(parameter.shape)}: {INSTEAD}"
        )
    parameter.copy_(tensor)
