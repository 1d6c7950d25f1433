"""Heads that read their own states: one unroll for training and validation, with the same steps as drafting."""

# B sequences, T tokens of one, N of all sequences, S supervised slots, L taps, H hidden, K rows of one level
# P what a token is projected to, V vocabulary

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, DraftState, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.drafters.parts.decoder_block import Cache, Rotary
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.text_blocks import (
    CompiledParts,
    Pair,
    key_value,
    position_tables,
    probe_read,
    read_context,
    read_rows,
    text_slots,
)
from eagle.drafters.parts.text_state import WINDOW_CHUNK_TOKENS, text_bytes
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.head_state import HeadState
from eagle.drafters.recurrent.static_loop import Capture, text_capacity


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A head's states on a batch: slot i reads state i and token i + 1, and predicts token i + 2."""

    states: list[Tensor]  # per step [S, H]: in step s a slot predicts the token s positions later
    places: Tensor  # [S], the index of each supervised slot among all tokens


class UnrolledDrafter(CompiledParts, TrainableDrafter):
    """A head whose level reads a token and the state of the level before, the first level a state of the target.

    A level is a stack of blocks. The first reads token and state, which subclasses fuse in two ways:
    `first_block` drafts, as the head is published; `project_tokens` and `block_inputs` train, because the products
    with tokens then serve all steps. They are equal up to rounding (tests/drafters/recurrent/test_unroll_steps.py).
    """

    rotary: Rotary
    layers: Any  # the blocks of a level
    # how draft loops of static shapes are captured, as `capture_cuda`; None: not at all
    capture: Capture | None = None

    @property
    def stack(self) -> dict[str, Any]:
        """What makes another network of the same blocks: their number and their window, where a head has these."""
        stack: dict[str, Any] = {}
        if len(self.layers) > 1:
            stack["blocks"] = len(self.layers)
        if self.window is not None:
            stack["window"] = asdict(self.window)
        return stack

    @property
    def window(self) -> Window | None:
        """The window of every block; None if rows see their whole sequence."""
        window: Window | None = getattr(self.settings, "window", None)
        return window

    @abstractmethod
    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return [.., H], the state that the target's features [.., L, H] stand for."""

    @abstractmethod
    def first_block(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: Pair,
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Return [B, T, H], the first block's output at tokens and states [B, T, H]."""

    @abstractmethod
    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return [N, P], the part of a level's computation that depends only on the token."""

    @abstractmethod
    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the first block's `key_value` and `query_and_residual`.

        Args:
            tokens: projected tokens [N, P].
            hidden: states [N, H].
        """

    @abstractmethod
    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """Return [.., V or D], the logits of states."""

    def next_input(self, state: Tensor) -> Tensor:
        """Return the next level's input, from a state."""
        return state

    # -- training -----------------------------------------------------------------------------------------------------

    def unroll(
        self,
        batch: Batch,
        frozen: TargetHead,
        steps: int,
        *,
        detach: bool = False,
        add_noise: Callable[[Tensor], Tensor] = lambda features: features,
    ) -> Unrolled:
        """Return the states of all supervised slots in each step, from the target's features.

        Step 0 sees the sequence so far. Step s reads the state of step s - 1 and the sequence's next token, stands one
        position later, and sees what step 0 saw and its own earlier steps.

        Args:
            steps: the number of levels that a draft would have.
            detach: whether no gradient flows from a step to the one before.
            add_noise: applied to the target's features.
        """
        slots, positions, spans = text_slots(batch, batch.tokens.device, self.window)
        dtype = self.layers[0].mlp.up_proj.weight.dtype
        features = add_noise(batch.select_taps(self.taps)[slots].to(dtype))
        tokens = self.project_tokens(frozen.embed(batch.tokens).to(dtype))  # [N, P], for all steps
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        inputs = self.block_inputs(tokens.index_select(0, slots + 1), self.fuse_taps(features))
        context, inputs = read_context(
            self.layers,
            inputs,
            tables_at(positions),
            batch,
            run=self._run,
            window=self.window,
        )

        # from here on supervised slots alone; the context holds what they see of the blocks below the last
        places = slots[spans.rows]
        positions = positions[spans.rows]
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        state = read_rows(
            self.layers[-1], inputs, tables_at(positions), context[-1], spans=spans, run=self._run
        )
        states = [state]
        # keys and values of the steps so far, by block
        step_pairs: list[list[Pair]] = [[] for _ in self.layers]
        for step in range(1, steps):
            following = batch.places_behind(places, 1 + step)
            above = state.detach() if detach else state
            inputs = self.block_inputs(tokens.index_select(0, following), self.next_input(above))
            state = self._read_step(
                inputs, tables_at(positions + step), context, spans, step_pairs=step_pairs
            )
            states.append(state)
        return Unrolled(states, places)

    def _read_step(
        self,
        inputs: tuple[Tensor, ...],
        tables: Pair,
        context: list[Pair],
        spans: Spans,
        step_pairs: list[list[Pair]],
    ) -> Tensor:
        """Return [S, H], the states of one step; add its keys and values to those of the steps before."""
        state = inputs[0]
        for layer_index, block in enumerate(self.layers):
            if layer_index:
                inputs = block.inputs(state)
            # a step sees itself too, so its own pair comes first
            pairs = step_pairs[layer_index]
            pairs.append(self._run(key_value, block, inputs, tables))
            state = read_rows(
                block,
                inputs,
                tables,
                context[layer_index],
                spans=spans,
                step_pairs=pairs,
                run=self._run,
            )
        return state

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(
        self,
        batch: Batch,
        frozen: TargetHead,
        trees: dict[str, Paths],
    ) -> dict[str, Tensor]:
        """Return validation sums over the trained slots: loss terms, and tokens that each tree would have kept."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        states = self.level_states(batch, frozen, steps)

        def logits(state: Tensor) -> Tensor:
            return self._on_all_tokens(self.logits(state, frozen))

        return validate_batch(batch, states, ([logits] * len(states), frozen.logits), trees)

    def draft_levels(
        self,
        batch: Batch,
        frozen: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's states [S, H], and their common LM head."""
        return [
            (state, lambda state: self.logits(state, frozen))
            for state in self.level_states(batch, frozen, levels)
        ]

    def level_states(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Tensor]:
        """Return each level's states [S, H] at all supervised slots."""
        return self.unroll(batch, frozen, levels).states

    def _on_all_tokens(self, logits: Tensor) -> Tensor:
        """Return [.., V], minus infinity outside the draft vocabulary."""
        if self.drafts is None:
            return logits
        all_logits = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        all_logits[..., self.drafts] = logits
        return all_logits

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        """Return the state for several sequences drafted in a batch."""
        return HeadState(self, self.window)

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        frozen: TargetHead,
    ) -> Tensor:
        """Return [B, T, H], the states after tokens [B, T] and states [B, T, H], each block with its own cache."""
        # blocks after the first read states alone
        embedded = frozen.embed(tokens).to(hidden.dtype)
        state = self.first_block(embedded, hidden, tables, mask, caches[0])
        for block, cache in zip(self.layers[1:], caches[1:], strict=True):
            state = block(state, tables, mask, cache)
        return state

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return the rows of each level of the tree after the first."""
        return level_rows(budget)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of keys and values of every block, with a window those before it drops any."""
        if self.window is not None:
            tokens = min(tokens, self.window.most + WINDOW_CHUNK_TOKENS)
        if self.capture is not None:
            # drafts lie after the columns that sequences are given
            tokens = text_capacity(tokens) + sum(self.forwards(self.budget or Budget()))
        return text_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: a forward of `rows` rows after `context` tokens, the last `scored` with logits."""
        (frozen,) = self.frozen
        read = probe_read(self, context, rows, self.window)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.logits(read()[0, -scored:], frozen)

        return run
