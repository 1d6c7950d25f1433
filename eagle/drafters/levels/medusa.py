"""Medusa (Cai et al. 2024, arXiv 2401.10774): independent levels that all read one state of the target."""

# H hidden, D = H what an LM head reads

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, TargetHead
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.objectives import LanguageHead, OwnHead

# the loss weight of a level relative to the level before, in the published recipes of joint training
FALLING = 0.8


class MedusaSettings(LevelSettings):
    """Settings of the heads in a recipe."""

    kind: Literal["medusa"] = "medusa"
    levels: int = Field(5, ge=1)  # number of drafted levels
    layers: int = Field(1, ge=1)  # number of residual blocks per level
    # `own`: each level has its own LM head, initialised from the target's; `target`: all levels use the target's
    lm_head: Literal["own", "target"] = "own"
    # weights of the levels in the loss; "falling": 0.8, 0.64, ...
    weights: Literal["equal", "falling"] = "equal"


class Residual(nn.Linear):
    """x + silu(Wx + b), initially the identity."""

    def __init__(self, width: int) -> None:
        """Make W and b, both zero, for x of this width."""
        super().__init__(width, width)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + silu(Wx + b), [.., width] as x."""
        return x + F.silu(super().forward(x))


class Medusa(LevelHeads):
    """Each level has residual blocks and an LM head; a path's probability is the product over its levels."""

    Settings = MedusaSettings
    settings: MedusaSettings
    reads_tokens = False
    network_keys = ("levels", "layers", "lm_head")
    blocks: Any
    heads: Any

    def __init__(self, settings: MedusaSettings, shape: HeadShape) -> None:
        """Make the residual blocks of each level, and its LM head unless the levels use the target's."""
        super().__init__(settings, shape)
        width = shape.hidden_size
        self.blocks = nn.ModuleList()
        for _ in range(settings.levels):
            self.blocks.append(nn.Sequential(*(Residual(width) for _ in range(settings.layers))))
        # LM heads of the levels would be most of the weights; with lm_head: target the target's serves all levels
        lm_heads = settings.levels if settings.lm_head == "own" else 0
        self.heads = nn.ModuleList(
            [nn.Linear(width, shape.vocab_size, bias=False) for _ in range(lm_heads)]
        )

    def start(self, target_head: TargetHead | None) -> None:
        """Let all levels predict the target's next token at first: their LM heads become copies of the target's.

        The residual blocks begin as the identity. Without `target_head` nothing is changed.
        """
        if target_head is not None:
            for lm_head in self.heads:
                lm_head.weight.data.copy_(target_head.start_matrix())

    @property
    def level_weights(self) -> Sequence[float]:
        """The weight of each level in the loss: 1 for all, or falling from level to level: 0.8, 0.64, ..."""
        if self.settings.weights == "equal":
            return [1.0] * self.levels
        return [FALLING ** (level + 1) for level in range(self.levels)]

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """Return the output [.., H] of the level's residual blocks for the target's state [.., H]; H is its width."""
        hidden: Tensor = self.blocks[level](state)
        return hidden

    def lm_heads(self, target_head: TargetHead) -> Sequence[LanguageHead]:
        """Return each level's own LM head, or if there are none the target's, for all levels."""
        return [OwnHead(lm_head.weight) for lm_head in self.heads] or [target_head]
