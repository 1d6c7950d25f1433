"""The networks of EAGLE-1 (EAGLE-2 and HASS have it too), EAGLE-3 and P-EAGLE, as trainers name them."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle.formats.layout import Config
from eagle.formats.networks.eagle_layouts import PEAGLE, FeatureLayout, FusedLayout
from eagle.formats.networks.layers_and_tokens import (
    LAYER_IDS,
    MIDLAYER_NAMES,
    check_draft_vocab,
    choose_taps,
    find_wrong_ids,
    mark_tokens,
)
from eagle.formats.networks.network import (
    INDICES,
    ROTARY,
    Network,
    describe_kind,
    keep_names,
    list_settings,
    load_or_zeros,
)
from eagle.formats.networks.network_layout import MASK_HIDDEN
from eagle.formats.reading import faults
from eagle.formats.reading.config_keys import Keys
from eagle.formats.reading.faults import FoundFault, find
from eagle.formats.reading.files import has
from eagle.formats.reading.head_folder import (
    AUTOMODEL,
    EAGLE1,
    EMBEDDING,
    LAYERS,
    MIDLAYER,
    MODELOPT,
    OUTPUT,
    REFERENCE,
    SPECULATORS,
    HeadFolder,
    compare_count,
    count_indices,
)
from eagle.formats.reading.target_files import EMBEDDINGS

AUTOMODEL_CLASS = "LlamaEagle3DraftModel"
EAGLE1_CLASSES = {"LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"}
EAGLE3_CLASSES = {
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator"),
    *("Eagle3DraftModel", AUTOMODEL_CLASS),
}
EAGLE1_NAMES = keep_names("layers.0.*", "fc.weight", "fc.bias", EMBEDDING, OUTPUT)
EAGLE3_NAMES = {**EAGLE1_NAMES, **keep_names("fc_norm.#.weight", "norm.weight", "d2t", "t2d")}
PEAGLE_NAMES = {**EAGLE3_NAMES, **keep_names("layers.#.*", MASK_HIDDEN)}
# the one key `norm_output` has two meanings
NEXT_STEP = "next-step"
LM_HEAD = "lm-head"
MEANINGS = {
    NEXT_STEP: "the next step reads the normed state, as vLLM, SGLang, TensorRT-LLM and speculators mean it",
    LM_HEAD: "the LM head reads the normed state and the next step the un-normed one, as SpecForge means it",
}
ASK = f"Import it with --norm-output={LM_HEAD} if SpecForge trained it, else with --norm-output={NEXT_STEP}"


# -- the block, which all of them have --------------------------------------------------------------------------------


def _read_block(head: HeadFolder) -> int | None:
    """Mark the keys of the block as used, for its tensors decide; returns its window."""
    head.keys.taken |= {"mask_token_id", "quantization_config"}
    for name in (
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "num_hidden_layers",
    ):
        head.block.read(name)
    if head.block is not head.keys:
        head.keys.read("tie_word_embeddings")
    if head.is_of_speculators:
        head.keys.section("speculators_config")
    return _read_window(head.block)


def _read_window(block: Keys) -> int | None:
    """Return the window switched on by `layer_types`, as engines read it; without `layer_types` engines differ."""
    kinds = block.read("layer_types") or []
    if "sliding_attention" not in kinds[:1]:
        return None
    window: int | None = block.read("sliding_window")
    return window


def _slides(block: Keys) -> bool:
    window = block.read("sliding_window")
    is_used = block.read("use_sliding_window")
    kinds = block.read("layer_types")
    if kinds:
        return "sliding_attention" in kinds[:1]
    return bool(window and is_used is not False)


def _refuse_foreign_settings(head: HeadFolder) -> None:
    """Record the settings that neither EAGLE-1's network nor EAGLE-3's has here."""
    keys, block, nested = head.sections
    # each of them changes what is computed, and no tensor shows it
    refused = {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "sliding_window": _slides(block) and not _read_window(block),
        "target_hidden_size": keys.read("target_hidden_size")
        not in (None, head.shape["hidden_size"]),
        "norm_before_fc": bool(keys.read("norm_before_fc") or nested.read("norm_before_fc")),
        "parallel_draft_step": (nested.read("parallel_draft_step") or 1) > 1,
        "use_mtp_layernorm": bool(nested.read("use_mtp_layernorm")),
        "use_input_layernorm_in_first_layer": nested.read("use_input_layernorm_in_first_layer")
        is False,
        "mask_token_id": "mask_token_id" in keys.values,
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    head.refuse(refused)


def _find_layout(head: HeadFolder, usual: str) -> str:
    """Return the layout of a checkpoint, named by the project that writes it; `usual` if nothing tells."""
    # by keys first, then by names of tensors
    if head.is_of_speculators:
        return SPECULATORS
    if any(name.startswith("model.") for name in head.tensors.stored):
        return AUTOMODEL
    if head.has_block("midlayer."):
        if head.architectures[:1] == ["LlamaForCausalLM"]:
            return REFERENCE
        return MIDLAYER
    nested = head.config.get("eagle_config")
    if isinstance(nested, dict) and "next_layer_regular" in nested:
        return MODELOPT
    return usual


def _find_unknown_names(head: HeadFolder, classes: set[str]) -> Iterator[FoundFault]:
    """Yield names of tensors and architectures that engines do not know."""
    count = sum(name.startswith("model.") for name in head.tensors.stored)
    if count:
        # these projects take the prefix off when they load
        is_fatal = AUTOMODEL_CLASS not in head.architectures and not has(head.path, "eagle_meta.pt")
        yield find(faults.MODEL_PREFIX, fatal=is_fatal, count=count)
    if not set(head.architectures) & classes:
        yield find(faults.ARCHITECTURE, names=head.architectures or "missing")


def _find_broken_promises(head: HeadFolder, is_tied_fatal: bool) -> Iterator[FoundFault]:
    """Yield keys of the config that promise other tensors."""
    block = head.block.values
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if block.get(name) is True:
            yield find(faults.PROMISED_BIAS, name=name)
    if True in (block.get("tie_word_embeddings"), head.keys.values.get("tie_word_embeddings")):
        yield find(faults.TIED, fatal=is_tied_fatal)
    # a head has one layer, whatever its target has
    layers = block.get("num_hidden_layers")
    if layers != 1 and not (layers is None and head.layout == SPECULATORS):
        yield find(faults.LAYER_COUNT, layers=layers)


def _list_block_facts(head: HeadFolder) -> Config:
    """Return the sizes of a head with one Llama block."""
    shape = head.shape
    rope = shape["rope_parameters"]
    return {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": f"{shape['vocab_size']}, of which it says {head.draft_vocab_size}",
    }


def _read_settings(head: HeadFolder, usual: str, read_switches: Any) -> Config:
    """Return the settings that change what is computed; those without a counterpart here are refused."""
    head.layout = _find_layout(head, usual)
    _refuse_foreign_settings(head)
    window = _read_block(head)
    settings = {"intermediate_size": head.shape["intermediate_size"], **read_switches(head)}
    if window:
        settings["window"] = {"sinks": 0, "recent": window}
    # read so that it counts as known; it changes nothing here
    head.nested.read("use_aux_hidden_state")
    return settings


# -- EAGLE-1 ----------------------------------------------------------------------------------------------------------


def _read_fc_bias(head: HeadFolder) -> Config:
    """Return EAGLE-1's one switch: the file decides whether `fc` has a bias."""
    head.draft_vocab_size = head.shape["vocab_size"]
    is_there = "fc.bias" in head.names
    is_promised = head.keys.read("bias")
    if is_promised and not is_there:
        head.problem(
            "config.json says that fc has a bias, and fc.bias is missing", "Export the head again"
        )
    if is_promised is None:
        state = "is there"
        if is_there and not head.load("fc.bias").any():
            # engines that expect a bias get one that does nothing
            state = "is there, all zeros as exports have it without fc_bias, and does nothing"
        if not is_there:
            state = "is not there, and a reader that expects one starts it at random"
        head.notes.append(f"no `bias` in config.json, true for SafeAILab/EAGLE: fc.bias {state}")
    return {"fc_bias": is_there}


def _settle_eagle1(
    head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> list[str]:
    """Drop a bias of zeros, which is none; what scales the target's embedding comes out of `fc`."""
    # such heads read the rows as they are stored, heads here as the target multiplies them
    notes = []
    if head.target and head.target.embed_scale != 1.0 and "fc.weight" in head.names:
        notes = [
            f"the target multiplies its embedding with {head.target.embed_scale:g}, by which fc is divided"
        ]
    if "fc.bias" in head.names and not bool(head.load("fc.bias").any()):
        head.settings["fc_bias"] = False
        return [*notes, "fc.bias is all zeros and left out: it changes nothing"]
    if head.settings["fc_bias"] and head.keys.values.get("bias") is False:
        raise ValueError(
            "config.json: bias is false, and fc.bias is there and not zero: correct the one that is wrong"
        )
    return notes


def _make_eagle1_tensor(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return one of our tensors; `fc` reads the embedding as the target multiplies it."""
    tensor = load_or_zeros(head, name, size)
    if name == "fc.weight" and head.target and head.target.embed_scale != 1.0:
        # [H, 2 H], of which the first half reads the embedding
        tensor[:, : tensor.shape[1] // 2] /= head.target.embed_scale
    return tensor


def _find_eagle1_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield names of classes and biases that some engines read in another way."""
    yield from _find_unknown_names(head, EAGLE1_CLASSES)
    if "fc.bias" not in head.names:
        yield find(
            faults.NO_BIAS,
            affects=lambda layout: isinstance(layout, FeatureLayout) and layout.reads_bias,
        )
    elif bool(head.load("fc.bias").any()):
        yield find(
            faults.BIAS_DROPPED,
            affects=lambda layout: isinstance(layout, FeatureLayout) and not layout.reads_bias,
        )
    yield from _find_broken_promises(head, is_tied_fatal=False)


def _list_eagle1_facts(head: HeadFolder) -> Config:
    """Return what `inspect` prints of an EAGLE-1 head: sizes, the target's state that it reads, and fc's bias."""
    bias = "yes" if "fc.bias" in head.names else "no"
    if bias == "yes" and not head.load("fc.bias").any():
        bias = "all zeros, as exports have it without fc_bias: does nothing"
    return {
        **_list_block_facts(head),
        "reads": "the target's last hidden state, after the final norm",
        "bias of fc": bias,
    }


EAGLE1_HEADS = Network(
    name="EAGLE-1",
    method="eagle1",
    methods=("eagle1", "hass"),
    read_settings=partial(_read_settings, usual=EAGLE1, read_switches=_read_fc_bias),
    spellings=((EAGLE1, EAGLE1_NAMES),),
    trains_embedding=True,
    optional=dict.fromkeys((EMBEDDING, OUTPUT), ("vocab_size", "hidden_size")),
    remedies={"fc.weight": "Engines start from random numbers there without a word: export again"},
    lists_all=True,
    takes_positions=True,
    settle=_settle_eagle1,
    make_tensor=_make_eagle1_tensor,
    find_faults=_find_eagle1_faults,
    describe=lambda head: "EAGLE-1 (or EAGLE-2, HASS: the same network)",
    list_facts=_list_eagle1_facts,
)


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def _read_switches(head: HeadFolder) -> Config:
    """Return the draft vocabulary, the taps and the switches."""
    _read_draft_vocab(head)
    # fc reads the states of all taps side by side
    width = head.shape["hidden_size"]
    columns = head.side("fc.weight", 1)
    if columns is None:
        columns = 3 * width
    head.tap_count, rest = divmod(columns, width)
    if rest or not 0 < head.tap_count < 100:
        head.problem(
            f"fc.weight reads {columns} numbers, expected a multiple of {width}, the width"
        )
        head.tap_count = 3
    switches = {
        name: _read_switch(head, name)
        for name in ("fc_norm", "norm_output", "norm_before_residual")
    }
    is_there = "fc_norm.0.weight" in head.names
    if is_there != switches["fc_norm"]:
        state = "is" if is_there else "is not"
        head.problem(
            f"config.json: fc_norm is {switches['fc_norm']}, and fc_norm.0.weight {state} there"
        )
    if head.nested.read("use_aux_hidden_state") is False:
        head.problem(
            "config.json: eagle_config.use_aux_hidden_state is false, but this is EAGLE-3's network"
        )
    inputs = head.keys.read(LAYER_IDS)
    outputs = head.nested.read(LAYER_IDS)
    if inputs is not None:
        head.inputs = tuple(inputs)
    if outputs:  # ModelOpt writes [] for its default
        head.outputs = tuple(outputs)
    draft_vocab = None
    if head.draft_vocab_size < head.shape["vocab_size"]:
        draft_vocab = head.draft_vocab_size
    # the taps until an import settles them
    return {**switches, "taps": tuple(range(head.tap_count)), "draft_vocab": draft_vocab}


def _read_draft_vocab(head: HeadFolder) -> None:
    """Read the number of tokens that can be drafted."""
    output = head.entry(OUTPUT)
    vocab_size = head.shape["vocab_size"]
    size = head.keys.read("draft_vocab_size")
    if size is None:
        size = vocab_size
        where = "the whole vocabulary"
        if output:
            where = "the rows of lm_head.weight"
            if output.shape:
                size = output.shape[0]
        head.notes.append(f"no draft_vocab_size: {size}, {where}")
    if size > vocab_size:
        what = f"draft_vocab_size is {size}, more than the vocabulary of {vocab_size}"
        head.problem(what, fatal=False)
    head.draft_vocab_size = size
    head.overrides["draft_vocab_size"] = size


def _read_switch(head: HeadFolder, name: str) -> bool:
    """Return a switch at the top of a config or in eagle_config; off if it is in neither."""
    outer = head.keys.read(name)
    inner = head.nested.read(name)
    if None not in (outer, inner) and outer != inner:
        head.problem(
            f"config.json: {name} is {outer} and eagle_config.{name} is {inner}",
            "Correct one of them",
        )
    if outer is None and inner is None:
        head.notes.append(f"no {name}: false")
    return bool(inner) if outer is None else bool(outer)


def _is_ambiguous(head: HeadFolder) -> bool:
    """Return whether the config holds `norm_output` and nothing tells whose."""
    keys = head.keys.values.keys() | head.nested.values.keys()
    # SpecForge never writes norm_before_residual
    is_from_specforge = "norm_before_residual" not in keys
    return head.layout in (MIDLAYER, REFERENCE) and "norm_output" in keys and is_from_specforge


def _ask_meaning(head: HeadFolder) -> str:
    """Return the question to the user that the config leaves open."""
    value = str(head.settings["norm_output"]).lower()
    meanings = ", or ".join(MEANINGS.values())
    return f"norm_output is {value}, which has two meanings: either {meanings}"


def _settle_norm_output(head: HeadFolder, meaning: str | None) -> None:
    """Set the head's switch by the meaning of `norm_output`; ValueError if it is open or has no counterpart."""
    if meaning is None and _is_ambiguous(head):
        raise ValueError(f"{head.path}: {_ask_meaning(head)}. {ASK}")
    if meaning not in (None, *MEANINGS):
        raise ValueError(
            f"norm_output is {meaning!r}, expected {' or '.join(map(repr, MEANINGS))}: what the key means"
        )
    if meaning != LM_HEAD:
        return
    if head.settings["norm_output"]:
        head.notes.append(f"norm_output is true and means, as asked: {MEANINGS[LM_HEAD]}")
        head.settings["norm_output"] = False
    elif _is_ambiguous(head):
        raise ValueError(
            f"{head.path}: norm_output is false, by which SpecForge means that the LM head reads the un-normed "
            "state: no head here does"
        )


def _settle_eagle3(
    head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> list[str]:
    """Settle `norm_output` and the taps: as asked, by two statements of the config that must agree, or the usual."""
    if "norm_output" in head.settings:
        _settle_norm_output(head, norm_output)
    head.settings["taps"], notes = choose_taps(head, taps)
    if "fc.bias" in head.names:
        if bool(head.load("fc.bias").any()):
            raise ValueError(
                "fc.bias is not zero, and EAGLE-3 has no bias in fc: no engine would add it"
            )
        notes.append("fc.bias is all zeros and left out: it changes nothing")
    return [*notes, *check_draft_vocab(head)]


def _make_eagle3_tensor(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return offsets as whole numbers, the mask that follows from them, and all else as it is."""
    if name not in INDICES:
        return head.load(name)
    offsets = head.load("d2t").long()  # [D]
    if name == "d2t":
        return offsets
    return mark_tokens(offsets + torch.arange(len(offsets)), head.shape["vocab_size"])


def _may_lack_mask(head: HeadFolder, name: str) -> str:
    return "no t2d: made from d2t" if name == "t2d" else ""


def _knows(layout: Any, switch: str) -> bool:
    # P-EAGLE's layouts are of this class too, and say nothing of EAGLE-3's
    return type(layout) is FusedLayout and switch in layout.switches


def _lacks(layout: Any, switch: str) -> bool:
    return type(layout) is FusedLayout and switch not in layout.switches


def _find_eagle3_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield names, layer ids, the draft vocabulary and switches that engines read in another way."""
    # in the order in which `inspect` shows them
    yield from _find_unknown_names(head, EAGLE3_CLASSES)
    if head.has_block("layers.0."):
        yield find(faults.MIDLAYER_ONLY)
    yield from find_wrong_ids(head)
    if head.inputs and head.outputs is None:
        yield find(faults.OUTER_IDS_ALONE)
    elif head.outputs and not head.inputs:
        yield find(faults.INNER_IDS_ALONE, inputs=list(head.inputs_by_outputs or ()))
    for switch, fault in faults.UNKNOWN_SWITCHES.items():
        if head.settings[switch]:
            lacks = partial(_lacks, switch=switch)
            yield find(fault, affects=lacks, servers=partial(_knows, switch=switch))
    if _is_ambiguous(head):
        readers = partial(_knows, switch="norm_output")
        yield find(faults.NORM_OUTPUT, affects=readers, question=_ask_meaning(head), ask=ASK)
    norm = "layers.0.input_layernorm.weight"
    if head.layout == MODELOPT and norm in head.names:
        # it begins as ones, and training has moved it where they differ
        weight = head.load(norm)
        if bool((weight != weight[:1]).any()):
            yield find(faults.MODELOPT_NORM)
    if head.layout == SPECULATORS and "norm_before_residual" not in head.keys.values:
        yield find(faults.RESIDUAL_UNSAID)
    if "fc.bias" in head.names:
        yield find(faults.FUSED_BIAS)
    yield from _find_broken_promises(head, is_tied_fatal=True)


def _list_eagle3_facts(head: HeadFolder) -> Config:
    """Return sizes, the layers that are read, and what is switched on."""
    reads = "layers that are not named"
    # in both ways of counting, to be compared with any config
    inputs = head.inputs or head.inputs_by_outputs
    if inputs:
        outputs = tuple(layer - 1 for layer in inputs)
        reads = f"inputs of layers {inputs}, which are outputs of {outputs}"
    names = ("fc_norm", "norm_output", "norm_before_residual", "window")
    switches = ", ".join(name for name in names if head.settings.get(name))
    return {**_list_block_facts(head), "reads": reads, "switches": switches or "none"}


def _describe_eagle3(head: HeadFolder) -> str:
    if head.settings.get("fc_norm") or head.settings.get("norm_output"):
        return "EAGLE-3.1"
    return "EAGLE-3"


EAGLE3_HEADS = replace(
    EAGLE1_HEADS,
    name="EAGLE-3",
    method="eagle3",
    methods=("eagle3",),
    read_settings=partial(_read_settings, usual=LAYERS, read_switches=_read_switches),
    spellings=((MIDLAYER, MIDLAYER_NAMES), (LAYERS, EAGLE3_NAMES)),
    borrowed={EMBEDDING: EMBEDDINGS},
    optional={
        EMBEDDING: ("vocab_size", "hidden_size"),
        "d2t": ("draft_vocab_size",),
        "t2d": ("vocab_size",),
        "fc.bias": ("hidden_size",),
    },
    remedies={
        **EAGLE1_HEADS.remedies,
        OUTPUT: "Engines use the target's, random numbers or none: export it, a head trains its own",
        "d2t": "Engines take the draft's numbers for tokens: export it",
    },
    takes_taps=True,
    may_lack=_may_lack_mask,
    settle=_settle_eagle3,
    make_tensor=_make_eagle3_tensor,
    find_faults=_find_eagle3_faults,
    describe=_describe_eagle3,
    list_facts=_list_eagle3_facts,
)


# -- P-EAGLE: EAGLE-3's, further blocks, and what stands where a token and its states are not known yet ---------------


def _read_peagle(head: HeadFolder) -> Config:
    """Return EAGLE-3's settings without a window, and the mask token, for which there is no default."""
    _refuse_foreign_peagle(head)
    _read_block(head)
    settings = {"intermediate_size": head.shape["intermediate_size"], **_read_switches(head)}
    settings.pop("norm_output")  # a state that is never read again
    count = count_indices(head, r"layers\.(\d+)\.")
    blocks = max(compare_count(head, head.block.read("num_hidden_layers"), count, "layers"), 1)
    head.overrides["num_hidden_layers"] = blocks
    head.overrides["qk_norm"] = "layers.0.self_attn.q_norm.weight" in head.names
    taps = head.inputs or head.inputs_by_outputs or settings["taps"]
    return {**settings, "taps": taps, "blocks": blocks, "mask_token": _read_peagle_mask(head)}


def _refuse_foreign_peagle(head: HeadFolder) -> None:
    """Record the settings that no P-EAGLE head of this project has."""
    keys, block, _ = head.sections
    refused = {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "layer_types": "sliding_attention" in (block.read("layer_types") or [])
        or bool(block.read("use_sliding_window")),
        "norm_before_fc": bool(keys.read("norm_before_fc")),
        "target_hidden_size": keys.read("target_hidden_size")
        not in (None, head.shape["hidden_size"]),
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    head.refuse(refused)
    head.take("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window")
    keys.taken |= {"speculators_config"}


def _read_peagle_mask(head: HeadFolder) -> int:
    """Return the token that stands where none is known, by any of its names."""
    values = {
        name: head.keys.read(name) for name in ("mask_token_id", "pard_token", "ptd_token_id")
    }
    # three projects have three names for it
    masks = {name: token for name, token in values.items() if token is not None}
    size = head.shape["vocab_size"]
    if not masks:
        head.problem(
            "config.json: no mask_token_id, which P-EAGLE reads", "See the training run's command"
        )
    elif len(set(masks.values())) > 1:
        head.problem(f"config.json: the mask tokens disagree: {masks}", "Keep the right one")
    elif max(masks.values()) >= size:
        head.problem(
            f"config.json: mask_token_id is {max(masks.values())}, the vocabulary has {size}",
            "Correct it",
        )
    return next(iter(masks.values()), 0)


PEAGLE_HEADS = replace(
    EAGLE3_HEADS,
    name="a P-EAGLE head",
    method=PEAGLE,
    methods=(PEAGLE,),
    tensors=r"mask_hidden$",
    words="peagle",
    read_settings=_read_peagle,
    spellings=(("P-EAGLE", MIDLAYER_NAMES), ("P-EAGLE", PEAGLE_NAMES)),
    spare={**ROTARY, r"verifier_(norm|lm_head)\.weight": "training alone reads it"},
    trains_embedding=False,
    find_faults=find_wrong_ids,
    describe=describe_kind,
    list_facts=list_settings,
)
