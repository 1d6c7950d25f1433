"""Medusa (Cai et al. 2024, arXiv 2401.10774): independent heads on one state of the target."""

# H width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, TargetHead
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.objectives import LanguageHead, OwnHead

FALLING = 0.8  # what a level weighs relative to the one before in the published recipes of joint training


class MedusaSettings(LevelSettings):
    """Settings of the heads in a recipe."""

    kind: Literal["medusa"] = "medusa"
    levels: int = Field(5, ge=1)  # levels that are drafted, one token each
    layers: int = Field(1, ge=1)  # residual blocks of each level
    lm_head: Literal["own", "target"] = "own"  # a matrix for each level that starts from the target's, or the target's
    weights: Literal["equal", "falling"] = "equal"  # of the levels; "falling" is 0.8, 0.64, ...


class Residual(nn.Linear):
    """x + silu(Wx + b), initially the identity."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return x + F.silu(super().forward(x))


class Medusa(LevelHeads):
    """Each level has residual blocks and an LM head; a path's probability is the product over its levels."""

    Settings = MedusaSettings
    settings: MedusaSettings
    reads_tokens = False
    blocks: Any
    heads: Any

    def __init__(self, settings: MedusaSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        width, levels = shape.hidden_size, range(settings.levels)
        self.blocks = nn.ModuleList([nn.Sequential(*(Residual(width) for _ in range(settings.layers))) for _ in levels])
        own = levels if settings.lm_head == "own" else ()
        self.heads = nn.ModuleList([nn.Linear(width, shape.vocab_size, bias=False) for _ in own])

    @classmethod
    def for_target(
        cls,
        settings: MedusaSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Medusa:
        """New heads; at first all predict the target's next token."""
        head = cls(settings, head_shape(target_config))
        if frozen is not None:
            for part in head.heads:
                part.weight.data.copy_(frozen.start_matrix())
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network: its levels, its blocks, and whose LM head they use."""
        named = ("levels", "layers", "lm_head")
        return {"network": "medusa", **{name: getattr(self.settings, name) for name in named}}

    @property
    def level_weights(self) -> Sequence[float]:
        """Weights of the levels in the loss: equal, or falling."""
        return [FALLING ** (level + 1) if self.settings.weights == "falling" else 1.0 for level in range(self.levels)]

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """[.., D], the output of the level's residual blocks."""
        hidden: Tensor = self.blocks[level](state)
        return hidden

    def lm_heads(self, frozen: TargetHead) -> Sequence[LanguageHead]:
        """Each level's own LM head, or the target's for all levels."""
        return [OwnHead(part.weight) for part in self.heads] or [frozen]
