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
)
from eagle.core.examples import Batch
from eagle.drafters.blocks.anchors import Anchors, draw_anchors
from eagle.drafters.blocks.block_spans import attend_block
from eagle.drafters.blocks.convolved_block import GroupedConv
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
from eagle.drafters.parts.validation import ValidatedHead
from eagle.drafters.parts.window import Window
from eagle.recipe import Section
from eagle.target.weights.packed import narrow_packed

ANCHORS_AT_ONCE = 256  # anchors whose blocks are read in one forward in validation


class InjectedSettings(Section):
    """Settings of such a head in a recipe."""

    # layers whose inputs the head reads; by default five, evenly spread
    taps: tuple[int, ...] | None = None
    blocks: int = Field(5, ge=1)  # number of decoder blocks
    # number of slots of a block: the last accepted token, then mask tokens
    slots: int = Field(16, ge=2, le=MOST_LEVELS)
    # each slot predicts the token after its position; otherwise the token at its position
    sample_from_anchor: bool = False
    # a slot attends only to earlier slots of its block; "window": only in decoder blocks that have a window
    causal: bool | Literal["window"] = False
    # {recent: W}: a slot attends to the latest W positions, including those of its own block
    window: Window | None = None
    # indices of the decoder blocks that have the window, from 0; by default all
    window_blocks: tuple[int, ...] | None = None
    # where the window ends: at each "slot", as in engines, or for all slots at the "root", as speculators trains
    window_end: Literal["slot", "root"] = "slot"
    qk_norm: bool = True  # normalise queries and keys per attention head, as in Qwen3
    # id of the mask token; by default the last token of the vocabulary
    mask_token: int | None = None
    # MLP width; by default the target's (set it for mixtures of experts)
    intermediate_size: int | None = None
    # initial weights of the linear layers: PyTorch's default, or "normal": N(0, 0.02)
    linears: Linears = "uniform"
    anchors: int = Field(512, ge=1)  # number of blocks that are trained per sequence
    decay: float | None = Field(7.0, gt=0)  # level d has the weight e^(-d / decay) in the loss
    # draft only this many tokens, the most frequent ones, or those in a file; null: all
    draft_vocab: int | str | None = None
    # divisor of the loss: the sum of the weights, or "reached": the number of tokens that have a weight
    divisor: Divisor = "weights"

    @model_validator(mode="after")
    def _check_window(self) -> InjectedSettings:
        """Refuse a window that is shorter than a block, and settings of a window that is not there."""
        indices = self.window_blocks or ()  # of transformer blocks
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


class InjectedHead(CompiledParts, ReducedVocab, ValidatedHead):
    """(the target's features of a sequence, root, mask tokens) -> a state for each slot, read by the target's LM head.

    In every transformer block a slot attends to the fused features of the tokens before the root, as keys and values,
    and to the slots of its own block of tokens. Fused features are one vector for each token, made of the target's
    hidden states at the head's taps.
    """

    # the input of the target's LM head, from which a loss takes the target's probs
    teacher_taps = (-1,)
    reads_tokens = False  # whether a level's logits depend on the tokens drafted before it
    sharpness = 1.0  # the factor on logits when the nodes of a tree are compared
    reads_all_levels = False  # whether a level's logits depend on the states of later levels
    # makes the `RowsLevel` that gives the logits of each level from the states of blocks
    open_levels: type[Any] = SlotLevels
    Settings: type[Any]

    def __init__(self, settings: InjectedSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        assert settings.taps is not None  # `for_target` decides them
        self.taps = settings.taps
        width = shape.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = Norm(width, shape.rms_norm_eps)
        self.norm = Norm(width, shape.rms_norm_eps)
        self.layers: Any = nn.ModuleList([self.make_block(shape) for _ in range(settings.blocks)])
        self.rotary = Rotary(shape)
        self.add_tables(shape)

    def make_block(self, shape: HeadShape) -> NormedBlock:
        """Return a new transformer block of the head, by its settings and sizes."""
        return NormedBlock(shape)

    @classmethod
    def taps_for(cls, settings: InjectedSettings, target_config: Any) -> tuple[int, ...]:
        """Return the target's layers whose inputs the head reads (taps): the settings' own, else the published ones.

        A tap that the target does not have is refused.
        """
        layers = target_config.num_hidden_layers
        # a shallow target has too few layers for the published ones: it gets all but the first
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

        Args:
            settings: The head's settings.
            target_config: The target's transformers config.
            target_head: Not used: no weights are copied.
            supervised: The supervised tokens of each sequence. The most frequent become the draft vocabulary if the
                settings give its size.
        """
        # by default the mask token is the last of the vocabulary, which may be a filler that no sequence has
        last = target_config.vocab_size - 1
        mask = last if settings.mask_token is None else settings.mask_token
        if not 0 <= mask <= last:
            raise ValueError(
                f"drafter.mask_token is {mask}, expected one of the target's tokens 0 to {last}: best one that no "
                "sequence has, as those that fill up a vocabulary"
            )
        # the sizes that are not the target's
        sizes = (
            {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        )
        # the token ids that the head can draft
        drafts = choose_draft_vocab(settings.draft_vocab, supervised, last + 1)
        # named only if some tokens are left out
        if len(drafts) <= last:
            sizes["draft_vocab_size"] = len(drafts)
        shape = head_shape(
            target_config, num_hidden_layers=settings.blocks, qk_norm=settings.qk_norm, **sizes
        )
        # a checkpoint says which taps and mask token were chosen
        derived = {"taps": cls.taps_for(settings, target_config), "mask_token": mask}
        head = cls(settings.model_copy(update=derived), shape)
        head.fill_tables(drafts)
        head.draw_weights()
        return head

    def draw_weights(self) -> None:
        """Initialise the linear layers of a new head in place, by the setting `linears`."""
        draw_linears(self, self.settings.linears)
        for module in self.modules():
            if isinstance(module, GroupedConv):
                # convolutions change nothing at first
                module.forget_inputs()

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        names = ("taps", "blocks", "slots", "sample_from_anchor", "causal", "qk_norm", "mask_token")
        settings = self.settings
        network = {
            "network": settings.kind,
            **{name: getattr(settings, name) for name in names},
        }
        # causal: "window" says the same as true where all blocks have a window, and as false where none has: the
        # description must not differ
        if len({self.is_causal(index) for index in range(settings.blocks)}) == 1:
            network["causal"] = self.is_causal(0)
        if settings.window is not None:
            blocks = [index for index in range(settings.blocks) if self.has_window(index)]
            window = {**asdict(settings.window), "blocks": blocks, "end": settings.window_end}
            network["window"] = window
        return network

    def has_window(self, index: int) -> bool:
        """Return whether the transformer block of this index attends to the window of the settings alone."""
        indices = self.settings.window_blocks  # None: all blocks
        return self.settings.window is not None and (indices is None or index in indices)

    def is_causal(self, index: int) -> bool:
        """Return whether a slot sees only earlier slots of its block, in the transformer block of this index."""
        # with "window", the transformer blocks with a window are causal
        causal = self.settings.causal
        return self.has_window(index) if causal == "window" else bool(causal)

    @property
    def drafted_in_window(self) -> tuple[int, ...]:
        """How many positions of its window each slot's own block takes up, one number for each slot of a block."""
        # With a window of W positions, slot j of a block whose root has position a sees the keys of the sequence at
        # positions k with a + j - (W - 1) <= k < a; as speculators trains, with a - W <= k < a for all slots.
        if self.settings.window_end == "root":
            return (0,) * int(self.settings.slots)
        return tuple(range(1, 1 + self.settings.slots))

    @property
    def parts(self) -> Parts:
        """What a faulty conversion could swap, which `eagle doctor` checks.

        The columns of `fc` belong to one tap each, and the mask token is a setting.
        """
        return Parts(by_tap=("fc.weight",), tokens=("mask_token",), levels=self.levels)

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the root."""
        return 0 if self.settings.sample_from_anchor else 1

    @property
    def first_state(self) -> int:
        """The first slot of a block whose state is used; usually that of the root is not if it predicts nothing."""
        return self.first_slot

    @property
    def levels(self) -> int:
        """The number of levels that one forward gives, one token each."""
        return int(self.settings.slots) - self.first_slot

    @property
    def level_width(self) -> int:
        """The width of what a draft's levels are made of; here it is that of the states."""
        return int(self.shape.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.fc.weight.dtype

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the fused features [.., H], of which keys and values are made, from the target's states [.., L, H].

        The L states of a token are those at the head's taps, in their order.
        """
        fused: Tensor = self.hidden_norm(self.fc(features.flatten(-2)))
        return fused

    def embed_slots(self, roots: Tensor, target_head: TargetHead) -> Tensor:
        """Return the embedded tokens [.., B, H] of blocks of B slots: a root of `roots` [..], then mask tokens."""
        tokens = torch.full(
            (*roots.shape, self.settings.slots), self.settings.mask_token, device=roots.device
        )
        tokens[..., 0] = roots
        return target_head.embed(tokens).to(self.dtype)

    def bind(self, target_head: TargetHead) -> InjectedHead:
        """Give the head the target's embedding and LM head, to draft with; it is in evaluation mode from then on.

        Of the LM head it takes the rows of its draft vocabulary, so that it makes no other logits.
        """
        drafts = self.own_drafts
        super().bind(target_head if drafts is None else narrow_packed(target_head, drafts))
        return self

    def output_head(self, target_head: TargetHead) -> TargetHead:
        """Return the target's head with the rows of the draft vocabulary alone, for training and validation."""
        # the head that `bind` kept has only these rows already
        if self.bound_to and target_head is self.target_head:
            return target_head
        return self.narrow_once(target_head, self.own_drafts)

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] that the target's LM head gives for states [.., H].

        V is the number of rows of `target_head`: the vocabulary, or the draft vocabulary if it was cut to that.
        """
        # flat, as a product of a three-dimensional tensor may copy the matrix
        return target_head.logits(state.flatten(0, -2)).unflatten(0, state.shape[:-1])

    def lm_head(self, target_head: TargetHead) -> LanguageHead:
        """Return the LM head that reads what `read_levels` returns; here the target's, as that returns states alone."""
        return target_head

    def level_logits(self, target_head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return the function that makes logits [.., V] of what `read_levels` returns, for validation."""
        return self.lm_head(target_head).logits

    def read_levels(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        target_head: TargetHead,
    ) -> Tensor:
        """Return the LM head's inputs [A, K, D] in training, where the sequences' tokens are taken as the draft tokens.

        There are K levels after each of A anchors. Here the inputs are the states. Subclasses whose levels depend on
        the draft tokens before them concatenate more to the states.

        Args:
            batch: The sequences.
            anchors: The slots after which the blocks are drafted.
            states: The states [A, K, H] of the blocks.
            target_head: The target's embedding.
        """
        return states

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def level_weights(self) -> list[float]:
        """The weight of each level in the loss: e^(-d / decay) for level d, from 0 on, or 1 without a decay."""
        decay = self.settings.decay
        return [1.0 if decay is None else math.exp(-level / decay) for level in range(self.levels)]

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """Return what the loss of these sequences is divided by: one number for all levels, or one for each level.

        The setting `divisor` says what is counted, see `divisors.Divisor`.

        Args:
            masks: The loss mask [T] of each sequence.
            seeds: The random seed of each sequence, which decides its anchors.
        """
        # for each sequence, whether the block after each anchor reaches each level: [anchors, levels] bool
        reached = []
        for mask, seed in zip(masks, seeds, strict=True):
            # the same anchors as in `Anchors.sampled`; slot i is marked if token i + 2 is supervised
            anchors = draw_anchors(mask[2:], seed, self.settings.anchors)
            reached.append(reached_levels(mask[2:], anchors, self.levels))
        return sum_divisors(self.settings.divisor, torch.cat(reached), self.level_weights)

    def level_shares(self, batch: Batch) -> Tensor:
        """Return [K], the weight of each of K levels divided by its divisor: the factor on the loss of one token."""
        # a batch that is a part of a training step has the divisors of the whole step
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        return level_shares(self.level_weights, divisors, self.dtype, batch.tokens.device)

    def read_anchors(self, batch: Batch, target_head: TargetHead) -> tuple[Anchors, Tensor]:
        """Sample anchors from each sequence, and return them and the states [A, K, H] of the blocks after them.

        Anchors are the slots after which blocks are drafted. There are A of them, and K levels of a block.
        """
        anchors = Anchors.sampled(batch, self.levels, self.settings.anchors)
        context = self.inject_sequences(batch)
        roots = anchors.tokens_at(batch, -1)
        return anchors, self.read_blocks(batch, target_head, context, anchors.spans, roots=roots)

    def inject_sequences(self, batch: Batch) -> list[Pair]:
        """Return each transformer block's keys and values, made of the fused features at all slots of all sequences.

        They are [k, N, w] each, for k key heads of width w and N slots. The blocks of a draft attend to them.
        """
        # [N] each: the index of a slot's token among all tokens, and its position in its sequence; the spans of the
        # supervised slots are not needed
        token_indices, positions, _ = sequence_positions(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, token_indices).to(self.dtype)
        fused = self.fuse_taps(features)
        tables = self._tables_of(batch, fused)(positions)
        context = []
        for block in self.layers:
            # `fused` twice: as the block's input and as its residual, of which keys and values need the first only;
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
        """Read a block of tokens after each of A anchors, and return its normed states [A, K, H] that predict tokens.

        A block has B slots, of which K, one for each level, predict a token.

        Args:
            batch: The sequences.
            target_head: The target's embedding.
            context: Each transformer block's keys and values at all slots, from `inject_sequences`.
            spans: The anchors as rows of attention among all slots.
            roots: The first tokens of the blocks [A].
        """
        size = self.settings.slots  # B
        state = self.embed_slots(roots, target_head).flatten(0, 1)  # [A * B, H]
        _, positions, _ = sequence_positions(batch, state.device)
        # [A, B]: the root has the position after its anchor's
        anchor_positions = positions.index_select(0, spans.rows)[:, None]
        block_positions = anchor_positions + torch.arange(1, 1 + size, device=state.device)
        tables = self._tables_of(batch, state)(block_positions.flatten())
        # `block_masks` caches masks of flex attention, which are others with a window
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
        states: Tensor = self.norm(state).unflatten(0, (-1, size))[:, self.first_state :]
        return states

    def _tables_of(self, batch: Batch, like: Tensor) -> Callable[[Tensor], Pair]:
        """Return a function that looks up rotary tables at positions of the batch's sequences and of their blocks.

        `like` is a tensor with the tables' dtype and device.
        """
        # a block reaches beyond the last token of its sequence
        return position_tables(
            self.rotary, like, max(batch.lengths, default=0) + self.settings.slots
        )

    # -- validation ---------------------------------------------------------------------------------------------------

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return for each of the first `levels` levels the inputs [S, D] of its LM head, and that head's `logits`.

        S are all supervised slots of the batch, after each of which a block is drafted.
        """
        anchors = Anchors.everywhere(batch, self.levels)
        context = self.inject_sequences(batch)
        roots = anchors.tokens_at(batch, -1)
        # some anchors at a time, as the states of a whole block are in memory for each of them
        chunks = []
        done = 0  # anchors that were read
        for spans in anchors.spans.split(ANCHORS_AT_ONCE):
            end = done + len(spans.rows)
            chunks.append(self.read_blocks(batch, target_head, context, spans, roots[done:end]))
            done = end
        # [S, K, H] for all K levels; a batch without supervised slots has no chunk
        states = (
            torch.cat(chunks)
            if chunks
            else self.fc.weight.new_empty(
                0, self.settings.slots - self.first_state, self.shape.hidden_size
            )
        )
        level_states = self.read_levels(batch, anchors, states, target_head)
        logits = self.level_logits(self.output_head(target_head))
        return [(state, logits) for state in level_states.unbind(1)[:levels]]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> InjectedState:
        """Return the state for several sequences drafted in a batch."""
        return InjectedState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes of a tree each forward of a draft after the first reads, level by level.

        Empty if the first forward gives all levels' logits, as these do not depend on drafted tokens.
        """
        return level_rows(budget.within(self.levels)) if self.reads_tokens else ()

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens the next draft's first forward reads.

        They are the last draft's root and its `accepted` draft tokens, whose features become keys and values, and a
        whole block of slots, whatever the last tree's `depth` was.
        """
        return accepted + 1 + int(self.settings.slots)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of one sequence's KV cache: keys and values in every transformer block.

        It has `tokens` tokens and the block of slots after them. `column`, the bytes of a token in the target, does not
        count.
        """
        return sequence_bytes(self.layers, tokens + int(self.settings.slots))

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """Return a function whose seconds are measured, to forecast the time of a draft.

        It is the forward of a block of tokens after `context` cached tokens, with the logits of all levels. `rows`
        beyond the block's are new tokens, whose keys and values it makes. If levels read tokens and all rows are
        scored, it is one level, which runs no transformer blocks.

        Args:
            context: How many tokens are in the KV cache before the forward.
            rows: How many tokens the forward reads.
            scored: How many of them get logits.
        """
        # arbitrary values: the time does not depend on the tokens
        requests = [DraftRequest(root=0, position=0, budget=Budget())]
        weight = self.fc.weight
        if self.reads_tokens and scored == rows:
            return self._probe_level(rows, requests)
        state = self.open()
        state.admit(0)
        cache_rows = state.take_rows([0])
        # a draft has at least one new token, the last root
        new = max(rows - self.settings.slots, 1)
        features = weight.new_zeros(context + new, len(self.taps), self.shape.hidden_size)
        root = torch.zeros(1, dtype=torch.long, device=weight.device)
        # fills the KV cache once, for all calls
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
        """Return a function whose seconds are measured: the logits of one level at `rows` nodes, if levels read tokens.

        `requests` is one draft request, for the constructor of the levels.
        """
        # arbitrary values of the right shapes: the time does not depend on them
        states = self.fc.weight.new_zeros(1, self.levels, self.level_width)
        tokens = torch.zeros(1, rows, dtype=torch.long, device=states.device)
        tree_mask = torch.ones_like(tokens, dtype=torch.bool)
        # a level after the first, so that its parents are nodes and not the root
        depth = min(1, self.levels - 1)
        with torch.inference_mode():
            levels = self.open_levels(self, requests, states)

        @torch.inference_mode()
        def run() -> Any:
            # [0]: the one row; zeros serve as tokens and as indices of parents
            return levels(depth, [0], tokens, parents=tokens, tree_mask=tree_mask)

        return run
