"""The layout of the methods' own published heads: what SafeAILab/EAGLE reads."""

from __future__ import annotations

from typing import Any

from eagle.drafter import TrainableDrafter
from eagle.export.features import features_layout, is_features
from eagle.export.fused import fused_layout
from eagle.export.layout import Layout, embedding_of, scale_of

SERVE = """```python
from eagle.model.ea_model import EaModel  # of SafeAILab/EAGLE

model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="HEAD", use_eagle3=EAGLE3)
```

Not run by this project: names, shapes and keys are those of the published heads."""


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The embedding is part of it; of EAGLE-3 no switches, and no other layers than the published ones."""
    if is_features(drafter):
        made = features_layout(drafter, target_config)
        bias = bool(made.tensors["fc.bias"].any())
        embedding = embedding_of(drafter, "eagle") / scale_of(drafter)  # which went into `fc`
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
        embedding = embedding_of(drafter, "eagle")
        made = made.of(SERVE.replace("EAGLE3", "True"), architectures=["LlamaForCausalLM"])
    return Layout(made.config, {**made.tensors, "embed_tokens.weight": embedding}, made.serve)
