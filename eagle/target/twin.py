"""A second set of modules over one model's weights, so that hooks and buffers of one do not affect the other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from eagle.target.structure import holder_of

# numbers in the largest buffer that is cloned for the second tree; larger buffers are constants, such as causal masks
MAX_CLONED = 2**16
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# dicts of a module that each tree has for itself: modules and buffers in all modules, and hooks in some
SEPARATE = ("_modules", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", *HOOKS)


def share_weights(model: Any, config: Any, layers: nn.ModuleList) -> tuple[Any, Any]:
    """Return a second module tree over a model's parameters, and the copy of its text config that this tree reads.

    The caller changes how the second tree reads, while the user's model stays as it is.

    Modules, config values and attributes of the second tree can be changed without changing the model. So can its
    buffers, which some rotary embeddings replace in a forward, and the hooks of the given layers and of vision towers.
    Parameters and all other hooks are shared. Attributes are copied once: `ModelMark` shows when the model's change.

    Args:
        model: the model.
        config: its text config.
        layers: its decoder layers, whose hooks are not shared. A hook is a function that torch calls around a module's
            forward.
    """
    modules = list(model.modules())
    # by id of a module or config, its counterpart in the second tree; a module's attributes follow below
    twins: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    twin_config = copy.copy(config)
    twins[id(config)] = twin_config
    outer = getattr(model, "config", config)
    # a model with several parts has a config that holds the text config, from which some modules read that
    if outer is not config:
        twins[id(outer)] = copy.copy(outer)
        vars(twins[id(outer)]).update(_swap_all(vars(outer), twins))
    separate = with_own_hooks(model, layers)
    for module in modules:
        # attributes that hold modules or configs hold their counterparts
        state = _swap_all(vars(module), twins)
        # dicts that both trees would share: submodules and buffers, and in some modules also hooks
        for name in SEPARATE if id(module) in separate else SEPARATE[:2]:
            state[name] = type(state[name])(_swap_all(vars(module)[name], twins))
        for name in module._non_persistent_buffers_set:
            buffer = state["_buffers"].get(name)
            # longrope writes to its frequencies in place during a forward
            if buffer is not None and buffer.numel() <= MAX_CLONED:
                state["_buffers"][name] = buffer.clone()
        vars(twins[id(module)]).update(state)
    return twins[id(model)], twin_config


def with_own_hooks(model: Any, layers: nn.ModuleList) -> set[int]:
    """Return the ids of the modules whose hooks a second module tree copies rather than shares.

    These are the decoder layers and the modules of vision towers, whose own hooks record states. A hook is a function
    that torch calls around a module's forward, such as one that records states.
    """
    separate = {id(layer) for layer in layers}
    for tower in _towers(model, layers):
        separate.update(map(id, tower.modules()))
    return separate


def _towers(model: Any, layers: nn.ModuleList) -> list[Any]:
    """Return the models inside a model that have no part in running its decoder layers, such as vision towers."""
    # no layers are given, so none can be told from a tower
    if not layers:
        return []
    # of the module whose child the layers are
    text_modules = {id(module) for module in holder_of(model, layers).modules()}
    towers = []
    for module in model.modules():
        # only the models of transformers have a base_model_prefix, and other modules do not
        is_model = id(module) not in text_modules and hasattr(module, "base_model_prefix")
        # a model that contains the layers runs them, and so is no tower
        if is_model and all(inner is not layers for inner in module.modules()):
            towers.append(module)
    return towers


def _swap_all(values: Mapping[str, Any], twins: dict[int, Any]) -> dict[str, Any]:
    """Return a dict with each value replaced by its counterpart in the second module tree.

    `twins` holds the counterparts of modules and configs by their ids. The second tree shares the weights of a model,
    and can be changed without changing the model.
    """
    return {name: _swap(value, twins) for name, value in values.items()}


def _swap(value: Any, twins: dict[int, Any]) -> Any:
    """Return an attribute's counterpart in the second module tree over a model's weights.

    It is the twin of a module or config, a method or partial bound to such a twin, or else the value itself. `twins`
    holds the counterparts of modules and configs by their ids.
    """
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _swap(value.__self__, twins))
    # where weights are offloaded, accelerate replaces a module's forward by a partial
    if isinstance(value, partial):
        return partial(
            value.func,
            *(_swap(argument, twins) for argument in value.args),
            **value.keywords,
        )
    return value
