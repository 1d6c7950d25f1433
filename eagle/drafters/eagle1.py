"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one Llama block that continues the target's last features."""

# B batch, T tokens, H width, K rows of one level, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from eagle.drafter import Budget, Committed, Noise, TargetHead, TrainableDrafter
from eagle.drafters.blocks import Block, Cache, Rotary, Spans, grow, head_shape, level_mask
from eagle.examples import Batch
from eagle.judge import added, judged
from eagle.objectives import feature_regression, soft_cross_entropy
from eagle.tree import DraftTree, Paths


class Eagle1Settings(BaseModel):
    """What a recipe may say about the head."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["eagle1"] = "eagle1"
    fc_bias: bool = True
    noise: float = 0.1  # features are trained with U(-noise, noise) * 512 / T, T held at 512 or more
    noise_as_published: bool = False  # T not held: texts of 16 tokens under 32 times the noise
    intermediate_size: int | None = None  # of its MLP; that of the target, but for a mixture of experts
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
        own = {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        return cls(settings, head_shape(target_config, **own))

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
        features, device = batch.tapped(self.taps)[:, 0], self.fc.weight.device
        # slot i reads (feature i, token i + 1) and predicts feature i + 1, whose logits name token i + 2
        known, positions = _slots(batch.lengths)
        spans = Spans.of([mask[2:] for mask in batch.loss_mask.split(batch.lengths)], device)
        known = known.to(device, non_blocking=True)
        seen = self._noised(features[known].to(self.fc.weight.dtype), batch)
        fused = self.fc(torch.cat([frozen.embed(batch.tokens[known + 1]).to(seen.dtype), seen], dim=-1))
        block: Any = self.layers[0]
        predicted = block.at(fused, self.rotary(fused, positions.to(device, non_blocking=True)[None]), spans)
        true = features[known[spans.rows] + 1]
        regression, entropy = feature_regression(predicted, true), soft_cross_entropy(predicted, true, frozen)
        return {
            "total": self.settings.regression * regression + self.settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "cross_entropy": entropy.detach(),
        }

    def _noised(self, features: Tensor, batch: Batch) -> Tensor:
        """Features [N, H] plus noise that each text's seed decides; weaker in long texts."""
        if not (self.training and self.settings.noise):
            return features
        noise = torch.empty_like(features, dtype=torch.float32)
        lengths = [max(length - 2, 0) for length in batch.lengths]
        for part, length, seed in zip(noise.split(lengths), batch.lengths, batch.seeds, strict=True):
            spread = self.settings.noise * 512 / (length if self.settings.noise_as_published else max(length, 512))
            part.uniform_(-spread, spread, generator=torch.Generator(noise.device).manual_seed(seed))
        return features + noise.to(features.dtype)

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Sums of the loss terms and of what each tree would have kept, over the slots that train."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        law = partial(_law, frozen)
        columns = (batch.tokens, batch.tapped(self.taps)[:, 0], batch.loss_mask)
        sums: dict[str, Tensor] = {}
        for tokens, true, counted in zip(*(column.split(batch.lengths) for column in columns), strict=True):
            if not counted.any():
                continue
            slots = counted[2:].nonzero()[:, 0].to(tokens.device)
            states = self._unrolled(tokens, true.to(self.fc.weight.dtype), slots, steps, frozen)
            found = judged(states, true, tokens, counted, (law, law), trees)
            found["regression"] = len(slots) * feature_regression(states[0], true[slots + 1]).double().cpu()
            sums = added(sums, found)
        return sums

    def _unrolled(
        self, tokens: Tensor, features: Tensor, slots: Tensor, steps: int, frozen: TargetHead
    ) -> list[Tensor]:
        """[S, H] for each step: what a slot makes of its own state of the step before, and of the text's next token."""
        cache, positions = Cache(), torch.arange(len(tokens) - 2, device=tokens.device)
        first = self._block(tokens[None, 1:-1], features[None, :-2], positions[None], None, cache, frozen)
        states, seen = [first[0, slots]], positions <= slots[:, None]
        own = torch.eye(len(slots), dtype=torch.bool, device=tokens.device)
        for step in range(1, steps):
            seen, place = torch.cat([seen, own], dim=1), slots + step
            read = tokens[(place + 1).clamp(max=len(tokens) - 1)]
            mask = level_mask(0, seen, features.dtype)
            states.append(self._block(read[None], states[-1][None], place[None], mask, cache, frozen)[0])
        return states

    # -- drafting -----------------------------------------------------------------------------------------------------

    def bind(self, frozen: TargetHead) -> Eagle1:
        """Lend the head what it needs to draft."""
        self.frozen = (frozen,)
        self.begin()
        return self.eval()

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence."""
        self.cache, self.noise = Cache(), noise

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
            return _law(frozen, hidden)

        tree = grow(news.root, _law(frozen, hidden)[0], level, budget, self.noise, committed + 1)
        self.cache.length = committed
        return tree


def _law(frozen: TargetHead, hidden: Tensor) -> Tensor:
    """Logits of states that may have another dtype than the target: a head in training has."""
    return frozen.logits(hidden.to(frozen.weight.dtype))


def _slots(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of texts that lie end to end: the places of all tokens but each text's last two, and their positions in it."""
    spans = [torch.arange(max(length - 2, 0)) for length in lengths]
    starts = accumulate(lengths, initial=0)
    return torch.cat([span + start for span, start in zip(spans, starts, strict=False)]), torch.cat(spans)
