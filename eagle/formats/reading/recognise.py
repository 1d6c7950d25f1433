"""Recognise a checkpoint's layout and network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eagle.formats.networks.head_parts import check_tensors, name_part, read_sizes, read_switches
from eagle.formats.networks.level_readers import READERS
from eagle.formats.networks.networks import FEATURES, FUSED
from eagle.formats.reading.files import read_json, read_tensors
from eagle.formats.reading.head_folder import (
    AUTOMODEL,
    EAGLE1,
    LAYERS,
    MIDLAYER,
    MODELOPT,
    OWN,
    REFERENCE,
    SPECULATORS,
    UNKNOWN,
    Finding,
    HeadFolder,
)
from eagle.formats.reading.keys import Keys, short
from eagle.formats.reading.kinds import kind_by_tensors

OWN_NETWORKS = {"eagle1": FEATURES, "hass": FEATURES, "eagle3": FUSED}
FUSED_TENSORS = {"layers.0.hidden_norm.weight", "norm.weight", "d2t", "t2d", "fc_norm.0.weight"}


def read_folder(path: Path) -> HeadFolder:
    """Read and recognise a folder with config.json and weights; ValueError if one of them cannot be read."""
    config = read_json(path, "config.json")
    keys = Keys(config)
    is_own = isinstance(config.get("settings"), dict) and isinstance(config.get("shape"), dict)
    block_key = "shape" if is_own else "transformer_layer_config"
    block = keys.section(block_key) if block_key in config else keys
    nested = keys.section("settings" if is_own else "eagle_config")
    head = HeadFolder(path, config, read_tensors(path), keys, block, nested)
    _name_tensors(head)
    head.layout = OWN if is_own else _layout_of(head)
    head.kind, advice = _own_kind(config) if is_own else kind_by_tensors(head.names, config)
    if head.kind in READERS and not is_own:
        head.guesses_levels = True
        return head
    if not head.kind and (is_own or any(name.startswith("layers.0.") for name in head.names)):
        fused = OWN_NETWORKS[config["settings"]["kind"]] == FUSED if is_own else _is_fused(head)
        head.network = FUSED if fused else FEATURES
    if head.network is None:
        head.layout = OWN if is_own else UNKNOWN
        head.kind = head.kind or "nothing that is known here"
        advice = advice or "Import knows EAGLE-1, EAGLE-2, HASS, EAGLE-3, 3.1"
        head.problem(f"this is no head of EAGLE's: {head.kind}; {_describe(head)}", advice, False)
        return head
    read_sizes(head)
    read_switches(head)
    check_tensors(head)
    fix = "Correct it by the run that made the head"
    head.problems += [Finding(f"config.json: {wrong}", fix=fix) for wrong in keys.wrong]
    sections = (keys, nested) if block is keys else (keys, block, nested)
    head.unknown_keys = [name for section in sections for name in section.left()]
    return head


def _name_tensors(head: HeadFolder) -> None:
    """Find this project's name of each tensor."""
    for name in head.tensors.stored:
        ours = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        if ours in head.names:
            head.problem(f"{head.names[ours]} and {name} are the same tensor by two names", "Keep the right one")
        head.names[ours] = name


def _layout_of(head: HeadFolder) -> str:
    """The project that writes checkpoints like this one."""
    config = head.config
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return SPECULATORS
    if head.prefixed:
        return AUTOMODEL
    if head.has_block("midlayer."):
        return REFERENCE if head.architectures[:1] == ["LlamaForCausalLM"] else MIDLAYER
    if isinstance(config.get("eagle_config"), dict) and "next_layer_regular" in config["eagle_config"]:
        return MODELOPT
    return LAYERS if _is_fused(head) else EAGLE1


def _is_fused(head: HeadFolder) -> bool:
    """Whether there is any sign of EAGLE-3's network."""
    words = f"{head.architectures[:1]} {head.config.get('speculators_model_type')}".lower()
    query, width = head.entry("layers.0.self_attn.q_proj.weight"), head.config.get("hidden_size")
    is_wide = query and len(query.shape) == 2 and type(width) is int and query.shape[1] == 2 * width
    named = "draft_vocab_size" in head.config or "eagle3" in words or head.has_block("midlayer.")
    return bool(FUSED_TENSORS & head.names.keys() or named or is_wide)


def _own_kind(config: dict[str, Any]) -> tuple[str, str]:
    """The kind of a head of this project with another network, and what to do with it."""
    kind = config["settings"].get("kind")
    if isinstance(kind, str) and kind in OWN_NETWORKS:
        return "", ""
    return f"a {short(kind)} of this project".replace("'", ""), "load_drafter reads it"


def _describe(head: HeadFolder) -> str:
    """The keys and tensors that may help to identify a checkpoint."""
    keys = ("architectures", "speculators_model_type", "model_type", "dflash_config", "medusa_num_heads")
    stated = [f"{key} is {short(head.config[key])}" for key in keys if key in head.config]
    parts = sorted({part for name in head.names if (part := name_part(name))})
    names = ", ".join(sorted(head.tensors.stored)[:4])
    return "; ".join([*stated, *parts, f"{len(head.names)} tensors: {names:.200}, ..."])
