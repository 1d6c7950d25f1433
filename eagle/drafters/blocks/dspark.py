"""DSpark (DeepSeek 2026): DFlash's blocks with a bias on each level from the previous tokens; and Domino's bias."""

# A anchors, K levels, H width, r rank

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.core.network_parts import Parts
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.blocks.sequential_bias import MARKOV, GruBias, PathLevels, SequentialBias
from eagle.drafters.parts.objectives import BiasedHead, LanguageHead, Named, Objective, distillation_loss


class DSparkSettings(InjectedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dspark"] = "dspark"
    slots: int = Field(7, ge=2)  # tokens read at once: the last accepted token, then mask tokens
    sample_from_anchor: bool = True  # each slot predicts the next token; else the token at its own place
    decay: float | None = Field(4.0, gt=0)  # level d has the weight e^(-d / decay) in the loss
    markov: Literal["none", "vanilla", "gated", "rnn", "domino"] = "vanilla"  # what makes biases from the token before
    rank: int = Field(256, ge=1)  # of that network's matrix
    gru_size: int = Field(1024, ge=1)  # of the GRU of "domino"
    unbiased: int = Field(1, ge=0)  # levels that "domino" leaves as they are
    confidence: bool = True  # learn how likely each level is accepted
    likelihood: float = Field(0.1, ge=0)  # weight of the cross-entropy with the text's own tokens
    distance: float = Field(0.9, ge=0)  # weight of the sum of |p - q|


class DSpark(InjectedHead):
    """(states of a block, earlier drafted tokens) -> logits: one forward gives all states, each level adds a bias."""

    open_levels = PathLevels
    Settings = DSparkSettings

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        width, rank = shape.hidden_size, settings.rank
        self.reads_tokens, self.rates_nodes = settings.markov != "none", settings.confidence
        self.markov_head = self.prefix_gru = None
        self.confidence_head: Any = None
        if settings.markov == "domino":
            self.prefix_gru = nn.GRU(width, settings.gru_size, bias=False, batch_first=True)
            projections = (
                nn.Linear(width + settings.gru_size, rank, False),
                nn.SiLU(),
                nn.Linear(rank, shape.vocab_size, False),
            )
            self.embed_proj = nn.Sequential(*projections)
        elif settings.markov != "none":
            self.markov_head = MARKOV[settings.markov](shape, rank)
        if settings.confidence:
            known = width + (rank if self.markov_head is not None else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(known, 1)})

    @property
    def network(self) -> dict[str, Any]:
        """The network: its taps, the token that a slot names, and how levels depend on earlier tokens."""
        named = ("markov", "confidence", *(("unbiased",) if self.settings.markov == "domino" else ()))
        return super().network | {name: getattr(self.settings, name) for name in named}

    @property
    def parts(self) -> Parts:
        """Those of a block head, and the tables of its Markov correction."""
        tables = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
        return replace(super().parts, alike=(tables,) if self.markov_head is not None else ())

    @property
    def bias(self) -> SequentialBias | None:
        """The module that encodes earlier tokens; None if all nodes of a level have the same logits."""
        if self.prefix_gru is not None:
            return GruBias(self.prefix_gru, self.embed_proj, self.settings.unbiased)
        return self.markov_head

    def rate(self, states: Tensor, tokens: Tensor) -> Tensor:
        """[..], log-odds that the guess of levels with states [.., H] after tokens [..] is accepted."""
        if self.markov_head is not None:
            known = self.markov_head.markov_w1(tokens)
            states = torch.cat([states.expand(*known.shape[:-1], -1), known], dim=-1)
        odds: Tensor = self.confidence_head.proj(states)
        return odds[..., 0]

    # -- training -----------------------------------------------------------------------------------------------------

    def lm_head(self, frozen: TargetHead) -> LanguageHead:
        """The LM head for states, or for states and codes."""
        return frozen if self.bias is None else BiasedHead(frozen, self.bias.matrix)

    def read_levels(self, batch: Batch, anchors: Anchors, states: Tensor, frozen: TargetHead) -> Tensor:
        """[A, K, H + r], states and the codes of the texts' tokens; states only, if there is no bias."""
        if (bias := self.bias) is None:
            return states
        codes, memory = list[Tensor](), states.new_zeros(len(states), bias.memory_size)
        for level, state in enumerate(states.unbind(1)):
            code, memory = bias.read_token(level, state, anchors.tokens_at(batch, level - 1), memory, frozen)
            codes.append(code)
        return torch.cat([states, torch.stack(codes, dim=1)], dim=-1)

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The loss of all levels and of their confidence, at blocks after anchors drawn from each text."""
        anchors = Anchors.drawn(batch, self.levels, self.settings.anchors)
        context, roots = self.inject_texts(batch), anchors.tokens_at(batch, -1)
        states = self.read_blocks(batch, frozen, context, anchors.spans, roots)
        hidden, weights = self.read_levels(batch, anchors, states, frozen), anchors.reached * self.level_shares(batch)
        total, overlaps = self.compare(batch, anchors, hidden, weights, (self.lm_head(frozen), frozen))
        if self.prefix_gru is not None:  # what it corrects is learned first
            alone, _ = self.compare(batch, anchors, states, weights, (frozen, frozen))
            total = batch.progress * total + (1 - batch.progress) * alone
        losses = {"total": total, "laws": total.detach()}
        if self.confidence_head is not None:
            before = torch.cat([roots[:, None], anchors.tokens_of(batch)[:, :-1]], dim=1)
            rated = self.rate(states, before).to(overlaps.dtype)
            losses["confidence"] = F.binary_cross_entropy_with_logits(rated, overlaps, weights, reduction="sum")
            losses["total"] = total + losses["confidence"]
        return losses

    def compare(
        self, batch: Batch, anchors: Anchors, hidden: Tensor, weights: Tensor, heads: tuple[LanguageHead, TargetHead]
    ) -> tuple[Tensor, Tensor]:
        """The divergence from the target's probs and the texts' tokens, and the overlaps [A, K] with the target."""
        settings, (student, frozen) = self.settings, heads
        overlaps = torch.zeros_like(weights, dtype=torch.promote_types(hidden.dtype, weights.dtype))
        named = Named(anchors.tokens_of(batch).flatten(), overlaps.view(1, -1))
        total, _ = distillation_loss(
            hidden.flatten(0, 1)[None],
            anchors.states_before(batch).flatten(0, 1),
            weights.flatten()[None],
            (student, frozen),
            Objective("tv", weight=2 * settings.distance, tokens=settings.likelihood),
            frozen.weight.dtype,
            named,
        )
        return total, overlaps
