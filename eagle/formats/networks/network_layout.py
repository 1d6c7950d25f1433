"""One engine's layout of one network, and the order of its taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, scale_of
from eagle.formats.networks.layers_and_tokens import INPUT_NORM

MASK_HIDDEN = "mask_hidden"


def reorder_taps(tensors: Mapping[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """Return tensors with the columns of `fc` and the norms of the taps in another order.

    Taps are the target's layers whose inputs the head reads. Engines read them in ascending order, so the export of a
    head whose taps are in another order needs it.

    Args:
        tensors: The head's tensors, by our names.
        order: The present index, among the head's taps, of the tap that becomes the first, the second and so on.
    """
    reordered = dict(tensors)
    # fc [H, taps x H] (H width of a state) reads the concatenated states of all taps: H columns for each
    columns = tensors["fc.weight"].chunk(len(order), dim=1)
    reordered["fc.weight"] = torch.cat([columns[tap] for tap in order], dim=1)
    # P-EAGLE's mask tokens have no target states: this tensor [..., taps x H] is read in their place
    if MASK_HIDDEN in tensors:
        masks = tensors[MASK_HIDDEN].chunk(len(order), dim=-1)
        reordered[MASK_HIDDEN] = torch.cat([masks[tap] for tap in order], dim=-1)
    if INPUT_NORM in tensors:
        norms = tensors[INPUT_NORM].chunk(len(order))
        reordered[INPUT_NORM] = torch.cat([norms[tap] for tap in order])
    # EAGLE-3.1 and P-EAGLE may norm each tap's state before `fc`
    for position, tap in enumerate(order):
        norm = f"fc_norm.{tap}.weight"
        if norm in tensors:
            reordered[f"fc_norm.{position}.weight"] = tensors[norm]
    return reordered


def network_of(drafter: TrainableDrafter) -> str:
    """Return the name of a drafter's network, such as "fused" for EAGLE-3, by which engines list what they serve."""
    return str(drafter.network["network"])


def mask_of(drafter: TrainableDrafter) -> int:
    """Return the id of the mask token, which the head reads at positions whose token is not known yet.

    Without the setting it is the last of the vocabulary.

    Exports write it into every config, because readers have different defaults.
    """
    token: int | None = drafter.settings.mask_token
    if token is None:
        token = drafter.shape.vocab_size - 1
    return token


def refuse_scale(drafter: TrainableDrafter, engine: str) -> None:
    """Raise ValueError for a target that multiplies its embedding rows by a factor, as Gemma does.

    The engines that read this layout draft without the factor, and the layout holds no embedding of the head's own.
    """
    if scale_of(drafter) != 1.0:
        raise ValueError(
            f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which is left out when it "
            "drafts: no exporter has a layout for it"
        )


@dataclass(frozen=True)
class NetworkLayout:
    """How one engine wants the heads of one network: config keys, tensor names and a guide to serving.

    Either `writer` produces the files, or a subclass overrides `write` for a network that several engines read.
    """

    serve: str  # the guide (Markdown), with the placeholders HEAD, TARGET and DEPTH
    # of config.json: the classes by which the engine recognises the head
    architectures: tuple[str, ...] = ()
    until: str = ""  # the last version of the engine that reads it, where a later one does not
    # most transformer blocks of a head; 1 by default, as no head with several was run in any engine
    max_blocks: int = 1
    reads_window: bool = False  # whether the engine reads a window without sinks from layer_types
    # (layout, head, the target's config) -> the layout with what this engine alone needs; None: nothing
    finish: Callable[[Layout, TrainableDrafter, Any], Layout] | None = None
    # (head, the target's config, the engine's name) -> its layout
    writer: Callable[[Any, Any, str], Layout] | None = None

    def with_window(self, config: Config, window_keys: Config) -> Config:
        """Return a head's config.json with the keys for its sliding window added.

        A subclass overrides it where `config` states the window already.

        Args:
            config: The contents of config.json.
            window_keys: The keys that state the window, as `Engine` makes them.
        """
        return {**config, **window_keys}

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return the head's config.json, tensors and guide as the engine wants them, by `writer`; nothing is written.

        ValueError for settings that the engine cannot serve.

        Args:
            drafter: The head.
            target_config: The target's config.
            engine: The engine's name, for messages.
        """
        if self.writer is None:
            raise NotImplementedError
        return replace(self.writer(drafter, target_config, engine), serve=self.serve)
