"""Falcon (Gao et al. 2024, arXiv 2412.12639): one forward over a block of k slots guesses the next k tokens."""

# A blocks of k slots, N slots of all texts, R rows, H width

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import Block, Rotary, head_shape
from eagle.drafters.parts.objectives import ROWS, distillation_loss, feature_regression
from eagle.drafters.parts.text_blocks import position_tables, text_slots
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.drafters.recurrent.block_head import BlockHead
from eagle.drafters.recurrent.feature_head import add_noise
from eagle.drafters.recurrent.slot_blocks import SlotBlocks
from eagle.recipe import Section


class FalconSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["falcon"] = "falcon"
    k: int = Field(2, ge=2)  # slots of a block, which one forward reads
    levels: int = Field(8, ge=1)  # levels that are drafted, one token each
    glance_from: float = Field(0.45, ge=0, lt=1)  # share of wrong slots that read the answer, at the start
    glance_to: float = Field(0.1, ge=0, lt=1)  # the same share at the end of training
    dropout: float = Field(0.1, ge=0, lt=1)  # between the gates
    noise: float = 0.1  # noise U(-noise, noise) * 512 / T on features in training, T at least 512
    regression: float = 1.0  # weight of Smooth-L1 between its features and the target's
    cross_entropy: float = 0.1  # weight of the cross-entropy with the target's probs


class Gate(nn.Linear):
    """An LSTM's cell from an empty state: sigmoid(output) * tanh(sigmoid(input) * tanh(cell)), each a linear map."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, 3 * width)
        for part in (self.weight, self.bias):
            nn.init.uniform_(part, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        enter, cell, leave = super().forward(x).chunk(3, dim=-1)
        return leave.sigmoid() * (enter.sigmoid() * cell.tanh()).tanh()


class Falcon(BlockHead):
    """Two gates over token and state, and EAGLE-1's block over them."""

    Settings = FalconSettings
    gates: Any

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        width = shape.hidden_size
        self.gates = nn.ModuleList([Gate(2 * width, width), Gate(width, width)])
        self.layers = nn.ModuleList([Block(shape)])
        self.rotary = Rotary(shape)

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Falcon:
        """A new head with the target's width."""
        return cls(settings, head_shape(target_config))

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and its number of slots a block."""
        return {"network": "falcon", "k": self.settings.k}

    def enter(self, embedded: Tensor, hidden: Tensor, drop: Callable[[Tensor], Tensor] = lambda state: state) -> Tensor:
        """[.., H], both gates, with dropout between them."""
        first, second = self.gates
        entered: Tensor = second(drop(first(torch.cat([embedded, hidden], dim=-1))))
        return entered

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Smooth-L1 of the states plus cross-entropy of the probs, with one phase of blocks for each text."""
        settings = self.settings
        states, true, weights = self.training_states(batch, frozen)
        regression = feature_regression(states[None], true, weights[None])
        entropy, _ = distillation_loss(states[None], true, weights[None], (frozen, frozen))
        return {
            "total": settings.regression * regression + settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "block_cross_entropy": entropy.detach(),
        }

    def training_states(self, batch: Batch, frozen: TargetHead) -> tuple[Tensor, Tensor, Tensor]:
        """States [R, H] of the slots of all blocks, the target's states [R, H] at their answers, and weights [R].

        In training some slots read their answer: the token and the state that they would guess.
        """
        settings, blocks = self.settings, SlotBlocks.side_by_side(batch, self.size)
        known, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
        tokens, hidden = batch.tokens.index_select(0, known + 1), features.index_select(0, known)
        slots, last = blocks.slots.flatten(), len(features) - 1
        answers = (known.index_select(0, slots) + self.size).clamp(max=last)  # beyond a text none counts
        true, counted = features.index_select(0, answers), blocks.reached
        tables = position_tables(self.rotary, features, max(batch.lengths, default=0))(positions)

        counts = [max(length - 2, 0) for length in batch.lengths]
        drop = TextDropout(settings.dropout if self.training else 0.0, batch.seeds, counts, features.device)

        def read(tokens: Tensor, hidden: Tensor) -> Tensor:
            entered = self.enter(frozen.embed(tokens).to(hidden.dtype), hidden, drop)
            return self.read_text(entered, tables, blocks)[0].flatten(0, 1)

        if self.training and settings.noise:
            hidden = add_noise(batch, hidden, settings.noise)
        if self.training and (settings.glance_from or settings.glance_to):
            with torch.no_grad():
                wrong = likeliest(read(tokens, hidden), frozen) != likeliest(true, frozen)
            glanced = blocks.glance(wrong.view_as(counted) & counted, self.glanced_share(batch.progress))
            named = batch.tokens.index_select(0, (answers + 1).clamp(max=last))
            tokens = replace_rows(tokens, slots, glanced, named)
            hidden = replace_rows(hidden, slots, glanced, true)
            counted = counted & ~glanced
        return read(tokens, hidden), true, blocks.weights(counted).flatten()

    def glanced_share(self, progress: float) -> float:
        """The share of wrong slots that read their answers, at this progress of training (0 to 1)."""
        first, last = self.settings.glance_from, self.settings.glance_to
        return float(first + (last - first) * progress)


def likeliest(states: Tensor, frozen: TargetHead) -> Tensor:
    """[R], the likeliest tokens for states [R, H]."""
    return torch.cat([frozen.logits(rows).argmax(-1) for rows in states.split(ROWS)])


def replace_rows(rows: Tensor, slots: Tensor, marked: Tensor, by: Tensor) -> Tensor:
    """[N, ..] with the rows at marked slots [R] replaced by those of `by` [R, ..]."""
    marked = marked.view(-1, *[1] * (rows.dim() - 1))
    return rows.index_copy(0, slots, torch.where(marked, by, rows.index_select(0, slots)))
