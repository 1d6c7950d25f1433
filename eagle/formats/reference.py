"""The layout of the methods' own published heads: what SafeAILab/EAGLE reads."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.feature_layout import features_layout, is_features
from eagle.formats.fused import fused_layout
from eagle.formats.layout import Layout, embedding_of

SERVE = """```python
from eagle.model.ea_model import EaModel  # of SafeAILab/EAGLE

model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="HEAD", use_eagle3=EAGLE3)
```

Not run by this project: names, shapes and keys are those of the published heads."""


FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")  # it takes every other target for a Mixtral


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The embedding is part of it; of EAGLE-3 no switches, and no other layers than the published ones."""
    if is_features(drafter):
        made = features_layout(drafter, target_config, "eagle")
        bias = bool(made.tensors["fc.bias"].any())
        made = made if bias else made.without("fc.bias")
        made = made.of(SERVE.replace("EAGLE3", "False"), architectures=["LlamaForCausalLM"], bias=bias)
    else:
        layers = target_config.num_hidden_layers
        made = fused_layout(drafter, target_config, "eagle")
        if made.config["eagle_aux_hidden_state_layer_ids"] != [2, layers // 2, layers - 3]:
            raise ValueError(
                f"eagle: drafter.taps is {drafter.taps}, but this code always reads {(2, layers // 2, layers - 3)} of "
                f"{layers} layers: train with these, or export to an engine that is told"
            )
        made = made.of(SERVE.replace("EAGLE3", "True"), architectures=["LlamaForCausalLM"])
    _refuse(drafter, target_config)
    embedding = embedding_of(drafter, "eagle")
    return Layout(made.config, {**made.tensors, "embed_tokens.weight": embedding}, made.serve)


def _refuse(drafter: TrainableDrafter, target_config: Any) -> None:
    """Say what of target or head this code cannot load."""
    if target_config.model_type not in FAMILIES:
        raise ValueError(
            f"eagle: the target is a {target_config.model_type}, and this code reads {', '.join(FAMILIES)}: export to "
            "an engine that serves it"
        )
    shape = drafter.shape
    if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        raise ValueError(
            f"eagle: head_dim is {shape.head_dim}, but this code takes hidden_size / num_attention_heads = "
            f"{shape.hidden_size} / {shape.num_attention_heads} and refuses others: export to another engine"
        )
