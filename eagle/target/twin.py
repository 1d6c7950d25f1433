"""A second set of modules over one model's weights, so that hooks and buffers of one do not affect the other."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from eagle.target.structure import holder_of

MAX_CLONED = 2**16  # numbers of a buffer that each tree has for itself; larger ones are constants, as causal masks
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
SEPARATE = ("_modules", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", *HOOKS)


def share_weights(model: Any, config: Any, layers: nn.ModuleList) -> tuple[Any, Any]:
    """A second module tree over the model's parameters, and the copy of `config` that it reads.

    Buffers can be replaced in one tree alone, as some rotary embeddings do while they run; so can the hooks of these
    layers, and those of models beside them, as towers that see, which record their own states. Everything else is
    shared, other modules' hooks included. Attributes are those of this moment: `ModelMark` tells when they change.
    """
    modules = list(model.modules())
    twins: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    twin_config = twins[id(config)] = copy.copy(config)
    outer = getattr(model, "config", config)
    if outer is not config:  # a config of several models, from which some modules read this one
        twins[id(outer)] = copy.copy(outer)
        vars(twins[id(outer)]).update({name: _swap(value, twins) for name, value in vars(outer).items()})
    separate = with_own_hooks(model, layers)
    for module in modules:
        state = {name: _swap(value, twins) for name, value in vars(module).items()}
        for name in SEPARATE if id(module) in separate else SEPARATE[:2]:
            state[name] = type(state[name])((key, _swap(value, twins)) for key, value in vars(module)[name].items())
        for name in module._non_persistent_buffers_set:
            buffer = state["_buffers"].get(name)
            # longrope writes its frequencies in place, in the middle of a forward
            if buffer is not None and buffer.numel() <= MAX_CLONED:
                state["_buffers"][name] = buffer.clone()
        vars(twins[id(module)]).update(state)
    return twins[id(model)], twin_config


def with_own_hooks(model: Any, layers: nn.ModuleList) -> set[int]:
    """Return the ids of the modules whose hooks are not shared with a second module tree."""
    towers = (part for tower in _towers(model, layers) for part in tower.modules())
    return {*map(id, layers), *map(id, towers)}


def _towers(model: Any, layers: nn.ModuleList) -> list[Any]:
    """Models within this one that have no part in these layers."""
    if not layers:
        return []
    within = {id(part) for part in holder_of(model, layers).modules()}
    beside = [part for part in model.modules() if id(part) not in within and hasattr(part, "base_model_prefix")]
    return [part for part in beside if all(module is not layers for module in part.modules())]


def _swap(value: Any, twins: dict[int, Any]) -> Any:
    """The value's counterpart in the second tree: a module's twin, a method or partial bound to it, else the value."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _swap(value.__self__, twins))
    if isinstance(value, partial):  # accelerate puts one in the place of `forward` where weights are offloaded
        return partial(value.func, *(_swap(part, twins) for part in value.args), **value.keywords)
    return value
