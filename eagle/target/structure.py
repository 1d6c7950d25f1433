"""Find a causal language model's base, its decoder layers and the layers of its cache by structure, not by names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import nn

# arguments of a forward that may take the cache, the most common first
CACHE_NAMES = ("past_key_values", "cache_params", "state", "cache")

# exceptions that a model may raise when it is run in a way that it does not support
FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    NotImplementedError,
)


def describe_failure(error: Exception) -> str:
    """Return the type of an error and the beginning of its message.

    Reasons why a model cannot be read in some way end with it.
    """
    return f"{type(error).__name__}: {str(error)[:200]}"


def base_of(model: Any) -> Any:
    """Return a causal language model without its LM head: the outermost module inside it that takes token ids.

    transformers' `base_model` looks up a name of the model's class. For some types the name is wrong, and for others it
    leads to a mere wrapper.
    """
    embedding = model.get_input_embeddings()
    base = model  # takes token ids too, but has the LM head
    # go down to the embedding until a module takes token ids
    while base is model or not takes_tokens(base):
        inner = [child for child in base.children() if _contains(child, embedding)]
        if not inner or inner[-1] is embedding:
            raise ValueError(
                f"{type(model).__name__} keeps no base model apart from its LM head: the states between them cannot "
                "be read"
            )
        base = inner[-1]
    return base


def _contains(module: nn.Module, inner: nn.Module) -> bool:
    """Return whether `module` is `inner`, or contains it as a submodule."""
    return any(submodule is inner for submodule in module.modules())


def cache_name_of(module: Any) -> str:
    """Return the name of the argument by which a module's forward takes a cache; "" for none."""
    arguments = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in arguments), "")


def takes_tokens(module: nn.Module) -> bool:
    """Return whether a module's forward takes token ids by the name `input_ids`."""
    return "input_ids" in inspect.signature(type(module).forward).parameters


def decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """Return a base model's decoder layers: its outermost module list of `count` modules, or without one the longest.

    Of several lists at the same depth, those of the last parent are taken, as encoders come before decoders. Of these,
    the first is taken.
    """
    # module lists by name, in the order of their registration
    lists = {
        name: module for name, module in base.named_modules() if isinstance(module, nn.ModuleList)
    }
    if not lists:
        raise ValueError(
            f"{type(base).__name__} has no list of layers: its layers cannot be tapped"
        )
    fitting = {name: module for name, module in lists.items() if len(module) == count}
    outermost = _outermost(fitting or lists)
    # a config's number may count other things than these layers, such as two caches in each of them
    if not fitting:
        longest = max(len(lists[name]) for name in outermost)
        outermost = [name for name in outermost if len(lists[name]) == longest]
    parent = outermost[-1].rpartition(".")[0]
    return next(lists[name] for name in outermost if name.rpartition(".")[0] == parent)


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that are nested least deep, by the number of dots in their names.

    Of several lists of modules, the decoder layers are the outermost.
    """
    names = list(names)
    depth = min(name.count(".") for name in names)
    return [name for name in names if name.count(".") == depth]


def holder_of(base: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Return the module that has this list of decoder layers as a child: the base itself, or its text model.

    Its forward calls the layers, so a hook on it sees the positions that they get.
    """
    return next(
        module for module in base.modules() if any(child is layers for child in module.children())
    )


def typical_config(config: Any, keys: Iterable[str]) -> Any:
    """Return a config that has a single value for each of these keys.

    It is the config itself, or where layers differ, the config of a layer with the commonest values. In Gemma 4, for
    one, global layers have wider heads, and transformers raises an error for the width of all.
    """
    try:
        # asked for the error alone, which a config raises where layers differ
        for key in keys:
            getattr(config, key, None)
    # AmbiguousGlobalPerLayerAttributeError, which older releases of transformers do not have
    except RuntimeError:
        layers = list(config.per_layer_config)
        values = []
        for layer in layers:
            values.append([getattr(layer, key, None) for key in keys])
        # the first layer with the values that most layers have
        return layers[values.index(max(values, key=values.count))]
    return config


def device_of(layer: nn.Module) -> torch.device:
    """Return the device on which a layer runs: that of its weights, or that to which accelerate moves them.

    Inputs are moved there.
    """
    hook = getattr(layer, "_hf_hook", None)
    for tensor in (*layer.parameters(), *layer.buffers()):
        # offloaded weights are on the meta device until the layer runs
        if not (tensor.is_meta and hook):
            return tensor.device
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def count_cache_layers(config: Any, layers: Sized = ()) -> int:
    """Return the number of layers of a model's cache: that of the config, or of the decoder layers if they are more.

    Without `layers` it is the config's number.
    """
    return max(len(layers), config.get_text_config(decoder=True).num_hidden_layers)
