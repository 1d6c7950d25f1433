"""Layers of multi-token prediction, as the families that ship with them name them: cut out, or in the whole model."""

# H width

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import (
    Config,
    Layout,
    TargetConfig,
    dtype_of,
    embedding_of,
    output_of,
    tensors_of,
)
from eagle.formats.networks.network import ROTARY, Network, Spelling, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout, refuse_scale
from eagle.formats.reading.head_folder import EMBEDDING, OUTPUT, SPECULATORS, HeadFolder

MTP = "mtp"
DEEPSEEK = "DeepSeek"
MIMO = "MiMo"
BLOCK = ("self_attn.*", "mlp.*", "input_layernorm.*", "post_attention_layernorm.*")
DEEPSEEK_LAYER = "model.layers.{layer}."
DEEPSEEK_NAMES = {
    **{
        f"{module}.weight": f"{DEEPSEEK_LAYER}{module}.weight"
        for module in ("enorm", "hnorm", "eh_proj")
    },
    "norm.weight": f"{DEEPSEEK_LAYER}shared_head.norm.weight",
    **{f"layers.0.{module}": f"{DEEPSEEK_LAYER}{module}" for module in BLOCK},
    EMBEDDING: f"{DEEPSEEK_LAYER}embed_tokens.weight",
    OUTPUT: f"{DEEPSEEK_LAYER}shared_head.head.weight",
}
MIMO_LAYER = "model.mtp_layers.0."
MIMO_NAMES = {
    "enorm.weight": f"{MIMO_LAYER}token_layernorm.weight",
    "hnorm.weight": f"{MIMO_LAYER}hidden_layernorm.weight",
    "eh_proj.weight": f"{MIMO_LAYER}input_proj.weight",
    "norm.weight": f"{MIMO_LAYER}final_layernorm.weight",
    **{f"layers.0.{module}": f"{MIMO_LAYER}{module}" for module in BLOCK},
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: OUTPUT,
}
# families whose norms multiply by the weight, not by 1 + weight
PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")


def _find_numbers(head: HeadFolder, pattern: str) -> list[str]:
    """Return what the pattern's group matches in the tensors' names in the file, such as the number of a layer.

    There is one item for each tensor whose name matches, so that numbers may repeat.
    """
    matches = (re.search(pattern, name) for name in head.tensors.stored)
    return [match[1] for match in matches if match]


def _layer_of_head(head: HeadFolder) -> str:
    """Return the number, as text, of the MTP layer in a model's list of layers; "none" if it cannot be told.

    It is the layer with a projection of token and state (eh_proj), or else the only layer in the file.
    """
    with_projection = _find_numbers(head, r"layers\.(\d+)\.eh_proj\.weight$")
    if with_projection:
        return with_projection[0]
    numbers = set(_find_numbers(head, r"^(?:model\.)?layers\.(\d+)\."))
    if len(numbers) == 1:
        return numbers.pop()
    return "none"


def _rename(head: HeadFolder, name: str, ours: str) -> str | None:
    """Return our name of a tensor, None for one of another layer: `Network.rename`. The file may hold a whole model.

    Args:
        head: The checkpoint; its `layer_number` is set at the first call.
        name: The tensor's name in the file.
        ours: Our name, which fits a layer of any number.
    """
    # looked up once, as a whole model has many tensors
    head.layer_number = head.layer_number or _layer_of_head(head)
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    if layer and layer[1] != head.layer_number:
        return None
    return ours


def _read_mtp(head: HeadFolder) -> Config:
    """Return an MTP layer's setting `hidden_first`: whether its projection reads the state before the token, as MiMo's.

    The projection reads the target's state and the token's embedding, concatenated in this order or the other. Whatever
    the layer has that heads here do not becomes a problem.
    """
    keys, block, _ = head.sections  # the third has no keys of such a layer
    if "speculators_model_type" in head.config:
        head.layout = SPECULATORS
        head.notes.append(
            "it was trained to read the state before the final norm at its first step, and heads here read the one "
            "behind it, as engines do: expect less acceptance than its training says"
        )
    # the numbers of all MTP layers in the file, by either family's names
    layers = {
        *_find_numbers(head, r"mtp_layers\.(\d+)\."),
        *_find_numbers(head, r"(\d+)\.eh_proj\.weight"),
    }
    if len(layers) > 1:
        head.problem(f"it holds {len(layers)} such layers, and heads here have one", fatal=False)
    refused = {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "model_type": head.layout == SPECULATORS
        and block.values.get("model_type") not in PLAIN_FAMILIES,
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    head.refuse(refused, "block")
    # the config is that of the whole model: its other keys do not matter to this layer
    for section in (keys, block):
        section.handled |= section.values.keys()
    if "num_nextn_predict_layers" in head.config:
        count = keys.read("num_hidden_layers")
        # a count of 1 is that of the head alone, any other that of its target
        if count != 1:
            head.target_layers = count
    # the tensors decide whether queries and keys are normed, and whether queries, keys and values have biases
    head.overrides = {
        "qk_norm": "layers.0.self_attn.q_norm.weight" in head.names,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in head.names,
    }
    return {"hidden_first": head.layout == MIMO}


MTP_HEADS = Network(
    name="a layer of multi-token prediction (MTP)",
    method=MTP,
    methods=(MTP,),
    tensors=r"(layers\.\d+\.|mtp\.)?(eh_proj|enorm|hnorm|shared_head)\b|(mtp|mtp_layers|mtp_block)\.",
    type_words="mtp",
    ambiguous_keys=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    read_settings=_read_mtp,
    spellings=((MIMO, MIMO_NAMES), (DEEPSEEK, DEEPSEEK_NAMES)),
    ignored={**ROTARY, r"(model\.)?(layers\..*|norm\.weight)": "it is the target's own"},
    rename=_rename,
)


@dataclass(frozen=True)
class MtpLayout(NetworkLayout):
    """How one family of models names its MTP layer, which follows the model's last layer."""

    names: Spelling = field(default_factory=dict)  # patterns of our names, and the family's
    hidden_first: bool = False  # whether its projection reads the state before the token
    biased: bool = False  # whether its queries, keys and values have biases
    families: tuple[str, ...] = ()  # model types of targets that it can be read with; empty for any

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return the head as the MTP layer of its target: the target's config, and the layer's tensors.

        They include copies of the target's embedding and LM head. `engine` is the layout's name, for messages.
        """
        self._check(drafter, target_config, engine)
        tensors = tensors_of(drafter)
        if drafter.settings.hidden_first != self.hidden_first:
            # [H, 2 H] with H the width: one half of the columns reads the state and the other the token's embedding;
            # put them in the family's order
            first, second = tensors["eh_proj.weight"].chunk(2, dim=1)
            tensors["eh_proj.weight"] = torch.cat([second, first], dim=1)
        # the family's code expects biases, and zeros change nothing
        if self.biased:
            for projection in ("q_proj", "k_proj", "v_proj"):
                weight = tensors[f"layers.0.self_attn.{projection}.weight"]
                tensors.setdefault(
                    f"layers.0.self_attn.{projection}.bias", torch.zeros_like(weight[:, 0])
                )
        tensors |= {EMBEDDING: embedding_of(drafter, engine), OUTPUT: output_of(drafter, engine)}
        more = {
            "num_nextn_predict_layers": 1,
            "torch_dtype": dtype_of(drafter),
            "tie_word_embeddings": False,
        }
        # layers count from 0, so the MTP layer after the target's last has this number
        renamed = rename_tensors(tensors, self.names, layer=target_config.num_hidden_layers)
        return Layout({**target_config.to_dict(), **more}, renamed, self.serve)

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
        """Raise ValueError for a target or a head that the family's code does not support."""
        # engines look for the layer among the tensors of a target of its own family
        if self.families and target_config.model_type not in self.families:
            raise ValueError(
                f"{engine}: the target is a {target_config.model_type}, and such a layer is read there in the files of "
                f"its own family alone, by its names; of those that this project writes: {', '.join(self.families)}"
            )
        if getattr(drafter.shape, "qk_norm", False):
            raise ValueError(
                f"{engine}: queries and keys of the head are normed, and no block of this layout's is"
            )
        if getattr(drafter.shape, "qkv_bias", False) and not self.biased:
            raise ValueError(
                f"{engine}: queries, keys and values of the head have biases, which would be dropped"
            )
        refuse_scale(drafter, engine)
