"""Layers of multi-token prediction as the families that ship with them name them, beside the target's own config."""

# H width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, embedding_of, output_of, scale_of, tensors_of
from eagle.formats.networks.level_layouts import rename
from eagle.formats.networks.networks import NetworkLayout

MTP = "mtp"
DEEPSEEK_NAMES = {  # L stands for the number of the target's layers
    r"(enorm|hnorm|eh_proj)\.weight": r"model.layers.L.\1.weight",
    r"norm\.weight": "model.layers.L.shared_head.norm.weight",
    r"layers\.0\.(.*)": r"model.layers.L.\1",
    "embedding": "model.layers.L.embed_tokens.weight",
    "output": "model.layers.L.shared_head.head.weight",
}
MIMO_NAMES = {
    r"enorm\.weight": "model.mtp_layers.0.token_layernorm.weight",
    r"hnorm\.weight": "model.mtp_layers.0.hidden_layernorm.weight",
    r"eh_proj\.weight": "model.mtp_layers.0.input_proj.weight",
    r"norm\.weight": "model.mtp_layers.0.final_layernorm.weight",
    r"layers\.0\.(.*)": r"model.mtp_layers.0.\1",
    "embedding": "model.embed_tokens.weight",
    "output": "lm_head.weight",
}


@dataclass(frozen=True)
class MtpLayout(NetworkLayout):
    """How one family names the layer behind its last one."""

    names: Mapping[str, str] = field(default_factory=dict)  # patterns of ours, and what they become
    hidden_first: bool = False  # in which order its projection reads state and token
    biased: bool = False  # whether queries, keys and values have biases there
    families: tuple[str, ...] = ()  # of targets beside which it is read; none for any

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The target's config with one such layer."""
        self._check(drafter, target_config, engine)
        tensors = tensors_of(drafter)
        if drafter.settings.hidden_first != self.hidden_first:
            tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
        if self.biased:  # a bias of zeros changes nothing
            for part in ("q", "k", "v"):
                weight = tensors[f"layers.0.self_attn.{part}_proj.weight"]
                tensors.setdefault(f"layers.0.self_attn.{part}_proj.bias", torch.zeros_like(weight[:, 0]))
        tensors |= self._copies(drafter, engine)
        layer = str(target_config.num_hidden_layers)
        spelling = {ours: theirs.replace("L.", f"{layer}.") for ours, theirs in self.names.items()}
        dtype = str(next(drafter.parameters()).dtype).removeprefix("torch.")
        extra = {"num_nextn_predict_layers": 1, "torch_dtype": dtype, "tie_word_embeddings": False}
        return Layout({**target_config.to_dict(), **extra}, rename(tensors, spelling), self.serve)

    def _copies(self, drafter: TrainableDrafter, engine: str) -> dict[str, Tensor]:
        """The target's tensors that the layer holds as copies."""
        return {"embedding": embedding_of(drafter, engine), "output": output_of(drafter, engine)}

    def _check(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> None:
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
