"""DFlash (Chen et al. 2026, arXiv 2602.06036): one forward over a root and masks guesses a block of tokens."""

# A anchors, K levels, H hidden

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.parts.objectives import ROWS, Loss, Objective, distillation_loss


class DFlashSettings(InjectedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dflash"] = "dflash"
    loss: Loss = "cross_entropy"  # towards the target's probs, or "tokens": towards the text's own, as published
    d_pace: bool = False  # weigh levels by how far a draft is expected to get, instead of `decay`


class DFlash(InjectedHead):
    """Blocks over root and masks whose slots attend to one another; with `causal`, JetSpec's network."""

    borrows_logits = True
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
        """Return the loss of all levels, at blocks after anchors sampled from each sequence.

        Args:
            count: return what the loss is divided by, as "divisor", in place of the loss.
        """
        settings = self.settings
        anchors, states = self.read_anchors(batch, frozen)
        tokens = anchors.tokens_of(batch)  # [A, K]
        # L = sum_ak w_k * CE(q_ak) / divisor, with w_k = e^(-k / decay), or D-PACE's weights
        weights = anchors.reached * self.level_shares(batch)
        if settings.d_pace:
            paces = pace_levels(states, tokens, anchors.reached, frozen)  # [A, K]
            # "weights" divides by the sum of all paces of a step, which only a forward knows: batches are counted first
            if count:
                return {"divisor": paces.sum()}
            if not self.counts_by_forward:
                weights = paces * weights
            elif batch.divisors:
                weights = paces / max(batch.divisors[0], 1e-9)
            else:
                weights = paces / paces.sum().clamp(min=1e-9)
        teacher = tokens
        teacher_head = None
        objective = Objective()
        if settings.loss != "tokens":
            teacher = anchors.states_before(batch)
            teacher_head = frozen
            objective = Objective(settings.loss)
        total, _ = distillation_loss(
            states.flatten(0, 1)[None],
            teacher.flatten(0, 1),
            weights.flatten()[None],
            (frozen, teacher_head),
            objective=objective,
            dtype=frozen.weight.dtype,
        )
        return {"total": total}


@torch.no_grad()
def pace_levels(states: Tensor, tokens: Tensor, reached: Tensor, frozen: TargetHead) -> Tensor:
    """Return [A, K], D-PACE's weights: how much of a draft's expected length depends on each level.

    A level is accepted with probability s = (1 + p) / 2, where p is its prob of the sequence's token. The expected
    length is the sum over k of s_1 ... s_k; level k appears in the products from k on.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    # some rows at a time, as logits are as wide as the vocabulary
    probs = []
    for chunk, chunk_tokens in zip(
        states.flatten(0, 1).split(ROWS), tokens.flatten().split(ROWS), strict=True
    ):
        chunk_probs = frozen.logits(chunk).softmax(-1, dtype=wide)
        probs.append(chunk_probs.gather(1, chunk_tokens[:, None])[:, 0])
    accepted = (0.5 + 0.5 * torch.cat(probs).view(tokens.shape)) * reached
    # sum over j >= k of s_1 ... s_j: a reversed cumulative sum
    lengths = accepted.cumprod(1)
    return lengths.flip(1).cumsum(1).flip(1) * reached
