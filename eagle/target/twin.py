"""A second set of modules over one model's weights, so that hooks and buffers of one do not affect the other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from eagle.target.structure import holder_of

# numbers of a buffer that each tree has for itself; larger ones are constants, as causal masks
MAX_CLONED = 2**16
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
SEPARATE = ("_modules", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", *HOOKS)


def share_weights(model: Any, config: Any, layers: nn.ModuleList) -> tuple[Any, Any]:
    """Return a second module tree over the model's parameters, and the copy of `config` that it reads.

    Buffers can be replaced in one tree alone, as some rotary embeddings do while they run; so can the hooks of these
    layers, and those of models beside them, as towers that see, which record their own states. Everything else is
    shared, other modules' hooks included. Attributes are those of this moment: `ModelMark` tells when they change.
    """
    modules = list(model.modules())
    twins: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    twin_config = copy.copy(config)
    twins[id(config)] = twin_config
    outer = getattr(model, "config", config)
    # a config of several models, from which some modules read this one
    if outer is not config:
        twins[id(outer)] = copy.copy(outer)
        vars(twins[id(outer)]).update(_swap_all(vars(outer), twins))
    separate = with_own_hooks(model, layers)
    for module in modules:
        state = _swap_all(vars(module), twins)
        for name in SEPARATE if id(module) in separate else SEPARATE[:2]:
            state[name] = type(state[name])(_swap_all(vars(module)[name], twins))
        for name in module._non_persistent_buffers_set:
            buffer = state["_buffers"].get(name)
            # longrope writes its frequencies in place, in the middle of a forward
            if buffer is not None and buffer.numel() <= MAX_CLONED:
                state["_buffers"][name] = buffer.clone()
        vars(twins[id(module)]).update(state)
    return twins[id(model)], twin_config


def with_own_hooks(model: Any, layers: nn.ModuleList) -> set[int]:
    """Return the ids of the modules whose hooks are not shared with a second module tree."""
    separate = {id(layer) for layer in layers}
    for tower in _towers(model, layers):
        separate.update(map(id, tower.modules()))
    return separate


def _towers(model: Any, layers: nn.ModuleList) -> list[Any]:
    """Return the models inside this one that neither run these layers nor lie in what does, such as vision towers."""
    if not layers:
        return []
    text_modules = {id(module) for module in holder_of(model, layers).modules()}
    towers = []
    for module in model.modules():
        # transformers' models have a base_model_prefix, and other modules do not
        is_model = id(module) not in text_modules and hasattr(module, "base_model_prefix")
        # a model that contains the layers is no tower: it runs them
        if is_model and all(inner is not layers for inner in module.modules()):
            towers.append(module)
    return towers


def _swap_all(values: Mapping[str, Any], twins: dict[int, Any]) -> dict[str, Any]:
    return {name: _swap(value, twins) for name, value in values.items()}


def _swap(value: Any, twins: dict[int, Any]) -> Any:
    """Return the value's counterpart: a module's twin, a method or partial bound to it, else the value."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _swap(value.__self__, twins))
    # accelerate replaces `forward` by one where weights are offloaded
    if isinstance(value, partial):
        return partial(
            value.func,
            *(_swap(argument, twins) for argument in value.args),
            **value.keywords,
        )
    return value
