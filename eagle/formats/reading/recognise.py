"""Recognise a checkpoint: a head of some network, a language model, or nothing that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle.formats.networks.block_heads import (
    DFLASH2_HEADS,
    DFLASH_HEADS,
    DOMINO_HEADS,
    DSPARK_HEADS,
    LILICORR_HEADS,
    XPRESS_HEADS,
)
from eagle.formats.networks.eagle_heads import EAGLE1_HEADS, EAGLE3_HEADS, PEAGLE_HEADS
from eagle.formats.networks.falcon_heads import FALCON_HEADS
from eagle.formats.networks.level_networks import HYDRA_HEADS, MEDUSA_HEADS, SPECULATOR_HEADS
from eagle.formats.networks.mtp_layers import MTP_HEADS
from eagle.formats.networks.network import Network
from eagle.formats.reading.config_keys import Keys, short
from eagle.formats.reading.files import read_json, read_tensors
from eagle.formats.reading.head_folder import OWN, HeadFolder, describe_tensor, usual_name

NOT_YET = "Heads of this kind are not readable here yet: serve it with an engine that knows it"
# advice on a language model
AS_DRAFT = "load_drafter takes it as a draft model, for a target with the same vocabulary (docs/drafters.md)"
# networks with tensors or keys that no other has, in the order of the search: some have those of a later one too
WITH_SIGNS = (
    DSPARK_HEADS,
    DOMINO_HEADS,
    XPRESS_HEADS,
    LILICORR_HEADS,
    DFLASH2_HEADS,
    DFLASH_HEADS,
    PEAGLE_HEADS,
    HYDRA_HEADS,
    MEDUSA_HEADS,
    SPECULATOR_HEADS,
    FALCON_HEADS,
)
NETWORKS = {
    network.name: network for network in (MTP_HEADS, *WITH_SIGNS, EAGLE1_HEADS, EAGLE3_HEADS)
}
FUSED_TENSORS = {"layers.0.hidden_norm.weight", "norm.weight", "d2t", "t2d", "fc_norm.0.weight"}
MTP_PROJECTION = re.compile(r"layers\.\d+\.eh_proj\.|mtp_layers\.0\.input_proj\.")
EAGLE_TENSORS = re.compile(r"fc\.|fc_norm\.|(d2t|t2d)$|layers\.0\.hidden_norm\.|midlayer\.")
LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|block|blocks)\.(\d+)\.")
LANGUAGE_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def read_folder(path: Path) -> tuple[HeadFolder, Network | None]:
    """Read and recognise a folder with config.json and weights.

    Tensors are read by the headers of their files alone.

    Returns:
        The checkpoint and its network. If no network here describes it, the second is None and the reason is among
        the checkpoint's problems. ValueError if one of the files cannot be read.
    """
    config = read_json(path, "config.json")
    keys = Keys(config)
    # heads of this project have two sections of their own, and configs of speculators nest the sizes of the block
    is_own = isinstance(config.get("settings"), dict) and isinstance(config.get("shape"), dict)
    block_key = "shape" if is_own else "transformer_layer_config"
    head = HeadFolder(
        path=path,
        config=config,
        tensors=read_tensors(path),
        keys=keys,
        block=keys.section(block_key) if block_key in config else keys,
        nested=keys.section("settings" if is_own else "eagle_config"),
    )
    # names for recognition; `match` replaces them by those of the network's table
    for name in head.tensors.stored:
        head.names[usual_name(name)] = name
    network = _recognise_own(head) if is_own else _recognise_foreign(head)
    return head, network


def _recognise_own(head: HeadFolder) -> Network | None:
    """Return the network of a head of this project, by the method in its settings.

    None, and a problem of the head, for a method of this project whose network no other tool has. `head` is the
    checkpoint while it is read.
    """
    head.layout = OWN
    method = head.config["settings"].get("kind")
    head.kind = f"a {short(method)} of this project".replace("'", "")
    for network in NETWORKS.values():
        if method in network.methods:
            return network
    _refuse_kind(head, "load_drafter reads it")
    return None


def _recognise_foreign(head: HeadFolder) -> Network | None:
    """Return the network of another tool's checkpoint, by its tensors and its config; `head.kind` is set.

    None, and a problem of the head, if it is of no known network. `head` is the checkpoint while it is read. A network
    is a table of tensor names that several methods may share.
    """
    head.kind, advice = kind_by_tensors(head.names, head.config)
    # EAGLE-1 and EAGLE-3 share the names of most tensors
    if not head.kind and any(name.startswith("layers.0.") for name in head.names):
        network = EAGLE3_HEADS if _is_fused(head) else EAGLE1_HEADS
        head.kind = network.name
    if head.kind in NETWORKS:
        return NETWORKS[head.kind]
    head.kind = head.kind or "nothing that is known here"
    _refuse_kind(head, advice or "Import knows EAGLE-1, EAGLE-2, HASS, EAGLE-3, 3.1")
    return None


def _refuse_kind(head: HeadFolder, advice: str) -> None:
    """Add a problem to the checkpoint: that it is no head of a known network, with what it is and advice on it."""
    head.problem(f"this is no head of EAGLE's: {head.kind}; {_describe(head)}", advice, fatal=False)


def kind_by_tensors(names: Iterable[str], config: dict[str, Any]) -> tuple[str, str]:
    """Return in words what a checkpoint is, by its tensors and its config, and advice on it.

    The words are a network's name where one is recognised. Both are empty for EAGLE-1 and EAGLE-3, and for what is
    unknown.

    Args:
        names: The tensors' names, as most trainers have them.
        config: The contents of config.json, of unknown origin.
    """
    names = list(names)
    words = _read_words(config)
    # either sign is enough, as tensors or config may be those of an older release
    for network in WITH_SIGNS:
        if any(re.match(network.tensors, name) for name in names) or _is_named(
            network, words, config
        ):
            return network.name, ""
    # an EAGLE head has one layer under a language model's names, so it is excluded first
    if not _is_eagle(names, words, config):
        kind, advice = _kind_of_model(names, config)
        if kind:
            return kind, advice
    speculator = config.get("speculators_model_type")
    if speculator not in (None, "eagle3"):
        return f"a speculator of the type {speculator!r:.40}", NOT_YET
    return "", ""


def _kind_of_model(names: list[str], config: dict[str, Any]) -> tuple[str, str]:
    """Return in words what a checkpoint is that may be a language model or a part of one, and advice on it.

    Both are "" if it is neither. `names` are those of its tensors as most trainers have them, and `config` is
    config.json.
    """
    # an MTP layer may be stored among all layers of its model, and only the layer is read then
    if any(MTP_PROJECTION.match(name) for name in names):
        return MTP_HEADS.name, ""
    matches = (LAYER_NUMBER.search(name) for name in names)
    layers = {match[1] for match in matches if match}  # the numbers of its layers
    # whether a tensor of an MTP layer, which predicts further tokens beside a model's own, is among them
    has_mtp = any(re.match(MTP_HEADS.tensors, name) for name in names)
    if len(layers) > 1 or (not has_mtp and _is_whole_model(set(names))):
        facts = [_architecture(config), f"{len(layers)} layers here"]
        return f"a causal language model ({', '.join(filter(None, facts))})", AS_DRAFT
    if has_mtp or any(config.get(key) for key in MTP_HEADS.ambiguous_keys):
        return MTP_HEADS.name, ""
    for network in WITH_SIGNS:
        if any(key in config for key in network.ambiguous_keys):
            return network.name, ""
    return "", ""


def kind_by_config(config: dict[str, Any]) -> str:
    """Return in words what a checkpoint with unreadable weights is, by its config alone; "" if unknown."""
    words = _read_words(config)
    for network in (*WITH_SIGNS, MTP_HEADS):
        if _is_named(network, words, config):
            return network.name
    layers = config.get("num_hidden_layers")
    architecture = _architecture(config)
    # most heads have one layer, so several are a language model's
    is_deep = isinstance(layers, int) and layers > 1
    if is_deep and LANGUAGE_MODEL.search(architecture) and not _is_eagle([], words, config):
        return f"a causal language model ({architecture})"
    return ""


def _is_named(network: Network, words: list[str], config: dict[str, Any]) -> bool:
    """Return whether a config names a network, by one of its `words` or by a key that no other network has.

    The words are the config's types, method and architecture, in lower case.
    """
    return any(re.search(network.type_words, word) for word in words) or any(
        key in config for key in network.config_keys
    )


def _is_eagle(names: list[str], words: list[str], config: dict[str, Any]) -> bool:
    """Return whether a key, a word of the config or a tensor belongs to an EAGLE head, which may be incomplete.

    Args:
        names: The tensors' names, as most trainers have them.
        words: The words of the config that may name a network, in lower case.
        config: The config.
    """
    keys = {"draft_vocab_size", "eagle_config", "speculators_config"} & config.keys()
    return (
        bool(keys)
        or any("eagle" in word for word in words)
        or any(EAGLE_TENSORS.match(name) for name in names)
    )


def _is_whole_model(names: set[str]) -> bool:
    """Return whether tensors of these names are a whole model of one layer: no head has all of them.

    A language model of one layer has tensors of the same names as a draft head, and more.
    """
    has_output = bool(names & {"norm.weight", "lm_head.weight"})
    return has_output and {"layers.0.input_layernorm.weight", "embed_tokens.weight"} <= names


def _read_words(config: dict[str, Any]) -> list[str]:
    """Return the words in a config that may name a network, in lower case: types, method and architecture."""
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    # any of these may be missing or of another type
    words = [
        config.get("model_type"),
        config.get("speculators_model_type"),
        projector,
        _architecture(config),
    ]
    return [word.lower() for word in words if isinstance(word, str) and word]


def _architecture(config: dict[str, Any]) -> str:
    """Return the first of the config's architectures, shortened; "" if there is none or it is no printable string."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return ""
    first = names[0]
    if not isinstance(first, str) or not first.isprintable():
        return ""
    return first[:80]


def _is_fused(head: HeadFolder) -> bool:
    """Return whether an EAGLE head is an EAGLE-3 head, which fuses several layers: one sign is enough.

    Else it is an EAGLE-1 head.
    """
    words = f"{head.architectures[:1]} {head.config.get('speculators_model_type')}".lower()
    is_named = head.has_block("midlayer.") or "draft_vocab_size" in head.config or "eagle3" in words
    # its attention reads embedding and state concatenated: q_proj is [..., 2 x width]
    width = head.config.get("hidden_size")
    is_wide = type(width) is int and head.side("layers.0.self_attn.q_proj.weight", 1) == 2 * width
    return bool(FUSED_TENSORS & head.names.keys()) or is_named or is_wide


def _describe(head: HeadFolder) -> str:
    """Return, as text, the keys and tensors by which a user may identify a checkpoint that is not known here.

    `head` is the checkpoint while it is read.
    """
    keys = (
        "architectures",
        "speculators_model_type",
        "model_type",
        "dflash_config",
        "medusa_num_heads",
    )
    values = [f"{key} is {short(head.config[key])}" for key in keys if key in head.config]
    meanings = {describe_tensor(name) for name in head.names} - {""}
    names = ", ".join(sorted(head.tensors.stored)[:4])
    return "; ".join([*values, *sorted(meanings), f"{len(head.names)} tensors: {names:.200}, ..."])
