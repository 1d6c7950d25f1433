"""Heads with EAGLE-1's network, as every engine that serves them names their parts."""

from __future__ import annotations

from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, llama_config, scale_of, tensors_of


def is_features(drafter: TrainableDrafter) -> bool:
    """Whether a head continues the target's last features, whatever trained it."""
    return drafter.network == {"network": "features"}


def features_layout(drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
    """No prefix, no norms but one, neither embedding nor LM head; what the embedding is scaled with goes into `fc`."""
    tensors = tensors_of(drafter)
    weight = tensors["fc.weight"].clone()
    weight[:, : weight.shape[1] // 2] *= scale_of(drafter)
    # where there is none, an engine that has one would keep what it started from; others ignore zeros
    bias = tensors.get("fc.bias", torch.zeros_like(weight[:, 0]))
    both = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    config = llama_config(drafter, target_config, engine, architectures=both)
    return Layout(config, {**tensors, "fc.weight": weight, "fc.bias": bias}, "")


def without_bias(layout: Layout, engine: str) -> Layout:
    """The same for an engine that has no bias in `fc`, unless the head learned one."""
    if bool(layout.tensors["fc.bias"].any()):
        raise ValueError(
            f"{engine}: fc.bias would be dropped in silence and acceptance lost: train with drafter.fc_bias=false"
        )
    return layout
