"""Known faults of checkpoints; each engine's table names those that affect it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Fault:
    """A fault of a checkpoint and its remedy, with braces for the checkpoint's values."""

    what: str
    fix: str
    fatal: bool = True  # whether it costs acceptance or prevents loading


@dataclass(frozen=True)
class Hint(Fault):
    """A fault that costs nothing, or only in some engines."""

    fatal: bool = False


class FoundFault(NamedTuple):
    """A fault in one checkpoint, with the values for its text."""

    fault: Fault
    values: dict[str, Any]
    fatal: bool
    # whether an engine with this layout is affected; None for the engines whose `faults` list it
    affects: Callable[[Any], bool] | None = None


def report(
    fault: Fault,
    fatal: bool | None = None,
    affects: Callable[[Any], bool] | None = None,
    **values: Any,
) -> FoundFault:
    """Return a fault as found in one checkpoint, which `lint` shows; nothing is recorded.

    Args:
        fault: The fault.
        fatal: Whether it is fatal in this checkpoint; None for the fault's default.
        affects: Whether an engine with a given layout is affected; None for the engines whose `faults` list it.
        values: The values that replace the words in braces of the fault's text.
    """
    return FoundFault(fault, values, fault.fatal if fatal is None else fatal, affects)


MODEL_PREFIX = Fault(
    "{count} tensors stand under `model.`", "Take `model.` off the names; import and export do"
)
MIDLAYER_ONLY = Hint(
    "the block is called layers.0: OpenVINO starts a random one", "Export to openvino"
)
ARCHITECTURE = Hint("architectures is {names}, which no engine knows", "Export again")

IDS_DISAGREE = Fault(
    "layer ids disagree: inputs {inputs}, outputs {outputs}{same}",
    "Outputs must be one less than inputs: correct one place",
)
NO_IDS = Hint(
    "no layer ids: engines take the inputs of 2, the middle and the last but two; OpenVINO one layer further",
    "Write them in both places; import with --taps or --target",
)
OUTER_IDS_ALONE = Hint(
    "layer ids stand in the outer key alone, which SGLang does not read", "Export again"
)
INNER_IDS_ALONE = Hint(
    "layer ids stand in eagle_config alone: vLLM takes them for inputs, llama.cpp does not read them",
    "Write eagle_aux_hidden_state_layer_ids: {inputs}",
)
USUAL_IDS = Fault("no layer ids, and the usual ones are not three of {layers} layers", "Write them")
IDS_COUNT = Fault("layer ids {ids}, but fc.weight reads {count} layers", "Name each layer once")
IDS_UNSORTED = Fault(
    "layer ids {ids} are not in order: vLLM sorts them, fc does not", "Export again"
)
IDS_OUTSIDE = Fault(
    "layer ids {ids} for a target of {layers} layers: the last input is that of {last}",
    "Correct them",
)

FULL_D2T = Fault(
    "d2t is there although the head says all tokens: vLLM refuses it, OpenVINO needs it",
    "Leave it out, but for OpenVINO",
)
FULL_D2T_NOT_ZERO = Fault(
    "d2t is not zero although the head says all tokens", "Correct draft_vocab_size"
)
NO_OFFSETS = Fault("{why}", "Engines would name other tokens than the head means")
D2T_UNSORTED = Hint("the tokens of d2t do not rise", "Nothing needs it, but trainers write them so")
OTHER_T2D = Fault(
    "t2d marks other tokens than d2t{ids}", "Make both again from the same vocabulary"
)

ROPE_THETA_NESTED = Hint(
    "rope_theta ({theta:g}) stands in the rotary parameters alone", "Write it beside them too"
)
OTHER_THETA = Fault(
    "rope_theta is {theta:g}, the target's is {theirs:g}{why}", "Write what it was trained on"
)
OTHER_SCALING = Hint(
    "rope scaling is {kind}, the target's is {theirs} or of other numbers", "Fine if trained so"
)
MODELOPT_SCALING = Hint(
    "ModelOpt writes rope scaling ({kind}) into exports of heads that were trained without",
    "Take rope_scaling out of config.json unless texts are longer than in training",
)

UNKNOWN_SWITCHES = {  # of engines that have no such switch
    "norm_before_residual": Hint(
        "norm_before_residual is true: these take the state as it is", "Train without it"
    ),
    "fc_norm": Hint("fc_norm: these have none", "Serve it with {servers}"),
    "norm_before_fc": Hint("norm_before_fc: these have none", "Serve it with {servers}"),
    "norm_output": Hint(
        "norm_output: these feed the state back un-normed", "Serve it with {servers}"
    ),
}
NORM_OUTPUT = Hint("{question}", "{ask}")
MODELOPT_NORM = Hint(
    "ModelOpt puts the state through input_layernorm too when it trains, and engines do not",
    "Expect less acceptance than its training says; a warm start learns it anew",
)
RESIDUAL_UNSAID = Fault(
    "norm_before_residual is not written: vLLM takes true, speculators false", "Write it"
)

FUSED_BIAS = Fault(
    "fc.bias in an EAGLE-3 head: dropped, or a load failure in llama.cpp", "Train without it"
)
BIAS_DROPPED = Hint("fc.bias is not zero, and vLLM drops it in silence", "Train with fc_bias=false")
NO_BIAS = Hint("no fc.bias: SGLang keeps a random one", "Write zeros; our exports do")
PROMISED_BIAS = Fault("{name} is true, and no such bias is among the tensors", "Set it to false")

MEDUSA_BIAS = Fault(
    "the blocks have biases, and medusa_fc_bias is not true: vLLM drops them in silence",
    "Write it, or export to vllm",
)
MEDUSA_COUNTS = Fault(
    "config.json: {keys}: vLLM takes any key with num and heads or layers in it for what Medusa heads it has",
    "Take it out",
)
ANCHOR_UNSAID = Fault(
    "sample_from_anchor is not written: some readers take true and others false, and every token stands one place off",
    "Write it, or export again",
)
SWA_UNREAD = Hint(
    "use_swa alone makes its layers slide: without it they attend to the whole context, and not to {size} tokens",
    "Write layer_types, sliding_window and is_causal, or import it and export it again",
)
WINDOW_MOVES = Hint(
    "speculators trains all slots on the window of the root: slot j sees j + 1 tokens less of the context",
    "It costs little where the window is much longer than a block",
)
MIXED_CAUSAL = Hint(
    "some layers slide: vLLM makes all layers of such a head causal, and those that do not slide were not trained so",
    "Import it and export it to vllm",
)
D2T_UNREAD = Hint(
    "it drafts a part of the vocabulary, of which this engine does not know: it takes the target's whole LM head, or "
    "fails on the Markov head",
    "Serve it with vLLM",
)

ORDINARY_MASK = Hint(
    "mask_token is {token}, an ordinary token of the target: trainers take one that no text has",
    "Compare it with the run that made the head; `eagle doctor` tries others",
)
TAPS_UNSORTED = Hint(
    "layer ids {ids} are not in order, as all known trainers have them",
    "Compare them with the run that made the head; `eagle doctor` tries other orders",
)

TIED = Fault(
    "tie_word_embeddings is true: some readers take the embedding for the LM head",
    "Set it to false",
)
LAYER_COUNT = Fault("num_hidden_layers is {layers!r:.30}, and there is one layer", "Write 1")
DTYPE = Hint(
    "config.json says {dtype!r:.30}, the weights are in {stored}: readers round them",
    "Write their dtype",
)
UNKNOWN_KEYS = Hint("unknown keys of config.json: {keys:.400}", "They were not used")

NOT_FINITE = Fault("{name}: {count:,} of {total:,} numbers are not finite", "Take an earlier one")
ALL_ZEROS = Fault("{name} is all zeros", "It was never filled: export again")

OTHER_SIZE = Fault("{name} is {size}, the target's is {theirs}", "This is another target's head")
OTHER_ROWS = Fault(
    "{name} differs from the target's in {count} of {total} rows",
    "The head was made for another target, or trained an embedding of its own",
)
TORN_PROVENANCE = Hint("{error}", "It only tells where a head comes from")
OTHER_TARGET = Fault(
    "it was trained on a target whose {part} are others ({stated!r:.20}, here {theirs})",
    "Serve it with the target that it was trained on",
)
