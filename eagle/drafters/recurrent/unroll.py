"""Heads that read their own states: one unroll for training and validation, with the same steps as drafting."""

# B batch, T tokens of a text, N of all texts, S supervised slots, L taps, H width, K rows of one level, V vocabulary

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
from eagle.drafters.parts.decoder_block import Cache, Rotary, rotary_tables
from eagle.drafters.parts.growth import level_rows
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
from eagle.drafters.parts.text_state import PART, causal_mask, text_bytes
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.head_state import HeadState
from eagle.drafters.recurrent.static_loop import Capture, text_room


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A head's states on a batch: slot i reads state i and token i + 1, and predicts token i + 2."""

    states: list[Tensor]  # per step [S, H]: in step s a slot predicts the token s places further
    places: Tensor  # [S], of the slots that are supervised, among all tokens


class UnrolledDrafter(CompiledParts, TrainableDrafter):
    """A head whose level reads a token and the state of the level before, the first level a state of the target.

    A level is a stack of blocks. The first reads token and state, which subclasses fuse in two ways: in drafting by
    `first_block`, as the head is published; in training by `project_tokens` and `block_inputs`, whose products with
    tokens serve all steps. They are equal up to rounding, which tests/drafters/recurrent/test_unroll_steps.py holds.
    """

    rotary: Rotary
    layers: Any  # the blocks of a level
    capture: Capture | None = None  # how draft loops of static shapes are captured, as `capture_cuda`; None: not at all

    @property
    def further_blocks(self) -> dict[str, Any]:
        """The number of blocks if it is more than one, which makes another network; else nothing."""
        return {"blocks": len(self.layers)} if len(self.layers) > 1 else {}

    @property
    def further_masks(self) -> dict[str, Any]:
        """The window as plain values; nothing for a head that sees its whole text."""
        return {"window": asdict(self.window)} if self.window is not None else {}

    @property
    def window(self) -> Window | None:
        """The window of every block; None if rows see their whole text."""
        window: Window | None = getattr(self.settings, "window", None)
        return window

    @abstractmethod
    def fuse_taps(self, features: Tensor) -> Tensor:
        """[.., H], the state that the target's features [.., L, H] stand for."""

    @abstractmethod
    def first_block(
        self, embedded: Tensor, hidden: Tensor, rotary: Pair, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """[B, T, H], the first block's output at tokens and states [B, T, H]."""

    @abstractmethod
    def project_tokens(self, embedded: Tensor) -> Tensor:
        """[N, P], the part of a level's computation that depends only on the token."""

    @abstractmethod
    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """The inputs of the first block's `key_value` and `query_and_residual`, from projected tokens and states."""

    @abstractmethod
    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """[.., V or D], the logits of states."""

    def next_input(self, state: Tensor) -> Tensor:
        """The next level's input, from a state."""
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
        """States of all supervised slots, by the target's features of every slot that has a future.

        Step 0 sees the text so far. Step s reads the state of step s - 1 and the text's next token, stands one place
        further, and sees what step 0 saw and its own earlier steps.
        """
        slots, positions, spans = text_slots(batch, batch.tokens.device, self.window)
        features = add_noise(batch.select_taps(self.taps)[slots].to(self.layers[0].mlp.up_proj.weight.dtype))
        tokens = self.project_tokens(frozen.embed(batch.tokens).to(features.dtype))
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        inputs = self.block_inputs(tokens.index_select(0, slots + 1), self.fuse_taps(features))
        context, inputs = read_context(self.layers, inputs, tables_at(positions), batch, self._run, self.window)
        places, positions = slots[spans.rows], positions[spans.rows]
        inputs = tuple(part.index_select(0, spans.rows) for part in inputs)
        states: list[Tensor] = []
        step_pairs: list[list[Pair]] = [[] for _ in self.layers]
        for step in range(steps):
            tables = tables_at(positions + step)
            if step:
                last = states[-1].detach() if detach else states[-1]
                following = batch.places_behind(places, 1 + step)
                inputs = self.block_inputs(tokens.index_select(0, following), self.next_input(last))
            state = inputs[0]
            for number, block in enumerate(self.layers):
                if step:
                    inputs = block.inputs(state) if number else inputs
                    step_pairs[number].append(self._run(key_value, block, inputs, tables))
                elif number + 1 < len(self.layers):
                    continue  # the context holds what step 0 sees of the blocks below the last
                state = read_rows(block, inputs, tables, context[number], spans, step_pairs[number], self._run)
            states.append(state)
        return Unrolled(states, places)

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Validation sums over the trained slots: loss terms, and tokens that each tree would have kept."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        states = self.level_states(batch, frozen, steps)
        student = [lambda state: self._on_all_tokens(self.logits(state, frozen))] * len(states)
        return validate_batch(batch, states, (student, frozen.logits), trees)

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Each level's states [S, H], and their common LM head."""
        return [(state, lambda state: self.logits(state, frozen)) for state in self.level_states(batch, frozen, levels)]

    def level_states(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Tensor]:
        """Each level's states [S, H] at all supervised slots."""
        return self.unroll(batch, frozen, levels).states

    def _on_all_tokens(self, logits: Tensor) -> Tensor:
        """[.., V], impossible outside the draft vocabulary."""
        if self.drafts is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        whole[..., self.drafts] = logits
        return whole

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        """The state for several texts drafted together."""
        return HeadState(self, self.window)

    def states(self, tokens: Tensor, hidden: Tensor, start: int, frozen: TargetHead) -> Tensor:
        """[B, T, H], the states of a causal pass over slots that begin at position `start`."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        tables = rotary_tables(self.rotary, hidden, positions)
        places = positions - start
        mask = None if self.window is None else causal_mask(places, len(places[0]), hidden.dtype, self.window)
        return self.read(tokens, hidden, tables, mask, [None] * len(self.layers), frozen)

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        frozen: TargetHead,
    ) -> Tensor:
        """[B, T, H], the states behind tokens [B, T] and states [B, T, H], each block with a cache of its own."""
        state = self.first_block(frozen.embed(tokens).to(hidden.dtype), hidden, tables, mask, caches[0])
        for number in range(1, len(self.layers)):
            state = self.layers[number](state, tables, mask, caches[number])
        return state

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Keys and values of every block, with a window of the columns before it drops any."""
        if self.window is not None:
            tokens = min(tokens, self.window.most + PART)
        if self.capture is not None:  # drafts lie behind the room that texts are given
            tokens = text_room(tokens) + sum(self.forwards(self.budget or Budget()))
        return text_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """The head's own forward of so many rows behind so much text, the last `scored` of them made into logits."""
        (frozen,), read = self.frozen, probe_read(self, context, rows, self.window)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.logits(read()[0, -scored:], frozen)

        return run
