"""`norm_output`, one key with two meanings: what the next step reads, or what the LM head reads."""

from __future__ import annotations

from eagle.formats.tensors import FUSED, MIDLAYER, REFERENCE, Reading

NEXT_STEP, LM_HEAD = "next-step", "lm-head"
MEANINGS = {
    NEXT_STEP: "the next step reads the normed state, as vLLM, SGLang, TensorRT-LLM and speculators mean it",
    LM_HEAD: "the LM head reads the normed state and the next step the un-normed one, as SpecForge means it",
}
ASK = f"Import it with --norm-output={LM_HEAD} if SpecForge trained it, else with --norm-output={NEXT_STEP}"


def is_ambiguous(reading: Reading) -> bool:
    """Whether the config holds `norm_output` and nothing tells whose: SpecForge never writes norm_before_residual."""
    held = [name for keys in (reading.keys, reading.nested) for name in keys.values]
    mixed = reading.network == FUSED and reading.layout in (MIDLAYER, REFERENCE)
    return mixed and "norm_output" in held and "norm_before_residual" not in held


def describe(reading: Reading) -> str:
    """The question that the config leaves open."""
    return (
        f"norm_output is {str(reading.switches['norm_output']).lower()}, which has two meanings: either "
        + ", or ".join(MEANINGS.values())
    )


def settle(reading: Reading, meaning: str | None) -> None:
    """Set the head's switch by what `norm_output` is told to mean; ValueError if that is open or has no counterpart."""
    if meaning is None:
        if is_ambiguous(reading):
            raise ValueError(f"{reading.folder}: {describe(reading)}. {ASK}")
        return
    if meaning not in MEANINGS:
        raise ValueError(f"norm_output is {meaning!r}, expected {' or '.join(map(repr, MEANINGS))}: what the key means")
    if reading.network != FUSED or meaning == NEXT_STEP:
        return
    if not reading.switches["norm_output"] and is_ambiguous(reading):
        raise ValueError(
            f"{reading.folder}: norm_output is false, by which SpecForge means that the LM head reads the un-normed "
            "state: no head here does"
        )
    if reading.switches["norm_output"]:
        reading.notes.append(f"norm_output is true and means, as asked: {MEANINGS[LM_HEAD]}")
        reading.switches["norm_output"] = False
