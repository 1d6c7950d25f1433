"""Copy decoder blocks from a target, by the tensor names of Llama-like models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Weights = Callable[[str], Tensor]
"""A target's tensor by its name; KeyError or ValueError where it has none."""
FURTHER = (  # what blocks of other families have beside a Llama block's tensors
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
ELSE = "take drafter.start=random where the method has it, or train a head that copies no blocks, as eagle3"


def copy_target_blocks(layers: Any, norm: nn.Module, weights: Weights, config: Any) -> None:
    """Fill Llama blocks with the target's last ones, and a norm with its final norm; refuse what is no Llama block."""
    for number, block in enumerate(layers, start=config.num_hidden_layers - len(layers)):
        copy_block(block, weights, f"model.layers.{number}.", config)
    copy_tensor(norm.get_parameter("weight"), weights, "model.norm.weight", config)


def block_kind(weights: Weights, prefix: str) -> dict[str, bool]:
    """The tensors that a target's block has beside a Llama block's, as keys of a shape (`parts/decoder_block.py`)."""
    return {kind: True for kind, name in KINDS.items() if find_tensor(weights, prefix + name) is not None}


def copy_block(block: nn.Module, weights: Weights, prefix: str, config: Any) -> None:
    """Fill a block with the target's tensors under a prefix; refuse a target's block that computes something else."""
    kind, names = config.model_type, ("hidden_act", "hidden_activation")
    activation = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if activation != "silu":
        raise ValueError(f"{kind} has blocks of hidden_act {activation!r}, expected 'silu': {ELSE}")
    own = dict(block.named_parameters())
    for name in FURTHER:
        if name not in own and find_tensor(weights, prefix + name) is not None:
            raise ValueError(f"{kind} has {prefix}{name}, which no Llama block has: {ELSE}")
    for name, part in own.items():
        copy_tensor(part, weights, prefix + name, config)


def find_tensor(weights: Weights, name: str) -> Tensor | None:
    """A tensor of the target, None if there is none of this name."""
    try:
        return weights(name)
    except (KeyError, ValueError):
        return None


@torch.no_grad()
def copy_tensor(part: Tensor, weights: Weights, name: str, config: Any) -> None:
    """Fill a parameter with the target's tensor of this name."""
    found = find_tensor(weights, name)
    if found is None or found.shape != part.shape or found.dtype not in PLAIN:
        got = "none" if found is None else f"{list(found.shape)} in {found.dtype}"
        raise ValueError(
            f"{config.model_type} has no Llama blocks: {name} is {got}, expected {list(part.shape)}: {ELSE}"
        )
    part.copy_(found)
