"""Layers of multi-token prediction, as the families that ship with them name them: cut out, or in the whole model."""

# H width

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, embedding_of, output_of, scale_of, tensors_of
from eagle.formats.networks.network import FOLLOWS, ROTARY, Network, Spelling, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading.head_folder import EMBEDDING, OUTPUT, SPECULATORS, HeadFolder
from eagle.formats.reading.target_files import TargetFiles

MTP, DEEPSEEK, MIMO = "mtp", "DeepSeek", "MiMo"
BLOCK = ("self_attn.*", "mlp.*", "input_layernorm.*", "post_attention_layernorm.*")
LAYER = "model.layers.{layer}."
DEEPSEEK_NAMES = {
    **{f"{part}.weight": f"{LAYER}{part}.weight" for part in ("enorm", "hnorm", "eh_proj")},
    "norm.weight": f"{LAYER}shared_head.norm.weight",
    **{f"layers.0.{part}": f"{LAYER}{part}" for part in BLOCK},
    EMBEDDING: f"{LAYER}embed_tokens.weight",
    OUTPUT: f"{LAYER}shared_head.head.weight",
}
MIMO_LAYER = "model.mtp_layers.0."
MIMO_NAMES = {
    "enorm.weight": f"{MIMO_LAYER}token_layernorm.weight",
    "hnorm.weight": f"{MIMO_LAYER}hidden_layernorm.weight",
    "eh_proj.weight": f"{MIMO_LAYER}input_proj.weight",
    "norm.weight": f"{MIMO_LAYER}final_layernorm.weight",
    **{f"layers.0.{part}": f"{MIMO_LAYER}{part}" for part in BLOCK},
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: OUTPUT,
}
TARGETS_OWN = "it is the target's own"
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "mimo")  # families whose norms multiply with the weight as it is


class Mtp(Network):
    """The layer behind a model's last one."""

    name, method, methods = "a layer of multi-token prediction (MTP)", MTP, (MTP,)
    tensors = r"(layers\.\d+\.|mtp\.)?(eh_proj|enorm|hnorm|shared_head)\b|(mtp|mtp_layers|mtp_block)\."
    words, common = "mtp", ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    spellings = ((MIMO, MIMO_NAMES), (DEEPSEEK, DEEPSEEK_NAMES))
    spare: Mapping[str, str] = {ROTARY: FOLLOWS, r"(model\.)?(layers\..*|norm\.weight)": TARGETS_OWN}

    def rename(self, head: HeadFolder, name: str, ours: str) -> str | None:
        """None for what belongs to another layer of the model."""
        head.layer = head.layer or _own_layer(head)
        found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        return None if found and found[1] != head.layer else ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """The order in which the projection reads state and token is the family's."""
        keys, block = head.keys, head.block
        if "speculators_model_type" in head.config:
            head.layout = SPECULATORS
            head.notes.append(
                "it was trained to read the state before the final norm at its first step, and heads here read the one "
                "behind it, as engines do: expect less acceptance than its training says"
            )
        layers = {found[1] for name in head.tensors.stored if (found := re.search(r"mtp_layers\.(\d+)\.", name))}
        layers |= {found[1] for name in head.tensors.stored if (found := re.search(r"(\d+)\.eh_proj\.weight", name))}
        if len(layers) > 1:
            head.problem(f"it holds {len(layers)} such layers, and heads here have one", fatal=False)
        refused = {
            "hidden_act": block.read("hidden_act") not in (None, "silu"),
            "model_type": head.layout == SPECULATORS and block.values.get("model_type") not in PLAIN,
            "quantization_config": bool(keys.values.get("quantization_config")),
        }
        head.refuse(refused, "block")
        for part in (keys, block):  # of a whole model, whose other keys do not matter to this layer
            part.taken |= part.values.keys()
        count = keys.read("num_hidden_layers") if "num_nextn_predict_layers" in head.config else None
        head.target_layers = None if count == 1 else count  # one layer is the head's own
        parts = {"qk_norm": "q_norm.weight", "qkv_bias": "q_proj.bias"}
        head.overrides = {kind: f"layers.0.self_attn.{part}" in head.names for kind, part in parts.items()}
        return {"hidden_first": head.layout == MIMO}


def _own_layer(head: HeadFolder) -> str:
    """The number of the layer that has a projection of token and state; the only one there is without such."""
    own = [found[1] for name in head.tensors.stored if (found := re.search(r"layers\.(\d+)\.eh_proj\.weight$", name))]
    every = {found[1] for name in head.tensors.stored if (found := re.match(r"(?:model\.)?layers\.(\d+)\.", name))}
    return own[0] if own else every.pop() if len(every) == 1 else "none"


@dataclass(frozen=True)
class MtpLayout(NetworkLayout):
    """How one family names the layer behind its last one."""

    names: Spelling = field(default_factory=dict)  # patterns of ours, and what they become
    hidden_first: bool = False  # in which order its projection reads state and token
    biased: bool = False  # whether queries, keys and values have biases there
    families: tuple[str, ...] = ()  # of targets beside which it is read; none for any

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """The target's config with one such layer."""
        self._check(drafter, target_config, engine)
        tensors = tensors_of(drafter)
        if drafter.settings.hidden_first != self.hidden_first:
            tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
        if self.biased:  # a bias of zeros changes nothing
            for part in ("q", "k", "v"):
                weight = tensors[f"layers.0.self_attn.{part}_proj.weight"]
                tensors.setdefault(f"layers.0.self_attn.{part}_proj.bias", torch.zeros_like(weight[:, 0]))
        tensors |= {EMBEDDING: embedding_of(drafter, engine), OUTPUT: output_of(drafter, engine)}
        dtype = str(next(drafter.parameters()).dtype).removeprefix("torch.")
        extra = {"num_nextn_predict_layers": 1, "torch_dtype": dtype, "tie_word_embeddings": False}
        named = rename_tensors(tensors, self.names, layer=target_config.num_hidden_layers)
        return Layout({**target_config.to_dict(), **extra}, named, self.serve)

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
        """Raise ValueError for settings that the family's code does not support."""
        if self.families and target_config.model_type not in self.families:
            raise ValueError(
                f"{engine}: the target is a {target_config.model_type}, and such a layer is read there in the files of "
                f"its own family alone, by its names; of those that this project writes: {', '.join(self.families)}"
            )
        shape = drafter.shape
        if getattr(shape, "qk_norm", False):
            raise ValueError(f"{engine}: queries and keys of the head are normed, and no block of this layout's is")
        if getattr(shape, "qkv_bias", False) and not self.biased:
            raise ValueError(f"{engine}: queries, keys and values of the head have biases, which would be dropped")
        if scale_of(drafter) != 1.0:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which is left out when it "
                "drafts: no exporter has a layout for it"
            )
