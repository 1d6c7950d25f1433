"""The parts of a checkpoint: sizes, switches and tensors, each used, known to be irrelevant, or reported."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.networks import EMBEDDING, FUSED
from eagle.formats.reading.files import TensorEntry
from eagle.formats.reading.head_folder import OWN, SPECULATORS, HeadFolder
from eagle.formats.reading.keys import Keys, read_rope, short

FOREIGN_PARTS = {  # tensors that no network here has
    r"parallel_draft_heads\.": "a Medusa head",
    r".*\.(kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj|q_a_\w+|q_b_proj)\.": "multi-head latent attention",
    r".*\.mlp\.(experts|gate\.|shared_expert)": "a mixture of experts",
    r"layers\.[1-9]\d*\.": "a second layer",
    r".*\.(q|k)_norm\.": "Qwen3's norm of queries and keys",
    r".*\.self_attn\.\w+_proj\.bias": "a bias in attention (attention_bias, qkv_bias)",
    r".*\.mlp\.\w+_proj\.bias": "a bias in the MLP (mlp_bias)",
    r"input_norm\.|norm_before_fc\.": "one norm over all taps (norm_before_fc)",
    r"(post_embedding|pre_lm_head|embed|lm_head)_?layernorm\.": "HASS's norm around the head (embed_layernorm, ...)",
    r"lm_head\.bias": "a bias in the LM head",
    r".*\.(weight_scale|input_scale|qweight|qzeros|scales|weight_packed)": "quantised weights",
}
REMEDIES = {
    "fc.weight": "Engines start from random numbers there without a word: export again",
    "lm_head.weight": "Engines use the target's, random numbers or none: export it, a head trains its own",
    "d2t": "Engines take the draft's numbers for tokens: export it",
}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def name_part(name: str) -> str:
    """The meaning of a tensor that no network here has; "" if unknown."""
    return next((part for pattern, part in FOREIGN_PARTS.items() if re.match(pattern, name)), "")


def read_sizes(head: HeadFolder) -> None:
    """The block's sizes from the config, else from its tensors, else Llama's defaults."""
    block = head.block
    width = _read_size(head, "hidden_size", "fc.weight")
    heads = block.size("num_attention_heads")
    if heads is None:
        head.problem("config.json: no num_attention_heads", "Take it from the config of the training run")
    head.shape = {
        "hidden_size": width,
        "intermediate_size": _read_size(head, "intermediate_size", "layers.0.mlp.gate_proj.weight"),
        "num_attention_heads": heads or 1,
        "vocab_size": _read_size(head, "vocab_size", EMBEDDING if EMBEDDING in head.names else "t2d"),
        "rope_parameters": read_rope(block, head.notes),
    }
    defaults = {
        "num_key_value_heads": heads or 1,
        "head_dim": max(width // (heads or 1), 1),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    for name, default in defaults.items():
        value = block.number(name) if name == "rms_norm_eps" else block.size(name)
        if not value:
            head.notes.append(f"no {name}: {default}, as in a Llama config without one")
        head.shape[name] = value or default
    head.shape["rms_norm_eps"] = float(head.shape["rms_norm_eps"])
    shared = head.shape["num_key_value_heads"]
    if heads and heads % shared:
        head.problem(f"config.json: {heads} heads cannot share {shared} key-value heads", "Correct one of them")


def _read_size(head: HeadFolder, name: str, tensor: str) -> int:
    """A size by the config, else the rows of a tensor."""
    size, entry = head.block.size(name), head.entry(tensor)
    if size is None and entry is not None and len(entry.shape) > 0:
        size = entry.shape[0]
        head.notes.append(f"no {name}: {size}, the rows of {tensor}")
    if not size:
        head.problem(f"config.json: no {name}", "Take it from the config of the target or of the training run")
    return size or 1


def read_switches(head: HeadFolder) -> None:
    """Read the settings that change the computation; refuse those without a counterpart here."""
    keys, block, nested = head.keys, head.block, head.nested
    refused = {
        "hidden_act": block.text("hidden_act") not in (None, "silu"),
        "sliding_window": _slides(block) and not _read_window(block),
        "target_hidden_size": keys.size("target_hidden_size") not in (None, head.shape["hidden_size"]),
        "norm_before_fc": bool(keys.flag("norm_before_fc") or nested.flag("norm_before_fc")),
        "parallel_draft_step": (nested.size("parallel_draft_step") or 1) > 1,
        "use_mtp_layernorm": bool(nested.flag("use_mtp_layernorm")),
        "use_input_layernorm_in_first_layer": nested.flag("use_input_layernorm_in_first_layer") is False,
        "mask_token_id": "mask_token_id" in keys.values,
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    for name in (name for name, is_refused in refused.items() if is_refused):
        value = next((part.values[name] for part in (keys, block, nested) if name in part.values), None)
        head.problem(f"config.json: {name} is {short(value)}, which no head here can be", fatal=False)
    keys.taken |= {"mask_token_id", "quantization_config"}
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"):
        block.flag(name)
    block.size("num_hidden_layers")
    if block is not keys:
        keys.flag("tie_word_embeddings")
    if head.layout == SPECULATORS:
        keys.section("speculators_config")
    if head.layout == OWN:
        nested.taken |= DRAFTERS[nested.values["kind"]].Settings.model_fields.keys()
    if head.network == FUSED:
        _read_fused(head)
    else:
        _read_features(head)
    if window := _read_window(block):
        head.switches["window"] = {"sinks": 0, "recent": window}


def _slides(block: Keys) -> bool:
    window, used, kinds = block.size("sliding_window"), block.flag("use_sliding_window"), block.words("layer_types")
    return "sliding_attention" in kinds[:1] if kinds else bool(window and used is not False)


def _read_window(block: Keys) -> int | None:
    """The window switched on by `layer_types`, as engines read it; without `layer_types` engines differ."""
    return block.size("sliding_window") if "sliding_attention" in block.words("layer_types")[:1] else None


def _read_features(head: HeadFolder) -> None:
    """EAGLE-1's one switch: the file decides whether `fc` has a bias."""
    is_own, entry = head.layout == OWN, head.entry("fc.bias")
    promised = head.nested.flag("fc_bias") if is_own else head.keys.flag("bias")
    if promised and entry is None:
        head.problem("config.json says that fc has a bias, and fc.bias is missing", "Export the head again")
    if promised is None and not is_own:
        state = "is there" if entry else "is not there, and a reader that expects one starts it at random"
        head.notes.append(f"no `bias` in config.json, which SafeAILab/EAGLE takes for true: fc.bias {state}")
    head.draft_vocab_size = head.shape["vocab_size"]
    head.nested.flag("use_aux_hidden_state")
    head.switches = {"fc_bias": promised is not False if is_own else entry is not None}


def _read_fused(head: HeadFolder) -> None:
    """EAGLE-3's draft vocabulary, its taps and its switches."""
    keys, nested, is_own = head.keys, head.nested, head.layout == OWN
    width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
    output, fc = head.entry("lm_head.weight"), head.entry("fc.weight")
    size = (head.block if is_own else keys).size("draft_vocab_size")
    if size is None:
        size = output.shape[0] if output and output.shape else vocab_size
        where = "the rows of lm_head.weight" if output else "the whole vocabulary"
        head.notes.append(f"no draft_vocab_size: {size}, {where}")
    if size > vocab_size:
        head.problem(f"draft_vocab_size is {size}, more than the vocabulary of {vocab_size}", fatal=False)
    head.draft_vocab_size = size
    columns = fc.shape[1] if fc and len(fc.shape) == 2 else 3 * width
    head.tap_count, rest = divmod(columns, width)
    if rest or not 0 < head.tap_count < 100:
        head.problem(f"fc.weight reads {columns} numbers, expected a multiple of {width}, the width")
        head.tap_count = 3
    for name in ("fc_norm", "norm_output", "norm_before_residual"):
        _read_switch(head, name)
    is_there = "fc_norm.0.weight" in head.names
    if is_there != head.switches["fc_norm"]:
        state = f"fc_norm.0.weight {'is' if is_there else 'is not'} there"
        head.problem(f"config.json: fc_norm is {head.switches['fc_norm']}, and {state}")
    if nested.flag("use_aux_hidden_state") is False:
        head.problem("config.json: eagle_config.use_aux_hidden_state is false, but this is EAGLE-3's network")
    if is_own:
        head.inputs = nested.whole("taps", least=-1)
    else:
        head.inputs = keys.whole(LAYER_IDS)
        head.outputs = nested.whole(LAYER_IDS) or None  # ModelOpt writes [] for its default


def _read_switch(head: HeadFolder, name: str) -> None:
    """A switch at the top of a config or in eagle_config; off if it is in neither."""
    outer = None if head.layout == OWN else head.keys.flag(name)
    inner = head.nested.flag(name)
    if None not in (outer, inner) and outer != inner:
        head.problem(f"config.json: {name} is {outer} and eagle_config.{name} is {inner}", "Correct one of them")
    head.switches[name] = bool(outer if outer is not None else inner)
    if outer is None and inner is None:
        head.notes.append(f"no {name}: false")


# -- tensors ----------------------------------------------------------------------------------------------------------


def build_drafter(head: HeadFolder, taps: tuple[int, ...], sizes: dict[str, Any]) -> TrainableDrafter:
    """A drafter with a checkpoint's network and these sizes, and uninitialised weights."""
    settings: dict[str, Any] = {"intermediate_size": sizes["intermediate_size"], **head.switches}
    overrides = {}
    if head.is_fused:
        overrides = {"draft_vocab_size": head.draft_vocab_size}
        settings["taps"] = taps
        settings["draft_vocab"] = head.draft_vocab_size if head.draft_vocab_size < sizes["vocab_size"] else None
    method: Any = DRAFTERS["eagle3" if head.is_fused else "eagle1"]
    try:
        shape = head_shape(SimpleNamespace(**sizes), **overrides)
        drafter: TrainableDrafter = method(method.Settings(**settings), shape)
    except Exception as error:  # of many kinds: transformers checks the rotary parameters, torch the sizes
        raise ValueError(f"{head.path}: no head of these sizes can be made: {error!r:.300}") from None
    return drafter


def expected_tensors(head: HeadFolder) -> dict[str, tuple[int, ...]]:
    """The tensors of a head here with this network and these sizes; `t2d` follows from `d2t` in other layouts."""
    with torch.device("meta"):  # which takes no memory
        sizes = {**head.shape, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        drafter = build_drafter(head, tuple(range(head.tap_count)), sizes)
    tensors = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    return tensors if head.layout == OWN else {name: size for name, size in tensors.items() if name != "t2d"}


def _spare_tensors(head: HeadFolder) -> dict[str, tuple[int, ...] | None]:
    """Tensors that may stand beside the network's, with their sizes."""
    if head.layout == OWN:
        return {}
    width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
    spare: dict[str, tuple[int, ...] | None] = {EMBEDDING: (vocab_size, width)}
    spare |= {"rotary_emb.inv_freq": None, "layers.0.self_attn.rotary_emb.inv_freq": None}
    if head.is_fused:
        return spare | {"d2t": (head.draft_vocab_size,), "t2d": (vocab_size,), "fc.bias": (width,)}
    return spare | {"lm_head.weight": (vocab_size, width)}


def check_tensors(head: HeadFolder) -> None:
    """Check that every expected tensor is present in its size, and that every other one is known."""
    try:
        expected, spare = expected_tensors(head), _spare_tensors(head)
    except ValueError as error:
        head.problem(str(error), "Correct config.json")
        return
    for name, size in expected.items():
        if name not in head.names:
            fix = REMEDIES.get(name, "Engines may start from random numbers there: export again")
            head.problem(f"{name} is missing, expected {_show_size(size)}", fix)
    for name, wanted in {**spare, **expected}.items():
        entry = head.entry(name)
        if entry is None:
            continue
        if wanted is not None and entry.shape != wanted:
            what = f"{name} is {_show_size(entry.shape)}, expected {_show_size(wanted)}"
            head.problem(what, "Correct config.json, or export again")
        elif name in expected and name not in ("d2t", "t2d") and not _is_float(entry):
            head.problem(f"{name} is in {entry.dtype}, expected plain floating-point weights", fatal=False)
        elif name == "d2t" and entry.dtype.is_floating_point:
            head.problem(f"d2t is in {entry.dtype}, expected whole numbers", "Export again")
    others: dict[str, list[str]] = {}
    for name in sorted(head.names.keys() - expected.keys() - spare.keys()):
        others.setdefault(name_part(name), []).append(name)
    for part, names in others.items():
        listed = f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if part:
            head.problem(f"{part}: {listed}; no head here has that", fatal=False)
        else:
            fix = "Take them out if they do not matter: nothing is left out here"
            head.problem(f"unknown tensors: {listed}", fix)


def _is_float(entry: TensorEntry) -> bool:
    return entry.dtype.is_floating_point and entry.dtype.itemsize > 1


def _show_size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"
