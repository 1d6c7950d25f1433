"""The networks of heads with the part names of the engines that serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, embedding_of, llama_config, scale_of, tensors_of

FEATURES, FUSED, LANGUAGE_MODEL = "features", "fused", "draft_model"  # EAGLE-1's, EAGLE-3's, a whole model
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")  # of EAGLE-3's network
EMBEDDING = "embed_tokens.weight"
MASK_HIDDEN = "mask_hidden"


def network_of(drafter: TrainableDrafter) -> str:
    """The name of a drafter's network."""
    return str(drafter.network["network"])


@dataclass(frozen=True)
class NetworkLayout:
    """One engine's layout of one network."""

    serve: str  # Markdown, in which HEAD, TARGET and DEPTH stand for themselves
    architectures: tuple[str, ...] = ()
    until: str = ""  # the last version of the engine that reads it, where a later one does not
    blocks: int = 1  # the most that a head may have: none of several was run in any engine
    slides: bool = False  # whether it reads a window without sinks from layer_types
    finish: Callable[[Layout, TrainableDrafter, Any], Layout] | None = None  # what this engine alone needs

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The layout of a head; ValueError with the settings that the engine cannot serve."""
        raise NotImplementedError


@dataclass(frozen=True)
class FeatureLayout(NetworkLayout):
    """One engine's names for EAGLE-1's network."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
    reads_bias: bool = True  # of fc

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """No prefix, one norm, neither embedding nor LM head; what scales the embedding goes into `fc`."""
        tensors = tensors_of(drafter)
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
    taps: int | None = 3  # how many layers it fuses; None for any number
    reads_embedding: bool = False  # one that the head brings
    needs_offsets: bool = False  # where all tokens can be drafted too

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """Layer ids ascend, and stand twice in the config, each time as those who look there count them."""
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
            eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs, **nested},
        )
        tensors = reorder_taps(tensors_of(drafter), order)
        if scale_of(drafter) != 1.0:
            tensors[EMBEDDING] = embedding_of(drafter, engine)
        if self.needs_offsets and draft_vocab_size == target_config.vocab_size:
            tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.long)
            tensors["t2d"] = torch.ones(draft_vocab_size, dtype=torch.bool)
        # most engines call the block midlayer, and all of them know it by that name
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        serve = self.serve.replace("[LAYERS]", str(outputs)).replace("LAYERS", " ".join(map(str, outputs)))
        return Layout(config, tensors, serve)

    def _check(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> None:
        """Raise ValueError with the reason why the head cannot be served."""
        for switch in SWITCHES:
            if getattr(drafter.settings, switch, False) and switch not in self.switches:
                raise ValueError(
                    f"{engine}: drafter.{switch} is unknown there, and acceptance would be lost in silence: train with "
                    f"drafter.{switch}=false, or export to an engine that knows it (docs/serving.md)"
                )
        layers, taps = target_config.num_hidden_layers, drafter.taps
        if len(taps) != (self.taps or len(taps)) or not all(0 < tap < layers for tap in taps):
            raise ValueError(
                f"{engine}: drafter.taps is {taps}, expected the inputs of {self.taps or 'some'} layers of 1 to "
                f"{layers - 1}: train with such"
            )
        if scale_of(drafter) != 1.0 and not self.reads_embedding:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which this engine leaves "
                "out when it drafts: use vllm, llamacpp or speculators, where the head brings its own embedding"
            )


@dataclass(frozen=True)
class ModelLayout(NetworkLayout):
    """A whole language model under its own names."""

    def write(self, drafter: Any, target_config: Any, engine: str) -> Layout:
        """Its own config and tensors; of those that are tied, one."""
        model = drafter.model
        tensors: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict().items():
            tensors.setdefault(tensor.data_ptr(), (name, tensor.detach().cpu()))
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
        return Layout(config, dict(tensors.values()), self.serve)


def add_embedding(layout: Layout, drafter: TrainableDrafter, engine: str) -> Layout:
    """The layout with the target's embedding, which some engines read whatever scales it."""
    return replace(layout, tensors={**layout.tensors, EMBEDDING: embedding_of(drafter, engine)})


def reorder_taps(tensors: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """The columns of `fc` and the norms of the taps in another order."""
    columns = tensors["fc.weight"].chunk(len(order), dim=1)
    if MASK_HIDDEN in tensors:  # what stands for taps that are not known
        masks = tensors[MASK_HIDDEN].chunk(len(order), dim=-1)
        tensors = {**tensors, MASK_HIDDEN: torch.cat([masks[tap] for tap in order], dim=-1)}
    norms = {f"fc_norm.{place}.weight": f"fc_norm.{tap}.weight" for place, tap in enumerate(order)}
    return {
        **tensors,
        "fc.weight": torch.cat([columns[tap] for tap in order], dim=1),
        **{name: tensors[source] for name, source in norms.items() if source in tensors},
    }
