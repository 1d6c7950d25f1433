"""A checkpoint of unknown origin: its own statements and its faults."""

# D tokens that can be drafted

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle.formats.networks.networks import FUSED
from eagle.formats.reading.files import FolderTensors, TensorEntry
from eagle.formats.reading.keys import Keys

OWN, SPECULATORS, AUTOMODEL, REFERENCE = "this project", "speculators", "Automodel", "SafeAILab/EAGLE"
MODELOPT, MIDLAYER, LAYERS, UNKNOWN = "ModelOpt", "EAGLE-3, midlayer.*", "EAGLE-3, layers.0.*", "unknown"
EAGLE1 = "EAGLE-1"


@dataclass(frozen=True)
class Finding:
    """A fault of a checkpoint that costs acceptance or prevents loading in some engine."""

    what: str
    engines: tuple[str, ...] = ()  # where it strikes; all readers where none is named
    fatal: bool = True
    fix: str = ""

    def __str__(self) -> str:
        where = f" [{', '.join(self.engines)}]" if self.engines else ""
        return f"{'FATAL' if self.fatal else 'note '} {self.what}{where}{f'. {self.fix}' if self.fix else ''}"


@dataclass
class HeadFolder:
    """A checkpoint with tensors by this project's names, and the problems that prevent an import."""

    path: Path
    config: dict[str, Any]
    tensors: FolderTensors
    keys: Keys  # of the whole config
    block: Keys  # of its Llama block
    nested: Keys  # of its eagle_config, or of this project's settings
    layout: str = UNKNOWN
    network: str | None = None
    kind: str = ""  # what it is where it is no head of EAGLE's
    guesses_levels: bool = False  # whether it is one of those that foreign_levels reads
    settings: dict[str, Any] = field(default_factory=dict)  # of such a head
    layer: str = ""  # that it is, by its number in a whole model
    names: dict[str, str] = field(default_factory=dict)  # ours: theirs
    shape: dict[str, Any] = field(default_factory=dict)
    draft_vocab_size: int = 0  # D
    tap_count: int = 1
    switches: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[int, ...] | None = None  # layer ids that count inputs
    outputs: tuple[int, ...] | None = None  # layer ids that count outputs
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown_keys: list[str] = field(default_factory=list)

    @property
    def is_fused(self) -> bool:
        """Whether it has EAGLE-3's network."""
        return self.network == FUSED

    @property
    def inputs_by_outputs(self) -> tuple[int, ...] | None:
        """Layer ids that count outputs, converted to ids that count inputs."""
        return None if self.outputs is None else tuple(layer + 1 for layer in self.outputs)

    @property
    def architectures(self) -> list[str]:
        """The config's architectures, by which engines choose what to load."""
        named = self.config.get("architectures")
        return [name[:80] for name in named if isinstance(name, str)][:8] if isinstance(named, list) else []

    @property
    def prefixed(self) -> list[str]:
        """Tensors whose names begin with `model.`."""
        return [name for name in self.tensors.stored if name.startswith("model.")]

    def has_block(self, prefix: str) -> bool:
        """Whether some tensor's name begins with this prefix."""
        return any(name.startswith(prefix) for name in self.names.values())

    def entry(self, name: str) -> TensorEntry | None:
        """A tensor's entry by this project's name, if present."""
        return self.tensors.stored.get(self.names.get(name, ""))

    def load(self, name: str) -> Tensor:
        """A tensor's values by this project's name."""
        return self.tensors.load(self.names[name])

    def problem(self, what: str, fix: str = "", fatal: bool = True) -> None:
        """Record a problem that prevents an import."""
        self.problems.append(Finding(what, (), fatal, fix))

    def refuse_problems(self) -> None:
        """Raise a ValueError with all problems that prevent an import."""
        listed = [f"- {problem.what}{f'. {problem.fix}' if problem.fix else ''}" for problem in self.problems]
        if listed:
            named = f"{self.path}, {self.kind}," if self.guesses_levels else str(self.path)
            raise ValueError("\n".join([f"{named} cannot become a head of this project:", *listed]))
