"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3's network over masks, with all levels in one forward."""

# S supervised slots, E masks after them in all, n slots of one group with m masks each, K levels, L taps, H hidden
# B sequences, T tokens of one, h heads of width w

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
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
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.text_blocks import (
    Pair,
    add_rows,
    key_value,
    position_tables,
    query_and_residual,
    read_context,
    read_rows,
    text_slots,
)
from eagle.drafters.parts.text_state import TextState
from eagle.drafters.recurrent.fused_head import FusedHead, FusedSettings


class PeagleSettings(FusedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["peagle"] = "peagle"
    blocks: int = Field(4, ge=1)  # transformer blocks that are stacked
    # levels that are drafted: of the root, then of masks
    depths: int = Field(8, ge=1, le=MOST_LEVELS)
    # in training, share of the slots with d masks that get one more
    keep: float = Field(0.7, gt=0, le=1)
    keep_least: float = Field(0.2, ge=0, le=1)  # lowest share of all slots, at every depth
    # the token that mask slots read; by default the last of the vocabulary
    mask_token: int | None = None
    # of the loss: each sequence a mean over its rows, or "reached": all alike
    divisor: Literal["texts", Divisor] = "texts"


class Peagle(FusedHead):
    """(states of token i, token i + 1) -> a state whose logits predict token i + 2; each mask after it, one more."""

    Settings = PeagleSettings
    settings: PeagleSettings
    sharpness = 1.0

    def __init__(self, settings: PeagleSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.taps) * shape.hidden_size))

    @classmethod
    def for_target(
        cls,
        settings: PeagleSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> FusedHead:
        """Return a new head, with its mask token resolved."""
        count = target_config.vocab_size
        token = count - 1 if settings.mask_token is None else settings.mask_token
        if not 0 <= token < count:
            raise ValueError(
                f"drafter.mask_token is {token}, expected 0 to {count - 1}: name a token of the target's"
            )
        settings = settings.model_copy(update={"mask_token": token})
        return super().for_target(settings, target_config, frozen, supervised)

    @classmethod
    def sizes(cls, settings: PeagleSettings) -> dict[str, int]:
        """Return the shape's sizes: the number of blocks."""
        return {**super().sizes(settings), "num_hidden_layers": settings.blocks}

    @property
    def network(self) -> dict[str, Any]:
        """The network: its taps, where it has norms, and its mask token."""
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
        """The parts of EAGLE-3's network, the mask token, and the state of masks by tap."""
        parts = super().parts
        return replace(
            parts, by_tap=(*parts.by_tap, "mask_hidden"), tokens=("mask_token",), levels=self.levels
        )

    @property
    def levels(self) -> int:
        """The number of tokens that one forward guesses."""
        return int(self.settings.depths)

    def mask_state(self) -> Tensor:
        """Return [1, H], the learned state that a mask reads."""
        return self.fuse_taps(self.mask_hidden.view(1, len(self.taps), -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss at the supervised slots and the masks sampled after them."""
        settings = self.settings
        counts = draw_masks(batch, self.levels - 1, settings.keep, settings.keep_least)
        masks = MaskRows.of(counts, batch.tokens.device)
        token_indices, slot_states, mask_states = self.read_masks(batch, frozen, masks)
        weights = self.row_weights(batch, masks, len(slot_states))
        if self.drafts is not None:
            weights = weights * self.t2d[batch.tokens.index_select(0, token_indices + 2)]
        target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, token_indices + 1)
        # slots and masks are rows of one step: L = sum_r w_r D(p_r, q_r)
        total, _ = distillation_loss(
            self.norm(torch.cat([slot_states, mask_states]))[None],
            target_hidden,
            weights[None],
            (OwnHead(self.lm_head.weight), self.narrow_to_draft_vocab(frozen)),
            objective=Objective(settings.loss),
            dtype=frozen.weight.dtype,
        )
        return {"total": total}

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """Return the divisor of all levels, or of each, by the masks sampled after the slots of these sequences."""
        settings = self.settings
        depths = torch.arange(self.levels)
        reached = []
        for mask, seed in zip(masks, seeds, strict=True):
            # `forward` samples the same masks, as the seed decides it
            counts = draw_text_masks(
                mask[2:], seed, self.levels - 1, settings.keep, least=settings.keep_least
            )
            reached.append(counts[mask[2:], None] >= depths)
        divisor: Divisor = "slots" if settings.divisor == "texts" else settings.divisor
        return sum_divisors(divisor, torch.cat(reached), [1.0] * self.levels)

    def row_weights(self, batch: Batch, masks: MaskRows, slots: int) -> Tensor:
        """Return [S + E], the weights of supervised slots and masks."""
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        dtype = self.fc.weight.dtype
        device = batch.tokens.device
        if self.settings.divisor == "texts":
            return upload((weigh_sequences(batch, masks) / max(*divisors, 1)).to(dtype), device)
        shares = level_shares([1.0] * self.levels, divisors, dtype, device)
        depths = F.pad(masks.depths, (slots, 0))  # 0 at the slots themselves
        return shares.index_select(0, depths)

    def read_masks(
        self,
        batch: Batch,
        frozen: TargetHead,
        masks: MaskRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what supervised slots and the masks after them become.

        Returns:
            The indices [S + E] of slots and masks among all tokens, and their states [S, H] and [E, H].
        """
        slots, positions, spans = text_slots(batch, batch.tokens.device)
        dtype = self.layers[0].mlp.up_proj.weight.dtype
        features = batch.select_taps(self.taps)[slots].to(dtype)
        tables_at = position_tables(
            self.rotary, features, max(batch.lengths, default=0) + self.levels
        )
        tokens = self.project_tokens(
            frozen.embed(batch.tokens.index_select(0, slots + 1)).to(dtype)
        )
        inputs = self.block_inputs(tokens, self.fuse_taps(features))
        context, inputs = read_context(
            self.layers, inputs, tables_at(positions), batch, run=self._run
        )

        # the last block's output at the supervised slots
        inputs = tuple(tensor.index_select(0, spans.rows) for tensor in inputs)
        tables = tables_at(positions.index_select(0, spans.rows))
        slot_states = read_rows(
            self.layers[-1], inputs, tables, context[-1], spans=spans, run=self._run
        )
        # the mask of depth d has the position d after that of its slot
        tables = tables_at(positions.index_select(0, masks.spans.rows) + masks.depths)
        mask_states = self._read_blocks(frozen, masks, tables, context)
        rows = torch.cat([spans.rows, masks.spans.rows])
        token_indices = slots.index_select(0, rows) + F.pad(masks.depths, (len(spans.rows), 0))
        return token_indices, slot_states, mask_states

    def _read_blocks(
        self,
        frozen: TargetHead,
        masks: MaskRows,
        tables: tuple[Tensor, Tensor],
        context: Sequence[Pair],
    ) -> Tensor:
        """Return [E, H], the states of masks, which differ only by position."""
        token = upload(torch.tensor([self.settings.mask_token]), masks.depths.device)
        state = self.mask_state()
        inputs = self.block_inputs(self.project_tokens(frozen.embed(token).to(state.dtype)), state)
        inputs = tuple(tensor.expand(len(masks.depths), -1) for tensor in inputs)
        for layer_index, block in enumerate(self.layers):
            if layer_index:
                inputs = block.inputs(state)
            # a mask sees the masks before it by their keys and values in the same block
            mask_pair = self._run(key_value, block, inputs, tables)
            query, residual = self._run(query_and_residual, block, inputs, tables)
            attended = masks.attend(query, context[layer_index], mask_pair)
            state = self._run(add_rows, block, attended, residual)
        return state

    # -- validation ---------------------------------------------------------------------------------------------------

    def level_states(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Tensor]:
        """Return the states [S, H] of each level at every supervised slot.

        Each slot gets a mask token for every level but the first.
        """
        count = min(levels, self.levels) - 1
        # without sampling: every supervised slot has a mask for each level
        masks_by_slot = [count * supervised for supervised in supervised_slots(batch)]
        masks = MaskRows.of(masks_by_slot, batch.tokens.device)
        _, slot_states, mask_states = self.read_masks(batch, frozen, masks)
        by_level = mask_states.unflatten(0, (len(slot_states), count)).unbind(1)
        return [slot_states, *by_level]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MaskedState:
        """Return the state for several sequences drafted in a batch."""
        return MaskedState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return no rows: the first forward gives all levels."""
        return ()

    def unread(self, accepted: int, depth: int) -> int:
        """Return the accepted tokens, the root, and a mask for each level after the first."""
        return accepted + max(min(depth, self.levels), 1)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: the forward of `rows` rows after `context` tokens, with logits for the levels."""
        return super().probe(context, rows, max(scored, min(rows, self.levels)))


class MaskedState(TextState):
    """Keys and values of many sequences; those of masks are overwritten by the tokens that are committed next."""

    head: Any

    @torch.inference_mode()
    def __init__(self, head: Any) -> None:
        super().__init__(head)
        count = head.levels - 1
        mask_tokens = torch.full((count,), head.settings.mask_token)
        self.masks = mask_tokens, head.mask_state().expand(count, -1)
        self.levels = 1  # of the deepest draft that is asked for

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees whose levels are the states after the root and the masks."""
        budgets = {row: budget.within(self.head.levels) for row, budget in budgets.items()}
        depths = [budgets[row].depth for row in updates if not budgets[row].is_empty]
        self.levels = max([1, *depths])
        rows, seeds, hidden = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_slots(self.head, seeds, hidden), strict=True))

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Return [B, K, H], the states of the levels after each row's sequence."""
        tokens, states = self.masks
        count = self.levels - 1
        return self._read_rows(updates, (tokens[:count], states[:count]))


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Masks in groups of slots that have equally many, those of a slot one after the other."""

    groups: list[tuple[Spans, int]]  # the slots among all, and how many masks each of them has
    spans: Spans  # [E], the slot of each mask
    depths: Tensor  # [E], from 1 on
    runs: list[tuple[int, int]]  # the sequence of the next masks, and how many they are

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device) -> MaskRows:
        """Return the masks after the slots of sequences.

        Args:
            masks: [T - 2] of each sequence, how many masks come after each slot.
            device: Where the rows are used.
        """
        groups = []
        spans_runs = []
        rows = []  # by run
        depths = [torch.empty(0, dtype=torch.long)]
        runs = []
        lengths = [len(counts) for counts in masks]
        begins = list(accumulate(lengths, initial=0))
        max_count = max((int(counts.max()) for counts in masks if len(counts)), default=0)
        for size in range(1, max_count + 1):
            slots = [(counts == size).nonzero()[:, 0] for counts in masks]
            if any(map(len, slots)):
                groups.append((Spans.at(slots, lengths, device), size))
            for seq, members in enumerate(slots):
                if not len(members):
                    continue
                # masks attend from the row of their slot, which comes once for each of its masks
                run = (begins[seq] + members).repeat_interleave(size).tolist()
                rows.append(run)
                spans_runs.append((begins[seq], run[0], run[-1] + 1))
                depths.append(torch.arange(1, size + 1).repeat(len(members)))
                runs.append((seq, len(run)))
        all_rows = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
        spans = Spans(upload(all_rows, device), spans_runs, sum(lengths), scattered=tuple(rows))
        return cls(groups, spans, upload(torch.cat(depths), device), runs)

    def attend(self, query: Tensor, context: Pair, mask_pair: Pair, kernel: Any = None) -> Tensor:
        """Return [h, E, w], what masks see of their sequences and of the masks before them.

        Args:
            query: [h, E, w].
            context: keys and values of all slots.
            mask_pair: keys and values of the masks.
            kernel: fused attention in place of the device's own.
        """
        if not self.groups:
            return query
        seen_before: Pair | None = None  # what all masks see of their sequences
        if kernel or query.device.type not in ATTEND:
            # one kernel call for all masks, as each size of a group would compile another
            output, log_sum = attend_sequences(query, *context, self.spans, kernel)
            seen_before = output, log_sum[..., None]
        attended = []
        done = 0
        for spans, size in self.groups:
            rows = slice(done, done + len(spans.rows) * size)
            done = rows.stop
            mask_query = _by_slot(query, rows, size)
            key, value = (_by_slot(tensor, rows, size) for tensor in mask_pair)
            if seen_before is None:
                seen = attend_block(mask_query, *context, spans, (key, value), causal=True)
            else:
                output, log_sum = (_by_slot(tensor, rows, size) for tensor in seen_before)
                seen = add_blocks(output, log_sum, mask_query, (key, value), causal=True)
            attended.append(seen.flatten(1, 2))
        return torch.cat(attended, dim=1)


def _by_slot(tensor: Tensor, rows: slice, size: int) -> Tensor:
    """Return [h, n, m, ..], the rows of a group's masks, by their slots."""
    return tensor[:, rows].unflatten(1, (-1, size))


def supervised_slots(batch: Batch) -> list[Tensor]:
    """Return [T - 2] for each sequence, whether the token that a slot predicts is supervised."""
    return [mask[2:] for mask in batch.masks]


def draw_masks(batch: Batch, max_masks: int, keep: float, least: float) -> list[Tensor]:
    """Return [T - 2] for each sequence, how many masks come after each slot."""
    counts = []
    for supervised, seed in zip(supervised_slots(batch), batch.seeds, strict=True):
        counts.append(draw_text_masks(supervised, seed, max_masks, keep, least=least))
    return counts


def draw_text_masks(
    supervised: Tensor,
    seed: int,
    max_masks: int,
    keep: float,
    *,
    least: float,
) -> Tensor:
    """Return [T - 2], how many masks come after each slot of a sequence (COD: conditional drop of tokens).

    Of n supervised slots of one answer, n - d could have d masks. A share max(keep^d, least) of these gets them,
    sampled from the slots that have d - 1 and whose answer continues.

    Args:
        supervised: [T - 2], the supervised slots.
        seed: decides the sample.
        max_masks: the largest number of masks after a slot.
        keep: the share of slots with d masks that get one more.
        least: the lowest share of all slots, at every depth.
    """
    generator = torch.Generator().manual_seed(seed)
    padded = F.pad(supervised, (0, max_masks))
    sampled = supervised.nonzero()[:, 0]
    slots = len(sampled)
    counts = torch.zeros_like(supervised, dtype=torch.long)
    for depth in range(1, max_masks + 1):
        # COD: d masks after a slot only if d - 1 are there, and its answer continues for d tokens
        candidates = sampled[padded[sampled + depth]]
        wanted = max(int((slots - depth) * max(keep**depth, least)), 0)
        order = torch.empty_like(candidates).random_(generator=generator).argsort()
        sampled = candidates[order[:wanted]]
        counts[sampled] = depth
    return counts


def weigh_sequences(batch: Batch, masks: MaskRows) -> Tensor:
    """Return [S + E], the weights of supervised slots and masks: each row of a sequence weighs the same.

    A sequence weighs as much as it has supervised slots, however many masks they have.
    """
    slots = [int(supervised.sum()) for supervised in supervised_slots(batch)]
    rows = list(slots)
    for seq, count in masks.runs:
        rows[seq] += count
    weights = []
    for seq, count in [*enumerate(slots), *masks.runs]:
        share = slots[seq] / max(rows[seq], 1)
        weights.append(torch.full((count,), share, dtype=torch.float64))
    return torch.cat(weights)
