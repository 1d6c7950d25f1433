"""P-EAGLE as engines name it: EAGLE-3's network, and what stands where a token and its states are not known yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout
from eagle.formats.networks.injected_layouts import mask_of
from eagle.formats.networks.networks import FusedLayout

PEAGLE = "peagle"


@dataclass(frozen=True)
class ParallelLayout(FusedLayout):
    """One engine's names for P-EAGLE's network, whose blocks are all numbered."""

    blocks: int = 4  # as published

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """EAGLE-3's layout and the mask token, for which readers have no default."""
        layout = super().write(drafter, target_config, engine)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
        config = {**layout.config, "mask_token_id": mask_of(drafter)}
        if getattr(drafter.shape, "qk_norm", False):
            config |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
        return replace(layout, config=config, tensors=tensors, deepest=drafter.settings.depths, at_once=True)
