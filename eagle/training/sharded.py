"""A head whose weights, gradients and moments are spread over all processes (FSDP2); its state dicts are whole.

And the clipping of gradients, whole or spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from eagle.recipe import TrainSection


def shard_head(head: nn.Module) -> None:
    """Spread a head's weights over all processes; each gathers them for a step and keeps its part of the gradients.

    The head is one unit, as drafters read weights outside of their modules' forwards. `state_dict` gathers whole
    tensors, so all processes must call it together; `load_state_dict` takes whole ones.
    """
    device = next(head.parameters()).device
    fully_shard(head, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    head.register_state_dict_post_hook(_gather_weights)
    head.register_load_state_dict_pre_hook(_split_weights)


def prepare_sharded(accelerator: Any, head: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """A sharded head in the accelerator's precision, without DDP, and its optimizer, whose state dict is whole."""
    optimizer.register_state_dict_post_hook(lambda _, state: tree_map(gather, state))
    optimizer.register_load_state_dict_post_hook(_split_moments)
    return accelerator.prepare_model(head, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)


def gather(value: Any) -> Any:
    """The whole of a sharded tensor; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def clip_gradients(weights: Sequence[Tensor], settings: TrainSection) -> Tensor:
    """Clip the gradients of these weights in place; returns their norm before."""
    if settings.clip_by == "norm":
        return torch.nn.utils.clip_grad_norm_(weights, settings.clip)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    torch.nn.utils.clip_grad_value_(weights, settings.clip)
    return norm


def _gather_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name, tensor in state.items():
        state[name] = gather(tensor)


def _split_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    weights = dict(head.named_parameters())
    for name, tensor in state.items():
        if name in weights:
            state[name] = _split_like(tensor, weights[name])


def _split_moments(optimizer: torch.optim.Optimizer) -> None:
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape == weight.shape:  # not the number of steps
                moments[name] = _split_like(moment, weight)


def _split_like(whole: Tensor, weight: Tensor) -> Tensor:
    """This process's part of a tensor, split as a weight is."""
    if not isinstance(weight, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
