"""Recognising a checkpoint: whose layout it is, and which network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eagle.formats.expected import FOREIGN_NAMES, check_tensors, sizes, switches
from eagle.formats.files import read_json, read_tensors
from eagle.formats.keys import Keys, short
from eagle.formats.kinds import kind_by_tensors
from eagle.formats.tensors import (
    AUTOMODEL,
    EAGLE1,
    FEATURES,
    FUSED,
    LAYERS,
    MIDLAYER,
    MODELOPT,
    OWN,
    REFERENCE,
    SPECULATORS,
    UNKNOWN,
    Finding,
    Reading,
)

OWN_NETWORKS = {"eagle1": FEATURES, "hass": FEATURES, "eagle3": FUSED}


def read(folder: Path) -> Reading:
    """A folder with config.json and weights, recognised; ValueError where one of them cannot be read at all."""
    config = read_json(folder, "config.json")
    keys = Keys(config)
    own = isinstance(config.get("settings"), dict) and isinstance(config.get("shape"), dict)
    named = "shape" if own else "transformer_layer_config"
    block = keys.section(named) if named in config else keys
    nested = keys.section("settings" if own else "eagle_config")
    reading = Reading(folder, config, read_tensors(folder), keys, block, nested)
    reading.names = _names(reading)
    reading.layout = _layout(reading, own)
    reading.kind, advice = _own_kind(config) if own else kind_by_tensors(reading.names, config)
    reading.network = _network(reading, own)
    if reading.network is None:
        reading.layout = OWN if own else UNKNOWN
        reading.kind = reading.kind or "nothing that is known here"
        advice = advice or "Import knows EAGLE-1, EAGLE-2, HASS, EAGLE-3, 3.1"
        reading.problem(f"this is no head of EAGLE's: {reading.kind}; {_guess(reading)}", advice, False)
        return reading
    sizes(reading)
    switches(reading)
    check_tensors(reading)
    reading.problems += [
        Finding(f"config.json: {wrong}", fix="Correct it by the run that made the head") for wrong in keys.wrong
    ]
    reading.unknown = [name for part in ({id(k): k for k in (keys, block, nested)}).values() for name in part.left()]
    return reading


def _names(reading: Reading) -> dict[str, str]:
    """This project's name of each tensor, and the one it goes by here."""
    found: dict[str, str] = {}
    for name in reading.tensors.stored:
        ours = name.removeprefix("model.")
        ours = re.sub(r"^midlayer\.", "layers.0.", ours)
        if ours in found:
            reading.problem(f"{found[ours]} and {name} are the same tensor by two names", "Keep the right one")
        found[ours] = name
    return found


def prefixed(reading: Reading) -> list[str]:
    """Tensors that stand under `model.`."""
    return [name for name in reading.tensors.stored if name.startswith("model.")]


def _layout(reading: Reading, own: bool) -> str:
    config, stored = reading.config, reading.tensors.stored
    if own:
        return OWN
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return SPECULATORS
    if prefixed(reading):
        return AUTOMODEL
    if any(name.startswith("midlayer.") for name in stored):
        return REFERENCE if _architecture(reading) == "LlamaForCausalLM" else MIDLAYER
    if isinstance(config.get("eagle_config"), dict) and "next_layer_regular" in config["eagle_config"]:
        return MODELOPT
    return LAYERS if _fused(reading) else EAGLE1


def architectures(reading: Reading) -> list[str]:
    """The names by which engines know what to load."""
    named = reading.config.get("architectures")
    return [name[:80] for name in named if isinstance(name, str)][:8] if isinstance(named, list) else []


def _architecture(reading: Reading) -> str:
    return next(iter(architectures(reading)), "")


def _fused(reading: Reading) -> bool:
    """Whether anything speaks for EAGLE-3's network."""
    marks = {"layers.0.hidden_norm.weight", "norm.weight", "d2t", "t2d", "fc_norm.0.weight"}
    named = f"{_architecture(reading)} {reading.config.get('speculators_model_type')}".lower()
    query = reading.stored("layers.0.self_attn.q_proj.weight")
    hidden = reading.config.get("hidden_size")
    wide = query is not None and len(query.shape) == 2 and type(hidden) is int and query.shape[1] == 2 * hidden
    midlayer = any(name.startswith("midlayer.") for name in reading.tensors.stored)
    return bool(
        marks & reading.names.keys() or "draft_vocab_size" in reading.config or "eagle3" in named or wide or midlayer
    )


def _own_kind(config: dict[str, Any]) -> tuple[str, str]:
    """What this project made that is none of the two networks, and what to do with it."""
    kind = config["settings"].get("kind")
    known = isinstance(kind, str) and kind in OWN_NETWORKS
    return ("", "") if known else (f"a {short(kind)} of this project".replace("'", ""), "load_drafter reads it")


def _network(reading: Reading, own: bool) -> str | None:
    if own:
        kind = reading.config["settings"].get("kind")
        return OWN_NETWORKS.get(kind) if isinstance(kind, str) else None
    if reading.kind or not any(name.startswith("layers.0.") for name in reading.names):
        return None
    return FUSED if _fused(reading) else FEATURES


def _guess(reading: Reading) -> str:
    """What else a checkpoint may be."""
    found = {what for pattern, what in FOREIGN_NAMES.items() for name in reading.names if re.match(pattern, name)}
    says = [
        f"{key} is {short(reading.config[key])}"
        for key in ("architectures", "speculators_model_type", "model_type", "dflash_config", "medusa_num_heads")
        if key in reading.config
    ]
    names = ", ".join(sorted(reading.tensors.stored)[:4])
    return "; ".join([*says, *sorted(found), f"{len(reading.names)} tensors: {names:.200}, ..."])
