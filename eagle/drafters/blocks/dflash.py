"""DFlash (Chen et al. 2026, arXiv 2602.06036): one forward over a root and masks guesses a block of tokens."""

# A anchors, K levels, H width

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.parts.objectives import ROWS, Loss, Objective, distillation_loss


class DFlashSettings(InjectedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dflash"] = "dflash"
    loss: Loss = "cross_entropy"  # towards the target's probs, or "tokens": towards the text's own, as published
    d_pace: bool = False  # weigh levels by how far a draft is expected to get, instead of `decay`


class DFlash(InjectedHead):
    """Blocks over root and masks whose slots attend to one another; with `causal`, JetSpec's network."""

    Settings = DFlashSettings
    settings: DFlashSettings

    @property
    def level_weights(self) -> list[float]:
        """The weight of each level in the loss; with `d_pace` every anchor has its own."""
        return [1.0] * self.levels if self.settings.d_pace else super().level_weights

    @property
    def counts_by_forward(self) -> bool:  # type: ignore[override]
        """Whether its divisor depends on the head's states."""
        return bool(self.settings.d_pace and self.settings.divisor == "weights")

    def forward(self, batch: Batch, frozen: TargetHead, count: bool = False) -> dict[str, Tensor]:
        """The loss of all levels, at blocks after anchors drawn from each text; or what it is divided by."""
        settings, anchors = self.settings, Anchors.drawn(batch, self.levels, self.settings.anchors)
        context, roots = self.inject_texts(batch), anchors.tokens_at(batch, -1)
        states = self.read_blocks(batch, frozen, context, anchors.spans, roots)
        tokens = torch.stack([anchors.tokens_at(batch, level) for level in range(self.levels)], dim=1)
        weights = anchors.reached * self.level_shares(batch)
        if settings.d_pace:
            paces = pace_levels(states, tokens, anchors.reached, frozen)
            if count:
                return {"divisor": paces.sum()}
            weights = paces / self.pace_divisor(batch, paces) if self.counts_by_forward else paces * weights
        taught, teacher, objective = tokens, None, Objective()
        if settings.loss != "tokens":
            taught, teacher = anchors.states_before(batch), frozen
            objective = Objective(settings.loss)
        total, _ = distillation_loss(
            states.flatten(0, 1)[None],
            taught.flatten(0, 1),
            weights.flatten()[None],
            (frozen, teacher),
            objective,
            frozen.weight.dtype,
        )
        return {"total": total}

    def pace_divisor(self, batch: Batch, paces: Tensor) -> Tensor | float:
        """The sum of the weights [A, K] over the whole step."""
        return max(batch.divisors[0], 1e-9) if batch.divisors else paces.sum().clamp(min=1e-9)


@torch.no_grad()
def pace_levels(states: Tensor, tokens: Tensor, reached: Tensor, frozen: TargetHead) -> Tensor:
    """[A, K], D-PACE's weights: how much of a draft's expected length depends on each level.

    A level is kept with probability s = (1 + p) / 2, where p is its prob of the text's token.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    rows = zip(states.flatten(0, 1).split(ROWS), tokens.flatten().split(ROWS), strict=True)
    probs = [frozen.logits(state).softmax(-1, dtype=wide).gather(1, named[:, None])[:, 0] for state, named in rows]
    kept = (0.5 + 0.5 * torch.cat(probs).view(tokens.shape)) * reached
    lengths = kept.cumprod(1)
    return lengths.flip(1).cumsum(1).flip(1) * reached
