"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one decoder block that continues the target's last states."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.objectives import Objective
from eagle.drafters.recurrent.feature_head import FeatureHead, FeatureSettings


class Eagle1Settings(FeatureSettings):
    """Settings of the head in a recipe."""

    kind: Literal["eagle1"] = "eagle1"


class Eagle1(FeatureHead):
    """EAGLE-1's head, trained on the target's features only."""

    Settings = Eagle1Settings
    settings: Eagle1Settings

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return EAGLE-1's loss: Smooth-L1 of the features plus cross-entropy of the probs, each with its weight.

        Both are means over the supervised slots, at which token i and the feature of it predict the next feature.
        "total" is minimised, the other terms are logged.
        """
        settings = self.settings
        # the default objective is the cross-entropy; the third result is the loss by step, and there is one step
        regression, entropy, _ = self.losses(batch, target_head, Objective())
        # L = w_reg * SmoothL1(f, f') + w_cls * CE(softmax(head(f)), softmax(head(f')))
        return {
            "total": settings.regression * regression + settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "cross_entropy": entropy.detach(),
        }
