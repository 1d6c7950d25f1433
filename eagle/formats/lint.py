"""What is known to go wrong with checkpoints: in which engine, and what helps."""

# D tokens that can be drafted, V vocabulary, L layers of the target

from __future__ import annotations

from collections.abc import Callable, Iterator

from eagle.data.identity import target_identity
from eagle.formats.files import has, read_json
from eagle.formats.foreign_head import EMBEDDINGS, HEADS, Served, apart, drafted
from eagle.formats.norm_output import ASK, describe, is_ambiguous
from eagle.formats.recognise import architectures, prefixed
from eagle.formats.tensors import FEATURES, FUSED, MODELOPT, OWN, SPECULATORS, Finding, Reading
from eagle.recipe import TargetSection

VLLM, SGLANG, TRTLLM, OPENVINO, LLAMACPP = "vLLM", "SGLang", "TensorRT-LLM", "OpenVINO", "llama.cpp"
KNOWN = {  # names that some engine takes a head by
    FUSED: {
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
        "LlamaEagle3DraftModel",
    },
    FEATURES: {"LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"},
}
USUAL_THETA = 10000.0  # which some trainers keep whatever the target has
Check = Callable[[Reading, Served | None], Iterator[Finding]]


def names(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """How tensors and architectures are called."""
    if under := prefixed(reading):
        usual = "LlamaEagle3DraftModel" in architectures(reading) or has(reading.folder, "eagle_meta.pt")
        fix = "Take `model.` off the names; import and export do"
        yield Finding(f"{len(under)} tensors stand under `model.`", (VLLM, LLAMACPP), not usual, fix)
    if reading.network == FUSED and any(name.startswith("layers.0.") for name in reading.names.values()):
        fix = "Export to openvino, which says `midlayer`"
        yield Finding("the block is called layers.0: OpenVINO starts a random one", (OPENVINO,), False, fix)
    named = architectures(reading)
    if not set(named) & KNOWN[reading.network or FUSED]:
        yield Finding(f"architectures is {named or 'missing'}, which no engine knows", fatal=False, fix="Export again")


def layer_ids(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """Two conventions, two places: inputs of layers in the outer key, outputs in the inner one."""
    if reading.network != FUSED:
        return
    inner = None if reading.outputs is None else tuple(layer + 1 for layer in reading.outputs)
    found = reading.inputs or inner
    if reading.inputs and inner and reading.inputs != inner:
        same = (
            " (they are the same numbers, but the inner ones count outputs)"
            if reading.inputs == reading.outputs
            else ""
        )
        what = f"layer ids disagree: inputs {reading.inputs}, outputs {reading.outputs}{same}"
        yield Finding(
            what, (VLLM, LLAMACPP, SGLANG), True, "Inner ids must be one less than outer ones: correct one place"
        )
    if not found:
        what = "no layer ids: engines take the inputs of 2, the middle and the last but two; OpenVINO one layer further"
        yield Finding(what, (OPENVINO,), False, "Write them in both places; import with --taps or --target")
    elif reading.inputs and reading.outputs is None:
        fix = "Write eagle_config.eagle_aux_hidden_state_layer_ids, each one less"
        yield Finding("layer ids stand in the outer key alone, which SGLang does not read", (SGLANG,), False, fix)
    elif reading.outputs and not reading.inputs:
        engines = (VLLM, LLAMACPP)
        what = "layer ids stand in eagle_config alone: vLLM takes them for inputs, llama.cpp does not read them"
        yield Finding(what, engines, False, f"Write eagle_aux_hidden_state_layer_ids: {list(inner or ())}")
    if found and (len(found) != reading.taps or len(set(found)) != len(found)):
        yield Finding(f"layer ids {found}, but fc.weight reads {reading.taps} layers", (), True, "Name each layer once")
    if found and list(found) != sorted(found):
        yield Finding(
            f"layer ids {found} are not in order: vLLM sorts them, fc does not", (VLLM,), True, "Export again"
        )
    if served and found and not all(-1 <= layer < served.layers for layer in found):
        what = (
            f"layer ids {found} for a target of {served.layers} layers: the last input is that of {served.layers - 1}"
        )
        yield Finding(what, (), True, "This is the head of another target, or the ids are wrong")
    if served and not found and len({2, served.layers // 2, served.layers - 3}) < 3:
        yield Finding(
            f"no layer ids, and the usual ones are not three of {served.layers} layers", (), True, "Write them"
        )


def vocabulary(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """`d2t` and `t2d`."""
    stored, vocab = reading.stored("d2t"), reading.shape["vocab_size"]
    if reading.network != FUSED or stored is None or stored.shape != (reading.said,) or stored.dtype.is_floating_point:
        return
    if reading.said == vocab:
        block = any(name.startswith("midlayer.") for name in reading.names.values())
        what = "d2t is there although the head says all tokens: vLLM refuses it, OpenVINO needs it"
        yield Finding(what, (VLLM,), not block, "Leave it out, but for OpenVINO")
        if bool(reading.load("d2t").any()):
            yield Finding("d2t is not zero although the head says all tokens", (), True, "Correct draft_vocab_size")
        return
    offsets = reading.load("d2t").long()
    tokens, why = drafted(offsets, vocab)
    if tokens is None:
        yield Finding(why, (), True, "Engines would name other tokens than the head means")
        return
    if not bool((tokens.diff() > 0).all()):
        yield Finding("the tokens of d2t do not rise", (), False, "Nothing needs it, but trainers write them so")
    mask = reading.stored("t2d")
    if mask is not None and mask.shape == (vocab,):
        marked = reading.load("t2d").bool()
        if not (bool(marked[tokens].all()) and int(marked.sum()) == len(tokens)):
            ids = bool((offsets >= 0).all()) and bool((offsets < vocab).all()) and bool(marked[offsets].all())
            what = "t2d marks other tokens than d2t" + (": d2t holds token ids, expected offsets" if ids else "")
            yield Finding(what, (), True, "Make both again from the same vocabulary")


def rotary(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """How positions turn."""
    own = reading.shape["rope_parameters"]
    theta, scaled = own["rope_theta"], own["rope_type"] != "default"
    outer = reading.block.values.get("rope_theta")
    if outer is None and theta != USUAL_THETA:
        what = f"rope_theta ({theta:g}) stands in the rotary parameters alone: older readers take 10000"
        yield Finding(what, (SGLANG, LLAMACPP), False, "Write rope_theta beside them")
    its = served.rope if served else {}
    if its and its["rope_theta"] != theta:
        usual = theta == USUAL_THETA and reading.layout != OWN
        what = f"rope_theta is {theta:g}, the target's is {its['rope_theta']:g}"
        why = "; some trainers do that on purpose" if usual else ""
        yield Finding(what + why, (), not usual, "Write what it was trained on")
    if its and {**own, "rope_theta": 0} != {**its, "rope_theta": 0}:
        what = f"rope scaling is {own['rope_type']}, the target's is {its['rope_type']}, or of other numbers"
        yield Finding(what, (), False, "Fine if it was trained so")
    if scaled and reading.layout == MODELOPT:
        what = f"ModelOpt writes rope scaling ({own['rope_type']}) into exports of heads that were trained without"
        yield Finding(what, (), False, "Take rope_scaling out of config.json unless texts are longer than in training")


def norms(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """Switches that some engines do not look at."""
    on, keys = reading.switches, reading.keys.values
    if reading.network != FUSED:
        return
    if on["norm_before_residual"]:
        engines = (SGLANG, TRTLLM, OPENVINO)
        yield Finding("norm_before_residual is true: these take the state as it is", engines, False, "Train without it")
    if on["fc_norm"]:
        yield Finding(
            "fc_norm: these have none", (LLAMACPP, OPENVINO), False, "Serve it with vLLM, SGLang, TensorRT-LLM"
        )
    if on["norm_output"]:
        yield Finding("norm_output: these feed the state back un-normed", (LLAMACPP, OPENVINO), False, "As for fc_norm")
    if is_ambiguous(reading):
        yield Finding(describe(reading), (VLLM, SGLANG, TRTLLM), False, ASK)
    name = "layers.0.input_layernorm.weight"
    weight = reading.load(name) if reading.layout == MODELOPT and reading.stored(name) else None
    if weight is not None and bool((weight != weight[:1]).any()):
        what = "ModelOpt puts the state through input_layernorm too when it trains, and engines do not"
        yield Finding(what, (), False, "Expect less acceptance than its training says; a warm start learns it anew")
    if reading.layout == SPECULATORS and "norm_before_residual" not in keys:
        what = "norm_before_residual is not written: vLLM takes true, speculators false"
        yield Finding(what, (VLLM,), True, "Write it")


def biases(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """Of `fc`, and those that a config promises."""
    stored = reading.stored("fc.bias")
    if reading.network == FUSED and stored is not None:
        what = "fc.bias in an EAGLE-3 head: dropped in silence, and a load failure in llama.cpp"
        yield Finding(what, (VLLM, SGLANG, LLAMACPP), True, "Train without it")
    if reading.network == FEATURES and stored is not None and bool(reading.load("fc.bias").any()):
        yield Finding("fc.bias is not zero, and vLLM drops it in silence", (VLLM,), False, "Train with fc_bias=false")
    if reading.network == FEATURES and stored is None:
        yield Finding("no fc.bias: SGLang keeps a random one", (SGLANG,), False, "Write zeros; our exports do")
    for name in ("attention_bias", "mlp_bias", "qkv_bias"):
        if reading.block.values.get(name) is True:
            yield Finding(
                f"{name} is true, and no such bias is among the tensors", (VLLM, TRTLLM), True, "Set it to false"
            )


def config(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """Keys that lie about the tensors."""
    values = reading.block.values
    if any(part.values.get("tie_word_embeddings") is True for part in (reading.block, reading.keys)):
        fused = reading.network == FUSED
        what = "tie_word_embeddings is true: some readers put the embedding in the place of the LM head"
        yield Finding(what, (), fused, "Set it to false")
    layers = values.get("num_hidden_layers")
    if layers != 1 and not (layers is None and reading.layout == SPECULATORS):
        yield Finding(
            f"num_hidden_layers is {layers!r:.30}, and there is one layer", (SGLANG, LLAMACPP), True, "Write 1"
        )
    said = values.get("torch_dtype") or values.get("dtype") or reading.config.get("torch_dtype")
    said = said or reading.config.get("dtype")
    stored = {
        str(one.dtype).removeprefix("torch.") for one in reading.tensors.stored.values() if one.dtype.is_floating_point
    }
    if isinstance(said, str) and stored - {said.removeprefix("torch.")} and reading.layout != OWN:
        what = f"config.json says {said!r:.30}, the weights are in {', '.join(sorted(stored))}: readers round them"
        yield Finding(what, (), False, "Write the dtype of the weights")
    if reading.unknown:
        yield Finding(
            f"unknown keys of config.json: {', '.join(reading.unknown):.400}", (), False, "They were not used"
        )


def numbers(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """Tensors that hold nothing, or nothing that is a number."""
    for name, theirs in reading.names.items():
        stored = reading.tensors.stored[theirs]
        if not stored.dtype.is_floating_point or name.endswith("inv_freq"):
            continue
        values = reading.load(name).float()
        if not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            yield Finding(
                f"{theirs}: {bad:,} of {values.numel():,} numbers are not finite", (), True, "Take an earlier one"
            )
        elif values.numel() and not bool(values.any()) and name != "fc.bias":
            yield Finding(f"{theirs} is all zeros", (), True, "It was never filled: export again")


def against(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """The target that it is said to be for."""
    if served is None:
        return
    for name, its in (("hidden_size", served.width), ("vocab_size", served.vocab)):
        if reading.shape[name] != its:
            yield Finding(
                f"{name} is {reading.shape[name]}, the target's is {its}", (), True, "This is another target's head"
            )
    pairs = [("embed_tokens.weight", EMBEDDINGS), *([("lm_head.weight", HEADS)] if reading.network == FEATURES else [])]
    for name, known in pairs:
        stored, its_own = reading.stored(name), served.matrix(known)
        if (
            stored is None
            or its_own is None
            or stored.shape != tuple(its_own.shape)
            or not stored.dtype.is_floating_point
        ):
            continue
        if differing := apart(reading.load(name), its_own):
            what = f"{differing} of {len(its_own)} rows of {reading.names[name]} differ from the target's"
            yield Finding(what, (), True, "The head was made for another target, or trained an embedding of its own")


def origin(reading: Reading, served: Served | None) -> Iterator[Finding]:
    """What made it, where this project wrote that down."""
    if served is None or not has(reading.folder, "provenance.json"):
        return
    try:
        made = read_json(reading.folder, "provenance.json").get("target")
    except ValueError as error:
        yield Finding(f"{error}", (), False, "It only tells where a head comes from")
        return
    if not isinstance(made, dict):
        return
    true = target_identity(TargetSection(path=served.path))
    for part in ("weights", "config"):
        if isinstance(made.get(part), str) and made[part] != true[part]:
            what = f"it was trained on a target whose {part} are others ({made[part]!r:.20}, here {true[part]})"
            yield Finding(what, (), part == "weights", "Serve it with the target that it was trained on")


CHECKS: tuple[Check, ...] = (
    names,
    layer_ids,
    vocabulary,
    rotary,
    norms,
    biases,
    config,
    numbers,
    against,
    origin,
)
SERVED_ONLY: tuple[Check, ...] = (names, layer_ids, norms, biases)  # of no matter to a head that no engine reads


def lint(reading: Reading, served: Served | None) -> list[Finding]:
    """All that is wrong with a checkpoint, the worst first; what stands in the way of an import is part of it."""
    found = list(reading.problems)
    if reading.network is not None:
        for check in CHECKS:
            if reading.layout != OWN or check not in SERVED_ONLY:
                try:
                    found += check(reading, served)
                except (ValueError, OSError, RuntimeError) as error:  # a tensor that cannot be read after all
                    found.append(Finding(f"{check.__name__} could not be looked at: {error!r:.200}"))
    unique = list({one.what: one for one in found}.values())
    return sorted(unique, key=lambda one: not one.fatal)
