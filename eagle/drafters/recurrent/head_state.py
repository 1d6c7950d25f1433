"""The state of a trained head: one forward over committed tokens, and one for each level of all trees."""

# B rows of text, K nodes of one level, R of all levels, H width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.grown import GrownTrees, hand_over
from eagle.core.tree import DraftTree
from eagle.device import must_wait, pick_rows, upload
from eagle.drafters.parts.decoder_block import FOLLOW_LENGTH, Rotary, rotary_tables
from eagle.drafters.parts.growth import (
    FollowsRows,
    grow_columns,
    grow_rows,
    level_mask,
    plan_parents,
)
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_state import TextHead, TextState
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.static_loop import Capture, HeldNoise, StaticLoop, text_room


class LevelHead(TextHead, Protocol):
    """The interface of a head whose levels read their own states."""

    capture: Capture | None

    @property
    def drafts(self) -> Tensor | None:
        """[D], the draft vocabulary; None for all tokens."""
        ...

    def next_input(self, state: Tensor) -> Tensor:
        """The next level's input, from a state."""
        ...

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """[.., D], the logits of states."""
        ...


class HeadState(TextState):
    """Texts and their drafts; levels see the text as committed tokens do."""

    head: LevelHead

    def __init__(self, head: LevelHead, window: Window | None = None) -> None:
        super().__init__(head, window)
        self.drafts = head.drafts
        self.loop = None if head.capture is None else StaticLoop(head.capture)

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the target's features of the committed tokens, then from the head's own."""
        rows, seeds, hidden = self.read_updates(updates, budgets)
        slots = [self.rows.index(row) for row in rows]
        return dict(zip(rows, self._grow(seeds, slots, hidden), strict=True))

    def _grow(self, seeds: Sequence[Seed], slots: list[int], hidden: Tensor) -> list[DraftTree]:
        """The trees of some slots, from the states behind their roots."""
        if self.loop is not None and _are_static(seeds, slots):
            grown, roots = self._grow_static(seeds, hidden, self.loop), [seed.root for seed in seeds]
            return hand_over([grown], roots, at_once=not must_wait(self.device))
        depth, room = max(seed.budget.depth for seed in seeds), max(self.cache.lengths[slot] for slot in slots)
        levels = _Levels(self, slots, hidden, *self._behind_texts(self.unlike_slots(slots), room, depth))
        return grow_rows(seeds, self.head.logits(hidden, self.head.frozen[0]), levels, self.drafts)

    def _grow_static(self, seeds: Sequence[Seed], hidden: Tensor, loop: StaticLoop) -> GrownTrees:
        """The draft of rows with one budget; its columns begin behind the room that texts have."""
        budget, slots, noises = seeds[0].budget, list(range(len(seeds))), [seed.noise for seed in seeds]
        room = text_room(max(self.cache.lengths[: len(seeds)]))
        shared = [
            seed.noise(list(range(seed.place, seed.place + budget.depth))) for seed in seeds if seed.noise is not None
        ]

        def draft(hidden: Tensor, cosine: Tensor, sine: Tensor, committed: Tensor, *shared: Tensor) -> Tensor:
            held = [
                HeldNoise(rows, noise, noise.temperature)
                for rows, noise in zip(shared, noises, strict=False)
                if noise is not None
            ]
            alike = [Seed(0, 0, budget, held[slot] if held else None) for slot in slots]
            levels = _Levels(self, slots, hidden, cosine, sine, committed)
            first = self.head.logits(hidden, self.head.frozen[0])
            return grow_columns(alike, first, levels, self.drafts)[0].columns

        places = tuple(rows.buffer.data_ptr() for rows in self.cache.buffers)
        key = budget, len(slots), room, places, tuple(noises)
        columns = loop(key, draft, [hidden, *self._behind_texts(slots, room, budget.depth), *shared])
        # the next replay writes where the columns lie
        return GrownTrees(slots, columns.clone(), budget.depth, plan_parents(budget, columns.shape[2], self.device))

    def unlike_slots(self, slots: list[int]) -> list[int]:
        """The slots that need their own mask and positions; only the first if all lengths are equal."""
        sizes = {(self.cache.lengths[slot], self.text_length(slot)) for slot in slots}
        return slots[:1] if len(sizes) == 1 else slots

    def _behind_texts(self, slots: Sequence[int], room: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotary tables [B, depth, w] of a draft's levels, and [B, room] what hides the columns behind each text.

        With a window, [B, depth, room]: each level sees a column less.
        """
        lengths = [self.cache.lengths[slot] for slot in slots]
        committed = self._hide_behind(lengths, room)
        if self.window is not None:
            ends = upload(torch.tensor(lengths)[:, None, None], self.device)
            column, level = (torch.arange(count, device=self.device) for count in (room, depth))
            old = self.window.hides(column, ends - 1, 0, 1 + level[:, None])
            committed = committed[:, None].masked_fill(old, torch.finfo(self.dtype).min)
        places = upload(torch.tensor([self.text_length(slot) for slot in slots])[:, None], self.device)
        return *_draft_tables(self.head.rotary, committed, places, depth), committed

    def _hide_behind(self, lengths: Sequence[int], columns: int) -> Tensor:
        """[B, columns], 0 at those that a row's text fills, the lowest number behind it."""
        committed = torch.zeros(len(lengths), columns, dtype=self.dtype, device=self.device)
        if min(lengths) < columns:
            places = upload(torch.tensor(lengths)[:, None], self.device)
            behind = torch.arange(columns, device=self.device) >= places
            committed.masked_fill_(behind, torch.finfo(self.dtype).min)
        return committed


class _Levels(FollowsRows):
    """The levels of the drafts behind some slots; their columns begin where the longest text ends, for all alike."""

    def __init__(
        self, state: HeadState, slots: list[int], hidden: Tensor, cosine: Tensor, sine: Tensor, committed: Tensor
    ) -> None:
        self.state, self.slots, self.first = state, slots, hidden[:, None]
        self.rows, self.hidden = list(range(len(slots))), self.first  # of the level before
        self.tables, self.committed, self.start = (cosine, sine), committed, committed.shape[-1]
        self.begins: list[int] = []  # where the levels begin among the draft's columns

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, K, D], the logits behind the nodes of one level of these rows."""
        state, head, width = self.state, self.state.head, tokens.shape[1]
        if depth == 1:
            self.rows, self.hidden, self.begins = list(range(len(self.slots))), self.first, []
        (self.hidden,) = self.keep_rows(rows, self.hidden)
        (cosine, sine), committed = self.tables, self.committed
        if len(committed) > 1:
            cosine, sine, committed = (pick_rows(part, rows) for part in (cosine, sine, committed))
        tables = cosine[:, depth - 1 : depth], sine[:, depth - 1 : depth]
        self.begins.append(seen.shape[2] - width)
        if state.window is not None:
            committed = committed[:, depth - 1]
            seen = _hide_levels(seen, self.begins[max(depth - state.window.recent, 0)])
        mask = level_mask(committed, seen, head.query_groups)
        above = self.hidden.gather(1, before[..., None].expand(-1, -1, self.hidden.shape[2]))
        state.cache.aim([self.slots[row] for row in rows], [self.start + self.begins[-1]] * len(rows))
        self.hidden = head.read(tokens, head.next_input(above), tables, mask, state.blocks, head.frozen[0])
        return head.logits(self.hidden, head.frozen[0])


def _hide_levels(seen: Tensor, begin: int) -> Tensor:
    """[B, K, R], what nodes see of their draft, without the columns before `begin`."""
    return F.pad(seen[..., begin:], (begin, 0)) if begin else seen


def _draft_tables(rotary: Rotary, like: Tensor, places: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """[B, depth, w] each, of the levels behind texts of these lengths [B, 1]; each level's as if it were the last."""
    positions = places + torch.arange(depth, device=places.device)
    if rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    cosine, sine = zip(*(rotary_tables(rotary, like, level) for level in positions.split(1, dim=1)), strict=True)
    return torch.cat(cosine, 1), torch.cat(sine, 1)


def _are_static(seeds: Sequence[Seed], slots: Sequence[int]) -> bool:
    """Whether rows draft by one budget from the first slots on, and need no noise that is new in every cycle."""
    budget, noises = seeds[0].budget, {seed.noise is None for seed in seeds}
    is_alike = len(noises) == 1 and all(seed.budget == budget for seed in seeds) and not budget.is_empty
    return is_alike and list(slots) == list(range(len(slots))) and (budget.draw != "sampled" or noises == {True})


def count_unlike(lengths: Sequence[int]) -> int:
    """The number of different masks and positions needed: one if all lengths are equal."""
    return 1 if min(lengths) == max(lengths) else len(lengths)
