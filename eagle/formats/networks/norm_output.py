"""`norm_output`, one key with two meanings: what the next step reads, or what the LM head reads."""

from __future__ import annotations

from eagle.formats.reading.head_folder import MIDLAYER, REFERENCE, HeadFolder

NEXT_STEP, LM_HEAD = "next-step", "lm-head"
MEANINGS = {
    NEXT_STEP: "the next step reads the normed state, as vLLM, SGLang, TensorRT-LLM and speculators mean it",
    LM_HEAD: "the LM head reads the normed state and the next step the un-normed one, as SpecForge means it",
}
ASK = f"Import it with --norm-output={LM_HEAD} if SpecForge trained it, else with --norm-output={NEXT_STEP}"


def is_ambiguous(head: HeadFolder) -> bool:
    """Whether the config holds `norm_output` and nothing tells whose: SpecForge never writes norm_before_residual."""
    keys = head.keys.values.keys() | head.nested.values.keys()
    return head.layout in (MIDLAYER, REFERENCE) and "norm_output" in keys and "norm_before_residual" not in keys


def describe_choice(head: HeadFolder) -> str:
    """The question to the user that the config leaves open."""
    value = str(head.switches["norm_output"]).lower()
    return f"norm_output is {value}, which has two meanings: either {', or '.join(MEANINGS.values())}"


def settle_norm_output(head: HeadFolder, meaning: str | None) -> None:
    """Set the head's switch by the meaning of `norm_output`; ValueError if it is open or has no counterpart."""
    if meaning is None and is_ambiguous(head):
        raise ValueError(f"{head.path}: {describe_choice(head)}. {ASK}")
    if meaning not in (None, *MEANINGS):
        raise ValueError(f"norm_output is {meaning!r}, expected {' or '.join(map(repr, MEANINGS))}: what the key means")
    if not head.is_fused or meaning != LM_HEAD:
        return
    if head.switches["norm_output"]:
        head.notes.append(f"norm_output is true and means, as asked: {MEANINGS[LM_HEAD]}")
        head.switches["norm_output"] = False
    elif is_ambiguous(head):
        raise ValueError(
            f"{head.path}: norm_output is false, by which SpecForge means that the LM head reads the un-normed "
            "state: no head here does"
        )
