"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3's network over masks, with all levels in one forward."""

# S supervised slots, A anchors, n of them with as many masks m, E masks of all, K levels, L taps, B rows of text
# T tokens of a text, H width, h heads of width w

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
from eagle.drafters.blocks.block_spans import ATTEND, add_blocks, attend_block, read_texts
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
    depths: int = Field(8, ge=1, le=MOST_LEVELS)  # levels that are drafted: of the root, then of masks
    keep: float = Field(0.7, gt=0, le=1)  # in training, share of the slots with d masks that get one more
    keep_least: float = Field(0.2, ge=0, le=1)  # lowest share of all slots, at every depth
    mask_token: int | None = None  # the token that mask slots read; by default the last of the vocabulary
    divisor: Literal["texts", Divisor] = "texts"  # of the loss: each text a mean over its rows, or "reached": all alike


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
        """A new head, with its mask token resolved."""
        count = target_config.vocab_size
        token = count - 1 if settings.mask_token is None else settings.mask_token
        if not 0 <= token < count:
            raise ValueError(f"drafter.mask_token is {token}, expected 0 to {count - 1}: name a token of the target's")
        settings = settings.model_copy(update={"mask_token": token})
        return super().for_target(settings, target_config, frozen, supervised)

    @classmethod
    def sizes(cls, settings: PeagleSettings) -> dict[str, int]:
        """The shape's sizes: the number of blocks."""
        return {**super().sizes(settings), "num_hidden_layers": settings.blocks}

    @property
    def network(self) -> dict[str, Any]:
        """The network: its taps, the place of its norms, and its mask token."""
        named = ("taps", "norm_before_residual", "blocks", "mask_token")
        return {"network": "peagle", **{name: getattr(self.settings, name) for name in named}}

    @property
    def parts(self) -> Parts:
        """The parts of EAGLE-3's network, the mask token, and the state of masks by tap."""
        parts = super().parts
        return replace(parts, by_tap=(*parts.by_tap, "mask_hidden"), tokens=("mask_token",), levels=self.levels)

    @property
    def levels(self) -> int:
        """The number of tokens that one forward guesses."""
        return int(self.settings.depths)

    def mask_state(self) -> Tensor:
        """[1, H], the learned state that a mask reads."""
        return self.fuse_taps(self.mask_hidden.view(1, len(self.taps), -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The distillation loss at the supervised slots and the masks drawn after them."""
        settings, device = self.settings, batch.tokens.device
        masks = MaskRows.of(draw_masks(batch, self.levels - 1, settings.keep, settings.keep_least), device)
        places, first, masked = self.read_masks(batch, frozen, masks)
        weights = self.row_weights(batch, masks, len(first))
        if self.drafts is not None:
            weights = weights * self.t2d[batch.tokens.index_select(0, places + 2)]
        true = batch.select_taps((-1,))[:, 0].index_select(0, places + 1)
        student = self.norm(torch.cat([first, masked]))[None]
        heads = OwnHead(self.lm_head.weight), self.narrow_to_draft_vocab(frozen)
        objective, dtype = Objective(settings.loss), frozen.weight.dtype
        return {"total": distillation_loss(student, true, weights[None], heads, objective, dtype)[0]}

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """The divisor of all levels, or of each, by the masks that are drawn after the slots of these texts."""
        settings, depths, reached = self.settings, torch.arange(self.levels), list[Tensor]()
        for mask, seed in zip(masks, seeds, strict=True):
            counts = draw_text_masks(mask[2:], seed, self.levels - 1, settings.keep, settings.keep_least)
            reached.append(counts[mask[2:], None] >= depths)
        divisor: Divisor = "slots" if settings.divisor == "texts" else settings.divisor
        return sum_divisors(divisor, torch.cat(reached), [1.0] * self.levels)

    def row_weights(self, batch: Batch, masks: MaskRows, slots: int) -> Tensor:
        """[S + E], what supervised slots and masks count."""
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        dtype, device = self.fc.weight.dtype, batch.tokens.device
        if self.settings.divisor == "texts":
            return upload((weigh_texts(batch, masks) / max(*divisors, 1)).to(dtype), device)
        shares = level_shares([1.0] * self.levels, divisors, dtype, device)
        return shares.index_select(0, F.pad(masks.depths, (slots, 0)))

    def read_masks(self, batch: Batch, frozen: TargetHead, masks: MaskRows) -> tuple[Tensor, Tensor, Tensor]:
        """Places [S + E] of supervised slots and masks among all tokens, and their states [S, H] and [E, H]."""
        slots, positions, spans = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps)[slots].to(self.layers[0].mlp.up_proj.weight.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + self.levels)
        tokens = self.project_tokens(frozen.embed(batch.tokens.index_select(0, slots + 1)).to(features.dtype))
        inputs = self.block_inputs(tokens, self.fuse_taps(features))
        context, inputs = read_context(self.layers, inputs, tables_at(positions), batch, self._run)
        inputs = tuple(part.index_select(0, spans.rows) for part in inputs)
        tables = tables_at(positions.index_select(0, spans.rows))
        first = read_rows(self.layers[-1], inputs, tables, context[-1], spans, (), self._run)
        tables = tables_at(positions.index_select(0, masks.spans.rows) + masks.depths)
        places = torch.cat([spans.rows, masks.spans.rows])
        places = slots.index_select(0, places) + F.pad(masks.depths, (len(spans.rows), 0))
        return places, first, self._read_blocks(frozen, masks, tables, context)

    def _read_blocks(
        self, frozen: TargetHead, masks: MaskRows, tables: tuple[Tensor, Tensor], context: Sequence[Pair]
    ) -> Tensor:
        """[E, H], the states of masks, which differ only by position."""
        token = upload(torch.tensor([self.settings.mask_token]), masks.depths.device)
        hidden = self.mask_state()
        inputs = self.block_inputs(self.project_tokens(frozen.embed(token).to(hidden.dtype)), hidden)
        inputs = tuple(part.expand(len(masks.depths), -1) for part in inputs)
        state = hidden
        for number, block in enumerate(self.layers):
            inputs = block.inputs(state) if number else inputs
            mask_pair = self._run(key_value, block, inputs, tables)
            query, residual = self._run(query_and_residual, block, inputs, tables)
            state = self._run(add_rows, block, masks.attend(query, context[number], mask_pair), residual)
        return state

    # -- validation ---------------------------------------------------------------------------------------------------

    def level_states(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Tensor]:
        """Each level's states [S, H] at all supervised slots, with the masks that the levels need after each."""
        count = min(levels, self.levels) - 1
        masks = MaskRows.of([count * slots for slots in supervised_slots(batch)], batch.tokens.device)
        _, first, masked = self.read_masks(batch, frozen, masks)
        return [first, *masked.unflatten(0, (len(first), count)).unbind(1)]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MaskedState:
        """The state for several texts drafted together."""
        return MaskedState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """No rows: the first forward gives all levels."""
        return ()

    def unread(self, accepted: int, depth: int) -> int:
        """The accepted tokens, the root, and a mask for each level after the first."""
        return accepted + max(min(depth, self.levels), 1)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """A function to time: the forward of `rows` rows after `context` tokens, with logits for the levels."""
        return super().probe(context, rows, max(scored, min(rows, self.levels)))


class MaskedState(TextState):
    """Keys and values of many texts; those of the masks are written over by the tokens that are committed next."""

    head: Any

    @torch.inference_mode()
    def __init__(self, head: Any) -> None:
        super().__init__(head)
        masks = head.levels - 1
        self.masks = torch.full((masks,), head.settings.mask_token), head.mask_state().expand(masks, -1)
        self.levels = 1  # of the deepest draft that is asked for

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees whose levels are the states behind the root and the masks."""
        budgets = {row: budget.within(self.head.levels) for row, budget in budgets.items()}
        self.levels = max(1, *(0 if budgets[row].is_empty else budgets[row].depth for row in updates))
        rows, seeds, hidden = self.read_updates(updates, budgets)
        return dict(zip(rows, grow_slots(self.head, seeds, hidden), strict=True))

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, K, H], the states of the levels behind each row's text."""
        tokens, states = self.masks
        return self._read_ahead(updates, (tokens[: self.levels - 1], states[: self.levels - 1]))


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Masks in groups of anchors that have equally many, those of an anchor one after the other."""

    groups: list[tuple[Spans, int]]  # the anchors among all slots, and how many masks each has
    spans: Spans  # [E], the anchor of each mask
    depths: Tensor  # [E], from 1 on
    texts: list[tuple[int, int]]  # which text the next so many masks are of

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device) -> MaskRows:
        """The masks behind each text's slots, by their number [T - 2] behind each."""
        groups, texts, lengths = [], list[tuple[int, int]](), [len(counts) for counts in masks]
        depths, runs, rows = [torch.empty(0, dtype=torch.long)], list[tuple[int, int, int]](), list[list[int]]()
        for size in range(1, max((int(counts.max()) for counts in masks if len(counts)), default=0) + 1):
            places = [(counts == size).nonzero()[:, 0] for counts in masks]
            if any(map(len, places)):
                groups.append((Spans.at(places, lengths, device), size))
            for text, (slots, begin) in enumerate(zip(places, accumulate(lengths, initial=0), strict=False)):
                if len(slots):
                    rows.append((begin + slots).repeat_interleave(size).tolist())
                    runs.append((begin, rows[-1][0], rows[-1][-1] + 1))
                    depths.append(torch.arange(1, size + 1).repeat(len(slots)))
                    texts.append((text, size * len(slots)))
        every = torch.tensor([row for run in rows for row in run], dtype=torch.long)
        spans = Spans(upload(every, device), runs, sum(lengths), scattered=tuple(rows))
        return cls(groups, spans, upload(torch.cat(depths), device), texts)

    def attend(self, query: Tensor, context: Pair, mask_pair: Pair, kernel: Any = None) -> Tensor:
        """[h, E, w] from query [h, E, w], the keys and values of all slots, and the masks' own."""
        seen, done, fused = list[Tensor](), 0, list[Tensor]()
        if not self.groups:
            return query
        if kernel or query.device.type not in ATTEND:  # one kernel for all: each number of masks would make another
            output, weight = read_texts(query, *context, self.spans, kernel)
            fused = [output, weight[..., None]]
        for spans, size in self.groups:
            rows = slice(done, done + len(spans.rows) * size)
            mask_query, key, value, *read = (
                part[:, rows].unflatten(1, (-1, size)) for part in (query, *mask_pair, *fused)
            )
            if fused:
                seen.append(add_blocks(read[0], read[1], mask_query, (key, value), causal=True))
            else:
                seen.append(attend_block(mask_query, *context, spans, (key, value), causal=True))
            done = rows.stop
        return torch.cat([part.flatten(1, 2) for part in seen], dim=1)


def supervised_slots(batch: Batch) -> list[Tensor]:
    """[T - 2] of each text, whether the token that a slot names is supervised."""
    return [mask[2:] for mask in batch.masks]


def draw_masks(batch: Batch, most: int, keep: float, least: float) -> list[Tensor]:
    """[T - 2] of each text, how many masks stand behind each slot."""
    texts = zip(supervised_slots(batch), batch.seeds, strict=True)
    return [draw_text_masks(supervised, seed, most, keep, least) for supervised, seed in texts]


def draw_text_masks(supervised: Tensor, seed: int, most: int, keep: float, least: float) -> Tensor:
    """[T - 2], how many masks stand behind each slot of a text: fewer by depth, as its seed decides.

    Of n supervised slots n - d would have d masks behind them in one answer; max(keep^d, least) of so many do, drawn
    from those that have d - 1 and whose answer goes on. (COD: conditional drop of tokens.)
    """
    draw, inside = torch.Generator().manual_seed(seed), F.pad(supervised, (0, most))
    drawn = supervised.nonzero()[:, 0]
    count, slots = torch.zeros_like(supervised, dtype=torch.long), len(drawn)
    for depth in range(1, most + 1):
        candidates = drawn[inside[drawn + depth]]
        wanted = max(int((slots - depth) * max(keep**depth, least)), 0)
        order = torch.empty_like(candidates).random_(generator=draw).argsort()
        drawn = candidates[order[:wanted]]
        count[drawn] = depth
    return count


def weigh_texts(batch: Batch, masks: MaskRows) -> Tensor:
    """[S + E], what supervised slots and masks weigh: a text as many as it has slots, each of its rows the same."""
    slots = [int(part.sum()) for part in supervised_slots(batch)]
    rows = list(slots)
    for text, count in masks.texts:
        rows[text] += count
    shares = [count / max(total, 1) for count, total in zip(slots, rows, strict=True)]
    parts = [*enumerate(slots), *masks.texts]
    return torch.cat([torch.full((count,), shares[text], dtype=torch.float64) for text, count in parts])
