"""SPiRe (Neelam et al. 2025, arXiv 2504.06419): the target's last blocks, a window of its states, feedback memory."""

# S slots, K passes

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from eagle.core.drafter import Reads, TargetHead
from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.objectives import Objective, distillation_loss
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.target_blocks import Weights, copy_target_blocks
from eagle.drafters.parts.window import Window
from eagle.drafters.self_speculation.memory_head import MemoryHead
from eagle.recipe import Section


class SpireSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["spire"] = "spire"
    blocks: int = Field(2, ge=1)  # the target's last blocks, this many
    window: Window | None = Window(sinks=1, recent=64)  # attend to the first S and the latest R tokens
    steps: int = Field(4, ge=2)  # passes of training, each of which predicts the next token
    stride: int = Field(4, ge=1)  # train every so many-th supervised slot
    cross_entropy: float = Field(0.5, ge=0, le=1)  # its share of the loss; the rest is 1 - sum min(p, q)


class Spire(MemoryHead):
    """The target's last blocks, whose memories of a text are the target's inputs to these blocks."""

    reads = Reads(weights=True)
    teacher_taps = (-1,)
    Settings = SpireSettings

    def __init__(self, settings: SpireSettings, shape: Any) -> None:
        super().__init__(settings, shape)
        self.taps = tuple(range(shape.target_layers - settings.blocks, shape.target_layers))

    @classmethod
    def taps_for(cls, settings: SpireSettings, target_config: Any) -> tuple[int, ...]:
        """The target's inputs to its last blocks."""
        layers = target_config.num_hidden_layers
        if settings.blocks > layers:
            raise ValueError(f"drafter.blocks is {settings.blocks}, expected at most the target's {layers}: ask fewer")
        return tuple(range(layers - settings.blocks, layers))

    @classmethod
    def for_target(
        cls,
        settings: SpireSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
        weights: Weights | None = None,
    ) -> Spire:
        """A head with the target's last blocks and final norm; random weights of the same sizes without `weights`."""
        cls.taps_for(settings, target_config)
        layers = target_config.num_hidden_layers
        head = cls(settings, head_shape(target_config, num_hidden_layers=settings.blocks, target_layers=layers))
        if weights is not None:
            copy_target_blocks(head.layers, head.norm, weights, target_config)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network: the blocks it was copied from, and their window."""
        window = self.settings.window
        return {"network": "spire", "taps": self.taps, "window": window and (window.sinks, window.recent)}

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Sum over the passes of cross-entropy from the target's probs and 1 - overlap, weighted."""
        settings, device = self.settings, batch.tokens.device
        spans, weights = self.training_slots(batch, device)
        places, states = self.unroll(batch, frozen, spans, settings.steps)
        true, objective = batch.select_taps((-1,))[:, 0], Objective("hybrid", blend=settings.cross_entropy)
        losses = []
        for step, (state, weight) in enumerate(zip(states, weights, strict=True), start=1):
            teacher = true.index_select(0, (places + step).clamp(max=len(true) - 1))
            losses.append(distillation_loss(state[None], teacher, weight[None], (frozen, frozen), objective)[0])
        total = torch.stack(losses).sum()
        return {"total": total, **{f"laws/{step}": loss.detach() for step, loss in enumerate(losses)}}

    def training_slots(self, batch: Batch, device: torch.device) -> tuple[Spans, Tensor]:
        """Every `stride`-th slot, from one that a text's seed decides, and its weight in each pass [K, S].

        A pass counts if all tokens up to the one it predicts are supervised. Texts are weighted by supervised tokens.
        """
        settings, firsts, weights = self.settings, list[int](), list[Tensor]()
        masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
        supervised, passes = max(sum(int(mask.sum()) for mask in masks), 1), torch.arange(settings.steps)[:, None]
        for mask, seed in zip(masks, batch.seeds, strict=True):
            marked = mask.nonzero()[:, 0]
            drawn = torch.randint(max(len(marked), 1), (1,), generator=torch.Generator().manual_seed(seed))
            firsts.append(int(marked[drawn]) % settings.stride if len(marked) else 0)
            slots = marked[marked % settings.stride == firsts[-1]]
            reached = F.pad(mask, (0, settings.steps))[slots + passes].long().cumprod(0)
            weights.append(reached * (len(marked) / max(len(slots), 1) / supervised))
        return Spans.of(masks, device, settings.stride, firsts, settings.window), upload(
            torch.cat(weights, dim=1), device
        )
