"""Heads that read slots in blocks: one forward guesses one token for each slot of a block."""

# S supervised slots, A blocks of k slots, N slots of all texts, H width, V vocabulary

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.drafters.parts.decoder_block import Cache, Rotary, rotary_tables
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.spans import Own, attend
from eagle.drafters.parts.text_blocks import Pair, add_rows, key_value, position_tables, query_and_residual, text_slots
from eagle.drafters.parts.text_state import text_bytes
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.recurrent.block_state import BlockState
from eagle.drafters.recurrent.slot_blocks import SlotBlocks, drafted_mask
from eagle.target.cache import SlotCache


class BlockHead(TrainableDrafter):
    """Slot i reads state i of the target and token i + 1, and guesses state i + k, whose logits name token i + k + 1.

    The last k slots of a text are a block: they see one another and everything before, and together guess the k tokens
    after the root. The next block reads these tokens and states in place of the target's.
    """

    taps = (-1,)
    capture = drafts = None  # drafts are not captured; all tokens can be drafted
    layers: Any  # the one Llama block that slots go through
    rotary: Rotary

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[.., H], the Llama block's input from tokens and states."""

    @property
    def size(self) -> int:
        """The number of slots of a block."""
        return int(self.settings.k)

    @property
    def levels(self) -> int:
        """The largest number of tokens that it guesses."""
        return int(self.settings.levels)

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.parameters()).dtype

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """The target's logits of a state."""
        return frozen.logits(state)

    # -- blocks of texts ----------------------------------------------------------------------------------------------

    def read_text(self, entered: Tensor, tables: Pair, blocks: SlotBlocks) -> tuple[Tensor, Pair]:
        """The states [k, A, H] of all blocks, and keys and values of all slots, from their inputs [N, H]."""
        key, value = key_value(self.layers[0], (entered, entered), tables)
        slots, context = blocks.slots.flatten(), (key.contiguous(), value.contiguous())
        at_slots = tables[0].index_select(0, slots), tables[1].index_select(0, slots)
        return self.read_blocks(entered.index_select(0, slots), at_slots, context, blocks, ()), context

    def read_blocks(self, entered: Tensor, tables: Pair, context: Pair, blocks: SlotBlocks, own: Own) -> Tensor:
        """[k, A, H], the states of blocks [k * A, H], which see their texts and what was drafted since.

        The queries of a block see the same, as those of further heads would.
        """
        size = self.size
        query, residual = query_and_residual(self.layers[0], (entered, entered), tables)
        heads = query.unflatten(1, (size, -1)).flatten(0, 1)
        seen = attend(heads, *context, blocks.spans, own).unflatten(0, (-1, size)).flatten(1, 2)
        return add_rows(self.layers[0], seen, residual).unflatten(0, (size, -1))

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Sums of the loss terms and of what each tree would have kept; a text's first slots guess nothing."""
        drafted = replace(batch, loss_mask=drafted_mask(batch, self.size))
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
        """Each level's states [S, H], and the target's LM head."""
        size, levels, device = self.size, min(levels, self.levels), batch.tokens.device
        blocks = SlotBlocks.everywhere(batch, size)
        known, positions, _ = text_slots(batch, device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
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
        """The state for several texts drafted together."""
        return BlockState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each forward after the first: a block after each node of every k-th level."""
        size = self.size
        return tuple(size * rows for rows in level_rows(budget.within(self.levels))[size - 1 :: size])

    def unread(self, accepted: int, depth: int) -> int:
        """The accepted tokens, the root, and the last slots once more, as the block has k."""
        return accepted + self.size

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Keys and values, and what the block reads of the last slots."""
        weight = self.layers[0].mlp.up_proj.weight
        recent: int = (self.size - 1) * self.shape.hidden_size * weight.element_size()
        return text_bytes(self.layers, tokens) + recent

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """A forward of so many rows behind so much text, the last `scored` and at least a block made into logits."""
        (frozen,), owner, width = self.frozen, SlotCache(), self.shape.hidden_size
        cache, weight = Cache(owner, self.layers[0]), self.layers[0].mlp.up_proj.weight
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
            return self.logits(states[0, -max(scored, self.size) :], frozen)

        return run
