"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): levels that read the tokens drafted before them."""

# S supervised slots, N tokens of all sequences, H hidden, V vocabulary, B sequences, T tokens, L taps

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, HeadShape, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.drafters.levels.level_heads import LevelHeads, LevelSettings, grow_levels
from eagle.drafters.parts.decoder_block import Cache, Norm, NormedBlock, Rotary
from eagle.drafters.parts.objectives import (
    LanguageHead,
    Loss,
    OwnHead,
    align_steps,
    feature_regression,
)
from eagle.drafters.parts.text_blocks import (
    Pair,
    position_tables,
    probe_read,
    read_context,
    read_rows,
    text_slots,
)
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.drafters.parts.text_state import TextState, text_bytes


class HydraSettings(LevelSettings):
    """Settings of the heads in a recipe."""

    kind: Literal["hydra"] = "hydra"
    levels: int = Field(4, ge=1)  # levels that are drafted, one token each
    layers: int = Field(1, ge=1)  # blocks of each level; Hydra++ has four
    prefix: bool = False  # put a Llama block over the target's states first, as Hydra++ does
    loss: Loss = "cross_entropy"  # towards the target's probs, as Hydra++; "tokens" is Hydra's own
    dropout: float = Field(0.0, ge=0, lt=1)  # in training, before every block and LM head
    # weight of Smooth-L1 between LM head inputs and the target's states
    regression: float = Field(0.0, ge=0)


class Gated(nn.Linear):
    """x + silu(Wx + b), or Rx + r + silu(Wx + b) where x is wider than what comes out; W and b are zero at first."""

    def __init__(self, read: int, width: int) -> None:
        super().__init__(read, width)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.residual = nn.Identity() if read == width else nn.Linear(read, width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return self.residual(x) + F.silu(super().forward(x))


class Hydra(LevelHeads):
    """Level d reads a state of the target concatenated with the embeddings of the next d + 1 tokens.

    With a prefix that state has passed a Llama block over the sequence's states alone, and a norm. Slot i stands at
    position i.
    """

    Settings = HydraSettings
    settings: HydraSettings
    network_keys = ("levels", "layers", "prefix")
    blocks: Any
    heads: Any
    layers: Any  # of the prefix

    def __init__(self, settings: HydraSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(int(settings.prefix))])
        if settings.prefix:
            self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
            self.rotary = Rotary(shape)
        width = shape.hidden_size
        self.blocks = nn.ModuleList()
        for level in range(settings.levels):
            # level d reads the state and d + 1 embeddings
            further = [Gated(width, width) for _ in range(1, settings.layers)]
            self.blocks.append(nn.ModuleList([Gated((level + 2) * width, width), *further]))
        self.heads = nn.ModuleList(
            [nn.Linear(width, shape.vocab_size) for _ in range(settings.levels)]
        )

    @classmethod
    def context_taps(cls, settings: HydraSettings, target_config: Any) -> tuple[int, ...]:
        """Return the target's states if a block reads the sequence first."""
        return cls.taps if settings.prefix else ()

    def start(self, frozen: TargetHead | None) -> None:
        """Let the LM heads start as the target's."""
        for lm_head in self.heads:
            nn.init.zeros_(lm_head.bias)
            if frozen is not None:
                lm_head.weight.data.copy_(frozen.start_matrix())

    def read_token(self, level: int, state: Tensor, tokens: Tensor, frozen: TargetHead) -> Tensor:
        """Return [.., (level + 2) H], the state with one more embedding."""
        return torch.cat([state, frozen.embed(tokens).to(state.dtype)], dim=-1)

    def hidden(
        self,
        level: int,
        state: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda state: state,
    ) -> Tensor:
        """Return [.., H], the output of the level's blocks."""
        for block in self.blocks[level]:
            state = block(drop(state))
        return state

    def lm_heads(self, frozen: TargetHead) -> Sequence[LanguageHead]:
        """Return each level's own LM head."""
        return [OwnHead(lm_head.weight, lm_head.bias) for lm_head in self.heads]

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss of all levels, plus the regression loss if it has a weight."""
        settings = self.settings
        places, states = self.read_levels(batch, frozen)
        slot_counts = [int(mask.sum()) for mask in batch.masks]
        dropout = settings.dropout if self.training else 0.0
        drop = TextDropout(dropout, batch.seeds, slot_counts, places.device)
        hidden = [self.hidden(level, state, drop) for level, state in enumerate(states)]
        losses = self.distill(batch, frozen, places, [drop(state) for state in hidden])
        if settings.regression:
            # before dropout, as it is a state and not the LM head's input that shall be the target's
            target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, places + 1)
            regression = feature_regression(
                align_steps(hidden), target_hidden, self.slot_weights(batch, places)
            )
            losses["total"] = losses["total"] + settings.regression * regression
            losses["regression"] = regression.detach()
        return losses

    def start_states(self, batch: Batch, places: Tensor) -> Tensor:
        """Return [S, H], the states that the blocks make at these slots."""
        if not self.layers:
            return super().start_states(batch, places)
        slots, positions, spans = text_slots(batch, places.device)
        states = batch.select_taps(self.taps)[:, 0].index_select(0, slots).to(self.dtype)  # [N, H]
        tables_at = position_tables(self.rotary, states, max(batch.lengths, default=0))
        context, inputs = read_context(
            self.layers, self.layers[0].inputs(states), tables_at(positions), batch
        )
        # the last block's output at supervised slots alone
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        tables = tables_at(positions[spans.rows])
        normed: Tensor = self.norm(
            read_rows(self.layers[-1], inputs, tables, context[-1], spans=spans)
        )
        return normed

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> Any:
        """Return the state for several sequences drafted in a batch."""
        return PrefixState(self) if self.layers else super().open()

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return [N, H], the single tap."""
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
        """Return [B, T, H], what the blocks make of states [B, T, H], each block with its own cache."""
        # the tokens are read by the levels alone
        for block, cache in zip(self.layers, caches, strict=True):
            hidden = block(hidden, tables, mask, cache)
        normed: Tensor = self.norm(hidden)
        return normed

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of keys and values of every block, 0 without blocks."""
        return text_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """Return a function to time: a level at `rows` nodes, the first one after blocks that read `rows` tokens."""
        level = super().probe(context, rows, scored)
        if not self.layers or scored == rows:
            return level
        # the prefix is read once a draft, with the first level
        read = probe_read(self, context, rows)
        return lambda: (read(), level())


class PrefixState(TextState):
    """Sequences whose committed states pass the blocks, and trees of levels that read no more than that."""

    head: Hydra

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees grown from the state that the blocks make after the last committed token of each row."""
        rows, requests, states = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_levels(self.head, requests, states), strict=True))
