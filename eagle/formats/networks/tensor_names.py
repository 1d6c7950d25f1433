"""Names of tensors in two spellings, and one engine's layout of one network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, TargetConfig

FEATURES, FUSED = "features", "fused"  # EAGLE-1's network and EAGLE-3's
MASK_HIDDEN = "mask_hidden"
USUAL_THETA = 10000.0  # of Llama when the first methods were written, which some trainers keep whatever the target has
Spelling = Mapping[str, str]  # our names and another tool's


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """The parts of a name for which `#` (a number) and `*` (anything) stand; None if the name is another."""
    found = _compile(pattern).fullmatch(name)
    return None if found is None else found.groups()


def fill_name(pattern: str, parts: Iterable[str], numbers: Mapping[str, Any]) -> str:
    """The name with these parts in place of `#` and `*`, and with numbers in place of their names in braces."""
    rest = iter(parts)
    return re.sub(r"[#*]", lambda _: next(rest), pattern).format_map(numbers)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """A pattern of names as a regular expression; a number in braces may be any."""
    kinds = {"#": r"(\d+)", "*": r"((?!.*inv_freq).+)"}
    pieces = re.split(r"(#|\*|\{\w+\})", pattern)
    return re.compile("".join(r"\d+" if part[:1] == "{" else kinds.get(part, re.escape(part)) for part in pieces))


def rename_tensors(tensors: Mapping[str, Tensor], spelling: Spelling, **numbers: Any) -> dict[str, Tensor]:
    """Tensors under the names of another tool; a name that its spelling lacks stays."""
    return {_rename(name, spelling, numbers): tensor for name, tensor in tensors.items()}


def _rename(name: str, spelling: Spelling, numbers: Mapping[str, Any]) -> str:
    for ours, theirs in spelling.items():
        if (parts := match_name(ours, name)) is not None:
            return fill_name(theirs, parts, numbers)
    return name


def keep_names(*names: str) -> Spelling:
    """The spelling of names that are ours."""
    return dict(zip(names, names, strict=True))


def reorder_taps(tensors: Mapping[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """The columns of `fc` and the norms of the taps in another order."""
    columns = tensors["fc.weight"].chunk(len(order), dim=1)
    moved = {"fc.weight": torch.cat([columns[tap] for tap in order], dim=1)}
    if MASK_HIDDEN in tensors:  # what stands for taps that are not known
        masks = tensors[MASK_HIDDEN].chunk(len(order), dim=-1)
        moved[MASK_HIDDEN] = torch.cat([masks[tap] for tap in order], dim=-1)
    norms = {f"fc_norm.{place}.weight": f"fc_norm.{tap}.weight" for place, tap in enumerate(order)}
    return {**tensors, **moved, **{name: tensors[source] for name, source in norms.items() if source in tensors}}


def network_of(drafter: TrainableDrafter) -> str:
    """The name of a drafter's network."""
    return str(drafter.network["network"])


@dataclass(frozen=True)
class NetworkLayout:
    """One engine's layout of one network."""

    serve: str  # Markdown, in which HEAD, TARGET and DEPTH stand for themselves
    architectures: tuple[str, ...] = ()
    until: str = ""  # the last version of the engine that reads it, where a later one does not
    blocks: int = 1  # the most that a head may have: none of several was run in any engine
    slides: bool = False  # whether it reads a window without sinks from layer_types
    finish: Callable[[Layout, TrainableDrafter, Any], Layout] | None = None  # what this engine alone needs

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """The layout of a head; ValueError with the settings that the engine cannot serve."""
        raise NotImplementedError
