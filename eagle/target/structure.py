"""Where a causal language model keeps its base, its decoder layers and the layers of its cache: found by structure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import nn

CACHE_NAMES = ("past_key_values", "cache_params", "state", "cache")


def base_of(model: Any) -> Any:
    """The part of a causal language model below its LM head: the outermost module inside it that reads token ids.

    `base_model` goes by a name in the model's class, which is wrong for some types and leads others to a mere wrapper.
    """
    embedding, base = model.get_input_embeddings(), model
    while base is model or not takes_tokens(base):
        inner = [part for part in base.children() if any(module is embedding for module in part.modules())]
        if not inner or inner[-1] is embedding:
            raise ValueError(
                f"{type(model).__name__} keeps no base model apart from its LM head: the states between them cannot "
                "be read"
            )
        base = inner[-1]
    return base


def cache_name_of(module: Any) -> str:
    """The name of the argument by which a model's forward takes a cache; "" for none."""
    arguments = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in arguments), "")


def takes_tokens(module: nn.Module) -> bool:
    """Whether a module's forward takes token ids by name."""
    return "input_ids" in inspect.signature(type(module).forward).parameters


def decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """A base model's stack of decoder layers: its outermost module list of `count` layers, else the longest.

    Of equally deep ones it is the last parent's (encoders come first), and the first of that parent.
    """
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(base).__name__} has no list of layers: its layers cannot be tapped")
    top = min(name.count(".") for name, _ in lists)
    outer = [(name, module) for name, module in lists if name.count(".") == top]
    fitting = [(name, module) for name, module in lists if len(module) == count]
    if fitting:
        top = min(name.count(".") for name, _ in fitting)
        stacks = [(name, module) for name, module in fitting if name.count(".") == top]
    else:  # a config may count something else than these layers, as two caches in each of them
        longest = max(len(module) for _, module in outer)
        stacks = [(name, module) for name, module in outer if len(module) == longest]
    parent = stacks[-1][0].rpartition(".")[0]
    return next(module for name, module in stacks if name.rpartition(".")[0] == parent)


def holder_of(base: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The module that runs these decoder layers: the base itself, or its text model."""
    return next(module for module in base.modules() if any(part is layers for part in module.children()))


def typical_config(config: Any, keys: Iterable[str]) -> Any:
    """The config itself, or that of a layer with the commonest values of these keys where they differ by layer.

    transformers names no one value for such layers, as Gemma 4's, whose global layers have wider heads.
    """
    try:
        for key in keys:
            getattr(config, key, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, which older releases lack
        layers = list(config.per_layer_config)
        values = [[getattr(layer, key, None) for key in keys] for layer in layers]
        return layers[values.index(max(values, key=values.count))]
    return config


def device_of(layer: nn.Module) -> torch.device:
    """The device on which a layer runs: of its weights, under whatever names they go, or to which they are brought."""
    hook = getattr(layer, "_hf_hook", None)  # accelerate's, where weights are offloaded
    tensors = [tensor for tensor in (*layer.parameters(), *layer.buffers()) if not (tensor.is_meta and hook)]
    if tensors:
        return tensors[0].device
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def count_cache_layers(config: Any, layers: Sized = ()) -> int:
    """The number of layers of a model's cache: as many as transformers gives its own, at least one a decoder layer."""
    return max(len(layers), config.get_text_config(decoder=True).num_hidden_layers)
