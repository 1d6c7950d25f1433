"""The networks of DFlash, DSpark and Domino: blocks over injected states; tensor names are ours everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from eagle.formats.layout import Config
from eagle.formats.networks.block_layouts import (
    CONFIDENCE,
    DFLASH,
    DOMINO_INPUT,
    DSPARK,
    GRU,
    MARKOV,
)
from eagle.formats.networks.network import ROTARY, Network, keep_names, list_settings
from eagle.formats.reading import faults
from eagle.formats.reading.config_keys import short
from eagle.formats.reading.faults import FoundFault, find
from eagle.formats.reading.files import has
from eagle.formats.reading.head_folder import (
    EMBEDDING,
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
    "layers.#.*", "fc.weight", "hidden_norm.weight", "norm.weight", EMBEDDING, OUTPUT
)
DSPARK_NAMES = {
    **DFLASH_NAMES,
    **keep_names("markov_head.*", "confidence_head.*", "prefix_gru.*", "embed_proj.*"),
}
FOREIGN_KEYS = (  # of dflash_config, which change what is computed
    *("use_swa", "attention_value_scale", "conv_kernel_size", "selector_rank", "output_multiplier"),
    *("final_logit_softcapping", "input_embedding_scale"),
)
MASK_ROW = "mask_embedding.pt"
AT_POSITION = "slot j names the token at its own place (z-lab's DFlash)"
AFTER_POSITION = "slot k names the token behind its place (DeepSpec's DFlash and DSpark)"
FROM_RUN = "Take it from the config of the training run"


def _read_blocks(head: HeadFolder, anchor_key: str, names_next: bool) -> Config:
    """Return a head's settings; sizes are those of the tensors, what the slots name stands in the config alone.

    Args:
        head: The checkpoint, with its tensors by our names.
        anchor_key: The key of the config that says which token a slot names.
        names_next: Whether a slot names the token after its position where the config does not say.
    """
    keys = head.keys
    head.nested = keys.section("dflash_config")
    head.layout = _find_layout(head)
    head.target_layers = head.block.read("num_target_layers") or keys.read("num_target_layers")
    layers = head.block.read("num_hidden_layers")
    refused = _list_refused(head)
    count = count_indices(head, r"layers\.(\d+)\.")
    blocks = max(compare_count(head, layers, count, "layers"), 1)
    # the blocks are Qwen3's, which norm queries and keys
    head.overrides = {"num_hidden_layers": blocks, "qk_norm": True}
    head.refuse(refused, "block")
    if has(head.path, MASK_ROW):
        head.problem(
            f"{MASK_ROW} lies beside it, a row of the head's own for its mask token, which no head here has: they "
            "read the target's row",
            "Serve it with vLLM, which reads that file",
        )
    slots = head.nested.read("block_size") or keys.read("block_size")
    if slots is None:
        head.problem("config.json: no block_size, the slots of a block", FROM_RUN)
    return {
        "taps": _read_taps(head, count),
        "blocks": blocks,
        "slots": slots or 2,
        "sample_from_anchor": _read_anchor(head, anchor_key, names_next),
        "intermediate_size": head.shape["intermediate_size"],
        "causal": bool(_first(keys.read("is_causal"), head.nested.read("causal"))),
        "mask_token": _read_mask(head),
    }


def _find_layout(head: HeadFolder) -> str:
    """Return the project that writes configs like this one."""
    if head.is_of_speculators:
        return SPECULATORS
    # DeepSpec's configs are flat
    is_deepspec = "markov_rank" in head.config or "Qwen3DSparkModel" in head.architectures
    if is_deepspec and "dflash_config" not in head.config:
        return DEEPSPEC
    return SPECFORGE if head.nested.values.get("projector_type") else ZLAB


def _list_refused(head: HeadFolder) -> dict[str, bool]:
    """Return the settings that no block of this project has, and whether the config has them."""
    keys, block, nested = head.sections
    slides = "sliding_attention" in (block.read("layer_types") or []) or bool(
        block.read("use_sliding_window")
    )
    draft_vocab = keys.read("draft_vocab_size")
    width = keys.read("target_hidden_size")
    # the rest does not matter, or is read elsewhere
    head.take("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", *FOREIGN_KEYS)
    keys.taken |= {
        "quantization_config",
        "num_anchors",
        "sliding_window_non_causal",
        "speculators_config",
    }
    nested.taken |= {"projector_type", "attention_mode", "confidence_head_alpha"}
    return {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "layer_types": slides,
        "draft_vocab_size": draft_vocab not in (None, head.shape["vocab_size"]),
        "target_hidden_size": width not in (None, head.shape["hidden_size"]),
        "quantization_config": bool(keys.values.get("quantization_config")),
        **{name: bool(nested.values.get(name)) for name in FOREIGN_KEYS},
    }


def _read_taps(head: HeadFolder, blocks: int) -> tuple[int, ...]:
    """Return inputs of layers, of ids that count outputs, or inputs in the layout of speculators."""
    # a config may tell how deep its target is
    layers = head.target.layers if head.target else head.keys.read("num_target_layers")
    inputs = head.keys.read("aux_hidden_state_layer_ids")
    outputs = _first(head.nested.read("target_layer_ids"), head.keys.read("target_layer_ids"))
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
        return (1,)
    if layers and not all(0 <= tap < layers for tap in taps):
        head.problem(
            f"it reads the inputs of layers {taps} of {layers}: behind the last layer transformers gives the state "
            "behind the final norm and engines the one before it, and behind that there is none",
            "Train it with others",
        )
    return taps


def _usual_taps(layers: int, blocks: int) -> list[int]:
    """Return the layers' inputs that z-lab's code takes: evenly, from the third to the last but one."""
    if blocks < 2:
        return [layers // 2 + 1]
    return [round(1 + block * (layers - 4) / (blocks - 1)) + 1 for block in range(blocks)]


def _read_anchor(head: HeadFolder, key: str, names_next: bool) -> bool:
    """Return whether the first slot predicts a token; by default as in the layout's own code, with a note."""
    keys = head.keys
    shift = head.nested.read("shift_label")
    anchor = _first(keys.read("sample_from_anchor"), head.nested.read("sample_from_anchor"))
    bonus = keys.read("dspark_bonus_anchor")
    if None not in (anchor, bonus) and anchor == bonus:
        head.problem(
            f"config.json: sample_from_anchor and dspark_bonus_anchor are both {anchor}",
            "Correct one",
        )
    if key == "shift_label":
        if None not in (anchor, shift) and anchor != shift:
            head.problem(
                f"config.json: sample_from_anchor is {anchor} and shift_label {shift}",
                "Correct one of them",
            )
        anchor = _first(shift, anchor)
    if anchor is None:
        # z-lab's DFlash and that of speculators fill positions in; DSpark names what comes after each
        anchor = head.layout == DEEPSPEC or names_next
        head.notes.append(f"no {key}: {str(anchor).lower()}, as {head.layout} takes it")
    return bool(anchor)


def _read_mask(head: HeadFolder) -> int:
    """Return the mask token, which only the config gives."""
    mask: int | None = _first(head.nested.read("mask_token_id"), head.keys.read("mask_token_id"))
    size = head.shape["vocab_size"]
    # no default: a slot that reads another token guesses otherwise
    if mask is None:
        head.problem("config.json: no mask_token_id", FROM_RUN)
    elif mask >= size:
        head.problem(
            f"config.json: mask_token_id is {mask}, the vocabulary has {size} tokens", "Correct it"
        )
    return mask or 0


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


# -- the correction of a slot's logits --------------------------------------------------------------------------------


def _read_corrected(head: HeadFolder, anchor_key: str, names_next: bool) -> Config:
    """Return the settings of blocks with the correction of their logits; a head without any is one of DFlash."""
    settings = _read_blocks(head, anchor_key, names_next)
    correction = _read_correction(head)
    if not {MARKOV, DOMINO_INPUT, CONFIDENCE} & head.names.keys():
        return settings
    head.method = DSPARK
    return settings | correction


def _read_correction(head: HeadFolder) -> Config:
    """Return the correction by its tensors; a problem if the config disagrees."""
    ranks = _read_both(head, "markov_rank")
    kinds = _read_both(head, "markov_head_type")
    flags = _read_both(head, "enable_confidence_head")
    for section in (head.keys, head.nested):
        section.taken |= {"confidence_head_with_markov", "emb_dim", "gru_hidden_dim"}
    # tensors decide, and what the config says of them is checked
    correction: Config = {"markov": "none", "rank": 1, "confidence": CONFIDENCE in head.names}
    if DOMINO_INPUT in head.names:
        correction |= {"markov": "domino", "rank": _side(head, DOMINO_INPUT, 0), **_read_gru(head)}
    elif MARKOV in head.names:
        correction |= {"markov": _kind_of_markov(head), "rank": _side(head, MARKOV, 1)}
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
    return correction


def _kind_of_markov(head: HeadFolder) -> str:
    """Return which of DSpark's Markov heads has these tensors."""
    modules = {name.split(".")[1] for name in head.names if name.startswith("markov_head.")}
    if "gate_proj" in modules:
        return "gated"
    return "rnn" if "joint_proj" in modules else "vanilla"


def _read_gru(head: HeadFolder) -> Config:
    """Return the size of Domino's cell, and how many levels it leaves as they are."""
    unbiased = head.nested.read("pure_draft_prefix_len")
    if unbiased is None:
        head.notes.append("no pure_draft_prefix_len: 0, as SpecForge takes it")
    return {"gru_size": _side(head, GRU, 1), "unbiased": unbiased or 0}


def _read_both(head: HeadFolder, name: str) -> list[Any]:
    """Return the values of a key that stands at the top, in dflash_config or in both."""
    values = [section.read(name) for section in (head.keys, head.nested)]
    return [value for value in values if value is not None]


def _side(head: HeadFolder, name: str, dim: int) -> int:
    """Return one side of a matrix; 1 if it is none."""
    side = head.side(name, dim)
    if side is None:
        return 1
    return side


# -- the tables -------------------------------------------------------------------------------------------------------


def _find_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield the default that engines take where a config does not say which token a slot predicts."""
    if (
        head.layout == SPECULATORS
        and head.method != DFLASH
        and "sample_from_anchor" not in head.config
    ):
        yield find(faults.ANCHOR_UNSAID, fatal=False)


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
    words="dflash",
    keys=("dflash_config",),
    common=("block_size",),
    read_settings=partial(_read_blocks, anchor_key="sample_from_anchor", names_next=False),
    spellings=((ZLAB, DFLASH_NAMES),),
    spare={**ROTARY, r"verifier_(norm|lm_head)\.weight": "training alone reads it"},
    find_faults=_find_faults,
    list_facts=_list_facts,
)
DSPARK_HEADS = replace(
    DFLASH_HEADS,
    name="a DSpark head",
    methods=(DSPARK,),
    tensors=r"(markov_head|confidence_head)\.",
    words="dspark",
    keys=(),
    common=(),
    read_settings=partial(_read_corrected, anchor_key="sample_from_anchor", names_next=True),
    spellings=((ZLAB, DSPARK_NAMES),),
    prefixes=("model.", "logit_head."),
)
DOMINO_HEADS = replace(
    DSPARK_HEADS,
    name="a Domino head",
    methods=(),
    tensors=r"(logit_head\.)?(prefix_gru|embed_proj)\.",
    words="domino",
    read_settings=partial(_read_corrected, anchor_key="shift_label", names_next=False),
)
