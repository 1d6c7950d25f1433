"""MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): each stage reads the previous state and one token."""

# H the target's width, D that of a stage

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS
from eagle.core.drafter import HeadShape, TargetHead
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.decoder_block import Norm, head_shape
from eagle.drafters.parts.objectives import LanguageHead, OwnHead

EPS = 1e-6  # of all its norms, whatever the target's


class MlpSpeculatorSettings(LevelSettings):
    """Settings of the head in a recipe."""

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    levels: int = Field(4, ge=1, le=MOST_LEVELS)  # levels that are drafted, one token each
    inner_dim: int | None = Field(None, ge=1)  # width of every stage; by default the target's
    tie_weights: bool = False  # share one stage between all levels, except the first projection
    scale_input: bool = False  # norm the target's state first


class ShiftedNorm(Norm):
    """w x / rms(x) + b, without subtracting a mean."""

    def __init__(self, width: int) -> None:
        super().__init__(width, EPS)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., D]."""
        return super().forward(x) + self.bias


class MlpSpeculator(LevelHeads):
    """s = gelu(ln(P s' + r E x)), from the previous state s' and the token x after it; an LM head reads s.

    r is chosen so that half of the last state's variance comes from the target's state: each stage keeps w^2 =
    .5^(1 / levels) of it and E x adds the rest. Entries of E start with variance 1 / D, those of s' have 1/2.
    """

    Settings = MlpSpeculatorSettings
    settings: MlpSpeculatorSettings
    emb: Any
    proj: Any
    ln: Any
    head: Any

    def __init__(self, settings: MlpSpeculatorSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        width, inner = shape.hidden_size, settings.inner_dim or shape.hidden_size
        stages, projections = range(settings.levels), range(settings.levels)
        if settings.tie_weights:
            stages, projections = stages[:1], projections[:2]
        self.emb = nn.ModuleList([nn.Embedding(shape.vocab_size, inner) for _ in stages])
        self.proj = nn.ModuleList([nn.Linear(inner if stage else width, inner, bias=False) for stage in projections])
        self.ln = nn.ModuleList([ShiftedNorm(inner) for _ in stages])
        self.head = nn.ModuleList([nn.Linear(inner, shape.vocab_size, bias=False) for _ in stages])
        kept = 0.5 ** (0.5 / settings.levels)
        self.token_ratio = math.sqrt((1 - kept**2) * inner / 2) / kept

    @classmethod
    def for_target(
        cls,
        settings: MlpSpeculatorSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> MlpSpeculator:
        """A new head, with all matrices initialised alike."""
        head = cls(settings, head_shape(target_config))
        for part in (*head.emb, *head.proj, *head.head):
            nn.init.normal_(part.weight, std=head.emb[0].embedding_dim ** -0.5)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network: its stages, what they share, and what the first one reads."""
        named = ("levels", "tie_weights", "scale_input")
        return {"network": "mlp_speculator", **{name: getattr(self.settings, name) for name in named}}

    def read_token(self, level: int, state: Tensor, tokens: Tensor, frozen: TargetHead) -> Tensor:
        """[.., D], a stage's state, from that of the stage before, or the target's [.., H], and the tokens [..]."""
        if level == 0 and self.settings.scale_input:
            state = F.rms_norm(state, state.shape[-1:], eps=EPS) / math.sqrt(2)
        emb, proj, ln = (parts[min(level, len(parts) - 1)] for parts in (self.emb, self.proj, self.ln))
        return F.gelu(ln(proj(state) + self.token_ratio * emb(tokens)))

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """The state itself."""
        return state

    def lm_heads(self, frozen: TargetHead) -> Sequence[LanguageHead]:
        """One LM head for each stage, or one for all."""
        return [OwnHead(part.weight) for part in self.head]
