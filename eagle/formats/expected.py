"""The parts of a checkpoint: sizes, switches and tensors, each used, known to be of no matter, or told."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

import re

from eagle.formats.files import Stored
from eagle.formats.keys import Keys, rope_of, short
from eagle.formats.tensors import FEATURES, FUSED, OWN, SPECULATORS, SWITCHES, Reading

FOREIGN_NAMES = {  # what stands for parts that no network here has
    r"mask_hidden": "P-EAGLE's state of tokens not yet seen",
    r"(markov_head|confidence_head)\.": "a part of DSpark",
    r"prefix_gru\.": "a part of Domino",
    r"(parallel_draft_heads|medusa_heads|lm_heads|blocks\.\d+)\.|\d+\.\d+\.(linear\.)?(weight|bias)": "a Medusa head",
    r"(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)": "a part of an MLP speculator",
    r"lstm\.": "FALCON's recurrent cell in place of fc",
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
SPARE = ("embed_tokens.weight", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")


def sizes(reading: Reading) -> None:
    """The block's sizes: as the config says, else as its tensors have them, else as a Llama config without them."""
    block, notes = reading.block, reading.notes

    def of(name: str, tensor: str) -> int:
        found, stored = block.size(name), reading.stored(tensor)
        if found is None and stored is not None and len(stored.shape) > 0:
            found = stored.shape[0]
            notes.append(f"no {name}: {found}, the rows of {tensor}")
        if not found:
            reading.problem(f"config.json: no {name}", "Take it from the config of the target or of the training run")
        return found or 1

    hidden, heads = of("hidden_size", "fc.weight"), block.size("num_attention_heads")
    if heads is None:
        reading.problem("config.json: no num_attention_heads", "Take it from the config of the training run")
    positions, eps = block.size("max_position_embeddings"), block.number("rms_norm_eps")
    kv_heads, head_dim = block.size("num_key_value_heads"), block.size("head_dim")
    rows = "embed_tokens.weight" if "embed_tokens.weight" in reading.names else "t2d"
    reading.shape = {
        "hidden_size": hidden,
        "intermediate_size": of("intermediate_size", "layers.0.mlp.gate_proj.weight"),
        "num_attention_heads": heads or 1,
        "num_key_value_heads": kv_heads or heads or 1,
        "head_dim": head_dim or max(hidden // (heads or 1), 1),
        "vocab_size": of("vocab_size", rows),
        "max_position_embeddings": positions or 2048,
        "rms_norm_eps": eps or 1e-6,
        "rope_parameters": rope_of(block, notes),
    }
    given = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
    }
    notes += [
        f"no {name}: {reading.shape[name]}, as in a Llama config without one"
        for name, value in given.items()
        if not value
    ]
    reading.shape["rms_norm_eps"] = float(reading.shape["rms_norm_eps"])
    if heads and reading.shape["num_attention_heads"] % reading.shape["num_key_value_heads"]:
        reading.problem(f"config.json: {heads} heads cannot share {kv_heads} key-value heads", "Correct one of them")


def switches(reading: Reading) -> None:
    """What decides the arithmetic beside the sizes; refused where this project has no counterpart."""
    keys, block, nested = reading.keys, reading.block, reading.nested
    refused = {
        "hidden_act": block.text("hidden_act") not in (None, "silu"),
        "sliding_window": _slides(block),
        "target_hidden_size": keys.size("target_hidden_size") not in (None, reading.shape["hidden_size"]),
        "norm_before_fc": bool(keys.flag("norm_before_fc") or nested.flag("norm_before_fc")),
        "parallel_draft_step": (nested.size("parallel_draft_step") or 1) > 1,
        "use_mtp_layernorm": bool(nested.flag("use_mtp_layernorm")),
        "use_input_layernorm_in_first_layer": nested.flag("use_input_layernorm_in_first_layer") is False,
        "mask_token_id": "mask_token_id" in keys.values,
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    keys.taken |= {"mask_token_id", "quantization_config"}
    for name, is_so in refused.items():
        if is_so:
            value = next((part.values[name] for part in (keys, block, nested) if name in part.values), None)
            reading.problem(f"config.json: {name} is {short(value)}, which no head here can be", fatal=False)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "num_hidden_layers"):
        (block.size if name == "num_hidden_layers" else block.flag)(name)
    if block is not keys:
        keys.flag("tie_word_embeddings")
    if reading.layout == SPECULATORS:
        keys.section("speculators_config")
    if reading.network == FEATURES:
        _feature_keys(reading)
        return
    _fused_keys(reading)


def _slides(block: Keys) -> bool:
    window, used, kinds = block.size("sliding_window"), block.flag("use_sliding_window"), block.words("layer_types")
    return "sliding_attention" in kinds[:1] if kinds else bool(window and used is not False)


def _feature_keys(reading: Reading) -> None:
    keys, nested, named = reading.keys, reading.nested, reading.nested.flag("fc_bias")
    bias = named if reading.layout == OWN else keys.flag("bias")
    stored = reading.stored("fc.bias")
    if bias and stored is None:
        reading.problem("config.json says that fc has a bias, and fc.bias is missing", "Export the head again")
    if bias is None and reading.layout != OWN:
        says = "is there" if stored else "is not there, and a reader that expects one starts it at random"
        reading.notes.append(f"no `bias` in config.json, which SafeAILab/EAGLE takes for true: fc.bias {says}")
    reading.said = reading.shape["vocab_size"]
    nested.flag("use_aux_hidden_state")
    if reading.layout == OWN:
        nested.taken |= {"kind", "steps", "noise", "noise_as_published", "intermediate_size", "regression"}
        nested.taken |= {"cross_entropy", "top_k", "top"}
    reading.switches = {"fc_bias": stored is not None if reading.layout != OWN else named is not False}


def _fused_keys(reading: Reading) -> None:
    keys, nested, shape = reading.keys, reading.nested, reading.shape
    head = reading.stored("lm_head.weight")
    said = (reading.block if reading.layout == OWN else keys).size("draft_vocab_size")
    if said is None:
        said = head.shape[0] if head and head.shape else shape["vocab_size"]
        where = "the rows of lm_head.weight" if head else "the whole vocabulary"
        reading.notes.append(f"no draft_vocab_size: {said}, {where}")
    if said > shape["vocab_size"]:
        reading.problem(f"draft_vocab_size is {said}, more than the vocabulary of {shape['vocab_size']}", fatal=False)
    reading.said = said
    fused = reading.stored("fc.weight")
    wide = fused.shape[1] if fused and len(fused.shape) == 2 else 3 * shape["hidden_size"]
    reading.taps, rest = divmod(wide, shape["hidden_size"])
    if rest or not 0 < reading.taps < 100:
        reading.problem(f"fc.weight reads {wide} numbers, expected a multiple of {shape['hidden_size']}, the width")
        reading.taps = 3
    _fused_switches(reading)
    if reading.layout == OWN:
        nested.taken |= {"kind", "steps", "decay", "draft_vocab", "lm_head", "train_lm_head", "loss", "queries"}
        nested.taken.add("intermediate_size")
        reading.inputs = nested.whole("taps", least=-1)
        return
    reading.inputs = keys.whole("eagle_aux_hidden_state_layer_ids")
    reading.outputs = nested.whole("eagle_aux_hidden_state_layer_ids") or None  # ModelOpt writes [] for its default


def _fused_switches(reading: Reading) -> None:
    keys, nested = reading.keys, reading.nested
    for name in SWITCHES:
        outer, inner = None if reading.layout == OWN else keys.flag(name), nested.flag(name)
        if None not in (outer, inner) and outer != inner:
            reading.problem(f"config.json: {name} is {outer} and eagle_config.{name} is {inner}", "Correct one of them")
        reading.switches[name] = bool(outer if outer is not None else inner)
        if outer is None and inner is None:
            reading.notes.append(f"no {name}: false")
    there = "fc_norm.0.weight" in reading.names
    if there != reading.switches["fc_norm"]:
        is_there = "is" if there else "is not"
        reading.problem(f"config.json: fc_norm is {reading.switches['fc_norm']}, and fc_norm.0.weight {is_there} there")
    if nested.flag("use_aux_hidden_state") is False:
        reading.problem("config.json: eagle_config.use_aux_hidden_state is false, but this is EAGLE-3's network")


# -- tensors ----------------------------------------------------------------------------------------------------------


def expected(reading: Reading) -> dict[str, tuple[int, ...]]:
    """The tensors that the network consists of, with their sizes."""
    shape = reading.shape
    width, wide, each = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key = shape["num_attention_heads"] * each, shape["num_key_value_heads"] * each
    fused, read = reading.network == FUSED, (2 if reading.network == FUSED else 1) * width
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, reading.taps * width if fused else 2 * width),
        "layers.0.self_attn.q_proj.weight": (query, read),
        "layers.0.self_attn.k_proj.weight": (key, read),
        "layers.0.self_attn.v_proj.weight": (key, read),
        "layers.0.self_attn.o_proj.weight": (width, query),
        "layers.0.mlp.gate_proj.weight": (wide, width),
        "layers.0.mlp.up_proj.weight": (wide, width),
        "layers.0.mlp.down_proj.weight": (width, wide),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    if not fused:
        return found | ({"fc.bias": (width,)} if reading.switches.get("fc_bias") else {})
    norms: tuple[str, ...] = ("norm", "layers.0.hidden_norm", "layers.0.input_layernorm")
    if reading.switches.get("fc_norm"):
        norms += tuple(f"fc_norm.{tap}" for tap in range(reading.taps))
    found |= {f"{name}.weight": (width,) for name in norms} | {"lm_head.weight": (reading.said, width)}
    if reading.said < shape["vocab_size"]:
        found["d2t"] = (reading.said,)
        if reading.layout == OWN:
            found["t2d"] = (shape["vocab_size"],)
    return found


def check_tensors(reading: Reading) -> None:
    """Every expected tensor is there in its size, and every other one is known."""
    wanted, vocab, width = expected(reading), reading.shape["vocab_size"], reading.shape["hidden_size"]
    spare: dict[str, tuple[int, ...] | None] = dict.fromkeys(SPARE[1:])
    spare["embed_tokens.weight"] = (vocab, width)
    if reading.network == FUSED:
        spare |= {"d2t": (reading.said,), "t2d": (vocab,), "fc.bias": (width,)}
    else:
        spare |= {"lm_head.weight": (vocab, width)}
    if reading.layout == OWN:
        spare = {}
    for name, shape in wanted.items():
        if name not in reading.names:
            reading.problem(f"{name} is missing, expected {_size(shape)}", _remedy(name))
    for name, size in {**spare, **wanted}.items():
        stored = reading.stored(name)
        if stored and size is not None and stored.shape != size:
            reading.problem(
                f"{name} is {_size(stored.shape)}, expected {_size(size)}", "Correct config.json, or export again"
            )
        elif stored and name in wanted and name not in ("d2t", "t2d") and not _floating(stored):
            reading.problem(f"{name} is in {stored.dtype}, expected plain floating-point weights", fatal=False)
        elif stored and name == "d2t" and stored.dtype.is_floating_point:
            reading.problem(f"d2t is in {stored.dtype}, expected whole numbers", "Export again")
    _others(reading, sorted(reading.names.keys() - wanted.keys() - spare.keys()))


def _others(reading: Reading, others: list[str]) -> None:
    """Tensors that the network does not have, by what they are."""
    told: dict[str, list[str]] = {}
    for name in others:
        what = next((what for pattern, what in FOREIGN_NAMES.items() if re.match(pattern, name)), "")
        told.setdefault(what, []).append(name)
    for what, names in told.items():
        listed = f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if what:
            reading.problem(f"{what}: {listed}; no head here has that", fatal=False)
        else:
            reading.problem(
                f"unknown tensors: {listed}", "Take them out if they do not matter: nothing is left out here"
            )


def _floating(stored: Stored) -> bool:
    return stored.dtype.is_floating_point and stored.dtype.itemsize > 1


def _size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _remedy(name: str) -> str:
    remedies = {
        "fc.weight": "Engines start from random numbers there without a word: export again",
        "lm_head.weight": "Engines use the target's, random numbers or none: export it, a head trains its own",
        "d2t": "Engines take the draft's numbers for tokens: export it",
    }
    return remedies.get(name, "Engines may start from random numbers there: export again")
