"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115): one hidden layer for all levels."""

# K levels, H hidden

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.objectives import (
    LanguageHead,
    align_steps,
    choose_teacher,
    distillation_loss,
)


class BlockwiseSettings(LevelSettings):
    """Settings of the head in a recipe."""

    kind: Literal["blockwise"] = "blockwise"
    levels: int = Field(4, ge=1)  # number of drafted levels
    # hidden units per level; by default the width of the target's MLP
    inner_dim: int | None = Field(None, ge=1)
    drawn: bool = False  # train one random level per step


class Blockwise(LevelHeads):
    """y_k = x + (down relu(up x))_k for every level k; the target's LM head gives the logits of y_k.

    All levels share the hidden units. Level 0 is the paper's k = 1; its k = 0 is the target's own next token, which a
    frozen target predicts without a head. The state x comes from the forward that verified the last draft, so one
    forward of the target verifies a draft and gives the next one.
    """

    Settings = BlockwiseSettings
    settings: BlockwiseSettings
    reads_tokens = False
    network_keys = ("levels",)

    def __init__(self, settings: BlockwiseSettings, shape: HeadShape) -> None:
        """Make two matrices for all levels: up to the hidden units, and down to the levels' changes of the state."""
        super().__init__(settings, shape)
        # one matrix product makes the hidden units of all levels
        inner = settings.levels * (settings.inner_dim or shape.intermediate_size)
        self.up = nn.Linear(shape.hidden_size, inner)
        self.down = nn.Linear(inner, settings.levels * shape.hidden_size)

    def start(self, target_head: TargetHead | None) -> None:
        """Let every level predict the target's next token at first: no level changes the state.

        `target_head` is not used, as the levels have no LM head of their own.
        """
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, target_head: TargetHead
    ) -> Tensor:
        """Return the states of all K levels, concatenated to [.., K * H] (H: the hidden size).

        Level 0 makes them from the target's state [.., H]; later levels return what they get. No level reads a token,
        so the last two arguments are not used.
        """
        if level:
            return state
        # y_k = x + (down relu(up x))_k, for all k in one product
        changes = self.down(F.relu(self.up(state))).unflatten(-1, (self.levels, -1))
        return (state[..., None, :] + changes).flatten(-2)

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """Return the state [.., width] that a level's LM head reads, from those of all levels [.., levels * width]."""
        return state.unflatten(-1, (self.levels, -1))[..., level, :]

    def lm_heads(self, target_head: TargetHead) -> Sequence[LanguageHead]:
        """Return the target's LM head, for all levels."""
        return [target_head]

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the loss of all levels; with `drawn`, in training, the loss of one sampled level times their number.

        Both are the same in expectation, and one level is less work. "total" is minimised, the losses of the levels are
        logged.
        """
        if not (self.settings.drawn and self.training):
            return super().forward(batch, target_head)
        # from the host's random generator, which training seeds in every step
        level = int(torch.randint(self.levels, (), device="cpu"))
        # the index of each of S supervised slots among all tokens, and the states [S, hidden size] of every level there
        slot_indices, hidden = self.level_states(batch, target_head)
        # all tensors of one level: [1, S] and [1, S, hidden size]
        weights = self.levels * self.slot_weights(batch, slot_indices)[level : level + 1]
        teacher, teacher_head, objective = choose_teacher(
            self.settings.loss, batch, slot_indices, target_head
        )
        # `align_steps` shifts level d by d slots, so it gets the levels before too
        student = align_steps(hidden[: level + 1])[level:]
        heads = target_head, teacher_head
        total, level_losses = distillation_loss(
            student, teacher, weights, heads, objective=objective
        )
        # zeros for the other levels, so that all steps log the same names
        level_losses = F.pad(level_losses, (level, self.levels - 1 - level))
        return {"total": total, **{f"draft_probs/{i}": loss for i, loss in enumerate(level_losses)}}
