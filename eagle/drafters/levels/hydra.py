"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): levels that also read the tokens drafted before."""

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
from eagle.drafters.parts.sequence_blocks import (
    Pair,
    position_tables,
    probe_read,
    read_context,
    read_rows,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import SequenceState, sequence_bytes
from eagle.drafters.parts.text_dropout import TextDropout


class HydraSettings(LevelSettings):
    """Settings of the heads in a recipe."""

    kind: Literal["hydra"] = "hydra"
    levels: int = Field(4, ge=1)  # number of drafted levels
    layers: int = Field(1, ge=1)  # number of blocks per level; Hydra++ has four
    prefix: bool = False  # put a decoder block in front of the levels, as in Hydra++
    # `tokens`: cross-entropy with the tokens of the data; otherwise a divergence from the target's probabilities
    # (Hydra's own loss is `tokens`)
    loss: Loss = "cross_entropy"
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout before every block and LM head
    # weight of the Smooth-L1 loss between the inputs of the LM heads and the target's states
    regression: float = Field(0.0, ge=0)


class Gated(nn.Linear):
    """A residual block x + silu(Wx + b), or Rx + r + silu(Wx + b) if input and output width differ.

    W and b start at zero.

    Args:
        input_width: Of x.
        width: Of the output.
    """

    def __init__(self, input_width: int, width: int) -> None:
        """Make W and b, both zero, and where the widths differ R and r."""
        super().__init__(input_width, width)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.residual = nn.Identity() if input_width == width else nn.Linear(input_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + silu(Wx + b), or Rx + r + silu(Wx + b), [.., width], from x [.., input width]."""
        return self.residual(x) + F.silu(super().forward(x))


class Hydra(LevelHeads):
    """Level d reads a state of the target concatenated with the embeddings of the next d + 1 tokens.

    With `prefix` (Hydra++) that state first passes a Llama block, which reads the target's states of the sequence, and
    a norm. In this block slot i has the position i.
    """

    Settings = HydraSettings
    settings: HydraSettings
    network_keys = ("levels", "layers", "prefix")
    blocks: Any
    heads: Any
    layers: Any  # of the prefix

    def __init__(self, settings: HydraSettings, shape: HeadShape) -> None:
        """Make blocks and an LM head for each level, and with `prefix` a Llama block, its norm and rotary tables."""
        super().__init__(settings, shape)
        # a list of one or no block
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(int(settings.prefix))])
        if settings.prefix:
            self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
            self.rotary = Rotary(shape)
        width = shape.hidden_size
        self.blocks = nn.ModuleList()
        for level in range(settings.levels):
            # made before the first block, as the first random weights follow from the order
            more_blocks = [Gated(width, width) for _ in range(1, settings.layers)]
            # the first block of level d reads the state and d + 1 embeddings
            first_block = Gated((level + 2) * width, width)
            self.blocks.append(nn.ModuleList([first_block, *more_blocks]))
        self.heads = nn.ModuleList(
            [nn.Linear(width, shape.vocab_size) for _ in range(settings.levels)]
        )

    @classmethod
    def context_taps(cls, settings: HydraSettings, target_config: Any) -> tuple[int, ...]:
        """Return the taps (the target's layers) whose states training reads at every position.

        They are the head's with a prefix block, which attends to the whole sequence. Without one there are none: levels
        read a state only where a supervised token is predicted.
        """
        return cls.taps if settings.prefix else ()

    def start(self, target_head: TargetHead | None) -> None:
        """Let the LM heads start as the target's; without `target_head` only their biases are set, to zero."""
        for lm_head in self.heads:
            nn.init.zeros_(lm_head.bias)
            if target_head is not None:
                lm_head.weight.data.copy_(target_head.start_matrix())

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, target_head: TargetHead
    ) -> Tensor:
        """Return a level's state [.., (level + 2) * H]: that of the level before and one more token's embedding.

        Args:
            level: The level, counted from 0.
            state: The state of the level before [.., (level + 1) * H], for level 0 the start state [.., H]; H is the
                hidden size.
            tokens: [..], the token after each of these.
            target_head: The target's embedding.
        """
        return torch.cat([state, target_head.embed(tokens).to(state.dtype)], dim=-1)

    def hidden(
        self,
        level: int,
        state: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda state: state,
    ) -> Tensor:
        """Return the output [.., H] of a level's blocks, which its LM head reads (H: the hidden size).

        Args:
            level: The level, counted from 0.
            state: The level's state [.., (level + 2) * H].
            drop: The dropout before each block; by default none.
        """
        for block in self.blocks[level]:
            state = block(drop(state))
        return state

    def lm_heads(self, target_head: TargetHead) -> Sequence[LanguageHead]:
        """Return each level's own LM head."""
        return [OwnHead(lm_head.weight, lm_head.bias) for lm_head in self.heads]

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss of all levels, plus the regression loss if it has a weight.

        "total" is minimised; the distillation loss of each level and the regression are logged.
        """
        settings = self.settings
        # the index of each of S supervised slots among all tokens, and each level's states there: those of the target
        # and the embeddings of level + 1 tokens, concatenated
        slot_indices, states = self.read_levels(batch, target_head)
        slot_counts = [int(mask.sum()) for mask in batch.masks]  # supervised slots of each sequence
        dropout = settings.dropout if self.training else 0.0
        drop = TextDropout(dropout, batch.seeds, slot_counts, slot_indices.device)
        hidden = [self.hidden(level, state, drop) for level, state in enumerate(states)]
        losses = self.distill(batch, target_head, slot_indices, [drop(state) for state in hidden])
        if settings.regression:
            # The regression takes the states before dropout. Level 0 at slot i should equal the target's state i + 1,
            # which predicts the same token; `align_steps` puts all levels that predict it in the same row.
            target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, slot_indices + 1)
            regression = feature_regression(
                align_steps(hidden), target_hidden, self.slot_weights(batch, slot_indices)
            )
            losses["total"] = losses["total"] + settings.regression * regression
            losses["regression"] = regression.detach()
        return losses

    def start_states(self, batch: Batch, slot_indices: Tensor) -> Tensor:
        """Return the states [S, H] from which level 0 begins, at all S supervised slots (H: the hidden size).

        They are the target's, or with a prefix the prefix block's normed output. `slot_indices` [S] are the slots'
        indices among all tokens.
        """
        if not self.layers:
            return super().start_states(batch, slot_indices)
        # indices among tokens and positions of all N slots [N], and which of them are supervised
        slots, positions, spans = sequence_positions(batch, slot_indices.device)
        states = batch.select_taps(self.taps)[:, 0].index_select(0, slots).to(self.dtype)  # [N, H]
        tables_at = position_tables(self.rotary, states, max(batch.lengths, default=0))
        context, inputs = read_context(
            self.layers, self.layers[0].inputs(states), tables_at(positions), batch
        )
        # the block's output is needed only at supervised slots
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        tables = tables_at(positions[spans.rows])
        normed: Tensor = self.norm(
            read_rows(self.layers[-1], inputs, tables, context[-1], spans=spans)
        )
        return normed

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> Any:
        """Return the state for several sequences drafted in a batch; only the prefix block has a KV cache."""
        return PrefixState(self) if self.layers else super().open()

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the state [.., width] that the head reads from the target's features [.., 1, width], of one tap."""
        return features[..., 0, :]

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        target_head: TargetHead,
    ) -> Tensor:
        """Return the prefix block's normed output [B, T, H] at T new tokens of each of B sequences.

        It reads the target's states `hidden` [B, T, H], H the hidden size, and no tokens. The arguments are those of
        `eagle.drafters.parts.sequence_state.SequenceHead.read`.
        """
        # only the levels read tokens
        for block, cache in zip(self.layers, caches, strict=True):
            hidden = block(hidden, tables, mask, cache)
        normed: Tensor = self.norm(hidden)
        return normed

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of the prefix block's keys and values for a sequence of `tokens` tokens, 0 without it.

        `column` is not used: the bytes that a token takes in the target.
        """
        return sequence_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """Return a function whose seconds are measured: one level, the first one with the prefix block's forward.

        The prefix block reads `rows` tokens after `context` cached tokens. `scored` is the number of the level's nodes.
        Decoding forecasts the cost of drafts from such seconds.
        """
        level = super().probe(context, rows, scored)
        # if all rows are scored it is a later level, and the prefix runs once a draft, before the first level
        if not self.layers or scored == rows:
            return level
        read = probe_read(self, context, rows)
        return lambda: (read(), level())


class PrefixState(SequenceState):
    """The drafting state of Hydra++: the prefix block's KV cache. The levels have no cache."""

    head: Hydra

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row (sequence), from the prefix block's state at its last committed token.

        Args:
            updates: By row the tokens that were committed since its last draft, which the prefix block reads first.
            budgets: By row the size of its tree.
        """
        rows, requests, states = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_levels(self.head, requests, states), strict=True))
