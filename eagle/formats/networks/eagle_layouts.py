"""How engines name the networks of EAGLE-1, EAGLE-3 and P-EAGLE: one class for each network, with what engines vary."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import (
    Layout,
    TargetConfig,
    embedding_of,
    llama_config,
    scale_of,
    tensors_of,
)
from eagle.formats.networks.layers_and_tokens import LAYER_IDS, MIDLAYER_NAMES, SWITCHES
from eagle.formats.networks.network import rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout, mask_of, reorder_taps
from eagle.formats.reading.head_folder import EMBEDDING

# names of networks
FEATURES = "features"  # of EAGLE-1, EAGLE-2 and HASS
FUSED = "fused"  # of EAGLE-3
PEAGLE = "peagle"


@dataclass(frozen=True)
class FeatureLayout(NetworkLayout):
    """One engine's names for EAGLE-1's network."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
    reads_bias: bool = True  # of fc

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return no prefix, one norm, neither embedding nor LM head; what scales the embedding goes into `fc`."""
        tensors = tensors_of(drafter)
        # [H, 2 H], of which the first half reads the embedding
        weight = tensors["fc.weight"].clone()
        weight[:, : weight.shape[1] // 2] *= scale_of(drafter)
        # where there is none, an engine that has one would keep what it started from; others ignore zeros
        bias = tensors.get("fc.bias", torch.zeros_like(weight[:, 0]))
        if not self.reads_bias and bool(bias.any()):
            raise ValueError(
                f"{engine}: fc.bias would be dropped in silence and acceptance lost: train with drafter.fc_bias=false"
            )
        config = llama_config(drafter, target_config, architectures=list(self.architectures))
        return Layout(config, {**tensors, "fc.weight": weight, "fc.bias": bias}, self.serve)


@dataclass(frozen=True)
class FusedLayout(NetworkLayout):
    """One engine's names for EAGLE-3's network; in the serve text LAYERS stands for the outputs that are fused."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle3",)
    switches: tuple[str, ...] = ()  # that it knows
    nested_switches: tuple[str, ...] = ()  # that it looks for in eagle_config
    reads_embedding: bool = False  # one that the head brings
    needs_offsets: bool = False  # where all tokens can be drafted too

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return layer ids in ascending order, twice in the config, each time as those who look there count them."""
        self._check(drafter, target_config, engine)
        order = sorted(range(len(drafter.taps)), key=drafter.taps.__getitem__)
        inputs = [drafter.taps[tap] for tap in order]
        outputs = [layer - 1 for layer in inputs]
        switches = {switch: bool(getattr(drafter.settings, switch, False)) for switch in SWITCHES}
        nested = {switch: switches[switch] for switch in self.nested_switches}
        draft_vocab_size: int = drafter.lm_head.out_features  # type: ignore[union-attr, assignment]
        config = llama_config(
            drafter,
            target_config,
            architectures=list(self.architectures),
            draft_vocab_size=draft_vocab_size,
            **switches,
            eagle_aux_hidden_state_layer_ids=inputs,
            eagle_config={"use_aux_hidden_state": True, LAYER_IDS: outputs, **nested},
        )
        tensors = reorder_taps(tensors_of(drafter), order)
        if scale_of(drafter) != 1.0:
            tensors[EMBEDDING] = embedding_of(drafter, engine)
        if self.needs_offsets and draft_vocab_size == target_config.vocab_size:
            # each token is its own draft token
            tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.long)
            tensors["t2d"] = torch.ones(draft_vocab_size, dtype=torch.bool)
        serve = self.serve.replace("[LAYERS]", str(outputs)).replace(
            "LAYERS", " ".join(map(str, outputs))
        )
        return Layout(config, rename_tensors(tensors, MIDLAYER_NAMES), serve)

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
        """Raise ValueError with the reason why the head cannot be served."""
        # an engine without a switch computes as if it were off
        for switch in SWITCHES:
            if getattr(drafter.settings, switch, False) and switch not in self.switches:
                raise ValueError(
                    f"{engine}: drafter.{switch} is unknown there, and acceptance would be lost in silence: train with "
                    f"drafter.{switch}=false, or export to an engine that knows it (docs/serving.md)"
                )
        layers = target_config.num_hidden_layers
        taps = drafter.taps
        if len(taps) != 3 or not all(0 < tap < layers for tap in taps):
            raise ValueError(
                f"{engine}: drafter.taps is {taps}, expected the inputs of 3 layers of 1 to {layers - 1}: train with "
                "such"
            )
        if scale_of(drafter) != 1.0 and not self.reads_embedding:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which this engine leaves "
                "out when it drafts: use vllm, llamacpp or speculators, where the head brings its own embedding"
            )


@dataclass(frozen=True)
class ParallelLayout(FusedLayout):
    """One engine's names for P-EAGLE's network, whose blocks are all numbered."""

    blocks: int = 4  # as published

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return EAGLE-3's layout and the mask token, for which readers have no default."""
        layout = super().write(drafter, target_config, engine)
        # the first block is called as the further ones are
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in layout.tensors.items()
        }
        config = {**layout.config, "mask_token_id": mask_of(drafter)}
        if getattr(drafter.shape, "qk_norm", False):
            config |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
        return replace(
            layout, config=config, tensors=tensors, deepest=drafter.settings.depths, at_once=True
        )


def add_embedding(layout: Layout, drafter: TrainableDrafter, engine: str) -> Layout:
    """Return the layout with the target's embedding, which some engines read whatever scales it."""
    return replace(layout, tensors={**layout.tensors, EMBEDDING: embedding_of(drafter, engine)})
