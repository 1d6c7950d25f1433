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
from eagle.formats.networks.layers_and_tokens import (
    JOINT_NORM,
    LAYER_IDS,
    MIDLAYER_NAMES,
    SWITCHES,
)
from eagle.formats.networks.network import rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout, mask_of, reorder_taps
from eagle.formats.reading.head_folder import EMBEDDING

# names of networks
FEATURES = "features"  # of EAGLE-1, EAGLE-2 and HASS
FUSED = "fused"  # of EAGLE-3
PEAGLE = "peagle"


@dataclass(frozen=True)
class FeatureLayout(NetworkLayout):
    """How one engine wants the heads of EAGLE-1, EAGLE-2 and HASS, which are one network."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
    reads_bias: bool = True  # whether the engine adds a bias of fc

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return an EAGLE-1 head under our own tensor names, without embedding and LM head, which are the target's.

        Some targets multiply their embedding rows by a factor. Engines leave it out, so the columns of `fc` that read
        the embedding are multiplied by it instead.
        """
        tensors = tensors_of(drafter)
        # [H, 2 H] with H the width: the first H columns read the embedding, the others the target's state
        weight = tensors["fc.weight"].clone()
        weight[:, : weight.shape[1] // 2] *= scale_of(drafter)
        # [H]; an engine with a bias would keep random numbers if the file had none, and the others ignore zeros
        bias = tensors.get("fc.bias", torch.zeros_like(weight[:, 0]))
        if not self.reads_bias and bool(bias.any()):
            raise ValueError(
                f"{engine}: fc.bias would be dropped in silence and acceptance lost: train with drafter.fc_bias=false"
            )
        config = llama_config(drafter, target_config, architectures=list(self.architectures))
        return Layout(config, {**tensors, "fc.weight": weight, "fc.bias": bias}, self.serve)


@dataclass(frozen=True)
class FusedLayout(NetworkLayout):
    """How one engine wants EAGLE-3 heads; LAYERS in its guide is a placeholder for the layers whose output is read."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle3",)
    switches: tuple[str, ...] = ()  # settings of the head that the engine knows
    nested_switches: tuple[str, ...] = ()  # those that it looks for in eagle_config
    reads_embedding: bool = False  # whether it reads the head's embedding in place of the target's
    needs_offsets: bool = False  # whether it needs d2t even if all tokens can be drafted

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return an EAGLE-3 head with its taps, the layers that it reads, in ascending order, as engines read them.

        The config names the layers twice: some engines read the key at the top, which counts layer inputs, and others
        the key in eagle_config, which counts layer outputs.
        """
        self._check(drafter, target_config, engine)
        # the index, among the taps, of the lowest layer, the next and so on
        order = sorted(range(len(drafter.taps)), key=drafter.taps.__getitem__)
        inputs = [drafter.taps[tap] for tap in order]
        # the input of a layer is the output of the layer before it
        outputs = [layer - 1 for layer in inputs]
        # boolean settings of EAGLE-3's network; a head without the setting computes as if it were off
        switches = {switch: bool(getattr(drafter.settings, switch, False)) for switch in SWITCHES}
        nested = {switch: switches[switch] for switch in self.nested_switches}
        if getattr(drafter.settings, JOINT_NORM, False):
            switches[JOINT_NORM] = True
        # the LM head has a row for each token that can be drafted
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
        # engines leave out a factor on the target's embedding: write a copy that is multiplied by it
        if scale_of(drafter) != 1.0:
            tensors[EMBEDDING] = embedding_of(drafter, engine)
        if self.needs_offsets and draft_vocab_size == target_config.vocab_size:
            # each token is its own draft token, at an offset of 0
            tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.long)
            tensors["t2d"] = torch.ones(draft_vocab_size, dtype=torch.bool)
        # in guides [LAYERS] stands for a list of Python or YAML, and LAYERS alone for numbers with spaces between
        serve = self.serve.replace("[LAYERS]", str(outputs)).replace(
            "LAYERS", " ".join(map(str, outputs))
        )
        return Layout(config, rename_tensors(tensors, MIDLAYER_NAMES), serve)

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
        """Raise ValueError if the engine cannot serve the head: its switches, its taps, or the target's embedding.

        Switches are the boolean settings of EAGLE-3's network, and taps the layers of the target whose inputs it reads.
        """
        # an engine that does not know a switch computes as if it were off
        for switch in (*SWITCHES, JOINT_NORM):
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
    """How one engine wants P-EAGLE heads: EAGLE-3's layout, with several numbered blocks and a mask token."""

    max_blocks: int = 4  # of the published heads

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return EAGLE-3's layout of a P-EAGLE head, with numbered blocks and the id of the mask token in its config.

        Readers have no default for the mask token.
        """
        layout = super().write(drafter, target_config, engine)
        # EAGLE-3's name for its only block gives way to a number, as the further blocks have
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in layout.tensors.items()
        }
        config = {**layout.config, "mask_token_id": mask_of(drafter)}
        # a block that norms queries and keys is a Qwen3's, not a Llama's
        if getattr(drafter.shape, "qk_norm", False):
            config |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
        return replace(
            layout,
            config=config,
            tensors=tensors,
            max_depth=drafter.settings.depths,
            one_forward=True,
        )


def add_embedding(layout: Layout, drafter: TrainableDrafter, engine: str) -> Layout:
    """Return the layout with a copy of the target's embedding, for engines that read it from the head's folder.

    Where the target multiplies its embedding rows by a factor, the copy is multiplied already. `engine` is named in
    the message if the head is not bound to a target.
    """
    return replace(layout, tensors={**layout.tensors, EMBEDDING: embedding_of(drafter, engine)})
