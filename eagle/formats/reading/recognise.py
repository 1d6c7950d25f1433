"""Recognise a checkpoint: a head of some network, a language model, or nothing that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle.formats.networks.dflash_heads import DFlash
from eagle.formats.networks.dspark_heads import Domino, DSpark
from eagle.formats.networks.eagle1_heads import Eagle1
from eagle.formats.networks.eagle3_heads import Eagle3
from eagle.formats.networks.falcon_heads import Falcon
from eagle.formats.networks.hydra_heads import Hydra
from eagle.formats.networks.medusa_heads import Medusa
from eagle.formats.networks.mlp_speculators import Speculator
from eagle.formats.networks.mtp_layers import Mtp
from eagle.formats.networks.network import Network
from eagle.formats.networks.peagle_heads import PEagle
from eagle.formats.reading.config_keys import Keys, short
from eagle.formats.reading.files import read_json, read_tensors
from eagle.formats.reading.head_folder import OWN, HeadFolder, name_part
from eagle.formats.reading.target_files import TargetFiles

NOT_YET = "Heads of this kind are not readable here yet: serve it with an engine that knows it"
AS_DRAFT = "load_drafter takes it as a draft model, for a target with the same vocabulary (docs/drafters.md)"


class Unknown(Network):
    """A checkpoint that no network here describes, with its problem."""

    def match(self, head: HeadFolder, target: TargetFiles | None) -> None:
        """There is nothing to match."""

    def list_facts(self, head: HeadFolder) -> dict[str, Any]:
        """No facts."""
        return {}


UNKNOWN = Unknown()
MTP, FEATURES, FUSED = Mtp(), Eagle1(), Eagle3()
KINDS = (DSpark(), Domino(), DFlash(), PEagle(), Hydra(), Medusa(), Speculator(), Falcon())  # in order
NETWORKS = {network.name: network for network in (MTP, *KINDS, FEATURES, FUSED)}
OWN_NETWORKS = {method: network for network in NETWORKS.values() for method in network.methods}
FUSED_TENSORS = {"layers.0.hidden_norm.weight", "norm.weight", "d2t", "t2d", "fc_norm.0.weight"}
WHOLE_MTP = re.compile(r"layers\.\d+\.eh_proj\.|mtp_layers\.0\.input_proj\.")
EAGLE_TENSORS = re.compile(r"fc\.|fc_norm\.|(d2t|t2d)$|layers\.0\.hidden_norm\.|midlayer\.")
BLOCKS = re.compile(r"(?:^|\.)(?:layers|h|block|blocks)\.(\d+)\.")
MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def read_folder(path: Path) -> tuple[HeadFolder, Network]:
    """Read and recognise a folder with config.json and weights; ValueError if one of them cannot be read."""
    config = read_json(path, "config.json")
    keys = Keys(config)
    is_own = isinstance(config.get("settings"), dict) and isinstance(config.get("shape"), dict)
    block_key = "shape" if is_own else "transformer_layer_config"
    block = keys.section(block_key) if block_key in config else keys
    nested = keys.section("settings" if is_own else "eagle_config")
    head = HeadFolder(path, config, read_tensors(path), keys, block, nested)
    for name in head.tensors.stored:
        head.names[re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))] = name
    if is_own:
        return _recognise_own(head)
    head.kind, advice = kind_by_tensors(head.names, config)
    if not head.kind and any(name.startswith("layers.0.") for name in head.names):
        head.kind = (FUSED if _is_fused(head) else FEATURES).name
    if head.kind not in NETWORKS:
        head.kind = head.kind or "nothing that is known here"
        _refuse_kind(head, advice or "Import knows EAGLE-1, EAGLE-2, HASS, EAGLE-3, 3.1")
    return head, NETWORKS.get(head.kind, UNKNOWN)


def _recognise_own(head: HeadFolder) -> tuple[HeadFolder, Network]:
    """A head of this project, by the method that its settings name."""
    head.layout, method = OWN, head.config["settings"].get("kind")
    network = OWN_NETWORKS.get(method, UNKNOWN) if isinstance(method, str) else UNKNOWN
    head.kind = f"a {short(method)} of this project".replace("'", "")
    if network is UNKNOWN:
        _refuse_kind(head, "load_drafter reads it")
    return head, network


def _refuse_kind(head: HeadFolder, advice: str) -> None:
    head.problem(f"this is no head of EAGLE's: {head.kind}; {_describe(head)}", advice, False)


def kind_by_tensors(names: Iterable[str], config: dict[str, Any]) -> tuple[str, str]:
    """The kind of a checkpoint with these tensors, and what to do with it; two empty strings for an EAGLE head."""
    names, words = list(names), _read_words(config)
    for kind in KINDS:
        if any(re.match(kind.tensors, name) for name in names) or _is_named(kind, words, config):
            return kind.name, ""
    if not _is_eagle(names, words, config):
        layers = {int(match[1]) for name in names if (match := BLOCKS.search(name))}
        has_mtp = any(re.match(MTP.tensors, name) for name in names)
        if any(WHOLE_MTP.match(name) for name in names):  # in a whole model too, of which the rest is not looked at
            return MTP.name, ""
        if len(layers) > 1 or (not has_mtp and _is_whole(set(names))):
            facts = ", ".join(filter(None, (_architecture(config), f"{len(layers)} layers here")))
            return f"a causal language model ({facts})", AS_DRAFT
        if has_mtp or any(config.get(key) for key in MTP.common):
            return MTP.name, ""
        for kind in KINDS:
            if any(key in config for key in kind.common):
                return kind.name, ""
    if (speculator := config.get("speculators_model_type")) not in (None, "eagle3"):
        return f"a speculator of the type {speculator!r:.40}", NOT_YET
    return "", ""


def kind_by_config(config: dict[str, Any]) -> str:
    """The kind that the config states, for a checkpoint with unreadable weights; "" if unknown."""
    words = _read_words(config)
    for kind in (*KINDS, MTP):
        if _is_named(kind, words, config):
            return kind.name
    layers, architecture = config.get("num_hidden_layers"), _architecture(config)
    is_deep = isinstance(layers, int) and layers > 1
    if is_deep and MODEL.search(architecture) and not _is_eagle([], words, config):
        return f"a causal language model ({architecture})"
    return ""


def _is_named(kind: Network, words: list[str], config: dict[str, Any]) -> bool:
    return any(re.search(kind.words, word) for word in words) or any(key in config for key in kind.keys)


def _is_eagle(names: list[str], words: list[str], config: dict[str, Any]) -> bool:
    """Whether there is any sign of an EAGLE head, complete or not."""
    keys = {"draft_vocab_size", "eagle_config", "speculators_config"} & config.keys()
    return bool(keys) or any("eagle" in word for word in words) or any(EAGLE_TENSORS.match(name) for name in names)


def _is_whole(names: set[str]) -> bool:
    """Whether a single layer has the parts that a head lacks: input norm, embedding, and final norm or LM head."""
    has_output = bool(names & {"norm.weight", "lm_head.weight"})
    return has_output and {"layers.0.input_layernorm.weight", "embed_tokens.weight"} <= names


def _read_words(config: dict[str, Any]) -> list[str]:
    """The names of model and method in a config, in lower case."""
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    words = [config.get("model_type"), config.get("speculators_model_type"), projector, _architecture(config)]
    return [word.lower() for word in words if isinstance(word, str) and word]


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first[:80] if isinstance(first, str) and first.isprintable() else ""


def _is_fused(head: HeadFolder) -> bool:
    """Whether there is any sign of EAGLE-3's network."""
    words = f"{head.architectures[:1]} {head.config.get('speculators_model_type')}".lower()
    query, width = head.entry("layers.0.self_attn.q_proj.weight"), head.config.get("hidden_size")
    is_wide = query and len(query.shape) == 2 and type(width) is int and query.shape[1] == 2 * width
    named = head.has_block("midlayer.") or "draft_vocab_size" in head.config or "eagle3" in words
    return bool(FUSED_TENSORS & head.names.keys() or named or is_wide)


def _describe(head: HeadFolder) -> str:
    """The keys and tensors that may help to identify a checkpoint."""
    keys = ("architectures", "speculators_model_type", "model_type", "dflash_config", "medusa_num_heads")
    stated = [f"{key} is {short(head.config[key])}" for key in keys if key in head.config]
    parts = sorted({part for name in head.names if (part := name_part(name))})
    names = ", ".join(sorted(head.tensors.stored)[:4])
    return "; ".join([*stated, *parts, f"{len(head.names)} tensors: {names:.200}, ..."])
