"""What was found out about a checkpoint: what it says of itself, and all that is wrong with it."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle.formats.files import Stored, Tensors
from eagle.formats.keys import Keys

OWN, SPECULATORS, AUTOMODEL, REFERENCE = "this project", "speculators", "Automodel", "SafeAILab/EAGLE"
MODELOPT, MIDLAYER, LAYERS, UNKNOWN = "ModelOpt", "EAGLE-3, midlayer.*", "EAGLE-3, layers.0.*", "unknown"
EAGLE1 = "EAGLE-1"
FUSED, FEATURES = "eagle3", "eagle1"  # the two networks, by the first method that had them
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class Finding:
    """Something in a checkpoint that costs acceptance, or will not load, somewhere."""

    what: str
    engines: tuple[str, ...] = ()  # where it strikes; all readers where none is named
    fatal: bool = True
    fix: str = ""

    def __str__(self) -> str:
        where = f" [{', '.join(self.engines)}]" if self.engines else ""
        return f"{'FATAL' if self.fatal else 'note '} {self.what}{where}{f'. {self.fix}' if self.fix else ''}"


@dataclass
class Reading:
    """What a checkpoint says of itself, by this project's names, and all that keeps it from being a head here."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors
    keys: Keys  # of the whole config
    block: Keys  # of its Llama block
    nested: Keys  # of its eagle_config, or of this project's settings
    layout: str = UNKNOWN
    network: str | None = None
    kind: str = ""  # what it is where it is no head of EAGLE's
    names: dict[str, str] = field(default_factory=dict)  # ours: theirs
    shape: dict[str, Any] = field(default_factory=dict)
    said: int = 0  # D
    taps: int = 1  # how many
    switches: dict[str, bool] = field(default_factory=dict)
    inputs: tuple[int, ...] | None = None  # layer ids that count inputs
    outputs: tuple[int, ...] | None = None  # layer ids that count outputs
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # keys

    def stored(self, name: str) -> Stored | None:
        """A tensor by this project's name, if it is there."""
        return self.tensors.stored.get(self.names.get(name, ""))

    def load(self, name: str) -> Tensor:
        """Its values."""
        return self.tensors.load(self.names[name])

    def problem(self, what: str, fix: str = "", fatal: bool = True) -> None:
        """Keep something that stands in the way of an import."""
        self.problems.append(Finding(what, (), fatal, fix))
