"""EAGLE-1's network, which EAGLE-2 and HASS have too, as engines and trainers name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, embedding_of, llama_config, scale_of, tensors_of
from eagle.formats.networks.network import Network, Spelling, keep_names
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading import traps
from eagle.formats.reading.config_keys import Keys
from eagle.formats.reading.folder_paths import has
from eagle.formats.reading.head_folder import (
    AUTOMODEL,
    EAGLE1,
    EMBEDDING,
    MIDLAYER,
    MODELOPT,
    OUTPUT,
    REFERENCE,
    SPECULATORS,
    HeadFolder,
)
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike

FEATURES = "features"  # the name of the network
AUTOMODEL_CLASS = "LlamaEagle3DraftModel"
BLOCK = keep_names("layers.0.*", "fc.weight", "fc.bias", EMBEDDING, OUTPUT)


class Eagle1(Network):
    """EAGLE-1's heads of any trainer."""

    name, method = "EAGLE-1", "eagle1"
    methods: tuple[str, ...] = ("eagle1", "hass")
    spellings: tuple[tuple[str, Spelling], ...] = ((EAGLE1, BLOCK),)
    own_copies: tuple[str, ...] = (EMBEDDING,)
    remedies: Mapping[str, str] = {"fc.weight": "Engines start from random numbers there without a word: export again"}
    beside: Mapping[str, tuple[str, ...]] = dict.fromkeys((EMBEDDING, OUTPUT), ("vocab_size", "hidden_size"))
    lists_all = takes_positions = True
    classes: frozenset[str] = frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"})
    layers = EAGLE1  # the layout of a head whose block is called layers.0

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """The settings that change what is computed; those without a counterpart here are refused."""
        head.layout = self._find_layout(head)
        refused, window = self._list_refused(head), self.read_block(head, head.layout)
        head.refuse(refused)
        settings = {"intermediate_size": head.shape["intermediate_size"], **self.read_switches(head)}
        if window:
            settings["window"] = {"sinks": 0, "recent": window}
        head.nested.read("use_aux_hidden_state")
        return settings

    def read_block(self, head: HeadFolder, layout: str) -> int | None:
        """The window of the block; of its other keys only the kind is checked, for tensors decide."""
        keys, block = head.keys, head.block
        keys.taken |= {"mask_token_id", "quantization_config"}
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "num_hidden_layers"):
            block.read(name)
        if block is not keys:
            keys.read("tie_word_embeddings")
        if layout == SPECULATORS:
            keys.section("speculators_config")
        return _read_window(block)

    def _find_layout(self, head: HeadFolder) -> str:
        """The project that writes checkpoints like this one."""
        config = head.config
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            return SPECULATORS
        if any(name.startswith("model.") for name in head.tensors.stored):
            return AUTOMODEL
        if head.has_block("midlayer."):
            return REFERENCE if head.architectures[:1] == ["LlamaForCausalLM"] else MIDLAYER
        if isinstance(config.get("eagle_config"), dict) and "next_layer_regular" in config["eagle_config"]:
            return MODELOPT
        return self.layers

    def _list_refused(self, head: HeadFolder) -> dict[str, bool]:
        """The settings that no head of this project has, and whether the config has them."""
        keys, block, nested = head.keys, head.block, head.nested
        return {
            "hidden_act": block.read("hidden_act") not in (None, "silu"),
            "sliding_window": _slides(block) and not _read_window(block),
            "target_hidden_size": keys.read("target_hidden_size") not in (None, head.shape["hidden_size"]),
            "norm_before_fc": bool(keys.read("norm_before_fc") or nested.read("norm_before_fc")),
            "parallel_draft_step": (nested.read("parallel_draft_step") or 1) > 1,
            "use_mtp_layernorm": bool(nested.read("use_mtp_layernorm")),
            "use_input_layernorm_in_first_layer": nested.read("use_input_layernorm_in_first_layer") is False,
            "mask_token_id": "mask_token_id" in keys.values,
            "quantization_config": bool(keys.values.get("quantization_config")),
        }

    def read_switches(self, head: HeadFolder) -> Config:
        """One switch: the file decides whether `fc` has a bias."""
        head.draft_vocab_size = head.shape["vocab_size"]
        entry, promised = head.entry("fc.bias"), head.keys.read("bias")
        if promised and entry is None:
            head.problem("config.json says that fc has a bias, and fc.bias is missing", "Export the head again")
        if promised is None:
            state = "is there" if entry else "is not there, and a reader that expects one starts it at random"
            head.notes.append(f"no `bias` in config.json, which SafeAILab/EAGLE takes for true: fc.bias {state}")
        return {"fc_bias": entry is not None}

    def settle(
        self, head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None, norm_output: str | None
    ) -> list[str]:
        """A bias of zeros is none, and what scales the target's embedding comes out of `fc`."""
        notes = []
        if target and target.embed_scale != 1.0 and "fc.weight" in head.names:
            head.embed_scale = target.embed_scale
            notes = [f"the target multiplies its embedding with {target.embed_scale:g}, by which fc is divided"]
        if "fc.bias" in head.names and not bool(head.load("fc.bias").any()):
            head.settings["fc_bias"] = False
            return [*notes, "fc.bias is all zeros and left out: it changes nothing"]
        if head.settings["fc_bias"] and head.keys.values.get("bias") is False:
            raise ValueError(
                "config.json: bias is false, and fc.bias is there and not zero: correct the one that is wrong"
            )
        return notes

    def make_tensor(self, head: HeadFolder, name: str, size: torch.Size) -> Tensor:
        """One of our tensors; `fc` reads the embedding as the target multiplies it."""
        read = super().make_tensor(head, name, size)
        if name == "fc.weight" and head.embed_scale != 1.0:
            read[:, : read.shape[1] // 2] /= head.embed_scale
        return read

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """Names and biases that some engines take otherwise."""
        yield from self.list_names(head)
        has_bias = head.entry("fc.bias") is not None
        if has_bias and bool(head.load("fc.bias").any()):
            yield strike(traps.BIAS_DROPPED, reads=lambda layout: _is_bias_read(layout, False))
        elif not has_bias:
            yield strike(traps.NO_BIAS, reads=lambda layout: _is_bias_read(layout, True))
        yield from self.list_promises(head, is_tied_fatal=False)

    def list_names(self, head: HeadFolder) -> Iterator[Strike]:
        """Names of tensors and architectures that engines do not know."""
        if count := sum(name.startswith("model.") for name in head.tensors.stored):
            is_fatal = AUTOMODEL_CLASS not in head.architectures and not has(head.path, "eagle_meta.pt")
            yield strike(traps.MODEL_PREFIX, fatal=is_fatal, count=count)
        if not set(head.architectures) & self.classes:
            yield strike(traps.ARCHITECTURE, names=head.architectures or "missing")

    def list_promises(self, head: HeadFolder, is_tied_fatal: bool) -> Iterator[Strike]:
        """Keys of the config that promise other tensors."""
        block = head.block.values
        for name in ("attention_bias", "mlp_bias", "qkv_bias"):
            if block.get(name) is True:
                yield strike(traps.PROMISED_BIAS, name=name)
        if True in (block.get("tie_word_embeddings"), head.keys.values.get("tie_word_embeddings")):
            yield strike(traps.TIED, fatal=is_tied_fatal)
        layers = block.get("num_hidden_layers")
        if layers != 1 and not (layers is None and head.layout == SPECULATORS):
            yield strike(traps.LAYER_COUNT, layers=layers)

    def describe(self, head: HeadFolder) -> str:
        """The methods that have this network."""
        return "EAGLE-1 (or EAGLE-2, HASS: the same network)"

    def list_facts(self, head: HeadFolder) -> Config:
        """Sizes, and whether `fc` has a bias."""
        bias = "yes" if "fc.bias" in head.names else "no"
        return {**list_block_facts(head), "reads": "the state behind the final norm", "bias of fc": bias}


def list_block_facts(head: HeadFolder) -> Config:
    """The sizes of a head with one Llama block."""
    shape = head.shape
    rope = shape["rope_parameters"]
    return {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": f"{shape['vocab_size']}, of which it says {head.draft_vocab_size}",
    }


def _is_bias_read(layout: NetworkLayout, is_read: bool) -> bool:
    return isinstance(layout, FeatureLayout) and layout.reads_bias == is_read


def _slides(block: Keys) -> bool:
    window, used, kinds = (block.read(name) for name in ("sliding_window", "use_sliding_window", "layer_types"))
    return "sliding_attention" in kinds[:1] if kinds else bool(window and used is not False)


def _read_window(block: Keys) -> int | None:
    """The window switched on by `layer_types`, as engines read it; without `layer_types` engines differ."""
    return block.read("sliding_window") if "sliding_attention" in (block.read("layer_types") or [])[:1] else None


@dataclass(frozen=True)
class FeatureLayout(NetworkLayout):
    """One engine's names for EAGLE-1's network."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
    reads_bias: bool = True  # of fc

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
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


def add_embedding(layout: Layout, drafter: TrainableDrafter, engine: str) -> Layout:
    """The layout with the target's embedding, which some engines read whatever scales it."""
    return replace(layout, tensors={**layout.tensors, EMBEDDING: embedding_of(drafter, engine)})
