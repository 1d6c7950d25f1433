"""Falcon (Gao et al. 2024, arXiv 2412.12639): one forward pass over a block of k slots predicts k tokens."""

# B or M sequences, T tokens, S supervised slots, N slots of all sequences, A blocks of k slots, H hidden, V vocabulary
# R = k * A rows: the slots of all blocks

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS, Budget
from eagle.core.drafter import (
    ColumnBytes,
    HeadShape,
    TargetHead,
)
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.device import upload
from eagle.drafters.parts.decoder_block import (
    Block,
    Cache,
    Rotary,
    head_shape,
)
from eagle.drafters.parts.divisors import reached_levels
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.objectives import ROWS, distillation_loss, feature_regression
from eagle.drafters.parts.sequence_blocks import (
    Pair,
    add_rows,
    key_value,
    position_tables,
    probe_read,
    query_and_residual,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import sequence_bytes
from eagle.drafters.parts.spans import Spans, StepPairs, attend
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.drafters.parts.validation import ValidatedHead
from eagle.drafters.recurrent.block_state import BlockState
from eagle.drafters.recurrent.feature_head import add_noise
from eagle.recipe import Section


class FalconSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["falcon"] = "falcon"
    k: int = Field(2, ge=2, le=MOST_LEVELS)  # number of tokens per forward pass of the head
    levels: int = Field(8, ge=1, le=MOST_LEVELS)  # number of drafted levels
    # share of wrongly predicted slots that read their true token, at the start of training
    glance_from: float = Field(0.45, ge=0, lt=1)
    glance_to: float = Field(0.1, ge=0, lt=1)  # this share at the end of training
    dropout: float = Field(0.1, ge=0, lt=1)  # dropout between the gates
    # training noise on the features, U(-noise, noise) * 512 / T for T tokens, with T at least 512
    noise: float = 0.1
    regression: float = 1.0  # weight of the Smooth-L1 loss between predicted and true features
    cross_entropy: float = 0.1  # weight of the cross-entropy with the target's probabilities


class Gate(nn.Linear):
    """One step of an LSTM whose state is empty: sigmoid(output) * tanh(sigmoid(input) * tanh(cell)).

    The input gate, the cell and the output gate are linear maps of x. There is no forget gate, as an empty state has
    nothing to forget.
    """

    def __init__(self, inputs: int, width: int) -> None:
        """Make the three linear maps as one, from `inputs` numbers to `width` each, initialised as in torch's LSTM."""
        super().__init__(inputs, 3 * width)
        bound = width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the new state [.., width] from x [.., inputs].

        out = sigmoid(o) * tanh(sigmoid(i) * tanh(c)): an LSTM step from an empty state, so without a forget gate.
        """
        input_gate, cell, output_gate = super().forward(x).chunk(3, dim=-1)
        return output_gate.sigmoid() * (input_gate.sigmoid() * cell.tanh()).tanh()


class Falcon(ValidatedHead):
    """Two gates over token and state, and EAGLE-1's block over blocks of k slots.

    Slot i reads the target's state of token i and token i + 1. It predicts the state of token i + k, whose logits
    predict token i + k + 1. The last k slots of a sequence are a block. They see one another and everything before, and
    together predict the k tokens after the root. The next block reads these tokens and states in place of the target's.
    """

    Settings = FalconSettings
    settings: FalconSettings
    taps = (-1,)
    capture = None  # drafts are not captured
    gates: Any
    layers: Any  # the one Llama block that slots go through
    rotary: Rotary

    def __init__(self, settings: FalconSettings, shape: HeadShape) -> None:
        """Make two gates that join token and state, one Llama block, and its rotary tables."""
        super().__init__(settings, shape)
        width = shape.hidden_size
        self.gates = nn.ModuleList([Gate(2 * width, width), Gate(width, width)])
        self.layers = nn.ModuleList([Block(shape)])
        self.rotary = Rotary(shape)

    @classmethod
    def for_target(
        cls,
        settings: FalconSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Falcon:
        """Return a new head with the target's sizes and random weights; the last two arguments are not used."""
        return cls(settings, head_shape(target_config))

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the number of tokens in a block (k), which decides what its weights mean."""
        return {"network": "falcon", "k": self.settings.k}

    @property
    def size(self) -> int:
        """The number k of slots of a block: consecutive positions that one forward reads together.

        The paper calls it k.
        """
        return int(self.settings.k)

    @property
    def levels(self) -> int:
        """The largest number of levels (tokens) that a draft may have."""
        return int(self.settings.levels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the head's weights, in which it computes."""
        return next(self.parameters()).dtype

    def enter(
        self,
        embedded: Tensor,
        hidden: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda state: state,
    ) -> Tensor:
        """Return the transformer block's input [.., H]: two gates (LSTM steps) applied to embedded tokens and states.

        Args:
            embedded: The tokens' embeddings [.., H], H the hidden size.
            hidden: The states that the tokens are read with [.., H].
            drop: The dropout between the gates; by default none.
        """
        first, second = self.gates
        entered: Tensor = second(drop(first(torch.cat([embedded, hidden], dim=-1))))
        return entered

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: Pair,
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        target_head: TargetHead,
    ) -> Tensor:
        """Return the head's states [B, T, H] at T slots of each of B sequences (H: the hidden size).

        A slot reads a token [B, T] and a state `hidden` [B, T, H]. `tables` are cosines and sines at the slots'
        positions, `mask` is the additive attention mask, and `caches` holds the KV cache of the only block.
        """
        # there is a single block, hence one cache
        entered = self.enter(target_head.embed(tokens).to(hidden.dtype), hidden)
        output: Tensor = self.layers[0](entered, tables, mask, caches[0])
        return output

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] that the target's LM head gives to the head's states [.., hidden size]."""
        return target_head.logits(state)

    # -- blocks of sequences ------------------------------------------------------------------------------------------

    def read_text(self, entered: Tensor, tables: Pair, blocks: SlotBlocks) -> tuple[Tensor, Pair]:
        """Return the states [k, A, H] of the k slots of A blocks, and the keys and values of all slots.

        A slot reads a token and a state; a block is k consecutive slots, which see one another.

        Args:
            entered: The transformer block's inputs at all N slots of the sequences [N, H], H the hidden size.
            tables: Rotary tables at all slots.
            blocks: The blocks, whose slots are among these.
        """
        key, value = key_value(self.layers[0], (entered, entered), tables)
        context = key.contiguous(), value.contiguous()
        slots = blocks.slots.flatten()
        cosine, sine = tables
        # a slot may be in several blocks: each of them computes a row for it
        tables_at_slots = cosine.index_select(0, slots), sine.index_select(0, slots)
        # nothing is drafted after these blocks yet, so no keys are besides the context
        states = self.read_blocks(
            entered.index_select(0, slots), tables_at_slots, context, blocks, block_pairs=()
        )
        return states, context

    def read_blocks(
        self,
        entered: Tensor,
        tables: Pair,
        context: Pair,
        blocks: SlotBlocks,
        block_pairs: StepPairs,
    ) -> Tensor:
        """Return the states [k, A, H] of the k slots (tokens) of A blocks (H: the hidden size).

        They are blocks of the sequences, or blocks that a draft adds after each of these. Their slots attend to the
        sequence up to the last slot of its block, and to the blocks drafted after that, their own included.

        Args:
            entered: The transformer block's inputs at the slots of the blocks [k * A, H], slot by slot.
            tables: Rotary tables at these slots.
            context: Keys and values at all slots of the sequences.
            blocks: The blocks of the sequences; their `spans` have the last slot of each.
            block_pairs: Keys and values [heads, A, w of a head] of each slot of the drafted blocks, if there are any.
        """
        query, residual = query_and_residual(self.layers[0], (entered, entered), tables)
        # all k queries of a block see the same keys, so they are given to attention as further heads of one row:
        # [heads, k * A, w] -> [heads * k, A, w]
        query_heads = query.unflatten(1, (self.size, -1)).flatten(0, 1)
        attended = attend(query_heads, *context, blocks.spans, block_pairs)
        # back to [heads, k * A, w]
        attended = attended.unflatten(0, (-1, self.size)).flatten(1, 2)
        return add_rows(self.layers[0], attended, residual).unflatten(0, (self.size, -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return Smooth-L1 of the states plus cross-entropy of the probs, at the tokens of blocks that do not overlap.

        "total" is minimised, the other terms are logged.
        """
        settings = self.settings
        states, answer_states, weights = self.training_states(batch, target_head)
        # L = w_reg * SmoothL1(f, f') + w_cls * CE(softmax(head(f)), softmax(head(f')))
        # the losses are for several draft steps: [None] makes the blocks a single one
        regression = feature_regression(states[None], answer_states, weights[None])
        entropy, _ = distillation_loss(
            states[None], answer_states, weights[None], (target_head, target_head)
        )
        return {
            "total": settings.regression * regression + settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "block_cross_entropy": entropy.detach(),
        }

    def training_states(
        self, batch: Batch, target_head: TargetHead
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head's states at the slots of training blocks, and the target's states that they should equal.

        The answer of a slot is the token and the target's state that it has to predict. In training some slots read
        their answers as inputs (glancing, as in non-autoregressive translation), so that the others learn from them.

        Returns:
            The head's states [R, H], the target's states [R, H] and the loss weights [R], at the R = k * A slots of all
            A blocks; H is the hidden size.
        """
        settings = self.settings
        blocks = SlotBlocks.side_by_side(batch, self.size)
        # Inputs of all N slots: tokens [N] and states [N, H]; slot i reads the state of token i and token i + 1. The
        # third result, the supervised slots, is not needed, as `blocks` have them.
        token_indices, positions, _ = sequence_positions(batch, batch.tokens.device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
        tokens = batch.tokens.index_select(0, token_indices + 1)
        hidden = features.index_select(0, token_indices)
        tables = position_tables(self.rotary, features, max(batch.lengths, default=0))(positions)

        answers = blocks.answers(token_indices, len(features))  # [R]
        answer_states = features.index_select(0, answers)
        counted = blocks.reached  # [k, A], the slots that are in the loss

        drop = self._dropout(batch)

        def read(tokens: Tensor, hidden: Tensor) -> Tensor:
            """Return the head's states [R, hidden size] at the R slots of all blocks, from the inputs of all slots.

            A slot reads a token of [N] and a state of [N, H].
            """
            # read_text also returns keys and values, which training does not need
            entered = self.enter(target_head.embed(tokens).to(hidden.dtype), hidden, drop)
            return self.read_text(entered, tables, blocks)[0].flatten(0, 1)

        if self.training and settings.noise:
            hidden = add_noise(batch, hidden, settings.noise)
        if self.training and (settings.glance_from or settings.glance_to):
            # a first pass without gradients finds the slots whose likeliest token is wrong
            with torch.no_grad():
                guesses = likeliest(read(tokens, hidden), target_head)
                answer_guesses = likeliest(answer_states, target_head)
            glanced = self._choose_glanced(batch, blocks, guesses != answer_guesses)
            # a slot that has read its answer would learn only to copy it
            counted = counted & ~glanced
            # a state is read with the token after it; an answer beyond the last token has no weight
            answer_tokens = batch.tokens.index_select(0, (answers + 1).clamp(max=len(features) - 1))
            slots = blocks.slots.flatten()
            tokens = replace_rows(tokens, slots, glanced, answer_tokens)
            hidden = replace_rows(hidden, slots, glanced, answer_states)
        return read(tokens, hidden), answer_states, blocks.weights(counted).flatten()

    def _choose_glanced(self, batch: Batch, blocks: SlotBlocks, wrong: Tensor) -> Tensor:
        """Return which slots read their answers, a bool [k, A]: some of those in the loss whose guess is wrong.

        `wrong` [R] marks the R = k * A slots of A blocks whose likeliest token is not the answer's.
        """
        wrong = wrong.view_as(blocks.reached) & blocks.reached
        return blocks.glance(wrong, self.glanced_share(batch.progress))

    def _dropout(self, batch: Batch) -> TextDropout:
        """Return the dropout between the two gates, by each sequence's seed; it does nothing outside training."""
        # the last two tokens of a sequence have no slot
        slot_counts = [max(length - 2, 0) for length in batch.lengths]
        share = self.settings.dropout if self.training else 0.0
        return TextDropout(share, batch.seeds, slot_counts, batch.tokens.device)

    @property
    def follows_progress(self) -> bool:  # type: ignore[override]
        """Whether the loss depends on the progress of training.

        It does if the share of slots that read their answers changes over the run.
        """
        return bool(self.settings.glance_from != self.settings.glance_to)

    def glanced_share(self, progress: float) -> float:
        """Return the share of wrongly predicted slots that read their answers, linear in training's progress (0 to 1).

        In a glancing Transformer (Qian et al. 2021) the others then learn from these answers, and fewer over time.
        """
        settings = self.settings
        return float(settings.glance_from + (settings.glance_to - settings.glance_from) * progress)

    # -- validation ---------------------------------------------------------------------------------------------------

    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return sums over a batch's supervised slots (tokens): loss terms, and how often levels are accepted.

        The first k - 1 slots of a sequence have no whole block. They count as drafts of which nothing is accepted.
        """
        # only slots with a whole block are supervised in this batch
        drafted = replace(batch, loss_mask=drafted_mask(batch, self.size))
        sums = super().validate(drafted, target_head, trees)
        missed = batch.slots - drafted.slots
        if missed and sums:
            # a slot without a block gets the cross-entropy of a uniform guess, and reaches the first level of every
            # tree, where nothing is accepted
            sums["slots"] += missed
            sums["cross_entropy"] += missed * math.log(len(target_head.weight))
            for name in trees:
                sums[f"{name}/reached"][0] += missed
        return sums

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's states [S, H] at the S supervised slots, and the target's LM head for it.

        A draft begins at every supervised slot, with the sequence's tokens as draft tokens. One block of k slots gives
        k levels: its first slot's state predicts the token after the root, its next slot's the one after that. H is the
        hidden size.
        """
        size = self.size
        levels = min(levels, self.levels)
        device = batch.tokens.device
        # a block at every supervised slot, which ends there; then the token indices and positions of all slots
        blocks = SlotBlocks.everywhere(batch, size)
        token_indices, positions, _ = sequence_positions(batch, device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
        embedded = target_head.embed(batch.tokens).to(features.dtype)
        tables_at = position_tables(
            self.rotary, features, max(batch.lengths, default=0) + levels + size
        )
        entered = self.enter(
            embedded.index_select(0, token_indices + 1), features.index_select(0, token_indices)
        )
        # states [k, S, H]: at each supervised slot the block that ends there, whose slots are the first k levels
        states, context = self.read_text(entered, tables_at(positions), blocks)

        level_states = list(states)
        block_pairs: list[Pair] = []
        # the slots where the blocks end, [S] each: as indices among slots and among tokens, and in their sequence
        last_slots = blocks.spans.rows
        last_indices = token_indices.index_select(0, last_slots)
        last_positions = positions.index_select(0, last_slots)
        while len(level_states) < levels:
            # the next block has the k slots after the last one, and reads the states that were predicted for them
            done = len(level_states)
            # [k, 1], how many slots each of them comes after the draft's first slot
            offsets = torch.arange(1 + done - size, 1 + done, device=device)[:, None]
            following = batch.places_behind(last_indices, 1 + offsets).flatten()
            entered = self.enter(embedded.index_select(0, following), states.flatten(0, 1))
            tables = tables_at((last_positions + offsets).flatten())
            block_pairs += self._slot_pairs(entered, tables)
            states = self.read_blocks(entered, tables, context, blocks, block_pairs)
            level_states += states
        return [(state, target_head.logits) for state in level_states[:levels]]

    def _slot_pairs(self, entered: Tensor, tables: Pair) -> list[Pair]:
        """Return the keys and values of A blocks: a pair [heads, A, w] for each of the k slots of a block, in order.

        They are what later blocks of the same draft attend to. w is the width of a head.

        Args:
            entered: The transformer block's inputs at the slots of the blocks [k * A, hidden size], slot by slot.
            tables: Rotary tables at these slots.
        """
        key, value = key_value(self.layers[0], (entered,), tables)
        keys = key.unflatten(1, (self.size, -1)).unbind(1)
        values = value.unflatten(1, (self.size, -1)).unbind(1)
        return list(zip(keys, values, strict=True))

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> BlockState:
        """Return the drafting state for several sequences that are decoded in a batch."""
        return BlockState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many slots (tokens) each forward after the first reads: k for each node of every k-th level.

        The cost of a draft within this budget is forecast from it. The first forward reads the committed tokens.
        """
        # the nodes of each level that are read, from level 1 on
        rows = level_rows(budget.within(self.levels))
        return tuple(self.size * nodes for nodes in rows[self.size - 1 :: self.size])

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many slots (tokens) the next draft's first forward reads.

        They are those of the accepted tokens and of the root, and k - 1 earlier ones.

        Args:
            accepted: How many draft tokens of the last tree were accepted.
            depth: Not used.
        """
        return accepted + self.size

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of one sequence's state: keys and values, and inputs of the last k - 1 tokens.

        Args:
            tokens: The length of the sequence, the tokens of a draft included.
            column: Not used: the bytes that a token takes in the target.
        """
        weight = self.layers[0].mlp.up_proj.weight
        recent: int = (self.size - 1) * self.shape.hidden_size * weight.element_size()
        return sequence_bytes(self.layers, tokens) + recent

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function whose seconds are measured: a forward of `rows` slots after `context` cached tokens.

        It computes logits of the last `scored` of them, at least of a block. Decoding forecasts the cost of drafts from
        such seconds.
        """
        head: Any = self
        read = probe_read(head, context, rows)
        scored = max(scored, self.size)

        @torch.inference_mode()
        def run() -> Tensor:
            """Run one timed forward, and return the logits [scored, V] of its last slots."""
            return self.logits(read()[0, -scored:], self.target_head)

        return run


def likeliest(states: Tensor, target_head: TargetHead) -> Tensor:
    """Return the likeliest token [R] for each of R states [R, hidden size], by the target's LM head.

    Training compares them to find wrong predictions.
    """
    # `max` gives the same as `argmax`, which takes four times as long in bf16 on CPUs; the states are split because
    # logits of all rows may not fit in memory
    return torch.cat([target_head.logits(rows).max(-1).indices for rows in states.split(ROWS)])


def replace_rows(rows: Tensor, slots: Tensor, marked: Tensor, replacements: Tensor) -> Tensor:
    """Return a copy of rows [N, ..] with some of them replaced, such as tokens or states that slots read.

    Args:
        rows: [N, ..], of all N slots.
        slots: [R], the indices of the R rows that may be replaced.
        marked: R booleans, whether to replace the row at this index.
        replacements: [R, ..], used where `marked` is true.
    """
    # `torch.where` needs a dimension of 1 for each of a row's own
    trailing = [1] * (rows.dim() - 1)
    marked = marked.view(-1, *trailing)
    return rows.index_copy(0, slots, torch.where(marked, replacements, rows.index_select(0, slots)))


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """The blocks of k consecutive slots that training or validation reads, each of which ends at a supervised slot.

    Slot i reads token i + 1 and predicts token i + k + 1. So the first slot of a block that ends at slot e predicts
    token e + 2, the one after the root that slot e reads.
    """

    spans: Spans  # the last slots of the blocks
    slots: Tensor  # [k, A], the indices of the blocks' slots; the sequence's first slot in place of slots before it
    reached: Tensor  # [k, A], whether all tokens that the block predicts up to this slot's are supervised
    sequences: Tensor  # [A], the index of each block's sequence
    # [A], a random order in which the whole blocks of a sequence are chosen for glancing; a rank beyond all for blocks
    # whose tokens are not all supervised
    glance_rank: Tensor
    # [A], how many slots of a block read their answers if it is chosen: its first ones, at least one and never all
    glance_count: Tensor
    supervised: Tensor  # [M], the number of supervised slots of each sequence

    @classmethod
    def everywhere(cls, batch: Batch, size: int) -> SlotBlocks:
        """Return blocks of `size` slots that end at every supervised slot, as validation reads them; they overlap.

        A slot is a token that is read with the target's state before it; it is supervised if its answer is.
        """
        return cls._ending_at(
            batch, size, firsts=[0] * len(batch.lengths), stride=1, generators=_generators(batch)
        )

    @classmethod
    def side_by_side(cls, batch: Batch, size: int) -> SlotBlocks:
        """Return blocks that do not overlap, as training reads them: every k-th slot (token) ends one if supervised.

        The sequence's seed decides where they begin, such that at least one block ends at a supervised slot. `size` is
        k, the slots of a block.
        """
        firsts = []
        generators = _generators(batch)
        for mask, generator in zip(batch.masks, generators, strict=True):
            # supervised slots that can end a block, counted from slot k - 1, as a block needs k slots
            # slot i predicts token i + 2, so its mask is that of this token
            ends = mask[2:][size - 1 :].nonzero()[:, 0]
            # the blocks end at one of these slots, and at every k-th slot before and after it
            phase = 0
            if len(ends):
                phase = int(ends[int(torch.randint(len(ends), (), generator=generator))]) % size
            firsts.append(size - 1 + phase)
        return cls._ending_at(batch, size, firsts=firsts, stride=size, generators=generators)

    @classmethod
    def _ending_at(
        cls,
        batch: Batch,
        size: int,
        *,
        firsts: list[int],
        stride: int,
        generators: list[torch.Generator],
    ) -> SlotBlocks:
        """Return the blocks that end at every `stride`-th slot (token) of each sequence, if that slot is supervised.

        Args:
            batch: The sequences.
            size: k, the slots of a block.
            firsts: The first slot of each sequence at which a block may end.
            stride: The distance from this slot to the next at which a block may end.
            generators: A random generator for each sequence, which decides what is glanced at.
        """
        # for each sequence its part of every field after `spans` but the last
        by_sequence = []
        # by slot: slot i reads token i + 1 as the root, and is supervised if token i + 2 is
        masks = [mask[2:] for mask in batch.masks]
        offsets = torch.arange(1 - size, 1)[:, None]
        begin = 0  # the first slot of the sequence among all slots
        for sequence, (mask, first, generator) in enumerate(
            zip(masks, firsts, generators, strict=True)
        ):
            ends = first + stride * mask[first::stride].nonzero()[:, 0]
            # [k, blocks]; the sequence's first slot in place of slots before it
            slots = begin + (ends + offsets).clamp(min=0)
            # [k, blocks]: whether the tokens that a block predicts are supervised, up to each of them
            reached = reached_levels(mask, ends, size).T
            # only blocks whose tokens are all supervised are glanced at, in a random order
            is_whole = reached[-1]
            # for all other blocks a rank beyond all
            rank = torch.full_like(ends, sum(batch.lengths))
            rank[is_whole] = torch.randperm(int(is_whole.sum()), generator=generator)
            # 1 to k - 1 slots
            glance_count = torch.randint(1, size, ends.shape, generator=generator)
            by_sequence.append(
                (slots, reached, torch.full_like(ends, sequence), rank, glance_count)
            )
            begin += len(mask)
        device = batch.tokens.device
        # the fields after `spans`, in their order
        tensors = [torch.cat(chunks, dim=-1) for chunks in zip(*by_sequence, strict=True)]
        tensors.append(torch.tensor([int(mask.sum()) for mask in masks]))  # supervised
        return cls(
            Spans.of(masks, device, stride, firsts),
            *(upload(tensor, device) for tensor in tensors),
        )

    def answers(self, token_indices: Tensor, count: int) -> Tensor:
        """Return [R], the index of the target's state that each of the R = k * A slots of A blocks predicts.

        Args:
            token_indices: [N], the index of each of all N slots among all tokens.
            count: The number of all tokens, which are as many as the target's states.
        """
        # slot i predicts the state of token i + k; an answer beyond its sequence has no weight
        size = len(self.slots)
        return (token_indices.index_select(0, self.slots.flatten()) + size).clamp(max=count - 1)

    def weights(self, counted: Tensor) -> Tensor:
        """Return the loss weight [k, A] of each of the k slots (tokens) of A blocks.

        They add up to 1 if every sequence has slots in the loss.

        A sequence's weight is proportional to its number of supervised slots, not to its number of blocks. Its slots in
        the loss share it equally.

        Args:
            counted: [k, A] bool, the slots that are in the loss.
        """
        # [sequences], the weight of each slot in the loss
        share = (
            self.supervised
            / self.sum_by_sequence(counted).clamp(min=1)
            / self.supervised.sum().clamp(min=1)
        )
        return counted * share.index_select(0, self.sequences)

    def glance(self, wrong: Tensor, share: float) -> Tensor:
        """Return which slots read their answers in training, a bool [k, A] for the k slots of A blocks.

        They are on average `share` times as many as predict a wrong token.

        The answer of a slot includes the target's state, which depends on the answers of the slots before it in the
        block, and so reveals them. So if a slot reads its answer, all slots before it in the block do too.

        Args:
            wrong: [k, A] bool, the slots whose likeliest token is wrong.
            share: Of these slots.
        """
        size = len(wrong)
        # in a chosen block k / 2 slots read their answers on average, so this many blocks of a sequence are chosen
        blocks = (self.sum_by_sequence(wrong) * (share * 2 / size)).floor()
        is_glanced = self.glance_rank < blocks.index_select(0, self.sequences)
        slot = torch.arange(size, device=wrong.device)[:, None]
        return is_glanced & (slot < self.glance_count)

    def sum_by_sequence(self, marked: Tensor) -> Tensor:
        """Return [M], for each of M sequences how many slots (tokens) of its blocks are marked.

        `marked` is a bool [k, A], for the k slots of all A blocks.
        """
        counts = torch.zeros(len(self.supervised), device=marked.device)
        return counts.index_add_(0, self.sequences, marked.sum(0).to(counts.dtype))


def drafted_mask(batch: Batch, size: int) -> Tensor:
    """Return the loss mask of all tokens, false at a sequence's first `size` + 1, which no whole block predicts.

    `size` is the number of slots of a block. The first whole block ends at slot `size` - 1, and a draft from slot i
    predicts token i + 2 first.
    """
    return torch.cat([mask & (torch.arange(len(mask)) > size) for mask in batch.masks])


def _generators(batch: Batch) -> list[torch.Generator]:
    """Return a random generator for each sequence, from its seed, on the host.

    They are on the host, so that a sequence draws the same numbers on every device and in every batch.
    """
    return [torch.Generator().manual_seed(seed) for seed in batch.seeds]
