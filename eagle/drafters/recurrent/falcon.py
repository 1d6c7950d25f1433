"""Falcon (Gao et al. 2024, arXiv 2412.12639): one forward over a block of k slots guesses the next k tokens."""

# B rows of text, S supervised slots, N slots of all texts, A blocks of k slots, M texts, H width, V vocabulary
# F paths with a block behind each, K nodes of one level, R rows, or all blocks of a draft

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS, Budget
from eagle.core.drafter import ColumnBytes, Committed, HeadShape, Noise, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
from eagle.device import pick_rows, upload
from eagle.drafters.parts.decoder_block import Block, Cache, Rotary, head_shape, rotary_tables
from eagle.drafters.parts.growth import FollowsRows, grow_rows, level_mask, level_rows
from eagle.drafters.parts.objectives import ROWS, distillation_loss, feature_regression
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.spans import Own, Spans, attend
from eagle.drafters.parts.text_blocks import Pair, add_rows, key_value, position_tables, query_and_residual, text_slots
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.drafters.parts.text_state import pad_rows, slot_positions, text_bytes
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.recurrent.feature_head import add_noise
from eagle.drafters.recurrent.head_state import HeadState, count_unlike
from eagle.recipe import Section
from eagle.target.slots import SlotCache


class FalconSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["falcon"] = "falcon"
    k: int = Field(2, ge=2, le=MOST_LEVELS)  # slots of a block, which one forward reads
    levels: int = Field(8, ge=1, le=MOST_LEVELS)  # levels that are drafted, one token each
    glance_from: float = Field(0.45, ge=0, lt=1)  # share of wrong slots that read the answer, at the start
    glance_to: float = Field(0.1, ge=0, lt=1)  # the same share at the end of training
    dropout: float = Field(0.1, ge=0, lt=1)  # between the gates
    noise: float = 0.1  # noise U(-noise, noise) * 512 / T on features in training, T at least 512
    regression: float = 1.0  # weight of Smooth-L1 between its features and the target's
    cross_entropy: float = 0.1  # weight of the cross-entropy with the target's probs


class Gate(nn.Linear):
    """An LSTM's cell from an empty state: sigmoid(output) * tanh(sigmoid(input) * tanh(cell)), each a linear map."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, 3 * width)
        for part in (self.weight, self.bias):
            nn.init.uniform_(part, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        enter, cell, leave = super().forward(x).chunk(3, dim=-1)
        return leave.sigmoid() * (enter.sigmoid() * cell.tanh()).tanh()


class Falcon(TrainableDrafter):
    """Two gates over token and state, and EAGLE-1's block over blocks of k slots.

    Slot i reads state i of the target and token i + 1, and guesses state i + k, whose logits name token i + k + 1. The
    last k slots of a text are a block: they see one another and everything before, and together guess the k tokens
    after the root. The next block reads these tokens and states in place of the target's.
    """

    Settings = FalconSettings
    settings: FalconSettings
    taps = (-1,)
    capture = drafts = None  # drafts are not captured; all tokens can be drafted
    gates: Any
    layers: Any  # the one Llama block that slots go through
    rotary: Rotary

    def __init__(self, settings: FalconSettings, shape: HeadShape) -> None:
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
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Falcon:
        """A new head with the target's width."""
        return cls(settings, head_shape(target_config))

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and its number of slots a block."""
        return {"network": "falcon", "k": self.settings.k}

    def enter(self, embedded: Tensor, hidden: Tensor, drop: Callable[[Tensor], Tensor] = lambda state: state) -> Tensor:
        """[.., H], both gates, with dropout between them."""
        first, second = self.gates
        entered: Tensor = second(drop(first(torch.cat([embedded, hidden], dim=-1))))
        return entered

    @property
    def size(self) -> int:
        """The number of slots of a block."""
        return int(self.settings.k)

    @property
    def levels(self) -> int:
        """The largest number of tokens that it guesses."""
        return int(self.settings.levels)

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

    def read_blocks(self, entered: Tensor, tables: Pair, context: Pair, blocks: SlotBlocks, block_pairs: Own) -> Tensor:
        """[k, A, H], the states of blocks [k * A, H], which see their texts and what was drafted since.

        The queries of a block see the same, as those of further heads would.
        """
        size = self.size
        query, residual = query_and_residual(self.layers[0], (entered, entered), tables)
        heads = query.unflatten(1, (size, -1)).flatten(0, 1)
        seen = attend(heads, *context, blocks.spans, block_pairs).unflatten(0, (-1, size)).flatten(1, 2)
        return add_rows(self.layers[0], seen, residual).unflatten(0, (size, -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Smooth-L1 of the states plus cross-entropy of the probs, with one phase of blocks for each text."""
        settings = self.settings
        states, true, weights = self.training_states(batch, frozen)
        regression = feature_regression(states[None], true, weights[None])
        entropy, _ = distillation_loss(states[None], true, weights[None], (frozen, frozen))
        return {
            "total": settings.regression * regression + settings.cross_entropy * entropy,
            "regression": regression.detach(),
            "block_cross_entropy": entropy.detach(),
        }

    def training_states(self, batch: Batch, frozen: TargetHead) -> tuple[Tensor, Tensor, Tensor]:
        """States [R, H] of the slots of all blocks, the target's states [R, H] at their answers, and weights [R].

        In training some slots read their answer: the token and the state that they would guess.
        """
        settings, blocks = self.settings, SlotBlocks.side_by_side(batch, self.size)
        places, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
        tokens, hidden = batch.tokens.index_select(0, places + 1), features.index_select(0, places)
        slots, last = blocks.slots.flatten(), len(features) - 1
        answers = (places.index_select(0, slots) + self.size).clamp(max=last)  # beyond a text none counts
        true, counted = features.index_select(0, answers), blocks.reached
        tables = position_tables(self.rotary, features, max(batch.lengths, default=0))(positions)

        counts = [max(length - 2, 0) for length in batch.lengths]
        drop = TextDropout(settings.dropout if self.training else 0.0, batch.seeds, counts, features.device)

        def read(tokens: Tensor, hidden: Tensor) -> Tensor:
            entered = self.enter(frozen.embed(tokens).to(hidden.dtype), hidden, drop)
            return self.read_text(entered, tables, blocks)[0].flatten(0, 1)

        if self.training and settings.noise:
            hidden = add_noise(batch, hidden, settings.noise)
        if self.training and (settings.glance_from or settings.glance_to):
            with torch.no_grad():
                wrong = likeliest(read(tokens, hidden), frozen) != likeliest(true, frozen)
            glanced = blocks.glance(wrong.view_as(counted) & counted, self.glanced_share(batch.progress))
            named = batch.tokens.index_select(0, (answers + 1).clamp(max=last))
            tokens = replace_rows(tokens, slots, glanced, named)
            hidden = replace_rows(hidden, slots, glanced, true)
            counted = counted & ~glanced
        return read(tokens, hidden), true, blocks.weights(counted).flatten()

    @property
    def follows_progress(self) -> bool:  # type: ignore[override]
        """Whether the share of glanced slots changes during training."""
        return bool(self.settings.glance_from != self.settings.glance_to)

    def glanced_share(self, progress: float) -> float:
        """The share of wrong slots that read their answers, at this progress of training (0 to 1)."""
        first, last = self.settings.glance_from, self.settings.glance_to
        return float(first + (last - first) * progress)

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
        places, positions, _ = text_slots(batch, device)
        features = batch.select_taps(self.taps)[:, 0].to(self.dtype)
        embedded = frozen.embed(batch.tokens).to(features.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + levels + size)
        entered = self.enter(embedded.index_select(0, places + 1), features.index_select(0, places))
        states, context = self.read_text(entered, tables_at(positions), blocks)
        level_states, block_pairs = list(states), list[Pair]()
        slots = blocks.spans.rows
        while len(level_states) < levels:
            ahead = torch.arange(1 + len(level_states) - size, 1 + len(level_states), device=device)[:, None]
            following = batch.places_behind(places.index_select(0, slots), 1 + ahead).flatten()
            entered = self.enter(embedded.index_select(0, following), states.flatten(0, 1))
            tables = tables_at((positions.index_select(0, slots) + ahead).flatten())
            parts = (part.unflatten(1, (size, -1)).unbind(1) for part in key_value(self.layers[0], (entered,), tables))
            block_pairs += zip(*parts, strict=True)
            states = self.read_blocks(entered, tables, context, blocks, block_pairs)
            level_states += states
        return [(state, frozen.logits) for state in level_states[:levels]]

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


def likeliest(states: Tensor, frozen: TargetHead) -> Tensor:
    """[R], the likeliest tokens for states [R, H]."""
    # argmax takes four times as long in bf16 on CPUs
    return torch.cat([frozen.logits(rows).max(-1).indices for rows in states.split(ROWS)])


def replace_rows(rows: Tensor, slots: Tensor, marked: Tensor, by: Tensor) -> Tensor:
    """[N, ..] with the rows at marked slots [R] replaced by those of `by` [R, ..]."""
    marked = marked.view(-1, *[1] * (rows.dim() - 1))
    return rows.index_copy(0, slots, torch.where(marked, by, rows.index_select(0, slots)))


class BlockState(HeadState):
    """Keys and values of several texts; a text's last k slots are read together whenever tokens are committed."""

    head: Any

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.size: int = head.size
        self.recent: dict[int, Tensor] = {}  # [up to k - 1, H], what the block reads of each text's last slots

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        super().admit(row, noise)
        self.recent[row] = torch.empty(0, self.head.shape.hidden_size, dtype=self.dtype, device=self.device)

    def fork(self, row: int, other: int) -> None:
        """A text goes on in two ways, from the same last slots."""
        super().fork(row, other)
        self.recent[other] = self.recent[row]

    def release(self, row: int) -> None:
        """Release a row."""
        super().release(row)
        del self.recent[row]

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, k, H], the states of each row's last slots, which see its text up to the last."""
        head, cache, frozen = self.head, self.cache, self.head.frozen[0]
        slots = [self.rows.index(row) for row in updates]
        new = [len(update.tokens) for update in updates.values()]
        tokens = [part for update in updates.values() for part in (update.tokens[1:], torch.tensor([update.root]))]
        hidden = torch.cat([update.features[:, 0] for update in updates.values() if update.features is not None])
        embedded = frozen.embed(upload(torch.cat(tokens), self.device)).to(self.dtype)
        entered = head.enter(embedded, hidden.to(self.device, self.dtype)).split(new)
        read = [torch.cat([self.recent[row], part]) for row, part in zip(updates, entered, strict=True)]
        counts = [len(part) for part in read]
        for row, slot, part, count in zip(updates, slots, read, new, strict=True):
            self.recent[row] = part[1 - self.size :].clone()
            cache.lengths[slot] += count
        lengths = [cache.lengths[slot] for slot in slots]
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        cache.aim(slots, starts)
        columns = self._hide_behind(lengths[: count_unlike(lengths)], max(starts) + max(counts))
        mask = columns[:, None, None].expand(-1, 1, head.query_groups * max(counts), -1)
        padded, positions = pad_rows(read), slot_positions(starts, counts, self.device)
        tables = rotary_tables(head.rotary, padded, positions)
        states = head.layers[0](padded, tables, mask, self.blocks[0])
        last = (torch.tensor(counts)[:, None] + torch.arange(-self.size, 0)).clamp(min=0)
        index = upload(last[..., None], self.device).expand(-1, -1, states.shape[2])
        return states.gather(1, index)

    def _grow(self, seeds: Sequence[Seed], slots: list[int], hidden: Tensor) -> list[DraftTree]:
        """The trees of some slots; only the root if fewer than k tokens are committed."""
        most = [self.head.levels if seed.place > self.size else 0 for seed in seeds]
        seeds = [replace(seed, budget=seed.budget.within(end)) for seed, end in zip(seeds, most, strict=True)]
        depth, room = max(seed.budget.depth for seed in seeds), max(self.cache.lengths[slot] for slot in slots)
        levels = _BlockLevels(self, slots, hidden, *self._behind_texts(self.unlike_slots(slots), room, depth))
        return grow_rows(seeds, levels.first[1][:, 0, 0], levels)


class _BlockLevels(FollowsRows):
    """The levels of the drafts behind some slots; every k of them come from one forward, over a block for each path."""

    def __init__(
        self, state: BlockState, slots: list[int], hidden: Tensor, cosine: Tensor, sine: Tensor, committed: Tensor
    ) -> None:
        self.state, self.slots, self.tables, self.committed = state, slots, (cosine, sine), committed
        self.first = hidden[:, None], state.head.logits(hidden[:, None], state.head.frozen[0])

    def _begin(self) -> None:
        """Start at the roots."""
        self.rows = list(range(len(self.slots)))
        self.states, self.logits = self.first  # of the last block [B, F, k, H] and [B, F, k, V]
        self.owner = torch.zeros(len(self.slots), 1, dtype=torch.long, device=self.states.device)  # [B, K], its path
        self.path: list[Tensor] = []  # the tokens [B, K] that follow it
        self.seen = torch.zeros(len(self.slots), 1, 0, dtype=torch.bool, device=self.states.device)  # [B, F, R]

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, K, V], the logits after the nodes of one level; [B, 1, V] if they are the same for all nodes."""
        if depth == 1:
            self._begin()
        parts = self.states, self.logits, self.owner, self.seen, *self.path
        self.states, self.logits, self.owner, self.seen, *self.path = self.keep_rows(rows, *parts)
        self.owner = self.owner.gather(1, before)
        self.path = [*(part.gather(1, before) for part in self.path), tokens]
        level = depth % self.state.size
        if level == 0:
            self._read_block(depth)
        logits = self.logits[:, :, level]
        if level == 0 or logits.shape[1] == 1:
            return logits
        return logits.gather(1, self.owner[..., None].expand(-1, -1, logits.shape[2]))

    def _read_block(self, depth: int) -> None:
        """A block behind each node: the last k tokens of its path, with the states that guessed them."""
        state, head, size, (frozen,) = self.state, self.state.head, self.state.size, self.state.head.frozen
        count, device = self.owner.shape[1], self.owner.device
        owner = self.owner[..., None]
        itself = torch.eye(count, dtype=torch.bool, device=device).expand(len(owner), -1, -1)
        self.seen = torch.cat([self.seen.gather(1, owner.expand(-1, -1, self.seen.shape[2])), itself], dim=2)
        above = self.states.gather(1, owner[..., None].expand(-1, -1, *self.states.shape[2:])).flatten(1, 2)
        embedded = frozen.embed(torch.stack(self.path, dim=2).flatten(1)).to(above.dtype)
        (cosine, sine), committed = self.tables, self.committed
        if len(committed) > 1:
            cosine, sine, committed = (pick_rows(part, self.rows) for part in (cosine, sine, committed))
        tables = cosine[:, depth - size : depth].repeat(1, count, 1), sine[:, depth - size : depth].repeat(1, count, 1)
        seen = self.seen[:, :, None, :, None].expand(-1, -1, size, -1, size).flatten(3).flatten(1, 2)
        start = self.committed.shape[1] + (self.seen.shape[2] - count) * size
        state.cache.aim([self.slots[row] for row in self.rows], [start] * len(self.rows))
        mask = level_mask(committed, seen, head.query_groups)
        read = head.layers[0](head.enter(embedded, above), tables, mask, state.blocks[0])
        self.states = read.unflatten(1, (count, size))
        self.logits, self.path = head.logits(self.states, frozen), []
        self.owner = torch.arange(count, device=device).expand(len(owner), -1)


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """Blocks that each end at a supervised slot, among all slots of the texts; a slot guesses k tokens past its root.

    The slot of level 0 is a block's first, and guesses the token behind the root of the last.
    """

    spans: Spans  # of the last slots
    slots: Tensor  # [k, A], which slots they are; those before a text's begin are its first
    reached: Tensor  # [k, A], whether all tokens up to the one that a slot guesses are supervised
    texts: Tensor  # [A], which text a block is of
    order: Tensor  # [A], in which the whole blocks of a text are glanced at; far behind all where a block is not whole
    run: Tensor  # [A], how many slots of a block are then glanced at: its first, and never all
    supervised: Tensor  # [M], slots of each text that are supervised

    @classmethod
    def everywhere(cls, batch: Batch, size: int) -> SlotBlocks:
        """A block that ends at each supervised slot."""
        return cls._of(batch, size, [0] * len(batch.lengths), 1, _draws(batch))

    @classmethod
    def side_by_side(cls, batch: Batch, size: int) -> SlotBlocks:
        """Blocks that share no slot, one of which ends at a supervised slot of each text that its seed decides."""
        firsts, draws = [], _draws(batch)
        for mask, draw in zip(batch.loss_mask.split(batch.lengths), draws, strict=True):
            last = mask[2:][size - 1 :].nonzero()[:, 0]  # fewer slots make no block
            drawn = int(last[int(torch.randint(len(last), (), generator=draw))]) if len(last) else 0
            firsts.append(size - 1 + drawn % size)
        return cls._of(batch, size, firsts, size, draws)

    @classmethod
    def _of(cls, batch: Batch, size: int, firsts: list[int], stride: int, draws: list[torch.Generator]) -> SlotBlocks:
        device, begin = batch.tokens.device, 0
        masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
        slots, reached, texts, order, run = (list[Tensor]() for _ in range(5))
        levels = torch.arange(size)[:, None]
        for number, (mask, first, draw) in enumerate(zip(masks, firsts, draws, strict=True)):
            last = first + stride * mask[first::stride].nonzero()[:, 0]
            slots.append(begin + (last + levels - (size - 1)).clamp(min=0))
            reached.append(F.pad(mask, (0, size))[last + levels].long().cumprod(0).bool())
            texts.append(torch.full_like(last, number))
            whole = reached[-1][-1]
            order.append(torch.full_like(last, sum(batch.lengths)))
            order[-1][whole] = torch.randperm(int(whole.sum()), generator=draw)
            run.append(torch.randint(1, size, last.shape, generator=draw))
            begin += len(mask)
        columns = [torch.cat(slots, 1), torch.cat(reached, 1), *map(torch.cat, (texts, order, run))]
        columns.append(torch.tensor([int(mask.sum()) for mask in masks]))
        return cls(Spans.of(masks, device, stride, firsts), *(upload(column, device) for column in columns))

    def weights(self, counted: Tensor) -> Tensor:
        """[k, A], what each slot weighs of those that count: a text weighs what is supervised of it, their sum is 1."""
        share = self.supervised / self.sum_by_text(counted).clamp(min=1) / self.supervised.sum().clamp(min=1)
        return counted * share.index_select(0, self.texts)

    def glance(self, wrong: Tensor, share: float) -> Tensor:
        """[k, A], slots that shall read their answers: on average such a share of those that guess wrong [k, A].

        A slot's answer has read those of the slots before it in its block, and tells them theirs. So the slots are the
        first of a block, and all that see their own answer are among them.
        """
        size = len(wrong)
        blocks = (self.sum_by_text(wrong) * (share * 2 / size)).floor()  # a run is half as long as a block on average
        glanced = self.order < blocks.index_select(0, self.texts)
        return glanced & (torch.arange(size, device=wrong.device)[:, None] < self.run)

    def sum_by_text(self, marked: Tensor) -> Tensor:
        """[M], how many slots of each text are marked [k, A]."""
        counts = torch.zeros(len(self.supervised), device=marked.device)
        return counts.index_add_(0, self.texts, marked.sum(0).to(counts.dtype))


def drafted_mask(batch: Batch, size: int) -> Tensor:
    """[N], the supervised tokens behind a root that so many slots stand before, itself included."""
    masks = batch.loss_mask.split(batch.lengths)
    return torch.cat([mask & (torch.arange(len(mask)) > size) for mask in masks])


def _draws(batch: Batch) -> list[torch.Generator]:
    """A random generator for each text, from its seed."""
    return [torch.Generator().manual_seed(seed) for seed in batch.seeds]
