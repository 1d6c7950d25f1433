"""Heads that predict a block of tokens in one forward over a root and mask tokens, as DFlash does.

The slots of a block attend to the target's features of the sequence, which are injected as keys and values.
"""

# A anchors, S supervised slots, B slots of a block, K levels, N slots of all sequences, L taps, H hidden, V vocabulary
# k key heads, w head width, D width of the LM head's input

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS, Budget
from eagle.core.drafter import (
    ColumnBytes,
    HeadShape,
    Parts,
    TargetHead,
    TrainableDrafter,
)
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.drafters.blocks.anchors import Anchors, draw_anchors
from eagle.drafters.blocks.block_spans import attend_block
from eagle.drafters.blocks.injected_state import InjectedState, SlotLevels
from eagle.drafters.parts.decoder_block import (
    Linears,
    Norm,
    NormedBlock,
    Rotary,
    check_taps,
    draw_linears,
    head_shape,
)
from eagle.drafters.parts.divisors import (
    Divisor,
    level_shares,
    reached_levels,
    sum_divisors,
)
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.objectives import LanguageHead
from eagle.drafters.parts.reduced_vocab import ReducedVocab, choose_draft_vocab
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.sequence_blocks import (
    CompiledParts,
    Pair,
    add_rows,
    key_value,
    position_tables,
    query_and_residual,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import sequence_bytes
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.parts.window import Window
from eagle.recipe import Section
from eagle.target.weights.packed import narrow_packed

ANCHORS_AT_ONCE = 256  # anchors whose blocks are read in one forward in validation


class InjectedSettings(Section):
    """Settings of such a head in a recipe."""

    # layers whose inputs it reads; by default five, evenly spread
    taps: tuple[int, ...] | None = None
    blocks: int = Field(5, ge=1)  # transformer blocks that are stacked
    # tokens read at once: the last accepted token, then mask tokens
    slots: int = Field(16, ge=2, le=MOST_LEVELS)
    # each slot predicts the next token; else the token at its own position
    sample_from_anchor: bool = False
    # a slot sees only earlier slots of its block; "window": in the blocks with a window alone
    causal: bool | Literal["window"] = False
    # {recent: W}: a slot attends to the latest W positions up to its own, those of its own block included
    window: Window | None = None
    window_blocks: tuple[int, ...] | None = None  # the blocks with a window, from 0; by default all
    # a slot's window ends at the "slot", as engines read it; or at the "root" for all slots, as speculators trains
    window_end: Literal["slot", "root"] = "slot"
    qk_norm: bool = True  # norm queries and keys by head, as Qwen3 does
    # the token that mask slots read; by default the last of the vocabulary
    mask_token: int | None = None
    # of the MLPs; by default the target's, but for mixtures of experts
    intermediate_size: int | None = None
    # how its linear layers start: as torch draws them, or "normal": N(0, 0.02)
    linears: Linears = "uniform"
    anchors: int = Field(512, ge=1)  # slots of a sequence from which blocks are trained
    decay: float | None = Field(7.0, gt=0)  # level d has the weight e^(-d / decay) in the loss
    # so many of the most frequent tokens are drafted, or those in a file of data_prep.draft_vocab; by default all
    draft_vocab: int | str | None = None
    # of the loss: the sum of the weights, or "reached": how many tokens have one
    divisor: Divisor = "weights"

    @model_validator(mode="after")
    def _check_window(self) -> InjectedSettings:
        """Refuse a window that is shorter than a block, and settings of a window that is not there."""
        indices = self.window_blocks or ()
        if self.window is None and (self.window_blocks is not None or self.causal == "window"):
            raise ValueError(
                "window is null, expected {recent: W}, as window_blocks or causal name blocks with a window"
            )
        if self.window is not None and self.window.recent < self.slots:
            raise ValueError(
                f"window.recent is {self.window.recent}, expected at least slots, {self.slots}: a window holds a block"
            )
        if not all(0 <= index < self.blocks for index in indices):
            raise ValueError(
                f"window_blocks is {indices}, expected some of 0 to {self.blocks - 1}, the {self.blocks} blocks"
            )
        return self


class InjectedHead(CompiledParts, ReducedVocab, TrainableDrafter):
    """(the target's features of a sequence, root, mask tokens) -> a state for each slot, read by the target's LM head.

    In every transformer block a slot attends to the fused features of the tokens before the root, as keys and values,
    and to the slots of its own block of tokens.
    """

    teacher_taps = (-1,)
    reads_tokens = False  # whether a level's logits depend on the tokens drafted before it
    sharpness = 1.0
    # makes the `RowsLevel` that gives the logits of each level from the states of blocks
    open_levels: type[Any] = SlotLevels
    Settings: type[Any]

    def __init__(self, settings: InjectedSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        assert settings.taps is not None
        self.taps = settings.taps
        width = shape.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = Norm(width, shape.rms_norm_eps)
        self.norm = Norm(width, shape.rms_norm_eps)
        self.layers: Any = nn.ModuleList([NormedBlock(shape) for _ in range(settings.blocks)])
        self.rotary = Rotary(shape)
        self.add_tables(shape)

    @classmethod
    def taps_for(cls, settings: InjectedSettings, target_config: Any) -> tuple[int, ...]:
        """Return the taps of the settings, by default the published ones."""
        layers = target_config.num_hidden_layers
        # a shallow target has too few layers for those: all but the first
        usual = tuple(range(1, layers)) or (0,)
        if layers > 7:
            # Five layers, evenly spread from the second to the third from the end. The published code rounds the index
            # of a layer whose output is read. A tap is the next layer's input, so 1 is added after rounding.
            usual = tuple(1 + round(1 + i * (layers - 4) / 4) for i in range(5))
        return check_taps(settings.taps or usual, layers)

    @classmethod
    def for_target(
        cls,
        settings: InjectedSettings,
        target_config: Any,
        target_head: Any = None,
        supervised: Any = None,
    ) -> Any:
        """Return a new head with the target's sizes, and defaults for taps and mask token if the settings have none.

        The most frequent of `supervised`, the supervised tokens of each sequence, become the draft vocabulary if the
        settings give its size. `target_head` is not used.
        """
        # by default the mask token is the last of the vocabulary, which may be a filler that no sequence has
        last = target_config.vocab_size - 1
        mask = last if settings.mask_token is None else settings.mask_token
        if not 0 <= mask <= last:
            raise ValueError(
                f"drafter.mask_token is {mask}, expected one of the target's tokens 0 to {last}: best one that no "
                "sequence has, as those that fill up a vocabulary"
            )
        sizes = (
            {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        )
        drafts = choose_draft_vocab(settings.draft_vocab, supervised, last + 1)
        if len(drafts) <= last:
            sizes["draft_vocab_size"] = len(drafts)
        shape = head_shape(
            target_config, num_hidden_layers=settings.blocks, qk_norm=settings.qk_norm, **sizes
        )
        # a checkpoint says which taps and mask token were chosen
        derived = {"taps": cls.taps_for(settings, target_config), "mask_token": mask}
        head = cls(settings.model_copy(update=derived), shape)
        head.fill_tables(drafts)
        draw_linears(head, settings.linears)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        names = ("taps", "blocks", "slots", "sample_from_anchor", "causal", "qk_norm", "mask_token")
        settings = self.settings
        network = {
            "network": settings.kind,
            **{name: getattr(settings, name) for name in names},
        }
        # `window` says the same as true where all blocks have one
        if len({self.is_causal(index) for index in range(settings.blocks)}) == 1:
            network["causal"] = self.is_causal(0)
        if settings.window is not None:
            blocks = [index for index in range(settings.blocks) if self.has_window(index)]
            window = {**asdict(settings.window), "blocks": blocks, "end": settings.window_end}
            network["window"] = window
        return network

    def has_window(self, index: int) -> bool:
        """Return whether a transformer block has the window."""
        indices = self.settings.window_blocks
        return self.settings.window is not None and (indices is None or index in indices)

    def is_causal(self, index: int) -> bool:
        """Return whether a slot sees only earlier slots of its block, in one transformer block."""
        causal = self.settings.causal
        return self.has_window(index) if causal == "window" else bool(causal)

    @property
    def drafted_in_window(self) -> tuple[int, ...]:
        """How many positions of its window each slot's own block takes up."""
        # row j at position a + j sees the context keys k with a + j - (W - 1) <= k < a; as speculators trains, with
        # a - W <= k < a
        if self.settings.window_end == "root":
            return (0,) * int(self.settings.slots)
        return tuple(range(1, 1 + self.settings.slots))

    @property
    def parts(self) -> Parts:
        """The parts that `eagle doctor` checks: `fc` has a part for each tap, and the mask token is a setting."""
        return Parts(by_tap=("fc.weight",), tokens=("mask_token",), levels=self.levels)

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the root."""
        return 0 if self.settings.sample_from_anchor else 1

    @property
    def levels(self) -> int:
        """The number of levels that one forward gives, one token each."""
        return int(self.settings.slots) - self.first_slot

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.fc.weight.dtype

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the fused features [.., H], of which keys and values are made, from features [.., L, H]."""
        fused: Tensor = self.hidden_norm(self.fc(features.flatten(-2)))
        return fused

    def embed_slots(self, roots: Tensor, target_head: TargetHead) -> Tensor:
        """Return the embedded tokens [.., B, H] of blocks: a root of `roots` [..], then mask tokens."""
        tokens = torch.full(
            (*roots.shape, self.settings.slots), self.settings.mask_token, device=roots.device
        )
        tokens[..., 0] = roots
        return target_head.embed(tokens).to(self.dtype)

    def bind(self, target_head: TargetHead) -> InjectedHead:
        """Give the head the target's embedding and LM head, of which it takes the rows of its draft vocabulary."""
        drafts = self.own_drafts
        super().bind(target_head if drafts is None else narrow_packed(target_head, drafts))
        return self

    def output_head(self, target_head: TargetHead) -> TargetHead:
        """Return the target's head with the rows of the draft vocabulary alone, for training and validation."""
        # once the head is bound, it may be asked with the rows that `bind` has taken
        if self.bound_to and target_head is self.target_head:
            return target_head
        return self.narrow_once(target_head, self.own_drafts)

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V or D] that the target's LM head gives for states [.., H]."""
        # flat, as a product of a three-dimensional tensor may copy the matrix
        return target_head.logits(state.flatten(0, -2)).unflatten(0, state.shape[:-1])

    def lm_head(self, target_head: TargetHead) -> LanguageHead:
        """Return the LM head that reads what `read_levels` returns."""
        return target_head

    def read_levels(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        target_head: TargetHead,
    ) -> Tensor:
        """Return the LM head's inputs [A, K, D] in training, where the sequences' tokens are the draft tokens.

        Here they are the states. Subclasses whose levels depend on the draft tokens before them add to these.

        Args:
            batch: The sequences.
            anchors: Those of the blocks.
            states: The states [A, K, H] of the blocks.
            target_head: The target's embedding.
        """
        return states

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def level_weights(self) -> list[float]:
        """The weight of each level in the loss: e^(-d / decay) for level d, or 1 without a decay."""
        decay = self.settings.decay
        return [1.0 if decay is None else math.exp(-level / decay) for level in range(self.levels)]

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """Return the divisor of the loss: one for all levels, or one for each level; see `divisors.Divisor`.

        Args:
            masks: The loss mask of each sequence.
            seeds: The random seed of each sequence, which decides its anchors.
        """
        reached = []
        for mask, seed in zip(masks, seeds, strict=True):
            # the same anchors as in `Anchors.sampled`
            anchors = draw_anchors(mask[2:], seed, self.settings.anchors)
            reached.append(reached_levels(mask[2:], anchors, self.levels))
        return sum_divisors(self.settings.divisor, torch.cat(reached), self.level_weights)

    def level_shares(self, batch: Batch) -> Tensor:
        """Return [K], the weight of each level divided by its divisor, for an anchor whose block reaches the level."""
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        return level_shares(self.level_weights, divisors, self.dtype, batch.tokens.device)

    def read_anchors(self, batch: Batch, target_head: TargetHead) -> tuple[Anchors, Tensor]:
        """Sample anchors from each sequence, and return them and the states [A, K, H] of the blocks after them."""
        anchors = Anchors.sampled(batch, self.levels, self.settings.anchors)
        context = self.inject_sequences(batch)
        roots = anchors.tokens_at(batch, -1)
        return anchors, self.read_blocks(batch, target_head, context, anchors.spans, roots=roots)

    def inject_sequences(self, batch: Batch) -> list[Pair]:
        """Return each transformer block's keys and values [k, N, w], made of the fused features at all slots."""
        token_indices, positions, _ = sequence_positions(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, token_indices).to(self.dtype)
        fused = self.fuse_taps(features)
        tables = self._tables_of(batch, fused)(positions)
        context = []
        for block in self.layers:
            # the same features in all blocks, without their input norms: only the slots' states pass through the blocks
            key, value = self._run(key_value, block, (fused, fused), tables)
            context.append((key.contiguous(), value.contiguous()))
        return context

    def read_blocks(
        self,
        batch: Batch,
        target_head: TargetHead,
        context: list[Pair],
        spans: Spans,
        roots: Tensor,
    ) -> Tensor:
        """Read a block of tokens after each anchor, and return its normed states [A, K, H] that predict tokens.

        Args:
            batch: The sequences.
            target_head: The target's embedding.
            context: Each transformer block's keys and values at all slots, from `inject_sequences`.
            spans: The anchors.
            roots: The first tokens of the blocks [A].
        """
        size = self.settings.slots
        state = self.embed_slots(roots, target_head).flatten(0, 1)  # [A * B, H]
        _, positions, _ = sequence_positions(batch, state.device)
        # [A, B]: the root has the position after its anchor's
        anchor_positions = positions.index_select(0, spans.rows)[:, None]
        block_positions = anchor_positions + torch.arange(1, 1 + size, device=state.device)
        tables = self._tables_of(batch, state)(block_positions.flatten())
        in_window = replace(spans, window=self.settings.window, block_masks={})
        for index, (block, (key, value)) in enumerate(zip(self.layers, context, strict=True)):
            inputs = block.inputs(state)
            query, residual = self._run(query_and_residual, block, inputs, tables)
            block_key, block_value = self._run(key_value, block, inputs, tables)
            # [heads, A * B, w] -> [heads, A, B, w]
            attended = attend_block(
                query.unflatten(1, (-1, size)),
                key,
                value,
                in_window if self.has_window(index) else spans,
                block_pair=(
                    block_key.unflatten(1, (-1, size)),
                    block_value.unflatten(1, (-1, size)),
                ),
                causal=self.is_causal(index),
                drafted=self.drafted_in_window,
            )
            state = self._run(add_rows, block, attended.flatten(1, 2), residual)
        states: Tensor = self.norm(state).unflatten(0, (-1, size))[:, self.first_slot :]
        return states

    def _tables_of(self, batch: Batch, like: Tensor) -> Callable[[Tensor], Pair]:
        """Return a function that looks up rotary tables at positions of the batch's sequences and of their blocks."""
        return position_tables(
            self.rotary, like, max(batch.lengths, default=0) + self.settings.slots
        )

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(
        self,
        batch: Batch,
        target_head: TargetHead,
        trees: dict[str, Paths],
    ) -> dict[str, Tensor]:
        """Return sums over the supervised slots of a batch: loss terms, and how often each tree's levels are accepted.

        `eagle.drafters.parts.validation.figures` makes figures of them. `trees` are fixed trees by name.
        """
        states, (student, *_) = zip(
            *self.draft_levels(batch, target_head, self.levels), strict=True
        )

        def logits(state: Tensor) -> Tensor:
            return self.on_all_tokens(student(state))

        return validate_batch(batch, states, ([logits] * len(states), target_head.logits), trees)

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return the inputs [S, D] of each level's LM head at all supervised slots, and the LM head."""
        anchors = Anchors.everywhere(batch, self.levels)
        context = self.inject_sequences(batch)
        roots = anchors.tokens_at(batch, -1)
        # some anchors at a time, as the states of a whole block are in memory for each of them
        chunks = []
        done = 0
        for spans in anchors.spans.split(ANCHORS_AT_ONCE):
            end = done + len(spans.rows)
            chunks.append(self.read_blocks(batch, target_head, context, spans, roots[done:end]))
            done = end
        states = (
            torch.cat(chunks)
            if chunks
            else self.fc.weight.new_empty(0, self.levels, self.shape.hidden_size)
        )
        level_states = self.read_levels(batch, anchors, states, target_head)
        head = self.lm_head(self.output_head(target_head))
        return [(state, head.logits) for state in level_states.unbind(1)[:levels]]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> InjectedState:
        """Return the state for several sequences drafted in a batch."""
        return InjectedState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward after the first reads; empty if the first gives all levels' logits."""
        return level_rows(budget.within(self.levels)) if self.reads_tokens else ()

    def unread(self, accepted: int, depth: int) -> int:
        """Return the rows of the next draft's first forward.

        They are the last draft's root and accepted tokens, whose features become keys and values, and a block.
        """
        return accepted + 1 + int(self.settings.slots)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of every block's keys and values for `tokens` tokens and the block of slots after them."""
        return sequence_bytes(self.layers, tokens + int(self.settings.slots))

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """Return a function whose seconds are measured.

        It is the forward of a block of tokens after `context` cached tokens, with the logits of all levels. `rows`
        beyond the block's are new tokens, whose keys and values it makes. If levels read tokens and all rows are
        scored, it is one level, which runs no transformer blocks.
        """
        requests = [DraftRequest(0, 0, Budget())]
        weight = self.fc.weight
        if self.reads_tokens and scored == rows:
            return self._probe_level(rows, requests)
        state = InjectedState(self)
        state.admit(0)
        cache_rows = state.take_rows([0])
        new = max(rows - self.settings.slots, 1)
        features = weight.new_zeros(context + new, len(self.taps), self.shape.hidden_size)
        root = torch.zeros(1, dtype=torch.long, device=weight.device)
        with torch.inference_mode():
            state.inject(cache_rows, [features[:context]])

        @torch.inference_mode()
        def run() -> Any:
            # each call overwrites the columns of the call before
            state.cache.lengths[0] = context
            state.inject(cache_rows, [features[context:]])
            return self.open_levels(self, requests, state.read_blocks(cache_rows, root))

        return run

    def _probe_level(self, rows: int, requests: list[DraftRequest]) -> Callable[[], Any]:
        """Return a function whose seconds are measured: one level at `rows` nodes, where levels read tokens."""
        states = self.fc.weight.new_zeros(1, self.levels, self.shape.hidden_size)
        tokens = torch.zeros(1, rows, dtype=torch.long, device=states.device)
        tree_mask = torch.ones_like(tokens, dtype=torch.bool)
        # a level after the first, so that its parents are nodes and not the root
        depth = min(1, self.levels - 1)
        with torch.inference_mode():
            levels = self.open_levels(self, requests, states)

        @torch.inference_mode()
        def run() -> Any:
            return levels(depth, [0], tokens, parents=tokens, tree_mask=tree_mask)

        return run
