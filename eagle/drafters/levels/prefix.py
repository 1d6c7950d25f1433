"""Heads whose levels begin from what blocks make of the target's states, each of which sees those before it."""

# B batch, T tokens, S supervised slots, L taps, H width

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.drafters.levels.level_heads import LevelHeads, grow_levels
from eagle.drafters.parts.decoder_block import Cache, Norm, NormedBlock, Rotary
from eagle.drafters.parts.text_blocks import Pair, position_tables, probe_read, read_context, read_rows, text_slots
from eagle.drafters.parts.text_state import TextState, text_bytes


class PrefixHeads(LevelHeads):
    """Levels that read a state which has passed so many Llama blocks over its text, and a norm; none where there are 0.

    Blocks read the target's states alone, no tokens; slot i stands at position i.
    """

    layers: Any

    def __init__(self, settings: Any, shape: Any, blocks: int) -> None:
        super().__init__(settings, shape)
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(blocks)])
        if blocks:
            self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
            self.rotary = Rotary(shape)

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    # -- training -----------------------------------------------------------------------------------------------------

    def start_states(self, batch: Batch, places: Tensor) -> Tensor:
        """[S, H], the states that the blocks make at these slots."""
        if not self.layers:
            return super().start_states(batch, places)
        known, positions, spans = text_slots(batch, places.device)
        states = batch.select_taps(self.taps)[:, 0].index_select(0, known).to(self.dtype)
        tables_at = position_tables(self.rotary, states, max(batch.lengths, default=0))
        context, inputs = read_context(self.layers, self.layers[0].inputs(states), tables_at(positions), batch)
        inputs = tuple(part.index_select(0, spans.rows) for part in inputs)
        tables = tables_at(positions[spans.rows])
        normed: Tensor = self.norm(read_rows(self.layers[-1], inputs, tables, context[-1], spans))
        return normed

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> Any:
        """The state for several texts drafted together."""
        return PrefixState(self) if self.layers else super().open()

    def fuse_taps(self, features: Tensor) -> Tensor:
        """[N, H], the single tap."""
        return features[..., 0, :]

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        frozen: TargetHead,
    ) -> Tensor:
        """[B, T, H], what the blocks make of states [B, T, H], each block with a cache of its own."""
        for block, cache in zip(self.layers, caches, strict=True):
            hidden = block(hidden, tables, mask, cache)
        normed: Tensor = self.norm(hidden)
        return normed

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Keys and values of every block, nothing without blocks."""
        return text_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """A level at so many nodes; the first one behind blocks that read so many tokens."""
        level = super().probe(context, rows, scored)
        if not self.layers or scored == rows:
            return level
        read = probe_read(self, context, rows)
        return lambda: (read(), level())


class PrefixState(TextState):
    """Texts whose committed states pass the blocks, and trees of levels that read no more of the text than that."""

    head: PrefixHeads

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the state that the blocks make behind the last committed token of each row."""
        rows, seeds, states = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_levels(self.head, seeds, states), strict=True))
