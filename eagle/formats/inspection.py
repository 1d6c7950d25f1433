"""What a checkpoint is, as it is printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from eagle.formats.head_folder import Finding, HeadFolder


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
        parts = [f"{self.folder}: {self.kind}", _show_table(self.facts)]
        parts += [f"by default: {note}" for note in self.notes]
        parts += [str(finding) for finding in self.findings] or ["nothing is wrong with it that can be seen from here"]
        return "\n".join(part for part in parts if part)


def describe_kind(head: HeadFolder) -> str:
    """The method, or what else a checkpoint is."""
    if head.network is None:
        return head.kind
    if not head.is_fused:
        return "EAGLE-1 (or EAGLE-2, HASS: the same network)"
    return "EAGLE-3.1" if head.switches["fc_norm"] or head.switches["norm_output"] else "EAGLE-3"


def list_facts(head: HeadFolder) -> dict[str, Any]:
    """What a checkpoint is, in figures."""
    entries, shape = head.tensors.stored.values(), head.shape
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    count = sum(math.prod(entry.shape) for entry in entries if entry.dtype.is_floating_point)
    facts: dict[str, Any] = {
        "layout": head.layout,
        "tensors": f"{len(entries)}, {count:,} parameters, {', '.join(dtypes)}",
    }
    if not shape:
        return facts
    rope = shape["rope_parameters"]
    facts |= {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": f"{shape['vocab_size']}, of which it says {head.draft_vocab_size}",
    }
    if not head.is_fused:
        bias = "yes" if "fc.bias" in head.names else "no"
        return {**facts, "reads": "the state behind the final norm", "bias of fc": bias}
    facts["reads"] = "layers that are not named"
    if inputs := head.inputs or head.inputs_by_outputs:
        outputs = tuple(layer - 1 for layer in inputs)
        facts["reads"] = f"inputs of layers {inputs}, which are outputs of {outputs}"
    facts["switches"] = ", ".join(name for name, is_on in head.switches.items() if is_on) or "none"
    return facts


def _show_table(facts: dict[str, Any]) -> str:
    """A table without lines."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
