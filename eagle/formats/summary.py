"""What a checkpoint is, as it is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from eagle.formats.tensors import FEATURES, FUSED, Finding, Reading


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, and what is wrong with it."""

    folder: str
    kind: str  # the method, or what else it is
    layout: str
    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def fatal(self) -> bool:
        """Whether anything would cost acceptance or keep it from loading."""
        return any(finding.fatal for finding in self.findings)

    def __str__(self) -> str:
        parts = [f"{self.folder}: {self.kind}", _shown(self.facts)]
        parts += [f"by default: {note}" for note in self.notes]
        parts += [str(finding) for finding in self.findings] or ["nothing is wrong with it that can be seen from here"]
        return "\n".join(part for part in parts if part)


def kind_of(reading: Reading) -> str:
    """The method, or what else a checkpoint is."""
    if reading.network is None:
        return reading.kind
    if reading.network == FEATURES:
        return "EAGLE-1 (or EAGLE-2, HASS: the same network)"
    return "EAGLE-3.1" if reading.switches["fc_norm"] or reading.switches["norm_output"] else "EAGLE-3"


def facts(reading: Reading) -> dict[str, Any]:
    """What a checkpoint is, in figures."""
    stored, shape = reading.tensors.stored, reading.shape
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in stored.values()})
    count = sum(one.bytes // one.dtype.itemsize for one in stored.values() if one.dtype.is_floating_point)
    found: dict[str, Any] = {
        "layout": reading.layout,
        "tensors": f"{len(stored)}, {count:,} parameters, {', '.join(dtypes)}",
    }
    if not shape:
        return found
    rope = shape["rope_parameters"]
    found |= {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": f"{shape['vocab_size']}, of which it says {reading.said}",
    }
    if reading.network == FUSED:
        inputs = reading.inputs or (reading.outputs and tuple(layer + 1 for layer in reading.outputs))
        outputs = inputs and tuple(layer - 1 for layer in inputs)
        found["reads"] = (
            f"inputs of layers {inputs}, which are outputs of {outputs}" if inputs else "layers that are not named"
        )
        found["switches"] = ", ".join(name for name, is_on in reading.switches.items() if is_on) or "none"
    else:
        found["reads"] = "the state behind the final norm"
        found["bias of fc"] = "yes" if "fc.bias" in reading.names else "no"
    return found


def _shown(values: dict[str, Any]) -> str:
    """A table without lines."""
    wide = max(map(len, values), default=0)
    return "\n".join(
        f"{name:<{wide}}  {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )
