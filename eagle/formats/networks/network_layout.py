"""One engine's layout of one network, and the order of its taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, TargetConfig

MASK_HIDDEN = "mask_hidden"


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
