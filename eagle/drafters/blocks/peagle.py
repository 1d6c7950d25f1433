"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3's network with mask tokens, for all levels in one forward pass.

A draft reads the root and then mask tokens. The root's slot predicts level 0, and mask token d predicts level d. In
this file "masks" are mask tokens.
"""

# S supervised slots, E mask tokens after all of them, n slots of one group with m mask tokens each, K levels, L taps
# H hidden, B sequences, T tokens of one, h heads of width w

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS, Budget
from eagle.core.drafter import Committed, HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.drafters.blocks.block_spans import (
    ATTEND,
    add_blocks,
    attend_block,
    attend_sequences,
)
from eagle.drafters.blocks.injected_state import grow_slots
from eagle.drafters.parts.divisors import Divisor, level_shares, sum_divisors
from eagle.drafters.parts.objectives import Objective, OwnHead, distillation_loss
from eagle.drafters.parts.sequence_blocks import (
    Pair,
    add_rows,
    key_value,
    position_tables,
    query_and_residual,
    read_context,
    read_rows,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import SequenceState
from eagle.drafters.parts.spans import Spans
from eagle.drafters.recurrent.fused_head import FusedHead, FusedSettings


class PeagleSettings(FusedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["peagle"] = "peagle"
    blocks: int = Field(4, ge=1)  # number of decoder blocks
    # number of drafted levels: the first from the root, the others from masks
    depths: int = Field(8, ge=1, le=MOST_LEVELS)
    # in training, share of the slots with d masks that get another mask
    keep: float = Field(0.7, gt=0, le=1)
    keep_least: float = Field(0.2, ge=0, le=1)  # minimum share of all slots at every depth
    # id of the mask token; by default the last token of the vocabulary
    mask_token: int | None = None
    # divisor of the loss: "texts": a mean for each sequence, or "reached": one mean over all slots and masks
    divisor: Literal["texts", Divisor] = "texts"


class Peagle(FusedHead):
    """(states of token i, token i + 1) -> a state whose logits predict token i + 2; each mask after it, one more."""

    Settings = PeagleSettings
    settings: PeagleSettings
    sharpness = 1.0  # the factor on logits when the nodes of a tree are compared
    reads_all_levels = False  # `grow_slots` asks for it

    def __init__(self, settings: PeagleSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        # what a mask token is read with in place of the target's states, one vector for each tap
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.taps) * shape.hidden_size))

    @classmethod
    def for_target(
        cls,
        settings: PeagleSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> FusedHead:
        """Return a new head as `FusedHead.for_target` does, with a default mask token if the settings have none.

        Args:
            settings: The head's settings; a mask token that the target does not have is refused.
            target_config: The target's transformers config.
            target_head: The target's embedding and LM head, from which weights may be copied.
            supervised: The supervised tokens of each training sequence, from which a draft vocabulary may be chosen.
        """
        # by default the mask token is the last of the vocabulary, which may be a filler that no sequence has
        count = target_config.vocab_size
        token = count - 1 if settings.mask_token is None else settings.mask_token
        if not 0 <= token < count:
            raise ValueError(
                f"drafter.mask_token is {token}, expected 0 to {count - 1}: name a token of the target's"
            )
        settings = settings.model_copy(update={"mask_token": token})
        return super().for_target(settings, target_config, target_head, supervised)

    @classmethod
    def sizes(cls, settings: PeagleSettings) -> dict[str, int]:
        """Return the sizes that the settings decide; all others are the target's."""
        return {**super().sizes(settings), "num_hidden_layers": settings.blocks}

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        settings = self.settings
        return {
            "network": "peagle",
            "taps": settings.taps,
            "norm_before_residual": settings.norm_before_residual,
            "blocks": settings.blocks,
            "mask_token": settings.mask_token,
        }

    @property
    def parts(self) -> Parts:
        """What a faulty conversion could swap, which `eagle doctor` checks.

        It is what EAGLE-3 has, the mask token, and the mask state, whose columns belong to one tap each.
        """
        parts = super().parts
        return replace(
            parts, by_tap=(*parts.by_tap, "mask_hidden"), tokens=("mask_token",), levels=self.levels
        )

    @property
    def levels(self) -> int:
        """The number of levels that one forward gives, one token each: of the root, then of the mask tokens."""
        return int(self.settings.depths)

    def mask_state(self) -> Tensor:
        """Return the learned state [1, H] that a mask token is read with, in place of the target's."""
        return self.fuse_taps(self.mask_hidden.view(1, len(self.taps), -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss at the S supervised slots and at E mask tokens sampled after them, as "total".

        Each of them is a row, which predicts one token.
        """
        settings = self.settings
        # how many mask tokens come after each slot; level 0 has none, as the root's slot predicts it
        mask_counts = draw_masks(batch, self.levels - 1, settings.keep, settings.keep_least)
        masks = MaskRows.of(mask_counts, batch.tokens.device)
        # [S + E], [S, H] and [E, H]
        row_indices, slot_states, mask_states = self.read_masks(batch, target_head, masks)
        weights = self.row_weights(batch, masks, len(slot_states))
        # A row with index i predicts token i + 2, as the target does from its state i + 1. Tokens outside the draft
        # vocabulary are not learned.
        if self.drafts is not None:
            weights = weights * self.t2d[batch.tokens.index_select(0, row_indices + 2)]
        target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, row_indices + 1)
        # slots and mask tokens are rows of one step: L = sum_r w_r D(p_r, q_r); the second result is the loss by step
        total, _ = distillation_loss(
            self.norm(torch.cat([slot_states, mask_states]))[None],
            target_hidden,
            weights[None],
            (OwnHead(self.lm_head.weight), self.narrow_once(target_head, self.drafts)),
            objective=Objective(settings.loss),
            dtype=target_head.weight.dtype,
        )
        return {"total": total}

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """Return what the loss of these sequences is divided by: one number for all levels, or one for each level.

        The setting `divisor` says what is counted, see `divisors.Divisor`.

        Args:
            masks: The loss mask [T] of each sequence.
            seeds: The random seed of each sequence, which decides its mask tokens.
        """
        settings = self.settings
        depths = torch.arange(self.levels)
        # for each sequence, whether each supervised slot reaches each level: [slots, levels] bool
        reached = []
        for mask, seed in zip(masks, seeds, strict=True):
            # the same mask tokens as in `forward`, because the seed is the same
            counts = draw_sequence_masks(
                mask[2:], seed, self.levels - 1, settings.keep, least=settings.keep_least
            )
            # a slot with c mask tokens reaches the levels 0 to c; mask[2:] marks the supervised slots
            reached.append(counts[mask[2:], None] >= depths)
        # "texts" gives each sequence the weight of its supervised slots, which are summed
        divisor: Divisor = "slots" if settings.divisor == "texts" else settings.divisor
        return sum_divisors(divisor, torch.cat(reached), [1.0] * self.levels)

    def row_weights(self, batch: Batch, masks: MaskRows, slots: int) -> Tensor:
        """Return the loss weights [S + E] of the S supervised slots and the E mask tokens, divided by the divisors.

        Args:
            batch: The sequences.
            masks: The mask tokens.
            slots: S.
        """
        # a batch that is a part of a training step has the divisors of the whole step
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        dtype = self.fc.weight.dtype
        device = batch.tokens.device
        if self.settings.divisor == "texts":
            # one divisor, the number of supervised slots; at least 1, as a batch may have none
            return upload((weigh_sequences(batch, masks) / max(*divisors, 1)).to(dtype), device)
        # [K], the weight 1 of each of K levels divided by its divisor; a row takes that of its level
        shares = level_shares([1.0] * self.levels, divisors, dtype, device)
        depths = F.pad(masks.depths, (slots, 0))  # the level of each row: 0 at the slots themselves
        return shares.index_select(0, depths)

    def read_masks(
        self,
        batch: Batch,
        target_head: TargetHead,
        masks: MaskRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network at the S supervised slots and at the E mask tokens after them.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's embedding.
            masks: The mask tokens.

        Returns:
            The row indices [S + E]: the row of index i predicts token i + 2 of the batch, so mask token d of slot i has
            the index i + d. And the states of the slots [S, H] and of the mask tokens [E, H].
        """
        # [N] each for the N slots of all sequences: their indices among all tokens, their positions in their sequence;
        # and spans of the supervised ones
        slots, positions, spans = sequence_positions(batch, batch.tokens.device)
        dtype = self.layers[0].mlp.up_proj.weight.dtype
        # [N, L, H], the target's states at the head's L taps
        features = batch.select_taps(self.taps)[slots].to(dtype)
        tables_at = position_tables(
            self.rotary, features, max(batch.lengths, default=0) + self.levels
        )
        tokens = self.project_tokens(
            target_head.embed(batch.tokens.index_select(0, slots + 1)).to(dtype)
        )
        inputs = self.block_inputs(tokens, self.fuse_taps(features))
        # keys and values of every transformer block, and the last block's inputs, at all slots
        context, inputs = read_context(
            self.layers, inputs, tables_at(positions), batch, run=self._run
        )

        # the last block's output at the supervised slots
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        tables = tables_at(positions.index_select(0, spans.rows))
        slot_states = read_rows(
            self.layers[-1], inputs, tables, context[-1], spans=spans, run=self._run
        )
        # mask token d comes d positions after its slot
        tables = tables_at(positions.index_select(0, masks.spans.rows) + masks.depths)
        mask_states = self._read_blocks(target_head, masks, tables, context)
        rows = torch.cat([spans.rows, masks.spans.rows])
        depths = F.pad(masks.depths, (len(spans.rows), 0))  # 0 at the slots themselves
        return slots.index_select(0, rows) + depths, slot_states, mask_states

    def _read_blocks(
        self,
        target_head: TargetHead,
        masks: MaskRows,
        tables: tuple[Tensor, Tensor],
        context: Sequence[Pair],
    ) -> Tensor:
        """Return the states [E, H] of the E mask tokens, whose inputs are all the same and whose positions differ.

        Args:
            target_head: The target's embedding.
            masks: The mask tokens.
            tables: Rotary tables, cosines and sines [E, w], at their positions.
            context: Each transformer block's keys and values [key heads, N, w] at all N slots.
        """
        token = upload(torch.tensor([self.settings.mask_token]), masks.depths.device)
        state = self.mask_state()
        inputs = self.block_inputs(
            self.project_tokens(target_head.embed(token).to(state.dtype)), state
        )
        inputs = tuple(tensor.expand(len(masks.depths), -1) for tensor in inputs)
        for layer_index, block in enumerate(self.layers):
            # the first transformer block reads the token too
            if layer_index:
                inputs = block.inputs(state)
            # a mask token attends to the mask tokens before it after the same slot, by this block's keys and values
            mask_pair = self._run(key_value, block, inputs, tables)
            query, residual = self._run(query_and_residual, block, inputs, tables)
            attended = masks.attend(query, context[layer_index], mask_pair)
            state = self._run(add_rows, block, attended, residual)
        return state

    # -- validation ---------------------------------------------------------------------------------------------------

    def level_states(self, batch: Batch, target_head: TargetHead, levels: int) -> list[Tensor]:
        """Return the states [S, H] of each of the first `levels` levels at the S supervised slots, for validation.

        Every supervised slot gets a mask token for each level but the first, without sampling.
        """
        count = min(levels, self.levels) - 1
        # the number of mask tokens after each slot: `count` after supervised ones, 0 after others
        masks_by_slot = [count * supervised for supervised in supervised_slots(batch)]
        masks = MaskRows.of(masks_by_slot, batch.tokens.device)
        # the row indices are not needed
        _, slot_states, mask_states = self.read_masks(batch, target_head, masks)
        # all slots have equally many mask tokens, so these lie slot by slot: [S, count, H]
        by_level = mask_states.unflatten(0, (len(slot_states), count)).unbind(1)
        return [slot_states, *by_level]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MaskedState:
        """Return the state for several sequences drafted in a batch."""
        return MaskedState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft after the first reads: none, as the first gives all levels."""
        return ()

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens the next draft's first forward reads.

        They are the accepted tokens, the root, and a mask token for each level after the first.

        Args:
            accepted: How many draft tokens of the last tree were accepted.
            depth: The levels of that tree; the next one is taken to have as many.
        """
        # the root and depth - 1 mask tokens; the root is read even if nothing is drafted
        return accepted + max(min(depth, self.levels), 1)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function whose seconds are measured: a forward of `rows` tokens after `context` cached tokens.

        It computes the logits of all levels, even if fewer rows are to be scored.

        Args:
            context: How many tokens are in the KV cache before the forward.
            rows: How many tokens the forward reads.
            scored: How many of them, from the last, get logits at least.
        """
        return super().probe(context, rows, max(scored, min(rows, self.levels)))


class MaskedState(SequenceState):
    """The KV cache of many sequences, for drafts that read mask tokens.

    Keys and values of mask tokens are overwritten by the next committed tokens.
    """

    head: Any

    @torch.inference_mode()
    def __init__(self, head: Any) -> None:
        super().__init__(head)
        # one mask token for each of K levels but the first, which the root's slot predicts
        count = head.levels - 1
        mask_tokens = torch.full((count,), head.settings.mask_token)
        # the mask tokens [K - 1], and the states [K - 1, H] that they are read with, all the same
        self.masks = mask_tokens, head.mask_state().expand(count, -1)
        self.levels = 1  # of the deepest draft of this call of `propose`

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row; its levels come from the states after the root and the mask tokens.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, with its states, and the
                new root.
            budgets: By row, the limits on its tree; trees have at most the head's number of levels.
        """
        budgets = {row: budget.within(self.head.levels) for row, budget in budgets.items()}
        depths = [budgets[row].depth for row in updates if not budgets[row].is_empty]
        # at least the root is read, even if all budgets are empty; `_read_group` reads a mask token for each level more
        self.levels = max([1, *depths])
        # the rows in the order of the cache, their requests, and the states of the levels [B, levels, H]
        rows, requests, states = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_slots(self.head, requests, states), strict=True))

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Read the new tokens, root and mask tokens of B rows, and return the states of their levels [B, levels, H].

        `SequenceState` calls it for groups of rows whose numbers of new tokens differ little.
        """
        tokens, states = self.masks
        count = self.levels - 1
        return self._read_rows(updates, (tokens[:count], states[:count]))


@dataclass(frozen=True, slots=True)
class MaskRows:
    """The E mask tokens after the slots of a batch, in an order that makes attention efficient.

    They are grouped by how many mask tokens their slot has. In a group they are in the order of the slots, and those of
    a slot are consecutive. Each mask token is a row of attention.
    """

    groups: list[
        tuple[Spans, int]
    ]  # the slots of each group, and how many mask tokens each of them has
    spans: Spans  # [E], the slot of each mask token
    depths: Tensor  # [E], 1 for the first mask token of a slot, and so on
    runs: list[
        tuple[int, int]
    ]  # for consecutive mask tokens of one sequence: its index, and how many they are

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device) -> MaskRows:
        """Lay out the mask tokens after the slots of a batch.

        Args:
            masks: For each sequence, how many mask tokens come after each slot [T - 2], on the host.
            device: Where the rows are used.
        """
        groups = []
        spans_runs = []  # of each run: its sequence's first slot, and the slot of each mask token
        # begins with an empty tensor, as there may be no mask tokens to concatenate
        depths = [torch.empty(0, dtype=torch.long)]
        runs = []
        lengths = [len(counts) for counts in masks]  # slots of each sequence
        begins = list(
            accumulate(lengths, initial=0)
        )  # the index of each sequence's first slot among all slots
        # an empty tensor has no maximum
        max_count = max((int(counts.max()) for counts in masks if len(counts)), default=0)
        for size in range(1, max_count + 1):
            # of each sequence, the slots with `size` mask tokens
            slots = [(counts == size).nonzero()[:, 0] for counts in masks]
            if any(map(len, slots)):
                groups.append((Spans.at(slots, lengths, device), size))
            for seq, members in enumerate(slots):
                if not len(members):
                    continue
                # a mask token sees the sequence up to its slot, so the slot's row is repeated for each mask token
                run = (begins[seq] + members).repeat_interleave(size).tolist()
                spans_runs.append((begins[seq], run))
                depths.append(torch.arange(1, size + 1).repeat(len(members)))
                runs.append((seq, len(run)))
        rows = torch.tensor([row for _, run in spans_runs for row in run], dtype=torch.long)
        spans = Spans(upload(rows, device), spans_runs, count=sum(lengths))
        return cls(groups, spans, upload(torch.cat(depths), device), runs)

    def attend(self, query: Tensor, context: Pair, mask_pair: Pair, kernel: Any = None) -> Tensor:
        """Return the attention output [h, E, w] of the E mask tokens, in h heads of width w.

        They attend to their sequence up to their slot, and to the slot's mask tokens up to themselves.

        Args:
            query: [h, E, w].
            context: Keys and values [key heads, N, w] at all N slots.
            mask_pair: Keys and values [key heads, E, w] of the mask tokens.
            kernel: Fused attention to use in place of the device's, for tests.
        """
        # no mask tokens: the query is empty
        if not self.groups:
            return query
        # attention to the sequences alone, and the log-sum-exp of its scores
        by_sequence: Pair | None = None
        if kernel or query.device.type not in ATTEND:
            # one kernel call for all mask tokens, as a call for each group would compile a kernel for each group size
            output, log_sum = attend_sequences(query, *context, self.spans, kernel)
            by_sequence = output, log_sum[..., None]
        attended = []
        done = 0  # mask tokens of the groups so far
        # a group of n slots with `size` mask tokens each is a batch of blocks: [h, n, size, w]
        for spans, size in self.groups:
            rows = slice(done, done + len(spans.rows) * size)
            done = rows.stop
            mask_query = _by_slot(query, rows, size)
            key, value = (_by_slot(tensor, rows, size) for tensor in mask_pair)
            if by_sequence is None:
                seen = attend_block(mask_query, *context, spans, (key, value), causal=True)
            else:
                output, log_sum = (_by_slot(tensor, rows, size) for tensor in by_sequence)
                seen = add_blocks(output, log_sum, mask_query, (key, value), causal=True)
            attended.append(seen.flatten(1, 2))
        return torch.cat(attended, dim=1)


def _by_slot(tensor: Tensor, rows: slice, size: int) -> Tensor:
    """Return [h, n, m, ..] of a tensor [h, E, ..] with a row for each of all E mask tokens.

    It has the rows of one group, whose slice is `rows`: m = `size` mask tokens for each of its n slots.
    """
    return tensor[:, rows].unflatten(1, (-1, size))


def supervised_slots(batch: Batch) -> list[Tensor]:
    """Return a bool [T - 2] for each sequence of T tokens: whether the token that a slot predicts is supervised."""
    # slot i predicts token i + 2
    return [mask[2:] for mask in batch.masks]


def draw_masks(batch: Batch, max_masks: int, keep: float, least: float) -> list[Tensor]:
    """Sample how many mask tokens come after each slot in training, [T - 2] for each sequence of T tokens.

    Args:
        batch: The sequences, each of which has a seed.
        max_masks: The most mask tokens after a slot.
        keep: The share of slots with d mask tokens that get one more.
        least: The lowest share of all supervised slots that get d mask tokens, for every d; see `draw_sequence_masks`.
    """
    counts = []
    for supervised, seed in zip(supervised_slots(batch), batch.seeds, strict=True):
        counts.append(draw_sequence_masks(supervised, seed, max_masks, keep, least=least))
    return counts


def draw_sequence_masks(
    supervised: Tensor,
    seed: int,
    max_masks: int,
    keep: float,
    *,
    least: float,
) -> Tensor:
    """Sample how many mask tokens come after each slot of a sequence of T tokens (COD: conditional drop of tokens).

    Training all levels at all slots would be too much work, so deeper levels are trained at fewer slots. Of n
    supervised slots, n - d could have d mask tokens. A share max(keep^d, least) of these gets them, sampled from the
    slots that have d - 1 mask tokens and whose answer has another supervised token.

    Args:
        supervised: [T - 2] bool, the supervised slots.
        seed: The sequence's random seed.
        max_masks: The largest number of mask tokens after a slot.
        keep: The share of slots with d mask tokens that get one more.
        least: The lowest share of all supervised slots, at every d.

    Returns:
        [T - 2], the number of mask tokens after each slot, 0 after slots that are not supervised.
    """
    generator = torch.Generator().manual_seed(seed)
    # slots after the end of the sequence are not supervised
    padded = F.pad(supervised, (0, max_masks))
    sampled = supervised.nonzero()[:, 0]  # the slots with at least `depth` - 1 mask tokens
    slots = len(sampled)
    counts = torch.zeros_like(supervised, dtype=torch.long)
    for depth in range(1, max_masks + 1):
        # COD: a slot gets d mask tokens only if it has d - 1, and slot i + d is supervised too
        candidates = sampled[padded[sampled + depth]]
        # a short sequence may have fewer supervised slots than `depth`
        wanted = max(int((slots - depth) * max(keep**depth, least)), 0)
        # the order that sorts random numbers is a random one
        order = torch.empty_like(candidates).random_(generator=generator).argsort()
        sampled = candidates[order[:wanted]]
        counts[sampled] = depth
    return counts


def weigh_sequences(batch: Batch, masks: MaskRows) -> Tensor:
    """Return the loss weights [S + E] of S supervised slots and E mask tokens, not yet divided by a divisor.

    A sequence's weight is its number of supervised slots, however many mask tokens they have. All rows of the sequence,
    its supervised slots and mask tokens, share it equally.
    """
    # of each sequence: its supervised slots
    slots = [int(supervised.sum()) for supervised in supervised_slots(batch)]
    rows = list(slots)  # of each sequence: supervised slots and mask tokens
    for seq, count in masks.runs:
        rows[seq] += count
    weights = []
    # in the order of the rows: the slots of all sequences, then the mask tokens
    for seq, count in [*enumerate(slots), *masks.runs]:
        # a sequence without supervised slots has no rows
        share = slots[seq] / max(rows[seq], 1)
        weights.append(torch.full((count,), share, dtype=torch.float64))
    return torch.cat(weights)
