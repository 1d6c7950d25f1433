"""An engine as data: the networks it reads, the settings it ignores, and its known faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, rotary_of
from eagle.formats.networks.network_layout import NetworkLayout, network_of
from eagle.formats.reading.faults import Fault

# types of rotary scaling that most engines read; no engine reads longrope, which depends on a sequence's length
SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class Engine:
    """One engine, or one project whose code loads heads: what it reads and what it gets wrong."""

    name: str  # as in `eagle export --to NAME`
    title: str  # as messages and guides call it
    networks: Mapping[str, NetworkLayout]  # by names of networks, as `network_of` returns them
    scalings: tuple[str, ...] | None = SCALINGS  # rotary scalings that it reads; None for all
    # rotary keys that it leaves out, though they change what is computed
    ignored_rotary: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()  # faults of checkpoints that this engine suffers from
    # the message on a network that it does not read
    unknown: str = "no layout for {kind!r}: {advice}"
    # a network that it no longer reads -> which versions did
    former_support: Mapping[str, str] = field(default_factory=dict)

    def layout(self, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
        """Return the head's config, tensors and guide in this engine's layout; nothing is written.

        ValueError if the engine would serve it badly.

        Args:
            drafter: The head, whose network is one of `networks`.
            target_config: The target's config.
        """
        network = self.networks[network_of(drafter)]  # this engine's layout of the head's network
        blocks = drafter.network.get("blocks", 1)  # transformer blocks
        if blocks > network.max_blocks:
            raise ValueError(
                f"{self.name}: the head has {blocks} blocks, expected {network.max_blocks}: more were never run there"
            )
        layout = network.write(drafter, target_config, self.name)
        # a sliding window over the context; `_window_keys` refuses one that the engine does not read
        window = drafter.network.get("window")
        if window:
            keys = self._window_keys(network, window, blocks)
            layout = replace(layout, config=network.with_window(layout.config, keys))
        if network.finish is None:
            return layout
        return network.finish(layout, drafter, target_config)

    def _window_keys(
        self, network: NetworkLayout, window: Mapping[str, int], blocks: int
    ) -> Config:
        """Return the config keys for a head's sliding window; ValueError if this engine would ignore the window.

        Args:
            network: The engine's layout of the head's network.
            window: The head's window: `sinks` (so many first tokens stay visible) and `recent` (so many last ones do).
            blocks: The number of the head's transformer blocks.
        """
        if network.reads_window and not window["sinks"]:
            return {
                "sliding_window": window["recent"],
                "layer_types": ["sliding_attention"] * blocks,
            }
        if network.reads_window:
            reason = "windows have no sinks"
            advice = "with sinks: 0"
        else:
            reason = "this network's windows are unknown"
            advice = "export EAGLE-3 without sinks to vllm, DFlash to vllm, sglang or zlab"
        raise ValueError(
            f"{self.name}: drafter.window is {dict(window)}, and {reason} there: the head would read rows that it "
            f"never saw in training, and acceptance be lost in silence. Train without drafter.window, or {advice}"
        )

    def unread_rotary(self, shape: Any) -> str:
        """Return why this engine would rotate the head's positions differently, for a message; "" if it would not.

        Args:
            shape: The head's config of sizes, with its rotary parameters.
        """
        if self.scalings is None:
            return ""
        rotary = rotary_of(shape)
        kind = rotary["rope_type"]
        if kind != "default" and kind not in self.scalings:
            scalings = ", ".join(self.scalings) or "none"
            return f"the head's rotary scaling is {kind!r}, of which this engine knows {scalings}"
        for key in self.ignored_rotary:
            # an engine that does not know `truncate` computes as if it were true
            is_default = key == "truncate" and rotary.get(key) is True
            if key in rotary and not is_default:
                silence = "would be left out in silence there, and acceptance lost"
                return f"{key}={rotary[key]!r} of the head's rotary scaling ({kind}) {silence}"
        return ""
