"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115): one hidden layer makes all levels' states."""

# K levels, H width, F of a level's hidden units, S supervised slots

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.objectives import LanguageHead, align_steps, distillation_loss


class BlockwiseSettings(LevelSettings):
    """Settings of the head in a recipe."""

    kind: Literal["blockwise"] = "blockwise"
    levels: int = Field(4, ge=1)  # levels that are drafted, one token each
    inner_dim: int | None = Field(None, ge=1)  # hidden units of a level; by default those of the target's MLP
    drawn: bool = False  # train one level a step, drawn uniformly


class Blockwise(LevelHeads):
    """y_k = x + (down relu(up x))_k for every level k; the target's LM head gives the logits of y_k.

    All levels share the hidden units. Level 0 is the paper's k = 1; its k = 0 is the target's own next token, which a
    frozen target predicts without a head. The state x comes from the forward that verified the last draft, so one
    forward of the target verifies a draft and gives the next one.
    """

    Settings = BlockwiseSettings
    settings: BlockwiseSettings
    reads_tokens = False

    def __init__(self, settings: BlockwiseSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        inner = settings.levels * (settings.inner_dim or shape.intermediate_size)
        self.up = nn.Linear(shape.hidden_size, inner)
        self.down = nn.Linear(inner, settings.levels * shape.hidden_size)

    @classmethod
    def for_target(
        cls,
        settings: BlockwiseSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Blockwise:
        """A new head; at first every level predicts the target's next token."""
        head = cls(settings, head_shape(target_config))
        nn.init.zeros_(head.down.weight)
        nn.init.zeros_(head.down.bias)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and its number of levels."""
        return {"network": "blockwise", "levels": self.levels}

    def read_token(self, level: int, state: Tensor, tokens: Tensor, frozen: TargetHead) -> Tensor:
        """[.., K * H], the states of all levels side by side, from the target's [.., H]; no token is read."""
        if level:
            return state
        changes = self.down(F.relu(self.up(state)))
        return (state[..., None, :] + changes.unflatten(-1, (self.levels, -1))).flatten(-2)

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """[.., H], the level's part of the states."""
        return state.unflatten(-1, (self.levels, -1))[..., level, :]

    def lm_heads(self, frozen: TargetHead) -> Sequence[LanguageHead]:
        """The target's LM head, for all levels."""
        return [frozen]

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The loss of all levels, or that of one drawn level times their number (the same in expectation)."""
        if not (self.settings.drawn and self.training):
            return super().forward(batch, frozen)
        level = int(torch.randint(self.levels, (), device="cpu"))  # on the host, which is seeded in every step
        places, hidden = self.level_states(batch, frozen)
        weights = self.levels * self.slot_weights(batch, places)[level : level + 1]
        teacher, teacher_head, objective = self.teacher(batch, places, frozen)
        student = align_steps(hidden[: level + 1])[level:]
        total, each = distillation_loss(student, teacher, weights, (frozen, teacher_head), objective)
        each = F.pad(each, (level, self.levels - 1 - level))  # zeros of the others: all steps log the same names
        return {"total": total, **{f"draft_probs/{number}": value for number, value in enumerate(each)}}
