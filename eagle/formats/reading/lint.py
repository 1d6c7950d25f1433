"""Check a checkpoint for known faults, with the affected engines and the remedy."""

# D tokens that can be drafted, V vocabulary, L layers of the target

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from eagle.data.identity import target_identity
from eagle.formats.engines.registry import SERVERS
from eagle.formats.networks.networks import FEATURES, FUSED
from eagle.formats.networks.norm_output import ASK, describe_choice, is_ambiguous
from eagle.formats.reading import traps
from eagle.formats.reading.files import has, read_json
from eagle.formats.reading.foreign_head import read_draft_tokens
from eagle.formats.reading.head_folder import MODELOPT, OWN, SPECULATORS, Finding, HeadFolder
from eagle.formats.reading.target_files import TargetFiles, borrowed_tensors, count_differing_rows
from eagle.formats.reading.traps import Trap
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
Findings = Iterator[Finding]


def strike(trap: Trap, engines: tuple[str, ...] | None = None, fatal: bool | None = None, **values: Any) -> Finding:
    """The finding of a known fault, for the engines whose tables name it unless others are given."""
    if engines is None:
        engines = tuple(engine.title for engine in SERVERS if trap in engine.traps)
    is_fatal = trap.fatal if fatal is None else fatal
    return Finding(trap.what.format(**values), engines, is_fatal, trap.fix.format(**values))


def _engines(network: str, fits: Callable[[Any], bool]) -> tuple[str, ...]:
    """The engines whose layout of a network is such."""
    return tuple(engine.title for engine in SERVERS if network in engine.networks and fits(engine.networks[network]))


def _engines_by_switch(switch: str, is_known: bool) -> tuple[str, ...]:
    """The engines that know a switch of EAGLE-3's network, or those that do not."""
    return _engines(FUSED, lambda layout: (switch in layout.switches) == is_known)


def check_names(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check the names of tensors and architectures."""
    if head.prefixed:
        is_fatal = AUTOMODEL_CLASS not in head.architectures and not has(head.path, "eagle_meta.pt")
        yield strike(traps.MODEL_PREFIX, fatal=is_fatal, count=len(head.prefixed))
    if head.is_fused and head.has_block("layers.0."):
        yield strike(traps.MIDLAYER_ONLY)
    if not set(head.architectures) & KNOWN[head.network or FUSED]:
        yield strike(traps.ARCHITECTURE, names=head.architectures or "missing")


def check_layer_ids(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check layer ids: the outer key counts layer inputs, the inner one outputs."""
    if not head.is_fused:
        return
    inputs, inner = head.inputs, head.inputs_by_outputs
    if inputs and inner and inputs != inner:
        same = " (they are the same numbers, but the inner ones count outputs)" if inputs == head.outputs else ""
        yield strike(traps.IDS_DISAGREE, inputs=inputs, outputs=head.outputs, same=same)
    if inputs and inner is None:
        yield strike(traps.OUTER_IDS_ALONE)
    elif inner and not inputs:
        yield strike(traps.INNER_IDS_ALONE, inputs=list(inner))
    ids = inputs or inner
    if not ids:
        yield strike(traps.NO_IDS)
        if target and len({2, target.layers // 2, target.layers - 3}) < 3:
            yield strike(traps.USUAL_IDS, layers=target.layers)
        return
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        yield strike(traps.IDS_COUNT, ids=ids, count=head.tap_count)
    if list(ids) != sorted(ids):
        yield strike(traps.IDS_UNSORTED, ids=ids)
    if target and not all(-1 <= layer < target.layers for layer in ids):
        yield strike(traps.IDS_OUTSIDE, ids=ids, layers=target.layers, last=target.layers - 1)


def check_vocabulary(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check `d2t` and `t2d`."""
    entry, size, vocab_size = head.entry("d2t"), head.draft_vocab_size, head.shape["vocab_size"]
    if not head.is_fused or entry is None or entry.shape != (size,) or entry.dtype.is_floating_point:
        return
    offsets = head.load("d2t").long()
    if size == vocab_size:
        yield strike(traps.FULL_D2T, fatal=not head.has_block("midlayer."))
        if bool(offsets.any()):
            yield strike(traps.FULL_D2T_NOT_ZERO)
        return
    tokens, why = read_draft_tokens(offsets, vocab_size)
    if tokens is None:
        yield strike(traps.NO_OFFSETS, why=why)
        return
    if not bool((tokens.diff() > 0).all()):
        yield strike(traps.D2T_UNSORTED)
    mask = head.entry("t2d")
    if mask is not None and mask.shape == (vocab_size,):
        marked = head.load("t2d").bool()
        if not bool(marked[tokens].all()) or int(marked.sum()) != len(tokens):
            are_ids = bool(((offsets >= 0) & (offsets < vocab_size)).all()) and bool(marked[offsets].all())
            yield strike(traps.OTHER_T2D, ids=": d2t holds token ids, expected offsets" if are_ids else "")


def check_rotary(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check the rotary parameters."""
    rope = head.shape["rope_parameters"]
    theta, kind = rope["rope_theta"], rope["rope_type"]
    if head.block.values.get("rope_theta") is None and theta != USUAL_THETA:
        yield strike(traps.ROPE_THETA_NESTED, theta=theta)
    theirs = target.rope if target else {}
    if theirs and theirs["rope_theta"] != theta:
        is_usual = theta == USUAL_THETA and head.layout != OWN
        why = "; some trainers do that on purpose" if is_usual else ""
        yield strike(traps.OTHER_THETA, fatal=not is_usual, theta=theta, theirs=theirs["rope_theta"], why=why)
    if theirs and {**rope, "rope_theta": 0} != {**theirs, "rope_theta": 0}:
        yield strike(traps.OTHER_SCALING, kind=kind, theirs=theirs["rope_type"])
    if kind != "default" and head.layout == MODELOPT:
        yield strike(traps.MODELOPT_SCALING, kind=kind)


def check_norms(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check switches that some engines ignore."""
    if not head.is_fused:
        return
    for switch, trap in traps.UNKNOWN_SWITCHES.items():
        if head.switches[switch]:
            knowing = _engines_by_switch(switch, True)
            yield strike(trap, _engines_by_switch(switch, False), servers=", ".join(knowing))
    if is_ambiguous(head):
        yield strike(
            traps.NORM_OUTPUT, _engines_by_switch("norm_output", True), question=describe_choice(head), ask=ASK
        )
    name = "layers.0.input_layernorm.weight"
    weight = head.load(name) if head.layout == MODELOPT and head.entry(name) else None
    if weight is not None and bool((weight != weight[:1]).any()):
        yield strike(traps.MODELOPT_NORM)
    if head.layout == SPECULATORS and "norm_before_residual" not in head.keys.values:
        yield strike(traps.RESIDUAL_UNSAID)


def check_biases(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check the bias of `fc` and the biases that a config states."""
    has_bias = head.entry("fc.bias") is not None
    if has_bias and head.is_fused:
        yield strike(traps.FUSED_BIAS)
    elif has_bias and bool(head.load("fc.bias").any()):
        yield strike(traps.BIAS_DROPPED, _engines(FEATURES, lambda layout: not layout.reads_bias))
    elif not has_bias and not head.is_fused:
        yield strike(traps.NO_BIAS, _engines(FEATURES, lambda layout: layout.reads_bias))
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if head.block.values.get(name) is True:
            yield strike(traps.PROMISED_BIAS, name=name)


def check_config(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check config keys that contradict the tensors."""
    block, config = head.block.values, head.config
    if True in (block.get("tie_word_embeddings"), head.keys.values.get("tie_word_embeddings")):
        yield strike(traps.TIED, fatal=head.is_fused)
    layers = block.get("num_hidden_layers")
    if layers != 1 and not (layers is None and head.layout == SPECULATORS):
        yield strike(traps.LAYER_COUNT, layers=layers)
    stated = block.get("torch_dtype") or block.get("dtype") or config.get("torch_dtype") or config.get("dtype")
    dtypes = {entry.dtype for entry in head.tensors.stored.values() if entry.dtype.is_floating_point}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if isinstance(stated, str) and set(names) - {stated.removeprefix("torch.")} and head.layout != OWN:
        yield strike(traps.DTYPE, dtype=stated, stored=", ".join(names))
    if head.unknown_keys:
        yield strike(traps.UNKNOWN_KEYS, keys=", ".join(head.unknown_keys))


def check_numbers(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check for tensors that are zero or not finite."""
    for name, stored in head.names.items():
        if not head.tensors.stored[stored].dtype.is_floating_point or name.endswith("inv_freq"):
            continue
        values = head.load(name).float()
        if count := int((~values.isfinite()).sum()):
            yield strike(traps.NOT_FINITE, name=stored, count=count, total=values.numel())
        elif values.numel() and not bool(values.any()) and name != "fc.bias":
            yield strike(traps.ALL_ZEROS, name=stored)


def check_target(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check the head against the given target."""
    if target is None:
        return
    for name, theirs in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if head.shape[name] != theirs:
            yield strike(traps.OTHER_SIZE, name=name, size=head.shape[name], theirs=theirs)
    for name, known_as in borrowed_tensors(head.is_fused).items():
        entry, matrix = head.entry(name), target.matrix(known_as)
        if entry is None or matrix is None or entry.shape != tuple(matrix.shape) or not entry.dtype.is_floating_point:
            continue
        if count := count_differing_rows(head.load(name), matrix):
            yield strike(traps.OTHER_ROWS, count=count, total=len(matrix), name=head.names[name])


def check_origin(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check the target recorded in the head's provenance."""
    if target is None or not has(head.path, "provenance.json"):
        return
    try:
        made_for = read_json(head.path, "provenance.json").get("target")
    except ValueError as error:
        yield strike(traps.TORN_PROVENANCE, error=error)
        return
    if not isinstance(made_for, dict):
        return
    identity = target_identity(TargetSection(path=target.path))
    for part in ("weights", "config"):
        if isinstance(made_for.get(part), str) and made_for[part] != identity[part]:
            is_fatal = part == "weights"
            yield strike(traps.OTHER_TARGET, fatal=is_fatal, part=part, stated=made_for[part], theirs=identity[part])


def check_masked(head: HeadFolder, target: TargetFiles | None) -> Findings:
    """Check what heads that draft several tokens at once say of their taps and their mask token."""
    taps, token = head.settings.get("taps"), head.settings.get("mask_token")
    if taps and list(taps) != sorted(taps):
        yield strike(traps.TAPS_UNSORTED, ids=list(taps))
    if token is not None and target and token < target.vocab_size - 1:
        ordinary = target.ordinary_tokens()
        if token in ordinary:
            yield strike(traps.ORDINARY_MASK, token=f"{token} ({ordinary[token]!r})")


SERVED_ONLY = (check_names, check_layer_ids, check_norms, check_biases)  # of no matter to a head that no engine reads
CHECKS = (
    *SERVED_ONLY[:2],
    *(check_vocabulary, check_rotary),
    *SERVED_ONLY[2:],
    *(check_config, check_numbers, check_target, check_origin),
)


def lint(head: HeadFolder, target: TargetFiles | None) -> list[Finding]:
    """All faults of a checkpoint, worst first, including those that prevent an import."""
    findings = list(head.problems)
    for check in CHECKS if head.network is not None else ():
        if head.layout != OWN or check not in SERVED_ONLY:
            try:
                findings += check(head, target)
            except Exception as error:  # of many kinds: a tensor that cannot be read after all, or of other dimensions
                what = check.__name__.removeprefix("check_").replace("_", " ")
                findings.append(Finding(f"{what} could not be looked at: {error!r:.200}"))
    unique = list({finding.what: finding for finding in findings}.values())
    return sorted(unique, key=lambda finding: not finding.fatal)
