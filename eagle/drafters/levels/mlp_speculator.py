"""MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): each level reads the previous state and token."""

# H hidden of the target, D of a stage

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS
from eagle.core.drafter import HeadShape, TargetHead
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings
from eagle.drafters.parts.decoder_block import Norm
from eagle.drafters.parts.objectives import LanguageHead, OwnHead

EPS = 1e-6  # of all norms of the head, independent of the target's


class MlpSpeculatorSettings(LevelSettings):
    """Settings of the head in a recipe."""

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    levels: int = Field(4, ge=1, le=MOST_LEVELS)  # number of drafted levels
    # width of each level's network; by default the target's hidden size
    inner_dim: int | None = Field(None, ge=1)
    tie_weights: bool = False  # all levels share one network, except the first projection
    scale_input: bool = False  # normalise the target's state first


class ShiftedNorm(Norm):
    """w x / rms(x) + b, without subtracting a mean."""

    def __init__(self, width: int) -> None:
        """Make the gain w and the bias b, of this width."""
        super().__init__(width, EPS)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return w x / rms(x) + b, [.., width] as x."""
        return super().forward(x) + self.bias


class MlpSpeculator(LevelHeads):
    """A stage computes s = gelu(ln(P s' + r E x)) from the stage before's state s' and the token x; an LM head reads s.

    P, ln and E are `proj`, `ln` and `emb`. The ratio r is chosen so that half of the last state's variance comes from
    the target's state: each stage keeps w^2 = 0.5^(1 / levels) of it and E x adds the rest. Entries of E start with
    variance 1 / D, and those of s' have 1/2.
    """

    Settings = MlpSpeculatorSettings
    settings: MlpSpeculatorSettings
    network_keys = ("levels", "tie_weights", "scale_input")
    emb: Any
    proj: Any
    ln: Any
    head: Any

    def __init__(self, settings: MlpSpeculatorSettings, shape: HeadShape) -> None:
        """Make the stages: one for each level, or a single one for all if the weights are tied."""
        super().__init__(settings, shape)
        inner = settings.inner_dim or shape.hidden_size
        stages = 1 if settings.tie_weights else settings.levels
        # tied stages share everything but the projection, which reads the target's width in the first stage and the
        # stage width in all others
        projections = min(settings.levels, 2) if settings.tie_weights else settings.levels
        widths = [shape.hidden_size] + [inner] * (projections - 1)
        self.emb = nn.ModuleList([nn.Embedding(shape.vocab_size, inner) for _ in range(stages)])
        self.proj = nn.ModuleList([nn.Linear(width, inner, bias=False) for width in widths])
        self.ln = nn.ModuleList([ShiftedNorm(inner) for _ in range(stages)])
        self.head = nn.ModuleList(
            [nn.Linear(inner, shape.vocab_size, bias=False) for _ in range(stages)]
        )
        # r = sqrt((1 - w^2) D / 2) / w with w^2 = 0.5^(1 / levels), for stages of width D = inner: each stage keeps the
        # share w^2 of the variance that comes from the target's state, so half of it is left after the last level
        state_weight = 0.5 ** (0.5 / settings.levels)
        self.token_ratio = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def start(self, target_head: TargetHead | None) -> None:
        """Initialise all matrices with N(0, 1 / D), D the width of a stage; `target_head` is not used."""
        # `token_ratio` assumes this variance
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=self.emb[0].embedding_dim ** -0.5)

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, target_head: TargetHead
    ) -> Tensor:
        """Return a stage's state [.., D] (D: the width of a stage) from the state of the stage before and tokens.

        Args:
            level: The stage, counted from 0.
            state: The state of the stage before [.., D]; for stage 0 the target's [.., H], H its hidden size.
            tokens: [..], the token after each state.
            target_head: Not used, as a stage has its own embedding.
        """
        # entries of a state should have the variance 1/2
        if level == 0 and self.settings.scale_input:
            state = F.rms_norm(state, state.shape[-1:], eps=EPS) / math.sqrt(2)
        # s = gelu(ln(P s' + r E x)); the last module of a list serves all further levels if weights are tied
        emb, proj, ln = (
            modules[min(level, len(modules) - 1)] for modules in (self.emb, self.proj, self.ln)
        )
        return F.gelu(ln(proj(state) + self.token_ratio * emb(tokens)))

    def hidden(self, level: int, state: Tensor) -> Tensor:
        """Return the state [.., width] itself, which the LM head of the stage reads."""
        return state

    def lm_heads(self, target_head: TargetHead) -> Sequence[LanguageHead]:
        """Return one LM head for each stage, or one for all."""
        return [OwnHead(lm_head.weight) for lm_head in self.head]
