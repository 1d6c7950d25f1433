"""Identify checkpoints other than EAGLE heads (language models, other methods) by tensor names and keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOT_YET = "Heads of this kind are not readable here yet: serve it with an engine that knows it"
AS_DRAFT = "load_drafter takes it as a draft model, for a target with the same vocabulary (docs/drafters.md)"


@dataclass(frozen=True)
class Kind:
    """The signs of one method; any of them is enough."""

    name: str
    tensors: str  # begins one of the tensors' names, `model.` taken off
    words: str = "^$"  # stands in architectures, model_type, speculators_model_type or projector_type
    keys: tuple[str, ...] = ()  # of config.json
    common: tuple[str, ...] = ()  # keys that a language model may have too


KINDS = (
    Kind("a DSpark head", r"(markov_head|confidence_head)\.", "dspark"),
    Kind("a Domino head", r"(prefix_gru|embed_proj)\.", "domino"),
    Kind("a DFlash head", r"hidden_norm\.weight$", "dflash", ("dflash_config",), ("block_size",)),
    Kind("a P-EAGLE head", r"mask_hidden$", "peagle"),
    Kind("Hydra heads", r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer)\.", "hydra", ("hydra_num_heads",)),
    Kind(
        "Medusa heads",
        r"(medusa_heads?|lm_heads|blocks\.\d+\.layers)\.|\d+\.\d+\.(linear\.)?(weight|bias)$",
        "medusa",
        ("medusa_num_heads", "medusa_num_layers"),
    ),
    Kind(
        "an MLP speculator",
        r"(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)$",
        "mlp_?speculator",
        ("top_k_tokens_per_head",),
        ("n_predict",),
    ),
    Kind("a FALCON head", r"lstm\.(weight|bias)"),
)
MTP = Kind(
    "a layer of multi-token prediction (MTP)",
    r"(layers\.\d+\.|mtp\.)?(eh_proj|enorm|hnorm|shared_head)\b|(mtp|mtp_layers|mtp_block)\.",
    r"mtp",
    common=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
)
WHOLE_MTP = re.compile(r"layers\.\d+\.eh_proj\.|mtp_layers\.0\.input_proj\.")
EAGLE_TENSORS = re.compile(r"fc\.|fc_norm\.|(d2t|t2d)$|layers\.0\.hidden_norm\.|midlayer\.")
BLOCKS = re.compile(r"(?:^|\.)(?:layers|h|block|blocks)\.(\d+)\.")
MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def kind_by_tensors(names: Iterable[str], config: dict[str, Any]) -> tuple[str, str]:
    """The kind of a checkpoint with these tensors, and what to do with it; two empty strings for an EAGLE head."""
    names, words = list(names), _read_words(config)
    for kind in KINDS:
        if any(re.match(kind.tensors, name) for name in names) or _is_named(kind, words, config):
            return kind.name, NOT_YET
    if not _is_eagle(names, words, config):
        layers = {int(match[1]) for name in names if (match := BLOCKS.search(name))}
        has_mtp = any(re.match(MTP.tensors, name) for name in names)
        if any(WHOLE_MTP.match(name) for name in names):  # in a whole model too, of which the rest is not looked at
            return MTP.name, NOT_YET
        if len(layers) > 1 or (not has_mtp and _is_whole(set(names))):
            return f"a causal language model ({_architecture(config)}, {len(layers)} layers here)", AS_DRAFT
        if has_mtp or any(config.get(key) for key in MTP.common):
            return MTP.name, NOT_YET
        for kind in KINDS:
            if any(key in config for key in kind.common):
                return kind.name, NOT_YET
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


def _is_named(kind: Kind, words: list[str], config: dict[str, Any]) -> bool:
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
    return [word.lower() for word in words if isinstance(word, str)]


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first[:80] if isinstance(first, str) and first.isprintable() else ""
