"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder block that reads three layers of the target."""

# S supervised slots, H hidden, D draft vocabulary, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import Norm
from eagle.drafters.parts.objectives import (
    Objective,
    OwnHead,
    align_steps,
    distillation_loss,
    feature_regression,
    step_weights,
)
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.fused_head import FusedHead, FusedSettings


class Eagle3Settings(FusedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["eagle3"] = "eagle3"
    steps: int = Field(7, ge=1)  # number of unrolled steps in training
    # weight of each step in the loss, relative to the step before
    decay: float = Field(0.8, gt=0, le=1)
    # weight of the Smooth-L1 loss between the inputs of the head's and of the target's LM head
    regression: float = Field(0.0, ge=0)
    norm_output: bool = False  # EAGLE-3.1: the next step reads the normalised output
    # normalise all taps together, as the trainer of speculators does by default
    norm_before_fc: bool = False
    # {sinks: S, recent: R}: attend only to the first S and the latest R tokens
    window: Window | None = None

    @model_validator(mode="after")
    def _check_norms(self) -> Eagle3Settings:
        """Refuse a norm of all taps together beside one of each tap."""
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are true, expected one of them at most: the first norms all taps together, "
                "the second each by itself"
            )
        return self


class Eagle3(FusedHead):
    """(three states of token i, token i + 1) -> a state whose logits name token i + 2, and that the next step reads."""

    Settings = Eagle3Settings
    settings: Eagle3Settings

    def __init__(self, settings: Eagle3Settings, shape: HeadShape) -> None:
        """Make the network, with one norm more if the settings have `norm_before_fc`."""
        super().__init__(settings, shape)
        self.input_norm: Norm | None = None
        if settings.norm_before_fc:
            self.input_norm = Norm(len(self.taps) * shape.hidden_size, shape.rms_norm_eps)

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion may have in a wrong order: the norm of all taps is one of them."""
        parts = super().parts
        if self.input_norm is None:
            return parts
        return replace(parts, by_tap=(*parts.by_tap, "input_norm.weight"))

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the state [.., H] that the first level reads: the target's states at L layers, joined by a matrix.

        `features` are these states [.., L, H], H the hidden size.
        """
        if self.input_norm is None:
            return super().fuse_taps(features)
        # fc(RMSNorm([h_1; ..; h_L])): one norm over the states of all taps
        return self.fc(self.input_norm(features.flatten(-2)))

    @property
    def network(self) -> dict[str, Any]:
        """The name of the network and the settings that decide what its weights mean, for checkpoints and engines.

        They are its stack of blocks, its taps (the target's layers whose inputs it reads) and its norms.
        """
        network = {
            "network": "fused",
            **self.stack,
            "taps": self.settings.taps,
            "norm_output": self.settings.norm_output,
            "norm_before_residual": self.settings.norm_before_residual,
        }
        # named only where it is there, as descriptions of earlier heads must not differ
        if self.settings.norm_before_fc:
            network["norm_before_fc"] = True
        return network

    def next_input(self, state: Tensor) -> Tensor:
        """Return the state that the next level reads: the last block's output, normed if `norm_output` is set.

        The norm is EAGLE-3.1's.
        """
        return self.norm(state) if self.settings.norm_output else state

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss over all draft steps, plus the regression loss if it has a weight.

        A slot i has the target's states of token i and token i + 1, and predicts token i + 2. It counts in step s if a
        draft that began s slots earlier reaches it. "total" is minimised, the other terms are logged, among them the
        distillation loss of each step.
        """
        settings = self.settings
        # the head's states at the S supervised slots, for each step, and the slots' token indices [S]
        unrolled = self.unroll(batch, target_head, settings.steps)
        in_draft_vocab = None
        if self.drafts is not None:
            # slot i predicts token i + 2; a token outside the draft vocabulary ends every draft that reaches it
            in_draft_vocab = self.t2d[batch.tokens[unrolled.places + 2]]
        # step s weighs decay^s: L = sum_s decay^s * D(p, q_s)
        weights = step_weights(unrolled.places, settings.steps, in_draft_vocab, settings.decay)
        student = align_steps(
            self.norm(state) for state in unrolled.states
        )  # [steps, S, hidden size]
        # [S, hidden size]: the target predicts token i + 2 from its state i + 1; tap -1 is what its LM head reads
        target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, unrolled.places + 1)
        # the student's LM head, and the teacher's with only the rows of the draft vocabulary
        heads = OwnHead(self.lm_head.weight), self.narrow_once(target_head, self.drafts)
        objective = Objective(settings.loss)
        # the dtype of the target's head for products of both heads, as autocast would choose
        total, step_losses = distillation_loss(
            student,
            target_hidden,
            weights,
            heads,
            objective=objective,
            dtype=target_head.weight.dtype,
        )
        losses = {
            "total": total,
            **{f"draft_probs/{step}": value for step, value in enumerate(step_losses)},
        }
        if settings.regression:
            losses["regression"] = feature_regression(student, target_hidden, weights)
            losses["total"] = total + settings.regression * losses["regression"]
        return losses
