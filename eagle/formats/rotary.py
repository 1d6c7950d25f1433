"""How positions turn: what each engine makes of the rotary parameters, by its source."""

from __future__ import annotations

from typing import Any

EVERY = ("linear", "llama3", "yarn")
SCALINGS: dict[str, tuple[str, ...]] = {  # beside "default"; longrope is chosen by length, which engines do otherwise
    "vllm": (*EVERY, "dynamic"),
    "speculators": (*EVERY, "dynamic"),  # as vLLM, which reads it
    "sglang": EVERY,
    "trtllm": EVERY,
    "openvino": EVERY,
    "llamacpp": EVERY,
    "eagle": (),
}
IGNORED: dict[str, tuple[str, ...]] = {  # keys of these that would change what is computed
    "sglang": ("attention_factor",),
    "trtllm": ("attention_factor", "truncate"),
    "llamacpp": ("attention_factor", "truncate", "mscale", "mscale_all_dim"),
}
PER_TARGET = ("partial_rotary_factor", "full_attention", "sliding_attention")  # heads turn whole vectors in one way


def rotary_of(shape: Any) -> dict[str, Any]:
    """The head's rotary parameters without those of its target that it does not follow."""
    return {
        key: value for key, value in shape.rope_parameters.items() if value is not None and key not in PER_TARGET
    } | {"rope_type": shape.rope_parameters.get("rope_type", "default")}


def check_rotary(shape: Any, engine: str) -> None:
    """Refuse rotary parameters that the engine refuses, or would leave out in silence."""
    rotary = rotary_of(shape)
    kind, known = rotary["rope_type"], SCALINGS.get(engine, (shape.rope_parameters.get("rope_type"),))
    if kind != "default" and kind not in known:
        raise ValueError(
            f"{engine}: the head's rotary scaling is {kind!r}, of which this engine knows "
            f"{', '.join(known) or 'none'}: {_others(rotary)}"
        )
    for key in IGNORED.get(engine, ()):
        if _changes(rotary, key):
            raise ValueError(
                f"{engine}: {key}={rotary[key]!r} of the head's rotary scaling ({kind}) would be left out in silence "
                f"there, and acceptance lost: {_others(rotary)}"
            )


def _changes(rotary: dict[str, Any], key: str) -> bool:
    """Whether a reader without this key would turn otherwise."""
    return key in rotary and not (key == "truncate" and rotary[key] is True)


def _others(rotary: dict[str, Any]) -> str:
    """Where such a head can go."""
    kind = rotary["rope_type"]
    able = [
        engine
        for engine, kinds in SCALINGS.items()
        if kind in kinds and not any(_changes(rotary, key) for key in IGNORED.get(engine, ()))
    ]
    return f"export to {' or '.join(able)} (docs/serving.md)" if able else "no exporter has a layout for it"
