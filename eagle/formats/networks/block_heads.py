"""The networks of block heads (DFlash, DFlash2, LiLiCorr, DSpark, Domino, XPress); tensor names are ours everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from eagle.formats.layout import Config
from eagle.formats.networks.block_layouts import (
    CONFIDENCE,
    CONV_KEYS,
    DFLASH,
    DFLASH2,
    DOMINO_INPUT,
    DSPARK,
    FULL,
    GRU,
    LATTICE_KEYS,
    LILICORR,
    MARKOV,
    REFINER,
    REFINER_MLP,
    SELECTOR_KEYS,
    SLIDING,
    VLLM_REFINER,
    XPRESS,
)
from eagle.formats.networks.layers_and_tokens import (
    INDICES,
    check_draft_vocab,
    make_vocab_tensor,
    may_lack_mask,
)
from eagle.formats.networks.network import ROTARY, Network, keep_names, list_settings
from eagle.formats.reading import faults
from eagle.formats.reading.config_keys import short
from eagle.formats.reading.faults import FoundFault, report
from eagle.formats.reading.files import has
from eagle.formats.reading.head_folder import (
    EMBEDDING,
    MODELOPT,
    OUTPUT,
    SPECULATORS,
    HeadFolder,
    compare_count,
    compare_size,
    count_indices,
)

# who writes such heads
ZLAB = "z-lab/dflash"
DEEPSPEC = "deepseek-ai/DeepSpec"
SPECFORGE = "sgl-project/SpecForge"
DFLASH_NAMES = keep_names(
    *("layers.#.*", "fc.weight", "hidden_norm.weight", "norm.weight", EMBEDDING, OUTPUT, *INDICES)
)
# DFlash2's convolutions are among its layers' tensors
PREDECESSORS = "candidate_selector.predecessor_codebook"
SUCCESSORS = "candidate_selector.successor_codebook"
KERNEL = "layers.0.attention_conv.base_kernel"
KERNEL_PROJECTION = "layers.0.attention_conv.kernel_projection.weight"
DFLASH2_NAMES = {
    **DFLASH_NAMES,
    **keep_names(PREDECESSORS, SUCCESSORS, "candidate_selector.hidden_projection.weight"),
}
# as modules of their own
CODEBOOK_NAMES = {name: f"{name}.weight" for name in (PREDECESSORS, SUCCESSORS)}
# ModelOpt's names of LiLiCorr's MLPs, by their indices; other tensors of the lattice have ours
SEQUENTIAL_NAMES = {
    "lilicorr.feature_norm.*": "lilicorr.feature_mlp.0.*",
    "lilicorr.feature_mlp.up_proj.*": "lilicorr.feature_mlp.1.*",
    "lilicorr.feature_mlp.down_proj.*": "lilicorr.feature_mlp.3.*",
    "lilicorr.layers.#.mlp.up_proj.*": "lilicorr.layers.#.mlp.0.*",
    "lilicorr.layers.#.mlp.down_proj.*": "lilicorr.layers.#.mlp.2.*",
}
DSPARK_NAMES = {
    **DFLASH_NAMES,
    **keep_names("markov_head.*", "confidence_head.*", "prefix_gru.*", "embed_proj.*"),
}
# XPress's refiner has two spellings
REFINER_NAMES = {**DFLASH_NAMES, **keep_names("refiner_head.*")}
# ModelOpt's names of what corrects a slot's logits
FLAT_NAMES = {
    "markov_head.markov_w#.weight": "markov_w#.weight",
    "markov_head.gate_proj.*": "gate_proj.*",
    "markov_head.joint_proj.*": "joint_proj.*",
    "confidence_head.proj.*": "confidence_proj.*",
}
FOREIGN_KEYS = (  # of any section, which change what is computed
    *("attention_value_scale", "attention_sink_bias", "add_swa_attention_sink_bias"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
)
# factors, of which 1 changes nothing
FACTORS = {"output_multiplier": 1, "input_embedding_scale": 1, "attention_value_scale": 1}
MODELOPT_KEYS = {"use_swa", "use_confidence_head"}  # which ModelOpt alone writes
MASK_ROW = "mask_embedding.pt"  # holds a trained embedding of the mask token
# how `inspect` prints which token a slot of a block predicts
AT_POSITION = "slot j names the token at its own place (z-lab's DFlash)"
AFTER_POSITION = "slot k names the token behind its place (DeepSpec's DFlash and DSpark)"
FROM_RUN = "Take it from the config of the training run"


def _read_blocks(head: HeadFolder, anchor_key: str, predicts_next: bool) -> Config:
    """Return a block head's settings: sizes by its tensors, and by its config which token a slot of a block predicts.

    Such a head drafts a block of tokens in one forward: the first slot of a block reads the root, the last committed
    token, and the others read masks. Whatever no head here can be becomes a problem of the checkpoint.

    Args:
        head: The checkpoint, with its tensors by our names; its layout and sizes are set.
        anchor_key: The key of the config that says which token a slot predicts.
        predicts_next: Whether a slot predicts the token after its position where the config does not say.
    """
    keys = head.keys
    head.nested = keys.section("dflash_config")
    head.layout = _find_layout(head)
    head.target_layers = head.block.read("num_target_layers") or keys.read("num_target_layers")
    layers = head.block.read("num_hidden_layers")  # of the head
    refused = _list_refused(head)
    count = count_indices(head, r"layers\.(\d+)\.")  # transformer blocks in the file
    # at least 1, since a file without a block, whose tensors are then reported as missing, must not fail here
    blocks = max(compare_count(head, layers, count, "layers"), 1)
    # the transformer blocks are those of Qwen3, which norms queries and keys
    head.overrides = {"num_hidden_layers": blocks, "qk_norm": True}
    draft_vocab = _read_draft_vocab(head)
    head.refuse(refused, "block")
    if has(head.path, MASK_ROW):
        head.problem(
            f"{MASK_ROW} lies beside it, a row of the head's own for its mask token, which no head here has: they "
            "read the target's row",
            "Serve it with vLLM, which reads that file",
        )
    # the nested one, which z-lab's code reads, comes last
    slots = next(reversed(_read_both(head, "block_size")), None)
    if slots is None:
        head.problem("config.json: no block_size, the slots of a block", FROM_RUN)
    return {
        "taps": _read_taps(head, count),
        "blocks": blocks,
        "slots": slots or 2,  # any valid number, as the problem above prevents an import
        "sample_from_anchor": _read_anchor(head, anchor_key, predicts_next),
        "intermediate_size": head.shape["intermediate_size"],
        **_read_window(head, blocks),
        "mask_token": _read_mask(head),
        "draft_vocab": draft_vocab,
    }


def _find_layout(head: HeadFolder) -> str:
    """Return which project wrote the checkpoint, by the keys of its config; z-lab's code if nothing else tells."""
    if head.is_of_speculators:
        return SPECULATORS
    # DeepSpec's configs are flat; those of the others nest keys in dflash_config
    is_deepspec = "markov_rank" in head.config or "Qwen3DSparkModel" in head.architectures
    if is_deepspec and "dflash_config" not in head.config:
        return DEEPSPEC
    if MODELOPT_KEYS & head.nested.values.keys():
        return MODELOPT
    return SPECFORGE if head.nested.values.get("projector_type") else ZLAB


def _list_refused(head: HeadFolder) -> dict[str, bool]:
    """Return the settings that no block head of this project has, each with whether the config has it.

    It also marks keys as handled that do not matter or that other functions read.
    """
    keys, block, nested = head.sections
    types = set(block.read("layer_types") or [])
    # without layer_types, readers differ in which layers slide
    is_open = bool(block.read("use_sliding_window")) and not (types or nested.read("use_swa"))
    width = keys.read("target_hidden_size")
    # others have no convolutions and no selector
    has_more = head.method in (DFLASH2, LILICORR)
    foreign = FOREIGN_KEYS if has_more else (*FOREIGN_KEYS, *SELECTOR_KEYS)
    # keys that do not matter, or that other functions read, must not count as unknown
    head.mark_handled(
        *("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", *foreign)
    )
    keys.handled |= {
        "quantization_config",
        "num_anchors",
        "speculators_config",
    }
    nested.handled |= {"projector_type", "attention_mode", "confidence_head_alpha"}
    return {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "layer_types": bool(types - {FULL, SLIDING}) or is_open,
        "target_hidden_size": width not in (None, head.shape["hidden_size"]),
        "quantization_config": bool(keys.values.get("quantization_config")),
        **{name: _is_stated(head, name) for name in foreign},
    }


def _is_stated(head: HeadFolder, name: str) -> bool:
    """Return whether a section of the config has a value for this key that changes what is computed."""
    values = [section.values.get(name) for section in head.sections]
    return any(value and value != FACTORS.get(name) for value in values)


def _read_draft_vocab(head: HeadFolder) -> int | None:
    """Return the setting `draft_vocab`: the number of tokens that a head can draft, None for all.

    It sets `head.draft_vocab_size` too, which is the whole vocabulary for None.
    """
    vocab_size = head.shape["vocab_size"]
    size = head.keys.read("draft_vocab_size") or vocab_size
    if size > vocab_size:
        head.problem(
            f"config.json: draft_vocab_size is {size}, the vocabulary has {vocab_size}",
            "Correct it",
        )
    # a number above the vocabulary, which is a problem already, must not fail here
    head.draft_vocab_size = min(size, vocab_size)
    if head.draft_vocab_size == vocab_size:
        return None
    head.overrides["draft_vocab_size"] = size
    return int(size)


def _settle(head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None) -> list[str]:
    """Return notes on the draft vocabulary at an import, ValueError if it cannot be right: `Network.settle`.

    `taps` and `norm_output` are the user's answers to questions that such a head does not leave open.
    """
    return check_draft_vocab(head)


def _read_window(head: HeadFolder, blocks: int) -> Config:
    """Return the settings of a head's sliding windows, and of which slots see only earlier slots of their block.

    Args:
        head: The checkpoint.
        blocks: The number of its transformer blocks.

    Returns:
        "causal": true or false for all transformer blocks, or "window" for those with a window alone. With windows also
        "window" (its tokens), and where not all have one "window_blocks", the indices of those that have.
    """
    keys, block, nested = head.sections
    types = block.read("layer_types") or [FULL] * blocks
    size = _first_not_none(nested.read("swa_window_size"), block.read("sliding_window"))  # tokens
    # the transformer blocks with a window
    indices = [index for index, kind in enumerate(types) if kind == SLIDING]
    non_causal = keys.read("sliding_window_non_causal")
    # all layers slide where layer_types name none, as ModelOpt leaves them; vLLM then takes no block as causal
    if nested.read("use_swa") and not indices:
        indices = list(range(blocks))
        non_causal = True
    if len(types) != blocks:
        head.problem(f"config.json: {len(types)} layer_types for {blocks} layers", FROM_RUN)
    if indices and size is None:
        head.problem("config.json: layers slide, and no sliding_window says how far", FROM_RUN)
    # speculators has another default for DFlash2
    if non_causal is None and head.layout == SPECULATORS:
        non_causal = head.method == DFLASH2
    # the last is a name in heads for Nemotron, beside `causal`
    causal = _first_not_none(
        block.read("is_causal"),
        keys.read("is_causal"),
        nested.read("causal"),
        keys.read("dflash_query_causal"),
    )
    # no window: without a key all slots of a block see one another
    if not indices or size is None:
        return {"causal": bool(causal)}
    # by default a layer with a window is causal and one without is not, except where speculators says otherwise
    if causal is None:
        causal = False if non_causal else "window"
    window: Config = {"window": {"recent": size}, "causal": causal}
    if len(indices) < blocks:
        window["window_blocks"] = tuple(indices)
    # there all slots of a block have the window that ends at its root, and elsewhere each one at its own place
    if head.layout == SPECULATORS:
        window["window_end"] = "root"
        head.notes.append(f"window_end root: speculators trains on the {size} tokens before a root")
    return window


def _read_taps(head: HeadFolder, blocks: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head reads.

    Configs of speculators count layer inputs, the others layer outputs, to which 1 is added. Where the config names no
    layers, z-lab's code takes layers that follow from the number of blocks.

    Args:
        head: The checkpoint.
        blocks: The number of its transformer blocks in the file.
    """
    # without the target, its config may tell how many layers it has
    layers = head.target.layers if head.target else head.keys.read("num_target_layers")
    inputs = head.keys.read("aux_hidden_state_layer_ids")
    outputs = _first_not_none(
        head.nested.read("target_layer_ids"), head.keys.read("target_layer_ids")
    )
    if inputs is not None:
        taps = tuple(inputs)
    elif outputs is not None:
        taps = tuple(layer + 1 for layer in outputs)
    elif layers and head.layout in (ZLAB, SPECFORGE):
        taps = tuple(_usual_taps(layers, blocks))
        head.notes.append(
            f"no target_layer_ids: taps {taps}, as that code takes them of {layers} layers"
        )
    else:
        head.problem(
            "config.json: no ids of the layers that it reads",
            "Take them from the config of the training run",
        )
        return (1,)  # any valid tap, as the problem prevents an import
    if layers and not all(0 <= tap < layers for tap in taps):
        head.problem(
            f"it reads the inputs of layers {taps} of {layers}: behind the last layer transformers gives the state "
            "behind the final norm and engines the one before it, and behind that there is none",
            "Train it with others",
        )
    return taps


def _usual_taps(layers: int, blocks: int) -> list[int]:
    """Return the layers whose inputs z-lab's code reads by default: evenly spread over the target.

    Args:
        layers: The number of the target's layers.
        blocks: The number of the head's transformer blocks, which is also that of the layers that it reads.
    """
    # that code counts outputs of layers, from 1 to layers - 3; the + 1 at the end makes inputs of them
    if blocks < 2:
        return [layers // 2 + 1]
    return [round(1 + block * (layers - 4) / (blocks - 1)) + 1 for block in range(blocks)]


def _read_anchor(head: HeadFolder, key: str, predicts_next: bool) -> bool:
    """Return `sample_from_anchor`: whether each slot predicts the token after its position, so that the first does too.

    Otherwise a slot predicts the token at its position, and the first, which holds the root, predicts nothing.

    Args:
        head: The checkpoint.
        key: The key that its project writes, "sample_from_anchor" or Domino's "shift_label", for the note.
        predicts_next: The answer where the config does not say it, which is noted.
    """
    keys = head.keys
    shift = head.nested.read("shift_label")
    anchor = _first_not_none(
        keys.read("sample_from_anchor"), head.nested.read("sample_from_anchor")
    )
    if None not in (anchor, shift) and anchor != shift:
        head.problem(
            f"config.json: sample_from_anchor is {anchor} and shift_label {shift}",
            "Correct one of them",
        )
    anchor = _first_not_none(shift, anchor)
    # DeepSpec's configs may hold the opposite too, or instead
    bonus = keys.read("dspark_bonus_anchor")
    if None not in (anchor, bonus) and anchor == bonus:
        head.problem(
            f"config.json: sample_from_anchor and dspark_bonus_anchor are both {anchor}",
            "Correct one",
        )
    if anchor is None and bonus is not None:
        anchor = not bonus
    if anchor is None:
        # DFlash of z-lab and speculators predicts the token at a slot; DSpark, and all of DeepSpec's, the one after it
        anchor = head.layout == DEEPSPEC or predicts_next
        head.notes.append(f"no {key}: {str(anchor).lower()}, as {head.layout} takes it")
    return bool(anchor)


def _read_mask(head: HeadFolder) -> int:
    """Return the id of the mask token, which slots read whose token is not known; 0 and a problem without one."""
    mask: int | None = _first_not_none(
        head.nested.read("mask_token_id"), head.keys.read("mask_token_id")
    )
    size = head.shape["vocab_size"]
    # there is no default: a head that reads another token in its slots drafts badly
    if mask is None:
        head.problem("config.json: no mask_token_id", FROM_RUN)
    elif mask >= size:
        head.problem(
            f"config.json: mask_token_id is {mask}, the vocabulary has {size} tokens", "Correct it"
        )
    return mask or 0


def _first_not_none(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


# -- DFlash2's convolutions and selector -----------------------------------------------------------------------------


def _read_selected(head: HeadFolder, anchor_key: str, predicts_next: bool) -> Config:
    """Return the settings of a DFlash2 head: those of a DFlash head, and the sizes of convolutions and selector.

    The tensors tell the sizes. Where the config says something else, that becomes a problem of the checkpoint.

    Args:
        head: The checkpoint.
        anchor_key: As in `_read_blocks`.
        predicts_next: As in `_read_blocks`.
    """
    settings = _read_blocks(head, anchor_key, predicts_next)
    width = head.shape["hidden_size"]
    kernel = head.entry(KERNEL)  # [2, taps, width]
    taps = kernel.shape[1] if kernel is not None and len(kernel.shape) == 3 else 1
    # any valid number must do for tensors of wrong shapes, which become problems later
    taps = min(max(taps, 1), settings["slots"])
    # the projection has a row for each side, tap and group of channels
    groups = (head.side(KERNEL_PROJECTION, 0) or 0) // (2 * taps)
    group_size = width // groups if groups and width % groups == 0 else 1
    sizes = {
        "conv_kernel_size": taps,
        "conv_group_size": group_size,
        "selector_rank": _side(head, PREDECESSORS, 1),
    }
    for key, size in sizes.items():
        compare_size(head, key, next(iter(_read_both(head, key)), None), size)
    counts = _read_both(head, "selector_top_k")
    if not counts:
        head.problem("config.json: no selector_top_k, the candidates of a slot", FROM_RUN)
    return {**settings, **sizes, "selector_top_k": next(iter(counts), 1)}


def _read_lattice(head: HeadFolder) -> Config:
    """Return the settings of a LiLiCorr head: those of its blocks, and by its config those of its lattice."""
    settings = _read_blocks(head, "sample_from_anchor", predicts_next=False)
    nested = head.nested
    # without the key the lattice has the width of the head
    settings["hidden_size"] = head.shape["hidden_size"]
    for key in LATTICE_KEYS:
        value = nested.read(f"lilicorr_{key}")
        if value is not None:
            settings[key] = value
        elif key not in settings:
            head.problem(f"config.json: no lilicorr_{key} in dflash_config", FROM_RUN)
    if nested.read("lilicorr_enabled") is False:
        head.problem("config.json: lilicorr_enabled is false", FROM_RUN)
    return settings | {key: nested.read(key) for key in CONV_KEYS}


# -- the correction of a slot's logits --------------------------------------------------------------------------------


def _read_corrected(head: HeadFolder, anchor_key: str, predicts_next: bool) -> Config:
    """Return the settings of a DSpark or Domino head, or of a DFlash head under DSpark's names.

    DSpark and Domino have DFlash's blocks and a part that corrects a slot's logits by the tokens drafted before it.

    Args:
        head: The checkpoint; its method is set.
        anchor_key: As in `_read_blocks`.
        predicts_next: As in `_read_blocks`.
    """
    settings = _read_blocks(head, anchor_key, predicts_next)
    correction = _read_correction(head)
    # DeepSpec and SpecForge write a head without such a part by DSpark's names too: it is one of DFlash
    if not {MARKOV, DOMINO_INPUT, CONFIDENCE} & head.names.keys():
        return settings
    head.method = DSPARK
    return settings | correction


def _read_correction(head: HeadFolder) -> Config:
    """Return the settings of the part that corrects a slot's logits by the tokens drafted before it.

    The tensors tell them. Where the config says something else, that becomes a problem of the checkpoint.

    Returns:
        "markov" (its kind, "none" without one), "rank" (the width of its code of the tokens), "confidence" (whether the
        head predicts how likely each token is accepted), and Domino's own settings.
    """
    # each a list, as a config may state a key twice
    ranks = _read_both(head, "markov_rank")
    kinds = _read_both(head, "markov_head_type")
    flags = _read_both(head, "enable_confidence_head") + _read_both(head, "use_confidence_head")
    # sizes that follow from the tensors
    for section in (head.keys, head.nested):
        section.handled |= {"confidence_head_with_markov", "emb_dim", "gru_hidden_dim"}
    # the tensors decide, and the config's statements are only compared with them
    correction: Config = {"markov": "none", "rank": 1, "confidence": CONFIDENCE in head.names}
    if DOMINO_INPUT in head.names:
        correction |= {"markov": "domino", "rank": _side(head, DOMINO_INPUT, 0), **_read_gru(head)}
    elif MARKOV in head.names:
        correction |= {"markov": _markov_type(head), "rank": _side(head, MARKOV, 1)}
        compare_size(head, "markov_rank", next(iter(ranks), None), correction["rank"])
    kind = correction["markov"]
    if kinds and kind not in ("domino", "none", kinds[0].lower()):
        head.problem(
            f"config.json: markov_head_type is {short(kinds[0])}, the tensors are {kind}",
            "Correct it",
        )
    if kind == "none" and any(ranks):
        head.problem(
            f"config.json: markov_rank is {max(ranks)}, and {MARKOV} is missing", "Copy it again"
        )
    if flags and flags[0] and not correction["confidence"]:
        head.problem(
            f"config.json: enable_confidence_head is true, and {CONFIDENCE} is missing",
            "Copy it again",
        )
    # SpecForge's default; DeepSpec, speculators and ModelOpt also give it the code of the token before
    reads_state = _side(head, CONFIDENCE, 1) == head.shape["hidden_size"]
    if reads_state and kind not in ("domino", "none"):
        head.problem(
            f"{CONFIDENCE} reads states alone, and beside a Markov head none here does",
            "Train it with confidence_head_with_markov, or import it without a confidence: remove confidence_head.proj "
            "and enable_confidence_head",
        )
    return correction


def _read_refined(head: HeadFolder) -> Config:
    """Return the settings of an XPress head: those of its blocks, and by tensors and config those of its refiner."""
    settings = _read_blocks(head, "sample_from_anchor", predicts_next=False)
    keys = head.keys
    rank = _side(head, REFINER, 1)
    hidden = _side(head, REFINER_MLP, 0)  # the width of the refiner's MLP
    compare_size(head, "xpress_rank", keys.read("xpress_rank"), rank)
    compare_size(head, "xpress_mlp_hidden", keys.read("xpress_mlp_hidden"), hidden)
    if keys.read("xpress_block_size") not in (None, settings["slots"]):
        head.problem(
            f"config.json: xpress_block_size is {keys.read('xpress_block_size')}, block_size {settings['slots']}",
            "Correct one of them",
        )
    # vLLM's limit of the tokens that it compares, and a ratio that follows from the tensors
    keys.handled |= {"xpress_topc", "xpress_mlp_ratio", "xpress_compile_head"}
    ratio, rest = divmod(hidden, rank)
    # a missing tensor is reported later
    if rest and hidden > 1:
        head.problem(
            f"{REFINER_MLP} has {hidden} rows, expected a multiple of the rank {rank}", FROM_RUN
        )
    passes = _first_not_none(keys.read("num_jacobi_passes"), keys.read("xpress_num_passes"), 6)
    return {**settings, "rank": rank, "mlp_ratio": max(ratio, 1), "passes": passes}


def _markov_type(head: HeadFolder) -> str:
    """Return which of DSpark's Markov heads the tensors are: "vanilla", "gated" or "rnn".

    Only the gated one has the module `gate_proj`, and only the recurrent one `joint_proj`.
    """
    # such as markov_w1 in `markov_head.markov_w1.weight`
    modules = {name.split(".")[1] for name in head.names if name.startswith("markov_head.")}
    if "gate_proj" in modules:
        return "gated"
    return "rnn" if "joint_proj" in modules else "vanilla"


def _read_gru(head: HeadFolder) -> Config:
    """Return Domino's settings: the size of its GRU, and the number of first levels whose logits stay uncorrected."""
    unbiased = head.nested.read("pure_draft_prefix_len")
    if unbiased is None:
        head.notes.append("no pure_draft_prefix_len: 0, as SpecForge takes it")
    return {"gru_size": _side(head, GRU, 1), "unbiased": unbiased or 0}


def _read_both(head: HeadFolder, name: str) -> list[Any]:
    """Return the values, 0 to 2, of a key that a config may hold at the top, in dflash_config or in both."""
    values = [section.read(name) for section in (head.keys, head.nested)]
    return [value for value in values if value is not None]


def _side(head: HeadFolder, name: str, dim: int) -> int:
    """Return the size of one dimension of a matrix; 1 if the tensor is no matrix.

    Its shape then becomes a problem later, when all tensors are checked.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        dim: The dimension, 0 or 1.
    """
    side = head.side(name, dim)
    if side is None:
        return 1
    return side


# -- the tables -------------------------------------------------------------------------------------------------------


def _find_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield what engines read differently: windows, and which token a slot predicts if the config does not say it."""
    window = head.settings.get("window")
    # ModelOpt's key alone, which engines do not read, gives all layers a window
    if window and head.nested.values.get("use_swa"):
        yield report(faults.SWA_UNREAD, size=window["recent"])
    if window and head.settings.get("window_end") == "root":
        yield report(faults.WINDOW_MOVES)
    if head.draft_vocab_size < head.shape["vocab_size"]:
        yield report(faults.D2T_UNREAD)
    # some layers have a window and are causal, so that a slot sees only earlier slots of its block; the others are not
    is_mixed = bool(head.settings.get("window_blocks")) and head.settings["causal"] == "window"
    if is_mixed and head.layout == SPECULATORS and head.method == DFLASH:
        yield report(faults.MIXED_CAUSAL)
    if (
        head.layout == SPECULATORS
        and head.method == DSPARK
        and "sample_from_anchor" not in head.config
    ):
        # readers of DSpark's configs have different defaults for it
        yield report(faults.ANCHOR_UNSAID, fatal=False)


def _list_facts(head: HeadFolder) -> Config:
    """Return what `inspect` prints of a block head: settings, method, and the token that a slot predicts.

    Two conventions are named DFlash: a slot predicts the token at its own position, or the one after. The setting
    `sample_from_anchor` marks the second.
    """
    rule = AT_POSITION
    if head.settings.get("sample_from_anchor"):
        rule = AFTER_POSITION
    return {
        **list_settings(head),
        "method": head.method,
        "slots": f"{head.settings.get('slots')}: {rule}",
    }


DFLASH_HEADS = Network(
    name="a DFlash head",
    method=DFLASH,
    methods=(DFLASH,),
    tensors=r"hidden_norm\.weight$",
    type_words="dflash",
    config_keys=("dflash_config",),
    ambiguous_keys=("block_size",),
    read_settings=partial(_read_blocks, anchor_key="sample_from_anchor", predicts_next=False),
    spellings=((ZLAB, DFLASH_NAMES),),
    ignored={**ROTARY, r"verifier_(norm|lm_head)\.weight": "training alone reads it"},
    optional={"d2t": ("draft_vocab_size",), "t2d": ("vocab_size",)},
    remedies={"d2t": "Without it, the draft's numbers are no tokens: export it"},
    may_lack=may_lack_mask,
    settle=_settle,
    make_tensor=make_vocab_tensor,
    find_faults=_find_faults,
    list_facts=_list_facts,
)
DFLASH2_HEADS = replace(
    DFLASH_HEADS,
    name="a DFlash2 head",
    method=DFLASH2,
    methods=(DFLASH2,),
    tensors=r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.",
    type_words="dflash2",
    config_keys=(),
    ambiguous_keys=(),
    read_settings=partial(_read_selected, anchor_key="sample_from_anchor", predicts_next=False),
    spellings=((ZLAB, DFLASH2_NAMES), (ZLAB, CODEBOOK_NAMES)),
    # a new head's convolutions change nothing, and its selector scores nothing
    zero_at_first=r"layers\.\d+\.(attention|mlp)_conv\.kernel_projection\.weight|"
    + re.escape(SUCCESSORS),
)
LILICORR_HEADS = replace(
    DFLASH2_HEADS,
    name="a LiLiCorr head",
    method=LILICORR,
    methods=(LILICORR,),
    tensors=r"lilicorr\.",
    type_words="lilicorr",
    read_settings=_read_lattice,
    spellings=((MODELOPT, SEQUENTIAL_NAMES), (ZLAB, {**DFLASH_NAMES, **keep_names("lilicorr.*")})),
    zero_at_first=DFLASH2_HEADS.zero_at_first + r"|lilicorr\.(slot|rank)_embedding",
)
DSPARK_HEADS = replace(
    DFLASH_HEADS,
    name="a DSpark head",
    methods=(DSPARK,),
    tensors=r"(markov_head|confidence_head|markov_w1|confidence_proj)\.",
    type_words="dspark",
    config_keys=(),
    ambiguous_keys=(),
    read_settings=partial(_read_corrected, anchor_key="sample_from_anchor", predicts_next=True),
    spellings=((ZLAB, DSPARK_NAMES), (MODELOPT, FLAT_NAMES)),
    prefixes=("model.", "logit_head."),
)
DOMINO_HEADS = replace(
    DSPARK_HEADS,
    name="a Domino head",
    methods=(),
    tensors=r"(logit_head\.)?(prefix_gru|embed_proj)\.",
    type_words="domino",
    read_settings=partial(_read_corrected, anchor_key="shift_label", predicts_next=False),
)
XPRESS_HEADS = replace(
    DFLASH_HEADS,
    name="an XPress head",
    method=XPRESS,
    methods=(XPRESS,),
    tensors=r"(refiner_head|xpress_head)\.",
    type_words="xpress",
    config_keys=("xpress_rank",),
    ambiguous_keys=(),
    read_settings=_read_refined,
    spellings=((ZLAB, REFINER_NAMES), (ZLAB, VLLM_REFINER)),
    zero_at_first=r"refiner_head\.mix_l",  # a new refiner mixes nothing
)
