"""Early exit: the target's first layers draft, untrained.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains a target for it; Draft & Verify (Zhang et al. 2023, arXiv
2309.08168) has an untrained target draft with some of its layers.
"""

from __future__ import annotations

from eagle.drafters.self_speculation.exit_state import ExitDrafter


class EarlyExit(ExitDrafter):
    """The target's first layers with its own final norm and LM head."""

    def __init__(self, layers: int | None = None) -> None:
        """Take the number of the target's first layers that draft; None for a third of its layers."""
        self.layers = layers
