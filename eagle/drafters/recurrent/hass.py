"""HASS (Zhang et al. 2024, arXiv 2408.15766): EAGLE-1's head, also trained on its own predicted features."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.objectives import Objective
from eagle.drafters.recurrent.feature_head import FeatureHead, FeatureSettings


class HassSettings(FeatureSettings):
    """Settings of the head in a recipe."""

    kind: Literal["hass"] = "hass"
    # number of unrolled steps; in step s, the latest s features that a slot reads are the head's own
    steps: int = Field(3, ge=1)
    top_k: int = Field(10, ge=1)  # number of tokens in the top-k loss
    # weight of the top-k loss, on the target's most probable tokens; 0 for small targets
    top: float = 1.0


class Hass(FeatureHead):
    """Each step reads the features predicted by the step before, without gradient through them."""

    Settings = HassSettings
    settings: HassSettings

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return EAGLE-1's loss plus the loss on the target's top-k tokens, summed over the draft steps.

        "total" is minimised, the other terms are logged: the regression of the features, and the weighted loss of the
        probs in each step.
        """
        settings = self.settings
        objective = Objective(weight=settings.cross_entropy, top=settings.top, top_k=settings.top_k)
        regression, loss, step_losses = self.losses(batch, target_head, objective, settings.steps)
        # the objective has already weighted the cross-entropy and the top-k loss
        return {
            "total": settings.regression * regression + loss,
            "regression": regression.detach(),
            **{f"draft_probs/{step}": value for step, value in enumerate(step_losses)},
        }
