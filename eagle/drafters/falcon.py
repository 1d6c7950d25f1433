"""Falcon (Gao et al. 2024, arXiv 2412.12639): one forward over a block of k slots guesses the next k tokens."""

# S supervised slots, A blocks of k slots, N slots of all texts, H width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.tree import Paths
from eagle.data.examples import Batch
from eagle.drafters.parts.block_state import BlockState
from eagle.drafters.parts.blocks import Block, Cache, Rotary, head_shape, rotary_tables
from eagle.drafters.parts.feature_head import add_noise
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.objectives import distillation_loss, feature_regression
from eagle.drafters.parts.slot_blocks import SlotBlocks, drafted_mask
from eagle.drafters.parts.spans import Own, attend
from eagle.drafters.parts.text_blocks import Pair, add_rows, key_value, position_tables, query_and_residual, text_slots
from eagle.drafters.parts.validation import validate_batch
from eagle.recipe import Section
from eagle.target.cache import SlotCache

ROWS = 256  # whose likeliest tokens are looked for at a time


class FalconSettings(Section):
    """What a recipe may say about the head."""

    kind: Literal["falcon"] = "falcon"
    k: int = Field(2, ge=2)  # slots of a block, which one forward reads
    levels: int = Field(8, ge=1)
    glance_from: float = Field(0.45, ge=0, lt=1)  # how many of the slots that guess wrong read their answers instead,
    glance_to: float = Field(0.1, ge=0, lt=1)  # when training begins and when it ends
    dropout: float = Field(0.1, ge=0, lt=1)  # between the gates
    noise: float = 0.1  # features are trained with U(-noise, noise) * 512 / T, T held at 512 or more
    regression: float = 1.0
    cross_entropy: float = 0.1


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


class Falcon(TrainableDrafter):
    """Slot i reads state i of the target and token i + 1, and guesses state i + k, whose logits name token i + k + 1.

    The last k slots of a text are a block: they see one another and all before, so that together they guess the k
    tokens behind the root. The next block reads these tokens and states in place of the target's.
    """

    taps = (-1,)
    Settings = FalconSettings
    capture = drafts = None  # drafts are not captured; all tokens can be drafted
    gates: Any
    layers: Any

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
        """A new head of the target's width."""
        return cls(settings, head_shape(target_config))

    @property
    def network(self) -> dict[str, Any]:
        """Blocks of how many slots it reads."""
        return {"network": "falcon", "k": self.settings.k}

    @property
    def levels(self) -> int:
        """How many tokens it guesses at most."""
        return int(self.settings.levels)

    @property
    def query_groups(self) -> int:
        """How many queries share a key."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    def enter(self, embedded: Tensor, hidden: Tensor, dropout: float = 0.0) -> Tensor:
        """[.., H], what the block reads of tokens and states."""
        first, second = self.gates
        entered: Tensor = second(F.dropout(first(torch.cat([embedded, hidden], dim=-1)), dropout))
        return entered

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """The target's own logits of a state."""
        return frozen.logits(state)

    # -- blocks of texts ----------------------------------------------------------------------------------------------

    def read_text(self, entered: Tensor, tables: Pair, blocks: SlotBlocks) -> tuple[Tensor, Pair]:
        """[k, A, H], the states of all blocks, and keys and values of all slots, from what these read [N, H]."""
        key, value = key_value(self.layers[0], (entered, entered), tables)
        slots, context = blocks.slots.flatten(), (key.contiguous(), value.contiguous())
        at_slots = tables[0].index_select(0, slots), tables[1].index_select(0, slots)
        return self.read_blocks(entered.index_select(0, slots), at_slots, context, blocks, ()), context

    def read_blocks(self, entered: Tensor, tables: Pair, context: Pair, blocks: SlotBlocks, own: Own) -> Tensor:
        """[k, A, H], the states of blocks [k * A, H], which see their texts and what was drafted since.

        The queries of a block see the same, as those of further heads would.
        """
        size = self.settings.k
        query, residual = query_and_residual(self.layers[0], (entered, entered), tables)
        heads = query.unflatten(1, (size, -1)).flatten(0, 1)
        seen = attend(heads, *context, blocks.spans, own).unflatten(0, (-1, size)).flatten(1, 2)
        return add_rows(self.layers[0], seen, residual).unflatten(0, (size, -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Smooth-L1 of the states plus cross-entropy of the probs, at blocks of one phase for each text."""
        settings, size = self.settings, self.settings.k
        blocks = SlotBlocks.side_by_side(batch, size)
        known, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps)[:, 0].to(self.gates[0].weight.dtype)
        tables = position_tables(self.rotary, features, max(batch.lengths, default=0))(positions)
        last = len(features) - 1  # what lies beyond a text counts for nothing
        true = features.index_select(0, (known.index_select(0, blocks.slots.flatten()) + size).clamp(max=last))
        tokens, hidden = batch.tokens.index_select(0, known + 1), features.index_select(0, known)
        if self.training and settings.noise:
            hidden = add_noise(batch, hidden, settings.noise)
        dropout = settings.dropout if self.training else 0.0
        entered = self.enter(frozen.embed(tokens).to(hidden.dtype), hidden, dropout)
        states = self.read_text(entered, tables, blocks)[0].flatten(0, 1)
        weights = blocks.weights(blocks.reached).view(1, -1)
        regression = feature_regression(states[None], true, weights)
        entropy, _ = distillation_loss(states[None], true, weights, (frozen, frozen))
        return {
            "total": settings.regression * regression + settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "block_cross_entropy": entropy.detach(),
        }

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Sums of the loss terms and of what each tree would have kept; a text's first slots guess nothing."""
        drafted = replace(batch, loss_mask=drafted_mask(batch, self.settings.k))
        deepest = max(len(path) for paths in trees.values() for path in paths)
        states = [state for state, _ in self.draft_levels(drafted, frozen, deepest)]
        sums = validate_batch(drafted, states, ([frozen.logits] * len(states), frozen.logits), trees)
        if (missed := batch.slots - drafted.slots) and sums:
            sums["slots"] += missed
            sums["cross_entropy"] += missed * math.log(len(frozen.weight))
            for name in trees:
                sums[f"{name}/reached"][0] += missed
        return sums

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Each level's states [S, H], all of them read by the target's LM head."""
        size, levels, device = self.settings.k, min(levels, self.levels), batch.tokens.device
        blocks = SlotBlocks.everywhere(batch, size)
        known, positions, _ = text_slots(batch, device)
        features = batch.select_taps(self.taps)[:, 0].to(self.gates[0].weight.dtype)
        embedded = frozen.embed(batch.tokens).to(features.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + levels + size)
        entered = self.enter(embedded.index_select(0, known + 1), features.index_select(0, known))
        states, context = self.read_text(entered, tables_at(positions), blocks)
        found, own = list(states), list[Pair]()
        slots = blocks.spans.rows
        while len(found) < levels:
            # what lies beyond a text counts for nothing
            ahead = torch.arange(1 + len(found) - size, 1 + len(found), device=device)[:, None]
            following = (known.index_select(0, slots) + 1 + ahead).clamp(max=len(embedded) - 1).flatten()
            entered = self.enter(embedded.index_select(0, following), states.flatten(0, 1))
            tables = tables_at((positions.index_select(0, slots) + ahead).flatten())
            parts = (part.unflatten(1, (size, -1)).unbind(1) for part in key_value(self.layers[0], (entered,), tables))
            own += zip(*parts, strict=True)
            states = self.read_blocks(entered, tables, context, blocks, own)
            found += states
        return [(state, frozen.logits) for state in found[:levels]]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> BlockState:
        """Texts that are drafted for together."""
        return BlockState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each forward after the first: a block behind each node of every k-th level."""
        size = self.settings.k
        return tuple(size * rows for rows in level_rows(budget.within(self.levels))[size - 1 :: size])

    def unread(self, accepted: int, depth: int) -> int:
        """The accepted tokens, the root, and the last slots once more, as the block has k."""
        return accepted + self.settings.k

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """A forward of so many rows behind so much text, the last `scored` and at least a block made into logits."""
        (frozen,), owner, width = self.frozen, SlotCache(), self.shape.hidden_size
        cache, weight = Cache(owner, self.layers[0]), self.gates[0].weight
        positions = torch.arange(context + rows, device=weight.device)[None]
        hidden = torch.zeros(1, context + rows, width, device=weight.device, dtype=weight.dtype)
        embedded, (cosine, sine) = hidden[:, context:], rotary_tables(self.rotary, hidden, positions)
        mask = hidden.new_zeros(1, 1, self.query_groups * rows, context + rows)
        before, behind = slice(0, context), slice(context, context + rows)
        with torch.inference_mode():
            self.layers[0](hidden[:, before], (cosine[:, before], sine[:, before]), None, cache)

        @torch.inference_mode()
        def run() -> Tensor:
            owner.length = context
            entered = self.enter(embedded, hidden[:, behind])
            states = self.layers[0](entered, (cosine[:, behind], sine[:, behind]), mask, cache)
            return self.logits(states[0, -max(scored, self.settings.k) :], frozen)

        return run
