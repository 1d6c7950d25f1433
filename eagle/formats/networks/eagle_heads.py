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
    INPUT_NORM,
    JOINT_NORM,
    LAYER_IDS,
    MIDLAYER_NAMES,
    check_draft_vocab,
    choose_taps,
    find_wrong_ids,
    make_vocab_tensor,
    may_lack_mask,
)
from eagle.formats.networks.network import (
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
from eagle.formats.reading.faults import FoundFault, report
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
FUSED_NAMES = {**EAGLE1_NAMES, **keep_names("fc_norm.#.weight", "norm.weight", "d2t", "t2d")}
EAGLE3_NAMES = {**FUSED_NAMES, **keep_names(INPUT_NORM)}
PEAGLE_NAMES = {**FUSED_NAMES, **keep_names("layers.#.*", MASK_HIDDEN)}
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
    """Return the tokens of the block's sliding window, None for full attention; mark the block's keys as handled.

    Whether there are biases, and how many layers, is decided by the tensors. Reading a key marks it as handled, so
    that it is not listed as unknown.
    """
    head.keys.handled |= {"mask_token_id", "quantization_config"}
    for name in (
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "num_hidden_layers",
    ):
        head.block.read(name)
    # configs of speculators nest the block's keys, and have this one at the top too
    if head.block is not head.keys:
        head.keys.read("tie_word_embeddings")
    if head.is_of_speculators:
        head.keys.section("speculators_config")
    return _read_window(head.block)


def _read_window(block: Keys) -> int | None:
    """Return the window, in tokens, that `layer_types` switches on for the head's layer; None for full attention.

    All engines read it so. Without `layer_types` they differ, and `_refuse_foreign_settings` refuses such a window.
    """
    # the head has one layer, so only the first type counts
    layer_types = block.read("layer_types") or []
    if "sliding_attention" not in layer_types[:1]:
        return None
    window: int | None = block.read("sliding_window")
    return window


def _slides(block: Keys) -> bool:
    """Return whether any engine may read a sliding window in this config.

    With `layer_types` all engines go by it. Without it some take `sliding_window` alone for a window, unless
    `use_sliding_window` is false.
    """
    window = block.read("sliding_window")
    is_used = block.read("use_sliding_window")
    layer_types = block.read("layer_types")
    if layer_types:
        return "sliding_attention" in layer_types[:1]
    return bool(window and is_used is not False)


def _refuse_foreign_settings(head: HeadFolder) -> None:
    """Add to the head's problems each setting in the config that neither EAGLE-1 nor EAGLE-3 heads have here."""
    keys, block, nested = head.sections
    # setting -> whether the config has it; each changes what the head computes, though its tensors look the same
    refused = {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "sliding_window": _slides(block) and not _read_window(block),
        "target_hidden_size": keys.read("target_hidden_size")
        not in (None, head.shape["hidden_size"]),
        "parallel_draft_step": (nested.read("parallel_draft_step") or 1) > 1,
        "use_mtp_layernorm": bool(nested.read("use_mtp_layernorm")),
        "use_input_layernorm_in_first_layer": nested.read("use_input_layernorm_in_first_layer")
        is False,
        # only heads that draft several tokens in one forward have a mask token
        "mask_token_id": "mask_token_id" in keys.values,
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    head.refuse(refused)


def _find_layout(head: HeadFolder, usual: str) -> str:
    """Return which project wrote a checkpoint, or how it names its block, by its keys and names of tensors.

    Args:
        head: The checkpoint.
        usual: The answer if nothing tells.
    """
    if head.is_of_speculators:
        return SPECULATORS
    if any(name.startswith("model.") for name in head.tensors.stored):
        return AUTOMODEL
    if head.has_block("midlayer."):
        if head.architectures[:1] == ["LlamaForCausalLM"]:
            return REFERENCE
        return MIDLAYER
    # ModelOpt writes this key
    nested = head.config.get("eagle_config")
    if isinstance(nested, dict) and "next_layer_regular" in nested:
        return MODELOPT
    return usual


def _find_unknown_names(head: HeadFolder, classes: set[str]) -> Iterator[FoundFault]:
    """Yield a fault for tensor names with the prefix `model.`, and for architectures that no engine knows.

    Args:
        head: The checkpoint.
        classes: The architectures that engines know for heads of this network.
    """
    count = sum(name.startswith("model.") for name in head.tensors.stored)
    if count:
        # the projects that write this class or this file remove the prefix themselves when they load
        is_fatal = AUTOMODEL_CLASS not in head.architectures and not has(head.path, "eagle_meta.pt")
        yield report(faults.MODEL_PREFIX, fatal=is_fatal, count=count)
    if not set(head.architectures) & classes:
        yield report(faults.ARCHITECTURE, names=head.architectures or "missing")


def _find_broken_promises(head: HeadFolder, is_tied_fatal: bool) -> Iterator[FoundFault]:
    """Yield a fault for each key of the config that promises other tensors than an EAGLE head has.

    Engines go by these keys when they build the head, whatever tensors the file holds.

    Args:
        head: The checkpoint.
        is_tied_fatal: Whether `tie_word_embeddings` makes readers replace an LM head that the file holds.
    """
    block = head.block.values
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if block.get(name) is True:
            yield report(faults.PROMISED_BIAS, name=name)
    if True in (block.get("tie_word_embeddings"), head.keys.values.get("tie_word_embeddings")):
        yield report(faults.TIED, fatal=is_tied_fatal)
    # a head has one layer, whatever its target has; configs of speculators may leave the count out
    layers = block.get("num_hidden_layers")
    if layers != 1 and not (layers is None and head.layout == SPECULATORS):
        yield report(faults.LAYER_COUNT, layers=layers)


def _list_block_facts(head: HeadFolder) -> Config:
    """Return what `eagle inspect` prints of a head with one Llama block: its sizes, rotary parameters, vocabulary."""
    shape = head.shape
    rope = shape["rope_parameters"]
    vocabulary = f"{shape['vocab_size']}"
    if head.draft_vocab_size != shape["vocab_size"]:
        vocabulary += f", of which it drafts {head.draft_vocab_size}"
    return {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": vocabulary,
    }


def _read_settings(head: HeadFolder, usual: str, read_switches: Any) -> Config:
    """Return the settings of an EAGLE-1 or EAGLE-3 head as a recipe would state them: `Network.read_settings`.

    Settings that no head here has become problems of the checkpoint.

    Args:
        head: The checkpoint; its `layout` is set.
        usual: The layout of the checkpoint if nothing in it tells.
        read_switches: A function of the checkpoint that returns the settings in which EAGLE-1 and EAGLE-3 differ.
    """
    head.layout = _find_layout(head, usual)
    _refuse_foreign_settings(head)
    window = _read_block(head)
    settings = {"intermediate_size": head.shape["intermediate_size"], **read_switches(head)}
    if window:
        # "sinks" are first tokens that stay visible, of which such configs have none
        settings["window"] = {"sinks": 0, "recent": window}
    # read only so that it does not count as unknown
    head.nested.read("use_aux_hidden_state")
    return settings


# -- EAGLE-1 ----------------------------------------------------------------------------------------------------------


def _read_fc_bias(head: HeadFolder) -> Config:
    """Return EAGLE-1's own setting, `fc_bias`: whether the file holds a bias of `fc`, whatever the config says.

    If the config promises a bias that is missing, that becomes a problem; if it says nothing, that is noted.
    """
    head.refuse({JOINT_NORM: _has_joint_norm(head)})
    # EAGLE-1 drafts by the target's LM head, so it can draft all tokens
    head.draft_vocab_size = head.shape["vocab_size"]
    has_bias = "fc.bias" in head.names
    config_bias = head.keys.read("bias")
    if config_bias and not has_bias:
        head.problem(
            "config.json says that fc has a bias, and fc.bias is missing", "Export the head again"
        )
    if config_bias is None:
        state = "is there"
        if has_bias and not head.load("fc.bias").any():
            # engines that expect a bias get one that does nothing
            state = "is there, all zeros as exports have it without fc_bias, and does nothing"
        if not has_bias:
            state = "is not there, and a reader that expects one starts it at random"
        head.notes.append(f"no `bias` in config.json, true for SafeAILab/EAGLE: fc.bias {state}")
    return {"fc_bias": has_bias}


def _settle_eagle1(
    head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> list[str]:
    """Decide at an import whether an EAGLE-1 head has a bias in `fc`; return notes for the user: `Network.settle`.

    A bias of zeros is dropped, by setting `head.settings["fc_bias"]`. ValueError for a bias that the config denies.
    `taps` and `norm_output` are the user's answers to questions that such a head does not leave open.
    """
    # heads elsewhere read the embedding as it is stored and heads here times the target's factor, as on Gemma:
    # `_make_eagle1_tensor` divides `fc` by it, so that the product stays the same
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
    """Return one of our tensors for an import: as the file has it, but for `fc`.

    Some targets multiply their embedding rows by a factor. Heads here read the multiplied rows and heads elsewhere the
    stored ones, so the columns of `fc` that read the embedding are divided by the factor.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        size: Its size in the head that is built.
    """
    tensor = load_or_zeros(head, name, size)
    if name == "fc.weight" and head.target and head.target.embed_scale != 1.0:
        # a copy in fp32: the file's own precision would round the quotients
        tensor = tensor.to(torch.float32, copy=True)
        # [H, 2 H] with H the width: the first H columns read the embedding, the others the target's state
        tensor[:, : tensor.shape[1] // 2] /= head.target.embed_scale
    return tensor


def _find_eagle1_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield what some engines read differently in an EAGLE-1 head: names, the bias of `fc`, and false promises."""
    yield from _find_unknown_names(head, EAGLE1_CLASSES)
    # a missing bias starts at random where an engine has one; a bias is dropped where an engine has none. `affects`
    # picks engines by their layout of the network.
    if "fc.bias" not in head.names:
        yield report(
            faults.NO_BIAS,
            affects=lambda layout: isinstance(layout, FeatureLayout) and layout.reads_bias,
        )
    elif bool(head.load("fc.bias").any()):
        yield report(
            faults.BIAS_DROPPED,
            affects=lambda layout: isinstance(layout, FeatureLayout) and not layout.reads_bias,
        )
    yield from _find_broken_promises(head, is_tied_fatal=False)


def _list_eagle1_facts(head: HeadFolder) -> Config:
    """Return what `eagle inspect` prints of an EAGLE-1 head: sizes, the state that it reads, and fc's bias."""
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
    """Return EAGLE-3's own settings: its three switches, the taps and the size of the draft vocabulary.

    Taps are the target's layers whose inputs the head reads. Besides the result it sets `head.tap_count`, and in
    `head.inputs` and `head.outputs` the layers that the config names.
    """
    _read_draft_vocab(head)
    # fc [H, taps x H] with H the width reads the concatenated states of all taps, by default three
    width = head.shape["hidden_size"]
    columns = head.side("fc.weight", 1)
    if columns is None:
        columns = 3 * width
    head.tap_count, rest = divmod(columns, width)
    # no head reads 100 layers: such a number comes from a wrong width
    if rest or not 0 < head.tap_count < 100:
        head.problem(
            f"fc.weight reads {columns} numbers, expected a multiple of {width}, the width"
        )
        # any valid number, as the problem prevents an import
        head.tap_count = 3
    switches = {
        name: _read_switch(head, name)
        for name in ("fc_norm", "norm_output", "norm_before_residual")
    }
    _compare_norm(head, "fc_norm", switches["fc_norm"], "fc_norm.0.weight")
    if head.nested.read("use_aux_hidden_state") is False:
        head.problem(
            "config.json: eagle_config.use_aux_hidden_state is false, but this is EAGLE-3's network"
        )
    # the same key counts the inputs of layers at the top of the config, and their outputs in eagle_config
    inputs = head.keys.read(LAYER_IDS)
    outputs = head.nested.read(LAYER_IDS)
    if inputs is not None:
        head.inputs = tuple(inputs)
    if outputs:  # ModelOpt writes [] for its default
        head.outputs = tuple(outputs)
    draft_vocab = None
    if head.draft_vocab_size < head.shape["vocab_size"]:
        draft_vocab = head.draft_vocab_size
    # these taps only have the right number: `_settle_eagle3` finds the layers
    return {**switches, "taps": tuple(range(head.tap_count)), "draft_vocab": draft_vocab}


def _read_eagle3(head: HeadFolder) -> Config:
    """Return the settings of `_read_switches`, and the norm of all taps together if the checkpoint has one."""
    switches = _read_switches(head)
    _compare_norm(head, JOINT_NORM, _has_joint_norm(head), INPUT_NORM)
    if INPUT_NORM in head.names:
        switches[JOINT_NORM] = True
    return switches


def _compare_norm(head: HeadFolder, key: str, promised: bool, tensor: str) -> None:
    """Add a problem to the checkpoint if its config promises a norm without weights, or denies one that has weights.

    Args:
        head: The checkpoint.
        key: The config's key for the norm.
        promised: Its value.
        tensor: Our name of the norm's weights.
    """
    if (tensor in head.names) != promised:
        state = "is not" if promised else "is"
        head.problem(f"config.json: {key} is {promised}, and {tensor} {state} there")


def _has_joint_norm(head: HeadFolder) -> bool:
    """Return whether the config says that one norm reads the states of all taps together."""
    outer = head.keys.read(JOINT_NORM)
    inner = head.nested.read(JOINT_NORM)
    return bool(outer or inner)


def _read_draft_vocab(head: HeadFolder) -> None:
    """Set `head.draft_vocab_size`, the number of tokens that the head can draft.

    It is that of the config, else the number of rows of the LM head, else the whole vocabulary. A number above the
    vocabulary becomes a problem.
    """
    lm_head = head.entry(OUTPUT)
    vocab_size = head.shape["vocab_size"]
    size = head.keys.read("draft_vocab_size")
    if size is None:
        size = vocab_size
        where = "the whole vocabulary"
        if lm_head:
            where = "the rows of lm_head.weight"
            if lm_head.shape:
                size = lm_head.shape[0]
        head.notes.append(f"no draft_vocab_size: {size}, {where}")
    if size > vocab_size:
        what = f"draft_vocab_size is {size}, more than the vocabulary of {vocab_size}"
        head.problem(what, fatal=False)
    head.draft_vocab_size = size
    # the size with which the head is built
    head.overrides["draft_vocab_size"] = size


def _read_switch(head: HeadFolder, name: str) -> bool:
    """Return a boolean setting at the top of the config or in eagle_config; false, with a note, if it is in neither.

    Args:
        head: The checkpoint, in which a contradiction becomes a problem.
        name: The config's key, which is also the setting's name here.
    """
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
    """Return whether the config holds `norm_output`, and nothing tells which of its two meanings it has.

    Most tools mean that the next draft step reads the normed state. SpecForge means that the LM head reads it.
    """
    keys = head.keys.values.keys() | head.nested.values.keys()
    # SpecForge, which means the LM head by it, never writes norm_before_residual
    may_be_specforge = "norm_before_residual" not in keys
    return head.layout in (MIDLAYER, REFERENCE) and "norm_output" in keys and may_be_specforge


def _ask_meaning(head: HeadFolder) -> str:
    """Return the question to the user what the config's key `norm_output` means."""
    value = str(head.settings["norm_output"]).lower()
    meanings = ", or ".join(MEANINGS.values())
    return f"norm_output is {value}, which has two meanings: either {meanings}"


def _settle_norm_output(head: HeadFolder, meaning: str | None) -> None:
    """Set `head.settings["norm_output"]`, which says whether the next draft step reads the normed state.

    Args:
        head: The checkpoint.
        meaning: What the config's key means, if the user says so: NEXT_STEP, that the next draft step reads the normed
            state, or LM_HEAD, that the LM head reads it.

    Raises:
        ValueError: if the meaning is open, or no head here computes what the config says.
    """
    if meaning is None and _is_ambiguous(head):
        raise ValueError(f"{head.path}: {_ask_meaning(head)}. {ASK}")
    if meaning not in (None, *MEANINGS):
        raise ValueError(
            f"norm_output is {meaning!r}, expected {' or '.join(map(repr, MEANINGS))}: what the key means"
        )
    # with NEXT_STEP the key means here what it means in the config
    if meaning != LM_HEAD:
        return
    # the LM head of a head here always reads the normed state, which SpecForge's true says, and the next step reads the
    # un-normed one, which our false says
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
    """Decide at an import what the config of an EAGLE-3 head leaves open: `norm_output` and the taps.

    `head.settings` is changed. The user's arguments come first, then the config, then what engines take by default.

    Args:
        head: The checkpoint.
        taps: The layers whose inputs the head reads, if the user says so.
        norm_output: What the config's key `norm_output` means, if the user says so.

    Returns:
        Notes for the user on what was assumed or left out.
    """
    # P-EAGLE shares this function and has no such setting
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


def _knows(layout: Any, switch: str) -> bool:
    """Return whether an engine's layout is one of EAGLE-3's network, and the engine knows this switch of it."""
    # P-EAGLE's layouts are of this class too, and say nothing of EAGLE-3's
    return type(layout) is FusedLayout and switch in layout.switches


def _lacks(layout: Any, switch: str) -> bool:
    """Return whether an engine's layout is one of EAGLE-3's network, and the engine does not know this switch of it."""
    return type(layout) is FusedLayout and switch not in layout.switches


def _find_eagle3_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield what some engines read differently in an EAGLE-3 head: names, layer ids, switches, norms and biases."""
    # in the order in which `inspect` shows them
    yield from _find_unknown_names(head, EAGLE3_CLASSES)
    # one engine finds the block only under the name `midlayer`
    if head.has_block("layers.0."):
        yield report(faults.MIDLAYER_ONLY)
    yield from find_wrong_ids(head)
    # `inputs` are the layer ids at the top of the config, `outputs` those in eagle_config; some engines read one alone
    if head.inputs and head.outputs is None:
        yield report(faults.OUTER_IDS_ALONE)
    elif head.outputs and not head.inputs:
        yield report(faults.INNER_IDS_ALONE, inputs=list(head.inputs_by_outputs or ()))
    for switch, fault in faults.UNKNOWN_SWITCHES.items():
        if head.settings.get(switch):
            lacks = partial(_lacks, switch=switch)
            # the fault affects engines that lack the switch; its advice names those that know it, as `servers`
            yield report(fault, affects=lacks, servers=partial(_knows, switch=switch))
    if _is_ambiguous(head):
        readers = partial(_knows, switch="norm_output")
        yield report(faults.NORM_OUTPUT, affects=readers, question=_ask_meaning(head), ask=ASK)
    norm = "layers.0.input_layernorm.weight"
    if head.layout == MODELOPT and norm in head.names:
        # ModelOpt also norms the state with it in training, which engines do not. A norm's weights start as ones: if
        # they differ from one another, it was trained.
        weight = head.load(norm)
        if bool((weight != weight[:1]).any()):
            yield report(faults.MODELOPT_NORM)
    # readers of speculators' configs have different defaults for the switch
    if head.layout == SPECULATORS and "norm_before_residual" not in head.keys.values:
        yield report(faults.RESIDUAL_UNSAID)
    if "fc.bias" in head.names:
        yield report(faults.FUSED_BIAS)
    yield from _find_broken_promises(head, is_tied_fatal=True)


def _list_eagle3_facts(head: HeadFolder) -> Config:
    """Return what `eagle inspect` prints of an EAGLE-3 head: sizes, the layers that it reads, and switches."""
    reads = "layers that are not named"
    # ids in both ways of counting, which a user can compare with any config
    inputs = head.inputs or head.inputs_by_outputs
    if inputs:
        outputs = tuple(layer - 1 for layer in inputs)
        reads = f"inputs of layers {inputs}, which are outputs of {outputs}"
    names = ("fc_norm", "norm_output", "norm_before_residual", JOINT_NORM, "window")
    switches = ", ".join(name for name in names if head.settings.get(name))
    return {**_list_block_facts(head), "reads": reads, "switches": switches or "none"}


def _describe_eagle3(head: HeadFolder) -> str:
    """Return the network's name for `inspect`: EAGLE-3.1 is EAGLE-3 with one of these two switches."""
    if head.settings.get("fc_norm") or head.settings.get("norm_output"):
        return "EAGLE-3.1"
    return "EAGLE-3"


EAGLE3_HEADS = replace(
    EAGLE1_HEADS,
    name="EAGLE-3",
    method="eagle3",
    methods=("eagle3",),
    read_settings=partial(_read_settings, usual=LAYERS, read_switches=_read_eagle3),
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
    may_lack=may_lack_mask,
    settle=_settle_eagle3,
    make_tensor=make_vocab_tensor,
    find_faults=_find_eagle3_faults,
    describe=_describe_eagle3,
    list_facts=_list_eagle3_facts,
)


# -- P-EAGLE: EAGLE-3's, further blocks, and what stands where a token and its states are not known yet ---------------


def _read_peagle(head: HeadFolder) -> Config:
    """Return a P-EAGLE head's settings: EAGLE-3's, the number of transformer blocks, and the mask token."""
    _refuse_foreign_peagle(head)
    _read_block(head)
    settings = {"intermediate_size": head.shape["intermediate_size"], **_read_switches(head)}
    # one forward drafts all tokens, so that no later step reads a state of the head
    settings.pop("norm_output")
    count = count_indices(head, r"layers\.(\d+)\.")
    # at least 1, since a file without a block, whose tensors are then reported as missing, must not fail here
    blocks = max(compare_count(head, head.block.read("num_hidden_layers"), count, "layers"), 1)
    # sizes that the tensors decide, whatever the config says
    head.overrides["num_hidden_layers"] = blocks
    head.overrides["qk_norm"] = "layers.0.self_attn.q_norm.weight" in head.names
    # layers that the config names; else placeholders of the right number, until `_settle_eagle3` finds the layers
    taps = head.inputs or head.inputs_by_outputs or settings["taps"]
    return {**settings, "taps": taps, "blocks": blocks, "mask_token": _read_peagle_mask(head)}


def _refuse_foreign_peagle(head: HeadFolder) -> None:
    """Add to the head's problems each setting in the config that no P-EAGLE head of this project has."""
    keys, block, _ = head.sections  # the third is eagle_config
    # setting -> whether the config has it
    refused = {
        "hidden_act": block.read("hidden_act") not in (None, "silu"),
        "layer_types": "sliding_attention" in (block.read("layer_types") or [])
        or bool(block.read("use_sliding_window")),
        JOINT_NORM: _has_joint_norm(head),
        "target_hidden_size": keys.read("target_hidden_size")
        not in (None, head.shape["hidden_size"]),
        "quantization_config": bool(keys.values.get("quantization_config")),
    }
    head.refuse(refused)
    head.mark_handled("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window")
    keys.handled |= {"speculators_config"}


def _read_peagle_mask(head: HeadFolder) -> int:
    """Return the mask token's id; without a valid one in the config, 0 or a wrong one, and a problem.

    The head reads this token at positions whose token is not known yet. Readers have no default for it.
    """
    # three projects have three names for it
    values = {
        name: head.keys.read(name) for name in ("mask_token_id", "pard_token", "ptd_token_id")
    }
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
    type_words="peagle",
    read_settings=_read_peagle,
    spellings=(("P-EAGLE", MIDLAYER_NAMES), ("P-EAGLE", PEAGLE_NAMES)),
    ignored={**ROTARY, r"verifier_(norm|lm_head)\.weight": "training alone reads it"},
    trains_embedding=False,
    find_faults=find_wrong_ids,
    describe=describe_kind,
    list_facts=list_settings,
)
