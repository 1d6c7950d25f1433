"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one Llama block that continues the target's last features."""

# B batch, T tokens, H width, K rows of one level, V vocabulary

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from eagle.drafter import Budget, Committed, Noise, TargetHead, TrainableDrafter
from eagle.drafters.blocks import Block, Cache, Rotary, grow, head_shape, level_mask
from eagle.examples import Batch
from eagle.objectives import feature_regression, soft_cross_entropy
from eagle.tree import DraftTree


class Eagle1Settings(BaseModel):
    """What a recipe may say about the head."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["eagle1"] = "eagle1"
    fc_bias: bool = True
    noise: float = 0.1  # features are trained with U(-noise, noise) * 512 / T, T held at 512 or more
    regression: float = 1.0
    cross_entropy: float = 0.1


class Eagle1(TrainableDrafter):
    """(feature of token i, token i + 1) -> feature of token i + 1, whose logits name token i + 2."""

    taps = (-1,)
    teacher_taps = (-1,)
    Settings = Eagle1Settings

    def __init__(self, settings: Eagle1Settings, shape: Any) -> None:
        super().__init__()
        self.settings, self.shape = settings, shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=settings.fc_bias)
        self.layers = nn.ModuleList([Block(shape)])
        self.rotary = Rotary(shape)
        self.frozen: tuple[TargetHead, ...] = ()  # in a tuple, so that the target's weights are no part of the head

    @classmethod
    def for_target(cls, settings: Eagle1Settings, target_config: Any) -> Eagle1:
        """A new head of the target's width."""
        return cls(settings, head_shape(target_config))

    def states(self, tokens: Tensor, features: Tensor, start: int, frozen: TargetHead) -> Tensor:
        """[B, T, H], predicted features in a causal pass over slots that begin at position `start`."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        return self._block(tokens, features, positions, None, None, frozen)

    def _block(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        frozen: TargetHead,
    ) -> Tensor:
        fused = self.fc(torch.cat([frozen.embed(tokens).to(features.dtype), features], dim=-1))
        return self.layers[0](fused, self.rotary(fused, positions), mask, cache)

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Smooth-L1 of the features plus cross-entropy of the laws, at slots whose predicted token is supervised."""
        features = batch.tapped(self.taps)[:, :, 0].to(self.fc.weight.dtype)
        known, true = features[:, :-2], features[:, 1:-1]
        if self.training and self.settings.noise:
            spread = self.settings.noise * 512 / batch.lengths.clamp(min=512)
            known = known + (2 * torch.rand_like(known) - 1) * spread[:, None, None].to(known)
        predicted = self.states(batch.tokens[:, 1:-1], known, 0, frozen)
        counted = batch.loss_mask[:, 2:]
        predicted, true = predicted[counted], true[counted]
        student, teacher = frozen.logits(predicted), frozen.logits(true)
        regression, entropy = feature_regression(predicted, true), soft_cross_entropy(student, teacher)
        return {
            "total": self.settings.regression * regression + self.settings.cross_entropy * entropy,
            "regression": regression,
            "cross_entropy": entropy,
            "agreement": (student.argmax(-1) == teacher.argmax(-1)).float().mean(),
        }

    # -- drafting -----------------------------------------------------------------------------------------------------

    def bind(self, frozen: TargetHead) -> Eagle1:
        """Lend the head what it needs to draft."""
        self.frozen = (frozen,)
        self.begin()
        return self.eval()

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence."""
        self.cache = Cache()

    @torch.inference_mode()
    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """A tree grown from the target's features of the committed tokens, then from the head's own."""
        assert news.features is not None
        (frozen,), device, dtype = self.frozen, self.fc.weight.device, self.fc.weight.dtype
        start, count = self.cache.length, len(news.tokens)
        tokens = torch.cat([news.tokens[1:], torch.tensor([news.root])]).to(device)
        positions = torch.arange(start, start + count, device=device)
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        mask = None if start == 0 else level_mask(start, causal, dtype)
        features = news.features[:, 0].to(device, dtype)
        hidden = self._block(tokens[None], features[None], positions[None], mask, self.cache, frozen)[0, -1:]
        committed = start + count

        def level(depth: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            nonlocal hidden
            positions = torch.full((1, len(tokens)), committed + depth - 1, device=device)
            mask = level_mask(committed, seen, dtype)
            hidden = self._block(tokens[None], hidden[None, before], positions, mask, self.cache, frozen)[0]
            return frozen.logits(hidden).log_softmax(-1)

        tree = grow(news.root, frozen.logits(hidden)[0].log_softmax(-1), level, budget)
        self.cache.length = committed
        return tree
