"""Layers of multi-token prediction as models ship with them: cut out, or in the files of the whole model."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.head_parts import name_part, read_sizes
from eagle.formats.networks.level_reader import FOLLOWS, OUTPUT, ROTARY, LevelReader
from eagle.formats.networks.mtp_layouts import MTP
from eagle.formats.networks.networks import EMBEDDING
from eagle.formats.reading.head_folder import SPECULATORS, HeadFolder
from eagle.formats.reading.keys import short
from eagle.formats.reading.target_files import TargetFiles

DEEPSEEK, MIMO = "DeepSeek", "MiMo"
NORMS = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
BLOCK = r"(?:self_attn|mlp|input_layernorm|post_attention_layernorm)\.(?!.*inv_freq).*"
WRAPPED = {
    **{rf"(?:model\.)?mtp_layers\.0\.{theirs}\.weight": f"{ours}.weight" for theirs, ours in NORMS.items()},
    rf"(?:model\.)?mtp_layers\.0\.({BLOCK})": r"layers.0.\1",
}
SHIPPED = {
    r"(?:model\.)?layers\.\d+\.(enorm|hnorm|eh_proj)\.weight": r"\1.weight",
    r"(?:model\.)?layers\.\d+\.shared_head\.norm\.weight": "norm.weight",
    r"(?:model\.)?layers\.\d+\.shared_head\.head\.weight": OUTPUT,
    r"(?:model\.)?layers\.\d+\.embed_tokens\.weight": EMBEDDING,
    rf"(?:model\.)?layers\.\d+\.({BLOCK})": r"layers.0.\1",
    r"(?:model\.)?embed_tokens\.weight": EMBEDDING,
}
TARGETS_OWN = "it is the target's own"
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "mimo")  # families whose norms multiply with the weight as it is


class MtpReader(LevelReader):
    """The layer behind a model's last one."""

    def rename(self, head: HeadFolder, name: str, ours: str) -> str | None:
        """None for what belongs to another layer of the model."""
        head.layer = head.layer or _own_layer(head)
        found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        return None if found and found[1] != head.layer else ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """The order in which the projection reads state and token is the family's."""
        keys, block = head.keys, head.block
        if "speculators_model_type" in head.config:
            head.layout = SPECULATORS
            head.notes.append(
                "it was trained to read the state before the final norm at its first step, and heads here read the one "
                "behind it, as engines do: expect less acceptance than its training says"
            )
        read_sizes(head)
        for kind in sorted({kind for ours in head.names if (kind := name_part(ours))}):
            if "bias in attention" not in kind and "norm of queries" not in kind:
                head.problem(f"{kind}, which no block here has", fatal=False)
        layers = {found[1] for name in head.tensors.stored if (found := re.search(r"mtp_layers\.(\d+)\.", name))}
        layers |= {found[1] for name in head.tensors.stored if (found := re.search(r"(\d+)\.eh_proj\.weight", name))}
        if len(layers) > 1:
            head.problem(f"it holds {len(layers)} such layers, and heads here have one", fatal=False)
        refused = {
            "hidden_act": block.text("hidden_act") not in (None, "silu"),
            "model_type": head.layout == SPECULATORS and block.values.get("model_type") not in PLAIN,
            "quantization_config": bool(keys.values.get("quantization_config")),
        }
        for name in (name for name, is_refused in refused.items() if is_refused):
            value = next((part.values[name] for part in (keys, block) if name in part.values), None)
            head.problem(f"config.json: {name} is {short(value)}, which no block here can be", fatal=False)
        for part in (keys, block):  # of a whole model, whose other keys do not matter to this layer
            part.taken |= part.values.keys()
        return {"hidden_first": head.layout == MIMO}

    def target_layers(self, head: HeadFolder) -> int | None:
        """The layers in front of it, of the model whose config it has; one layer is the head's own."""
        layers = head.keys.size("num_hidden_layers") if "num_nextn_predict_layers" in head.config else None
        return None if layers == 1 else layers

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """Those of the config; norms by head and biases where there are such tensors."""
        kinds = {name: f"layers.0.self_attn.{part}" in head.names for name, part in PARTS.items()}
        return head_shape(SimpleNamespace(**head.shape), **kinds)


PARTS = {"qk_norm": "q_norm.weight", "qkv_bias": "q_proj.bias"}


def _own_layer(head: HeadFolder) -> str:
    """The number of the layer that has a projection of token and state; the only one there is without such."""
    own = [found[1] for name in head.tensors.stored if (found := re.search(r"layers\.(\d+)\.eh_proj\.weight$", name))]
    every = {found[1] for name in head.tensors.stored if (found := re.match(r"(?:model\.)?layers\.(\d+)\.", name))}
    return own[0] if own else every.pop() if len(every) == 1 else "none"


READER = MtpReader(
    MTP,
    {MIMO: WRAPPED, DEEPSEEK: SHIPPED},
    {ROTARY: FOLLOWS, r"(model\.)?(layers\..*|norm\.weight)": TARGETS_OWN},
)
