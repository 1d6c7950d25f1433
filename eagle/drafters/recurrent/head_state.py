"""The state of a trained head: one forward over committed tokens, and one for each level of all trees."""

# B sequences, K nodes of one level, R of all levels, H hidden, D draft vocabulary, w of a head

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise, TargetHead
from eagle.core.grown import DeviceTrees, hand_over
from eagle.core.tree import DraftTree
from eagle.device import must_wait, pick_rows, upload
from eagle.drafters.parts.decoder_block import FOLLOW_LENGTH, Rotary, rotary_tables
from eagle.drafters.parts.growth import (
    FollowsRows,
    grow_rows,
    grow_without_roots,
    level_mask,
    plan_parents,
)
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.text_state import TextHead, TextState
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.static_loop import (
    Capture,
    PrecomputedNoise,
    StaticLoop,
    text_capacity,
)


class LevelHead(TextHead, Protocol):
    """The interface of a head whose levels read their own states."""

    capture: Capture | None

    @property
    def drafts(self) -> Tensor | None:
        """[D], the draft vocabulary; None for all tokens."""
        ...

    def next_input(self, state: Tensor) -> Tensor:
        """Return the next level's input, from a state."""
        ...

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """Return [.., D], the logits of states."""
        ...


class HeadState(TextState):
    """Sequences and their drafts; levels see a sequence as committed tokens do."""

    head: LevelHead

    def __init__(self, head: LevelHead, window: Window | None = None) -> None:
        super().__init__(head, window)
        self.drafts = head.drafts
        self.loop = None if head.capture is None else StaticLoop(head.capture)

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees grown from the target's features of the committed tokens, then from the head's own states."""
        rows, requests, hidden = self.read_updates(updates, budgets)
        cache_rows = [self.rows.index(row) for row in rows]
        return dict(zip(rows, self._grow(requests, cache_rows, hidden), strict=True))

    def _grow(
        self,
        requests: Sequence[DraftRequest],
        cache_rows: list[int],
        hidden: Tensor,
    ) -> list[DraftTree]:
        """Return the trees of some cache rows, from the states [B, H] after their roots."""
        if self.loop is not None and _are_static(requests, cache_rows):
            grown = self._grow_static(requests, hidden, self.loop)
            roots = [request.root for request in requests]
            return hand_over([grown], roots, at_once=not must_wait(self.device))
        # drafts of all rows begin at one column, after the longest sequence
        depth = max(request.budget.depth for request in requests)
        columns = max(self.cache.lengths[cache_row] for cache_row in cache_rows)
        inputs = self._draft_inputs(self._unlike_rows(cache_rows), columns, depth)
        levels = Levels(self, cache_rows, hidden, *inputs)
        return grow_rows(
            requests, self.head.logits(hidden, self.head.frozen[0]), levels, self.drafts
        )

    def _grow_static(
        self, requests: Sequence[DraftRequest], hidden: Tensor, loop: StaticLoop
    ) -> DeviceTrees:
        """Draft for rows with one budget by a function of tensors alone, which a CUDA graph captures and replays.

        The columns of the drafts begin after the cache space that is reserved for committed tokens.
        """
        budget = requests[0].budget
        cache_rows = list(range(len(requests)))
        room = text_capacity(max(self.cache.lengths[: len(requests)]))
        # rows have noise all or none; it comes in as tensors [depth, V], which a replay replaces
        noises = [request.noise for request in requests if request.noise is not None]
        level_noises = [
            request.noise(list(range(request.position, request.position + budget.depth)))
            for request in requests
            if request.noise is not None
        ]

        def draft(
            hidden: Tensor,
            cosine: Tensor,
            sine: Tensor,
            committed: Tensor,
            *level_noises: Tensor,
        ) -> Tensor:
            held: list[Noise | None] = [None] * len(cache_rows)
            if noises:
                held = [
                    PrecomputedNoise(rows, noise, noise.temperature)
                    for rows, noise in zip(level_noises, noises, strict=True)
                ]
            # root and position are 0 here: trees get their roots later, and the noise of each level is passed in
            static_seeds = [DraftRequest(0, 0, budget, noise) for noise in held]
            levels = Levels(self, cache_rows, hidden, cosine, sine, committed)
            first = self.head.logits(hidden, self.head.frozen[0])
            return grow_without_roots(static_seeds, first, levels, self.drafts)[0].columns

        addresses = tuple(buffer.buffer.data_ptr() for buffer in self.cache.buffers)
        key = budget, len(requests), room, addresses, tuple(noises)
        inputs = [hidden, *self._draft_inputs(cache_rows, room, budget.depth), *level_noises]
        # a copy, as the next replay writes where the columns lie
        columns = loop(key, draft, inputs).clone()
        parents = plan_parents(budget, columns.shape[2], self.device)
        return DeviceTrees(cache_rows, columns, budget.depth, parents)

    def _unlike_rows(self, cache_rows: list[int]) -> list[int]:
        """Return the cache rows that need their own mask and positions; only the first if all lengths are equal."""
        sizes = {
            (self.cache.lengths[cache_row], self.text_length(cache_row)) for cache_row in cache_rows
        }
        return cache_rows[:1] if len(sizes) == 1 else cache_rows

    def _draft_inputs(
        self,
        cache_rows: Sequence[int],
        columns: int,
        depth: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotary tables [B, depth, w] of a draft's levels, and what hides columns after each sequence.

        The latter is [B, columns], with a window [B, depth, columns]: each level sees a column less.
        """
        lengths = [self.cache.lengths[cache_row] for cache_row in cache_rows]
        committed = self._hide_after(lengths, columns)
        if self.window is not None:
            ends = upload(torch.tensor(lengths)[:, None, None], self.device)
            column = torch.arange(columns, device=self.device)
            level = torch.arange(depth, device=self.device)[:, None]
            is_old = self.window.hides(column, ends - 1, 0, 1 + level)
            committed = committed[:, None].masked_fill(is_old, torch.finfo(self.dtype).min)
        # positions count the columns that a window has dropped too
        positions = torch.tensor([self.text_length(cache_row) for cache_row in cache_rows])[:, None]
        tables = _draft_tables(self.head.rotary, committed, upload(positions, self.device), depth)
        return *tables, committed

    def _hide_after(self, lengths: Sequence[int], columns: int) -> Tensor:
        """Return [B, columns], 0 at those that a row's sequence fills, the lowest number after it."""
        committed = torch.zeros(len(lengths), columns, dtype=self.dtype, device=self.device)
        if min(lengths) < columns:
            ends = upload(torch.tensor(lengths)[:, None], self.device)
            is_after = torch.arange(columns, device=self.device) >= ends
            committed.masked_fill_(is_after, torch.finfo(self.dtype).min)
        return committed


class Levels(FollowsRows):
    """The levels of several drafts; their columns begin where the longest sequence ends, for all alike."""

    def __init__(
        self,
        state: Any,
        cache_rows: list[int],
        hidden: Tensor,
        cosine: Tensor,
        sine: Tensor,
        committed: Tensor,
    ) -> None:
        self.state = state
        self.cache_rows = cache_rows
        self.root_states = hidden[:, None]  # [B, 1, H]
        self.rows = list(range(len(cache_rows)))  # of the level before, as are its states [B, K, H]
        self.hidden = self.root_states
        self.tables = cosine, sine  # [B or 1, levels, w]
        self.committed = committed  # what hides columns after the sequences, [B or 1, columns]
        self.start = committed.shape[-1]
        self.begins: list[int] = []  # where the levels begin among the draft's columns

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return [B, K, D], the logits after the nodes of one level of these rows."""
        state = self.state
        head = state.head
        if depth == 1:
            self.rows = list(range(len(self.cache_rows)))
            self.hidden = self.root_states
            self.begins = []
        (self.hidden,) = self.keep_rows(rows, self.hidden)
        tables, committed = self._inputs_at(slice(depth - 1, depth))
        begin = tree_mask.shape[2] - tokens.shape[1]
        self.begins.append(begin)
        if state.window is not None:
            # levels that lie further back than the window are hidden, as committed tokens are
            committed = committed[:, depth - 1]
            tree_mask = _hide_levels(tree_mask, self.begins[max(depth - state.window.recent, 0)])
        mask = level_mask(committed, tree_mask, head.query_groups)

        parent_states = self.hidden.take_along_dim(parents[..., None], 1)
        state.cache.set_write_offset(
            [self.cache_rows[row] for row in rows], [self.start + begin] * len(rows)
        )
        self.hidden = head.read(
            tokens, head.next_input(parent_states), tables, mask, state.blocks, head.frozen[0]
        )
        logits: Tensor = head.logits(self.hidden, head.frozen[0])
        return logits

    def _inputs_at(self, levels: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the rotary tables of some levels, and what hides committed columns, for the rows that still grow."""
        cosine, sine = self.tables
        committed = self.committed
        if len(committed) > 1:
            cosine, sine, committed = (
                pick_rows(tensor, self.rows) for tensor in (cosine, sine, committed)
            )
        return (cosine[:, levels], sine[:, levels]), committed


def _hide_levels(tree_mask: Tensor, begin: int) -> Tensor:
    """Return [B, K, R], what nodes see of their draft, without the columns before `begin`."""
    return F.pad(tree_mask[..., begin:], (begin, 0)) if begin else tree_mask


def _draft_tables(
    rotary: Rotary,
    like: Tensor,
    lengths: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Return rotary tables [B, depth, w] of the levels after sequences of these lengths [B, 1]."""
    positions = lengths + torch.arange(depth, device=lengths.device)
    if rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    # frequencies depend on the longest position: each level's are as if it were the last
    cosine, sine = zip(
        *(rotary_tables(rotary, like, level) for level in positions.split(1, dim=1)), strict=True
    )
    return torch.cat(cosine, 1), torch.cat(sine, 1)


def _are_static(requests: Sequence[DraftRequest], cache_rows: Sequence[int]) -> bool:
    """Return whether rows draft by one budget from the first cache row on, and need no new noise in every cycle."""
    budget = requests[0].budget
    if budget.is_empty or any(request.budget != budget for request in requests):
        return False
    if list(cache_rows) != list(range(len(cache_rows))):
        return False
    is_greedy = [request.noise is None for request in requests]
    return all(is_greedy) or (not any(is_greedy) and budget.draw != "sampled")


def count_unlike(lengths: Sequence[int]) -> int:
    """Return the number of different masks and positions needed: one if all lengths are equal."""
    return 1 if min(lengths) == max(lengths) else len(lengths)
