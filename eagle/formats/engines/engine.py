"""An engine as data: the networks it reads, the settings it ignores, and its known faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, rotary_of
from eagle.formats.networks.network_layout import NetworkLayout, network_of
from eagle.formats.reading.traps import Trap

SCALINGS = ("linear", "llama3", "yarn")  # rotary ones that most engines read; longrope is chosen by length, by none


@dataclass(frozen=True)
class Engine:
    """One engine: its layouts and known faults."""

    name: str  # as `--to` has it
    title: str
    networks: Mapping[str, NetworkLayout]
    scalings: tuple[str, ...] | None = SCALINGS  # None for all
    ignored_rotary: tuple[str, ...] = ()  # keys that would change what is computed
    traps: tuple[Trap, ...] = ()
    unknown: str = "no layout for {kind!r}: {advice}"  # of a network that it does not read
    past: Mapping[str, str] = field(default_factory=dict)  # which network was served once, and by what

    def layout(self, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
        """The head in this engine's layout; ValueError if the engine would serve it badly."""
        network, blocks = self.networks[network_of(drafter)], drafter.network.get("blocks", 1)
        if blocks > network.blocks:
            raise ValueError(
                f"{self.name}: the head has {blocks} blocks, expected {network.blocks}: more were never run there"
            )
        layout = network.write(drafter, target_config, self.name)
        if window := drafter.network.get("window"):
            layout = replace(layout, config={**layout.config, **self._slide(network, window, blocks)})
        return network.finish(layout, drafter, target_config) if network.finish else layout

    def _slide(self, network: NetworkLayout, window: Mapping[str, int], blocks: int) -> Config:
        """The config's keys for a head's window; ValueError if this engine would ignore the window."""
        if not network.slides or window["sinks"]:
            what = "this network's windows are unknown" if not network.slides else "windows have no sinks"
            raise ValueError(
                f"{self.name}: drafter.window is {dict(window)}, and {what} there: the head would read rows that it "
                "never saw in training, and acceptance be lost in silence. Train without drafter.window"
                + (", or with sinks: 0" if network.slides else ", or export EAGLE-3 without sinks to vllm")
            )
        return {"sliding_window": window["recent"], "layer_types": ["sliding_attention"] * blocks}

    def unread_rotary(self, shape: Any) -> str:
        """Why this engine would rotate the head's positions differently; "" if it would not."""
        if self.scalings is None:
            return ""
        rotary = rotary_of(shape)
        kind = rotary["rope_type"]
        if kind != "default" and kind not in self.scalings:
            scalings = ", ".join(self.scalings) or "none"
            return f"the head's rotary scaling is {kind!r}, of which this engine knows {scalings}"
        for key in self.ignored_rotary:
            if key in rotary and not (key == "truncate" and rotary[key] is True):
                silence = "would be left out in silence there, and acceptance lost"
                return f"{key}={rotary[key]!r} of the head's rotary scaling ({kind}) {silence}"
        return ""
