"""What is known to go wrong with checkpoints: in which engine, and what helps."""

# D tokens that can be drafted, V vocabulary, L layers of the target

from __future__ import annotations

from collections.abc import Callable, Iterator

from eagle.data.identity import target_identity
from eagle.formats.engine import Engine, Trap
from eagle.formats.files import has, read_json
from eagle.formats.foreign_head import read_draft_tokens
from eagle.formats.head_folder import MODELOPT, OWN, SPECULATORS, Finding, HeadFolder
from eagle.formats.networks import EMBEDDING, FEATURES, FUSED, FeatureLayout, FusedLayout
from eagle.formats.norm_output import ASK, describe_choice, is_ambiguous
from eagle.formats.registry import SERVERS
from eagle.formats.target_files import EMBEDDINGS, LM_HEADS, TargetFiles, count_differing_rows
from eagle.recipe import TargetSection

AUTOMODEL_CLASS = "LlamaEagle3DraftModel"
KNOWN = {  # architectures that some engine takes a head by
    FUSED: {
        "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator",
        "Eagle3DraftModel", AUTOMODEL_CLASS,
    },
    FEATURES: {"LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"},
}  # fmt: skip
USUAL_THETA = 10000.0  # which some trainers keep whatever the target has
ANOTHER_TARGET = "This is another target's head"
Findings = Iterator[Finding]


def engines_with(*traps: Trap) -> tuple[str, ...]:
    """The engines that one of these traps strikes."""
    return _titles(lambda engine: bool(set(traps) & set(engine.traps)))


def engines_by_switch(switch: str, *, known: bool) -> tuple[str, ...]:
    """The engines that know a switch of EAGLE-3's network, or those that do not."""

    def matches(engine: Engine) -> bool:
        layout = engine.networks.get(FUSED)
        return isinstance(layout, FusedLayout) and (switch in layout.switches) == known

    return _titles(matches)


def engines_by_bias(*, read: bool) -> tuple[str, ...]:
    """The engines of EAGLE-1 that have a bias in `fc`, or those that have none."""

    def matches(engine: Engine) -> bool:
        layout = engine.networks.get(FEATURES)
        return isinstance(layout, FeatureLayout) and layout.reads_bias == read

    return _titles(matches)


def _titles(matches: Callable[[Engine], bool]) -> tuple[str, ...]:
    return tuple(engine.title for engine in SERVERS if matches(engine))


def check_names(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """How tensors and architectures are called."""
    if head.prefixed:
        is_fatal = AUTOMODEL_CLASS not in head.architectures and not has(head.path, "eagle_meta.pt")
        what = f"{len(head.prefixed)} tensors stand under `model.`"
        fix = "Take `model.` off the names; import and export do"
        yield Finding(what, engines_with(Trap.MODEL_PREFIX), is_fatal, fix)
    if head.is_fused and head.has_block("layers.0."):
        what = "the block is called layers.0: OpenVINO starts a random one"
        fix = "Export to openvino, which says `midlayer`"
        yield Finding(what, engines_with(Trap.MIDLAYER_ONLY), False, fix)
    if not set(head.architectures) & KNOWN[head.network or FUSED]:
        what = f"architectures is {head.architectures or 'missing'}, which no engine knows"
        yield Finding(what, fatal=False, fix="Export again")


def check_layer_ids(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Two conventions, two places: inputs of layers in the outer key, outputs in the inner one."""
    if not head.is_fused:
        return
    inputs, inner = head.inputs, head.inputs_by_outputs
    outer_unread, inner_misread = engines_with(Trap.OUTER_IDS_UNREAD), engines_with(Trap.INNER_IDS_MISREAD)
    if inputs and inner and inputs != inner:
        same = " (they are the same numbers, but the inner ones count outputs)" if inputs == head.outputs else ""
        what = f"layer ids disagree: inputs {inputs}, outputs {head.outputs}{same}"
        fix = "Inner ids must be one less than outer ones: correct one place"
        yield Finding(what, engines_with(Trap.OUTER_IDS_UNREAD, Trap.INNER_IDS_MISREAD), True, fix)
    if not inputs and not inner:
        what = "no layer ids: engines take the inputs of 2, the middle and the last but two; OpenVINO one layer further"
        fix = "Write them in both places; import with --taps or --target"
        yield Finding(what, engines_with(Trap.NO_IDS_LATE), False, fix)
    elif inputs and inner is None:
        what = "layer ids stand in the outer key alone, which SGLang does not read"
        fix = "Write eagle_config.eagle_aux_hidden_state_layer_ids, each one less"
        yield Finding(what, outer_unread, False, fix)
    elif inner and not inputs:
        what = "layer ids stand in eagle_config alone: vLLM takes them for inputs, llama.cpp does not read them"
        yield Finding(what, inner_misread, False, f"Write eagle_aux_hidden_state_layer_ids: {list(inner)}")
    if ids := inputs or inner:
        yield from _check_taps(head, ids, target)
    elif target and len({2, target.layers // 2, target.layers - 3}) < 3:
        what = f"no layer ids, and the usual ones are not three of {target.layers} layers"
        yield Finding(what, (), True, "Write them")


def _check_taps(head: HeadFolder, ids: tuple[int, ...], target: TargetFiles | None) -> Findings:
    """Layer ids that name each layer of the target once, in order."""
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        what = f"layer ids {ids}, but fc.weight reads {head.tap_count} layers"
        yield Finding(what, (), True, "Name each layer once")
    if list(ids) != sorted(ids):
        what = f"layer ids {ids} are not in order: vLLM sorts them, fc does not"
        yield Finding(what, engines_with(Trap.SORTS_IDS), True, "Export again")
    if target and not all(-1 <= layer < target.layers for layer in ids):
        last = target.layers - 1
        what = f"layer ids {ids} for a target of {target.layers} layers: the last input is that of {last}"
        yield Finding(what, (), True, "This is the head of another target, or the ids are wrong")


def check_vocabulary(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """`d2t` and `t2d`."""
    entry, size, vocab_size = head.entry("d2t"), head.draft_vocab_size, head.shape["vocab_size"]
    if not head.is_fused or entry is None or entry.shape != (size,) or entry.dtype.is_floating_point:
        return
    offsets = head.load("d2t").long()
    if size == vocab_size:
        what = "d2t is there although the head says all tokens: vLLM refuses it, OpenVINO needs it"
        is_fatal = not head.has_block("midlayer.")
        yield Finding(what, engines_with(Trap.FULL_D2T_REFUSED), is_fatal, "Leave it out, but for OpenVINO")
        if bool(offsets.any()):
            yield Finding("d2t is not zero although the head says all tokens", (), True, "Correct draft_vocab_size")
        return
    tokens, why = read_draft_tokens(offsets, vocab_size)
    if tokens is None:
        yield Finding(why, (), True, "Engines would name other tokens than the head means")
        return
    if not bool((tokens.diff() > 0).all()):
        yield Finding("the tokens of d2t do not rise", (), False, "Nothing needs it, but trainers write them so")
    mask = head.entry("t2d")
    if mask is not None and mask.shape == (vocab_size,):
        marked = head.load("t2d").bool()
        if not bool(marked[tokens].all()) or int(marked.sum()) != len(tokens):
            are_ids = bool(((offsets >= 0) & (offsets < vocab_size)).all()) and bool(marked[offsets].all())
            what = "t2d marks other tokens than d2t" + (": d2t holds token ids, expected offsets" if are_ids else "")
            yield Finding(what, (), True, "Make both again from the same vocabulary")


def check_rotary(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """How positions turn."""
    rope = head.shape["rope_parameters"]
    theta, kind = rope["rope_theta"], rope["rope_type"]
    if head.block.values.get("rope_theta") is None and theta != USUAL_THETA:
        what = f"rope_theta ({theta:g}) stands in the rotary parameters alone: older readers take 10000"
        yield Finding(what, engines_with(Trap.ROPE_THETA_AT_TOP), False, "Write rope_theta beside them")
    theirs = target.rope if target else {}
    if theirs and theirs["rope_theta"] != theta:
        is_usual = theta == USUAL_THETA and head.layout != OWN
        why = "; some trainers do that on purpose" if is_usual else ""
        what = f"rope_theta is {theta:g}, the target's is {theirs['rope_theta']:g}{why}"
        yield Finding(what, (), not is_usual, "Write what it was trained on")
    if theirs and {**rope, "rope_theta": 0} != {**theirs, "rope_theta": 0}:
        what = f"rope scaling is {kind}, the target's is {theirs['rope_type']}, or of other numbers"
        yield Finding(what, (), False, "Fine if it was trained so")
    if kind != "default" and head.layout == MODELOPT:
        what = f"ModelOpt writes rope scaling ({kind}) into exports of heads that were trained without"
        yield Finding(what, (), False, "Take rope_scaling out of config.json unless texts are longer than in training")


def check_norms(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Switches that some engines do not look at."""
    if not head.is_fused:
        return
    serve = f"Serve it with {', '.join(engines_by_switch('fc_norm', known=True))}"
    unknown = {
        "norm_before_residual": ("norm_before_residual is true: these take the state as it is", "Train without it"),
        "fc_norm": ("fc_norm: these have none", serve),
        "norm_output": ("norm_output: these feed the state back un-normed", "As for fc_norm"),
    }
    for switch, (what, fix) in unknown.items():
        if head.switches[switch]:
            yield Finding(what, engines_by_switch(switch, known=False), False, fix)
    if is_ambiguous(head):
        yield Finding(describe_choice(head), engines_by_switch("norm_output", known=True), False, ASK)
    name = "layers.0.input_layernorm.weight"
    weight = head.load(name) if head.layout == MODELOPT and head.entry(name) else None
    if weight is not None and bool((weight != weight[:1]).any()):
        what = "ModelOpt puts the state through input_layernorm too when it trains, and engines do not"
        yield Finding(what, (), False, "Expect less acceptance than its training says; a warm start learns it anew")
    if head.layout == SPECULATORS and "norm_before_residual" not in head.keys.values:
        what = "norm_before_residual is not written: vLLM takes true, speculators false"
        yield Finding(what, engines_with(Trap.NORMED_BY_DEFAULT), True, "Write it")


def check_biases(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """The bias of `fc`, and those that a config promises."""
    has_bias = head.entry("fc.bias") is not None
    if has_bias and head.is_fused:
        what = "fc.bias in an EAGLE-3 head: dropped in silence, and a load failure in llama.cpp"
        yield Finding(what, engines_with(Trap.FUSED_BIAS), True, "Train without it")
    elif has_bias and bool(head.load("fc.bias").any()):
        what = "fc.bias is not zero, and vLLM drops it in silence"
        yield Finding(what, engines_by_bias(read=False), False, "Train with fc_bias=false")
    elif not has_bias and not head.is_fused:
        what = "no fc.bias: SGLang keeps a random one"
        yield Finding(what, engines_by_bias(read=True), False, "Write zeros; our exports do")
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if head.block.values.get(name) is True:
            what = f"{name} is true, and no such bias is among the tensors"
            yield Finding(what, engines_with(Trap.PROMISED_BIAS), True, "Set it to false")


def check_config(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Keys that lie about the tensors."""
    block, config = head.block.values, head.config
    if True in (block.get("tie_word_embeddings"), config.get("tie_word_embeddings")):
        what = "tie_word_embeddings is true: some readers put the embedding in the place of the LM head"
        yield Finding(what, (), head.is_fused, "Set it to false")
    layers = block.get("num_hidden_layers")
    if layers != 1 and not (layers is None and head.layout == SPECULATORS):
        what = f"num_hidden_layers is {layers!r:.30}, and there is one layer"
        yield Finding(what, engines_with(Trap.LAYER_COUNT), True, "Write 1")
    stated = block.get("torch_dtype") or block.get("dtype") or config.get("torch_dtype") or config.get("dtype")
    dtypes = {entry.dtype for entry in head.tensors.stored.values() if entry.dtype.is_floating_point}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if isinstance(stated, str) and set(names) - {stated.removeprefix("torch.")} and head.layout != OWN:
        what = f"config.json says {stated!r:.30}, the weights are in {', '.join(names)}: readers round them"
        yield Finding(what, (), False, "Write the dtype of the weights")
    if head.unknown_keys:
        what = f"unknown keys of config.json: {', '.join(head.unknown_keys):.400}"
        yield Finding(what, (), False, "They were not used")


def check_numbers(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Tensors that hold nothing, or nothing that is a number."""
    for name, stored in head.names.items():
        if not head.tensors.stored[stored].dtype.is_floating_point or name.endswith("inv_freq"):
            continue
        values = head.load(name).float()
        if bad := int((~values.isfinite()).sum()):
            what = f"{stored}: {bad:,} of {values.numel():,} numbers are not finite"
            yield Finding(what, (), True, "Take an earlier one")
        elif values.numel() and not bool(values.any()) and name != "fc.bias":
            yield Finding(f"{stored} is all zeros", (), True, "It was never filled: export again")


def check_target(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """The target that it is said to be for."""
    if target is None:
        return
    for name, theirs in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if head.shape[name] != theirs:
            yield Finding(f"{name} is {head.shape[name]}, the target's is {theirs}", (), True, ANOTHER_TARGET)
    borrowed = {EMBEDDING: EMBEDDINGS} if head.is_fused else {EMBEDDING: EMBEDDINGS, "lm_head.weight": LM_HEADS}
    for name, known_as in borrowed.items():
        entry, matrix = head.entry(name), target.matrix(known_as)
        if entry is None or matrix is None or entry.shape != tuple(matrix.shape) or not entry.dtype.is_floating_point:
            continue
        if differing := count_differing_rows(head.load(name), matrix):
            what = f"{differing} of {len(matrix)} rows of {head.names[name]} differ from the target's"
            yield Finding(what, (), True, "The head was made for another target, or trained an embedding of its own")


def check_origin(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """The target that it was made for, where this project wrote that down."""
    if target is None or not has(head.path, "provenance.json"):
        return
    try:
        made_for = read_json(head.path, "provenance.json").get("target")
    except ValueError as error:
        yield Finding(f"{error}", (), False, "It only tells where a head comes from")
        return
    if not isinstance(made_for, dict):
        return
    identity = target_identity(TargetSection(path=target.path))
    for part in ("weights", "config"):
        if isinstance(made_for.get(part), str) and made_for[part] != identity[part]:
            others = f"{made_for[part]!r:.20}, here {identity[part]}"
            what = f"it was trained on a target whose {part} are others ({others})"
            yield Finding(what, (), part == "weights", "Serve it with the target that it was trained on")


SERVED_ONLY = (check_names, check_layer_ids, check_norms, check_biases)  # of no matter to a head that no engine reads
CHECKS = (
    *SERVED_ONLY[:2],
    *(check_vocabulary, check_rotary),
    *SERVED_ONLY[2:],
    *(check_config, check_numbers, check_target, check_origin),
)


def lint(head: HeadFolder, target: TargetFiles | None) -> list[Finding]:
    """All that is wrong with a checkpoint, the worst first; what stands in the way of an import is part of it."""
    findings = list(head.problems)
    for check in CHECKS if head.network is not None else ():
        if head.layout != OWN or check not in SERVED_ONLY:
            try:
                findings += check(head, target)
            except (ValueError, OSError, RuntimeError) as error:  # a tensor that cannot be read after all
                what = check.__name__.removeprefix("check_").replace("_", " ")
                findings.append(Finding(f"{what} could not be looked at: {error!r:.200}"))
    unique = list({finding.what: finding for finding in findings}.values())
    return sorted(unique, key=lambda finding: not finding.fatal)
