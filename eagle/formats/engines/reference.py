"""The layout of the methods' own published heads: what SafeAILab/EAGLE reads."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import Engine
from eagle.formats.layout import Layout
from eagle.formats.networks.eagle1_heads import FeatureLayout, add_embedding
from eagle.formats.networks.eagle3_heads import FusedLayout
from eagle.formats.networks.tensor_names import FEATURES, FUSED

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")  # it takes every other target for a Mixtral

SERVE = """```python
from eagle.model.ea_model import EaModel  # of SafeAILab/EAGLE

model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="HEAD", use_eagle3=EAGLE3)
```

Not run by this project: names, shapes and keys are those of the published heads."""


def _finish_features(layout: Layout, drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The config says whether `fc` has a bias, which is left out where it is zero."""
    bias = bool(layout.tensors["fc.bias"].any())
    tensors = {name: tensor for name, tensor in layout.tensors.items() if bias or name != "fc.bias"}
    _check(drafter, target_config)
    return add_embedding(Layout({**layout.config, "bias": bias}, tensors, layout.serve), drafter, "eagle")


def _finish_fused(layout: Layout, drafter: TrainableDrafter, target_config: Any) -> Layout:
    """Check that the taps are the published layers."""
    layers = target_config.num_hidden_layers
    published = (2, layers // 2, layers - 3)
    if layout.config["eagle_aux_hidden_state_layer_ids"] != [*published]:
        raise ValueError(
            f"eagle: drafter.taps is {drafter.taps}, but this code always reads {published} of {layers} layers: train "
            "with these, or export to an engine that is told"
        )
    _check(drafter, target_config)
    return add_embedding(layout, drafter, "eagle")


def _check(drafter: TrainableDrafter, target_config: Any) -> None:
    """Raise ValueError for a target or head that this code cannot load."""
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


REFERENCE = Engine(
    name="eagle",
    title="SafeAILab/EAGLE",
    networks={
        FEATURES: FeatureLayout(SERVE.replace("EAGLE3", "False"), ("LlamaForCausalLM",), finish=_finish_features),
        FUSED: FusedLayout(SERVE.replace("EAGLE3", "True"), ("LlamaForCausalLM",), finish=_finish_fused),
    },
    scalings=(),
)
