"""Heads that read their own states: one unroll for training and validation, with the same steps as drafting."""

# B sequences, T tokens of one, N slots of all sequences, S supervised slots, L taps, H hidden
# P width of a token's projection, V vocabulary, D draft vocabulary

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, DraftState, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import Cache, Rotary
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.reduced_vocab import ReducedVocab
from eagle.drafters.parts.sequence_blocks import (
    CompiledParts,
    Pair,
    key_value,
    position_tables,
    probe_read,
    read_context,
    read_rows,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import WINDOW_CHUNK_TOKENS, sequence_bytes
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.validation import ValidatedHead
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.head_state import HeadState
from eagle.drafters.recurrent.static_loop import Capture, sequence_capacity


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A head's states on a batch: slot i reads state i and token i + 1, and predicts token i + 2."""

    states: list[Tensor]  # of each step [S, H]: in step s slot i predicts token i + 2 + s
    places: Tensor  # [S], the index of each supervised slot among all tokens


class UnrolledDrafter(CompiledParts, ReducedVocab, ValidatedHead):
    """A head whose level reads a token and the state of the level before, the first level a state of the target.

    A level is a stack of blocks. The first reads token and state, which subclasses fuse in two ways:
    `first_block` drafts, as the head is published; `project_tokens` and `block_inputs` train, because the products
    with tokens then serve all steps. They are equal up to rounding (tests/drafters/recurrent/test_unroll_steps.py).
    """

    rotary: Rotary
    layers: Any  # the blocks of a level
    # captures draft loops of fixed shapes, such as `capture_cuda`; None to run them uncaptured
    capture: Capture | None = None

    @property
    def stack(self) -> dict[str, Any]:
        """What `network` says about the stack of blocks: their number if several, and their attention window if any.

        The same weights with other values are another network.
        """
        stack: dict[str, Any] = {}
        if len(self.layers) > 1:
            stack["blocks"] = len(self.layers)
        if self.window is not None:
            stack["window"] = asdict(self.window)
        return stack

    @property
    def window(self) -> Window | None:
        """The sliding window of attention of every block; None if tokens see their whole sequence."""
        window: Window | None = getattr(self.settings, "window", None)
        return window

    @abstractmethod
    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the state [.., H] that the first level reads (H: the hidden size), in place of the head's own.

        `features` [.., L, H] are the target's hidden states at the head's L taps, the layers that it reads.
        """

    @abstractmethod
    def first_block(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: Pair,
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Return the first block's output [B, T, H] at T tokens of B sequences (H: the hidden size); drafting calls it.

        `rotary` are cosines and sines at the tokens' positions, `mask` is the additive attention mask (None: causal),
        and `cache` the block's KV cache.

        Args:
            embedded: The tokens' embeddings [B, T, H].
            hidden: The states that the tokens are read with [B, T, H].
        """

    @abstractmethod
    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the part of a level's computation that depends only on the embedded tokens [N, hidden size].

        Training computes it once for all draft steps and passes it to `block_inputs`. It is [N, P] for N tokens, with a
        width P of the subclass's choice.
        """

    @abstractmethod
    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the first block's `key_value` and `query_and_residual`; training calls it.

        Args:
            tokens: What `project_tokens` returned for N tokens [N, ..].
            hidden: The states that the tokens are read with [N, H], H the hidden size.
        """

    @abstractmethod
    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits of states [.., width]: [.., V] over the target's tokens, or over a draft vocabulary."""

    def next_input(self, state: Tensor) -> Tensor:
        """Return the state [.., width] that the next level reads, from one that the head made: by default the same."""
        return state

    # -- training -----------------------------------------------------------------------------------------------------

    def unroll(
        self,
        batch: Batch,
        target_head: TargetHead,
        steps: int,
        *,
        detach: bool = False,
        add_noise: Callable[[Tensor], Tensor] = lambda features: features,
    ) -> Unrolled:
        """Run the head for several draft steps from every supervised slot, with the sequence's tokens as drafts.

        Step 0 reads the target's features and attends to the sequence up to the slot. Step s reads the state of step s
        - 1 and the sequence's next token at the next position. It attends to what step 0 attends to, and to the earlier
        steps of the same slot. That is what happens in a draft. A slot is a token of a sequence; it is supervised if
        the token that it predicts is.

        Args:
            batch: The sequences, with the target's features.
            target_head: The target's embedding.
            steps: The number of steps, the levels of the draft.
            detach: Whether to stop the gradient from a step to the step before.
            add_noise: Applied to the target's features.

        Returns:
            The states of each step at the supervised slots, and the slots' token indices.
        """
        # indices among tokens and positions of all N slots [N], and which of them are supervised
        slots, positions, spans = sequence_positions(batch, batch.tokens.device, self.window)
        dtype = self.layers[0].mlp.up_proj.weight.dtype
        features = add_noise(batch.select_taps(self.taps)[slots].to(dtype))
        tokens = self.project_tokens(
            target_head.embed(batch.tokens).to(dtype)
        )  # of all tokens of the batch, for all steps
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        # slot i reads token i + 1 with the target's states of token i
        inputs = self.block_inputs(tokens.index_select(0, slots + 1), self.fuse_taps(features))
        context, inputs = read_context(
            self.layers,
            inputs,
            tables_at(positions),
            batch,
            run=self._run,
            window=self.window,
        )

        # from here on only supervised slots are computed, as `context` has the keys and values of all slots that they
        # attend to; of step 0 only the last block's output is missing
        places = slots[spans.rows]
        positions = positions[spans.rows]
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        state = read_rows(
            self.layers[-1], inputs, tables_at(positions), context[-1], spans=spans, run=self._run
        )
        states = [state]
        # for each block the keys and values of the steps after step 0, to which `_read_step` adds
        step_pairs: list[list[Pair]] = [[] for _ in self.layers]
        for step in range(1, steps):
            # the indices of the tokens that this step reads; `places_behind` counts steps from 1
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
        """Return the states [S, H] of one draft step after step 0, and append its keys and values to `step_pairs`.

        S are the supervised slots (tokens), at each of which a draft begins; H is the hidden size.

        Args:
            inputs: Those of the first block at the supervised slots.
            tables: Rotary tables at the positions of this step.
            context: Keys and values of each block at all slots.
            spans: The supervised slots.
            step_pairs: For each block, the keys and values of the steps before.
        """
        state = inputs[0]
        for layer_index, block in enumerate(self.layers):
            if layer_index:
                inputs = block.inputs(state)
            # a step attends to itself too, so its keys and values are added before it is read
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

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's states [S, H] at the S supervised slots, and the function that makes logits of them.

        A draft begins at every supervised slot, with the sequence's tokens as draft tokens. H is the hidden size. A
        slot is a token of a sequence.
        """
        return [
            (state, lambda state: self.logits(state, target_head))
            for state in self.level_states(batch, target_head, levels)
        ]

    def level_states(self, batch: Batch, target_head: TargetHead, levels: int) -> list[Tensor]:
        """Return each level's states [S, hidden size] at all S supervised slots, of drafts that begin there.

        A slot is a token at which training or validation lets a draft begin; it is supervised if its answer is.
        """
        return self.unroll(batch, target_head, levels).states

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        """Return the drafting state, with a KV cache, for several sequences that are decoded in a batch."""
        return HeadState(self, self.window)

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        target_head: TargetHead,
    ) -> Tensor:
        """Return the head's states [B, T, hidden size] after T new tokens of each of B sequences, and cache these.

        Each of the tokens [B, T] is read with a state `hidden` [B, T, hidden size]. `tables` are cosines and sines at
        their positions, `mask` is the additive attention mask, and `caches` the KV cache of each block.
        """
        # only the first block reads the tokens
        embedded = target_head.embed(tokens).to(hidden.dtype)
        state = self.first_block(embedded, hidden, tables, mask, caches[0])
        for block, cache in zip(self.layers[1:], caches[1:], strict=True):
            state = block(state, tables, mask, cache)
        return state

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft reads, after the first: one forward for each level of the tree.

        The cost of a draft within this budget is forecast from it. The first forward reads the committed tokens.
        """
        return level_rows(budget)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of keys and values of every block that a sequence of `tokens` tokens needs at most.

        `column` is not used: the bytes that a token takes in the target. The forecast of memory asks for it.
        """
        # the cache has the most columns just before the window drops some
        if self.window is not None:
            tokens = min(tokens, self.window.most + WINDOW_CHUNK_TOKENS)
        if self.capture is not None:
            # the columns of captured drafts come after those that are reserved for sequences
            tokens = sequence_capacity(tokens) + sum(self.forwards(self.budget or Budget()))
        return sequence_bytes(self.layers, tokens)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function whose seconds are measured: a forward of `rows` tokens after `context` cached tokens.

        It computes logits of the last `scored` of them. Decoding forecasts the cost of drafts from such seconds.
        """
        target_head = self.target_head
        read = probe_read(self, context, rows, self.window)

        @torch.inference_mode()
        def run() -> Tensor:
            """Run one timed forward, and return the logits of its last `scored` tokens."""
            return self.logits(read()[0, -scored:], target_head)

        return run
