"""One engine's layout of one network, and the order of its taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, TargetConfig, scale_of

MASK_HIDDEN = "mask_hidden"


def reorder_taps(tensors: Mapping[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """Return tensors with the columns of `fc` and the norms of the taps in another order."""
    reordered = dict(tensors)
    # fc [H, taps x H] reads the states of all taps side by side
    columns = tensors["fc.weight"].chunk(len(order), dim=1)
    reordered["fc.weight"] = torch.cat([columns[tap] for tap in order], dim=1)
    if MASK_HIDDEN in tensors:  # what stands for taps that are not known
        masks = tensors[MASK_HIDDEN].chunk(len(order), dim=-1)
        reordered[MASK_HIDDEN] = torch.cat([masks[tap] for tap in order], dim=-1)
    for position, tap in enumerate(order):
        norm = f"fc_norm.{tap}.weight"
        if norm in tensors:
            reordered[f"fc_norm.{position}.weight"] = tensors[norm]
    return reordered


def network_of(drafter: TrainableDrafter) -> str:
    """Return the name of a drafter's network."""
    return str(drafter.network["network"])


def mask_of(drafter: TrainableDrafter) -> int:
    """Return the mask token; written into every config, because readers assume different ones."""
    token: int | None = drafter.settings.mask_token
    if token is None:
        token = drafter.shape.vocab_size - 1
    return token


def refuse_scale(drafter: TrainableDrafter, engine: str) -> None:
    """Refuse a target that multiplies its embedding, which no reader of this layout does when it drafts."""
    if scale_of(drafter) != 1.0:
        raise ValueError(
            f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which is left out when it "
            "drafts: no exporter has a layout for it"
        )


@dataclass(frozen=True)
class NetworkLayout:
    """One engine's layout of one network: what a function writes, or what a class for several engines does."""

    serve: str  # Markdown, in which HEAD, TARGET and DEPTH stand for themselves
    architectures: tuple[str, ...] = ()
    until: str = ""  # the last version of the engine that reads it, where a later one does not
    blocks: int = 1  # the most that a head may have: none of several was run in any engine
    slides: bool = False  # whether it reads a window without sinks from layer_types
    # what this engine alone needs
    finish: Callable[[Layout, TrainableDrafter, Any], Layout] | None = None
    # of a head, a target's config and the engine's name
    writer: Callable[[Any, Any, str], Layout] | None = None

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return the layout of a head; ValueError with the settings that the engine cannot serve."""
        if self.writer is None:
            raise NotImplementedError
        return replace(self.writer(drafter, target_config, engine), serve=self.serve)
