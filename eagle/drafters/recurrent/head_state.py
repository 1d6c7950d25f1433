"""The drafting state of a trained head: one forward over committed tokens, and one for each level of all trees.

A row is a sequence of the decoding batch; its cache row is its index in the KV cache.
"""

# B sequences, K nodes of one level, R of all levels, H hidden, D draft vocabulary, w width of a head

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, TargetHead
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
from eagle.drafters.parts.sequence_state import SequenceHead, SequenceState
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.static_loop import (
    Capture,
    PrecomputedNoise,
    StaticLoop,
    sequence_capacity,
)


class LevelHead(SequenceHead, Protocol):
    """The interface of a head whose levels read their own states."""

    capture: Capture | None

    @property
    def drafts(self) -> Tensor | None:
        """[D], the draft vocabulary as the target's token ids, one for each logit; None for all tokens."""

    def next_input(self, state: Tensor) -> Tensor:
        """Return the state [.., width] that the next level reads, from one that the head made, such as its norm."""

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., D] of states [.., hidden size] over the D tokens of the draft vocabulary."""


class HeadState(SequenceState):
    """Drafts for many sequences. A draft node attends to its sequence's committed tokens and to its own path."""

    head: LevelHead

    def __init__(self, head: LevelHead, window: Window | None = None) -> None:
        """Begin without sequences; `window` is the head's sliding window of attention, None if it has none."""
        super().__init__(head, window)
        self.drafts = head.drafts
        self.loop = None if head.capture is None else StaticLoop(head.capture)

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row, a sequence of the batch.

        The head first reads the committed tokens with the target's features, which adds them to the KV cache. Then each
        level of the trees reads the states that the head made in the level before.

        Args:
            updates: By row the tokens that were committed since its last draft, and the root.
            budgets: By row the size of its tree.
        """
        rows, requests, hidden = self.read_updates(updates, budgets)
        cache_rows = [self.rows.index(row) for row in rows]
        return dict(zip(rows, self._grow(requests, cache_rows, hidden), strict=True))

    def _grow(
        self,
        requests: Sequence[DraftRequest],
        cache_rows: list[int],
        hidden: Tensor,
    ) -> list[DraftTree]:
        """Return the draft tree of each request, grown level by level.

        Args:
            requests: Those of the B rows, the sequences of the batch.
            cache_rows: The index of each row in the KV cache.
            hidden: The head's states [B, H] after the roots, H the hidden size.
        """
        # a captured CUDA graph drafts all levels in one launch
        if self.loop is not None and _can_replay(requests, cache_rows):
            grown = self._grow_static(requests, hidden, self.loop)
            roots = [request.root for request in requests]
            return hand_over([grown], roots, at_once=not must_wait(self.device))
        levels = Levels(self, cache_rows, hidden, *self._inputs_after_longest(requests, cache_rows))
        return grow_rows(
            requests, self.head.logits(hidden, self.head.target_head), levels, self.drafts
        )

    def _grow_static(
        self, requests: Sequence[DraftRequest], hidden: Tensor, loop: StaticLoop
    ) -> DeviceTrees:
        """Grow the trees of sequences with one budget by a function of tensors, which a CUDA graph replays.

        Its shapes must not depend on the sequences' lengths. So the cache columns of the drafts begin after those that
        are reserved for committed tokens.

        Args:
            requests: Those of the B rows, whose indices in the KV cache are 0, 1, ...
            hidden: The head's states [B, H] after the roots, H the hidden size.
            loop: Runs, captures or replays the function.
        """
        budget = requests[0].budget
        cache_rows = list(range(len(requests)))
        room = sequence_capacity(max(self.cache.lengths[: len(requests)]))
        # Either all rows have noise, which the target adds to its V logits, or none has. It is fixed by the position,
        # so that of a draft's positions is an input of the graph, [depth, V] for each row.
        noises = [request.noise for request in requests if request.noise is not None]
        level_noises = []
        for request, noise in zip(requests, noises, strict=False):
            positions = range(request.position, request.position + budget.depth)
            level_noises.append(noise([*positions]))

        def draft(
            hidden: Tensor,
            cosine: Tensor,
            sine: Tensor,
            committed: Tensor,
            *level_noises: Tensor,
        ) -> Tensor:
            """Return the trees' nodes [rows, 1 or 3, nodes]: tokens, and for dynamic trees parents and likelihoods.

            The arguments are the states after the roots, what `_draft_inputs` returned, and the noise of each row.
            """
            # a captured function must not depend on roots and positions, so they are 0 here: trees get their roots
            # later, and the noise is that of levels 0, 1, ...
            greedy = DraftRequest(root=0, position=0, budget=budget, noise=None)
            static_requests = [greedy] * len(cache_rows)
            if noises:
                static_requests = [
                    replace(greedy, noise=PrecomputedNoise(rows, noise, noise.temperature))
                    for rows, noise in zip(level_noises, noises, strict=True)
                ]
            levels = Levels(self, cache_rows, hidden, cosine, sine, committed)
            first = self.head.logits(hidden, self.head.target_head)
            # with one budget all trees are in one group
            return grow_without_roots(static_requests, first, levels, self.drafts)[0].fields

        # a graph is valid for one set of shapes, for these noises' filters, and as long as the cache's buffers are not
        # allocated again, which would change their addresses
        addresses = tuple(buffer.tensor.data_ptr() for buffer in self.cache.buffers)
        key = budget, len(requests), room, addresses, tuple(noises)
        inputs = [hidden, *self._draft_inputs(cache_rows, room, budget.depth), *level_noises]
        # a copy, as the next replay overwrites the graph's output: [rows, 1 or 3, nodes]
        fields = loop(key, draft, inputs).clone()
        parents = plan_parents(budget, fields.shape[2], self.device)
        return DeviceTrees(cache_rows, fields, budget.depth, parents)

    def _inputs_after_longest(
        self, requests: Sequence[DraftRequest], cache_rows: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of drafts that all begin at one cache column, after the longest sequence."""
        depth = max(request.budget.depth for request in requests)
        columns = max(self.cache.lengths[cache_row] for cache_row in cache_rows)
        return self._draft_inputs(self._unlike_rows(cache_rows), columns, depth)

    def _unlike_rows(self, cache_rows: list[int]) -> list[int]:
        """Return the cache rows (sequences) that need a mask and positions of their own.

        It is only the first if all sequences have as many columns and the same length: its mask and positions then
        serve all rows.
        """
        sizes = {
            (self.cache.lengths[cache_row], self.sequence_length(cache_row))
            for cache_row in cache_rows
        }
        return cache_rows[:1] if len(sizes) == 1 else cache_rows

    def _draft_inputs(
        self,
        cache_rows: Sequence[int],
        columns: int,
        depth: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotary tables and the attention mask of a draft's levels, which do not depend on the tree.

        Args:
            cache_rows: The index of each of B rows, the sequences of the batch, in the KV cache.
            columns: The number of cache columns before the draft's.
            depth: The number of levels.

        Returns:
            Cosines and sines [B, depth, w of a head] of the levels, and the additive mask of the columns before the
            draft [B, columns]. With a window it is [B, depth, columns], as each level sees a column less.
        """
        lengths = [self.cache.lengths[cache_row] for cache_row in cache_rows]
        committed = self._hide_after(lengths, columns)
        if self.window is not None:
            ends = upload(torch.tensor(lengths)[:, None, None], self.device)
            column = torch.arange(columns, device=self.device)
            level = torch.arange(depth, device=self.device)[:, None]
            # a node of level d (from 0) sees 1 + d draft tokens of its path, which take up part of the window
            is_old = self.window.hides(column, ends - 1, begin=0, drafted=1 + level)
            committed = committed[:, None].masked_fill(is_old, torch.finfo(self.dtype).min)
        # positions count the columns that a window has dropped too
        positions = torch.tensor([self.sequence_length(cache_row) for cache_row in cache_rows])[
            :, None
        ]
        tables = _draft_tables(self.head.rotary, committed, upload(positions, self.device), depth)
        return *tables, committed

    def _hide_after(self, lengths: Sequence[int], columns: int) -> Tensor:
        """Return the additive mask [B, columns] that hides cache columns after the end of each of B sequences.

        It is 0 at the columns of sequence i, `lengths[i]` in number, and the dtype's lowest number after them. A column
        holds one token's key and value.
        """
        committed = torch.zeros(len(lengths), columns, dtype=self.dtype, device=self.device)
        # nothing is hidden if every sequence fills all columns
        if min(lengths) < columns:
            ends = upload(torch.tensor(lengths)[:, None], self.device)
            is_after = torch.arange(columns, device=self.device) >= ends
            committed.masked_fill_(is_after, torch.finfo(self.dtype).min)
        return committed


class Levels(FollowsRows):
    """Reads the levels of several drafts, one forward for each level of all drafts; see `RowsLevel`.

    The draft's cache columns begin after the longest sequence, in all rows alike.
    """

    def __init__(
        self,
        state: Any,
        cache_rows: list[int],
        hidden: Tensor,
        cosine: Tensor,
        sine: Tensor,
        committed: Tensor,
    ) -> None:
        """Begin the drafts of B rows, the sequences of the batch: each call then reads one level of their trees.

        Args:
            state: The drafting state of the head.
            cache_rows: The index of each row in the KV cache.
            hidden: The head's states [B, H] after the roots, H the hidden size; other shapes [B, ..] in subclasses.
            cosine: Rotary table of the levels, [B or 1, levels, w], w the width of a head.
            sine: Rotary table of the levels, [B or 1, levels, w].
            committed: The additive attention mask of the cached tokens (columns) before the draft, [B or 1, columns];
                with a window [B or 1, levels, columns].
        """
        self.state = state
        self.cache_rows = cache_rows
        self.root_states = hidden[:, None]  # [B, 1, H]
        self.rows = list(range(len(cache_rows)))  # the rows of the level before
        self.hidden = self.root_states  # the states [B, nodes, H] of the level before
        self.tables = cosine, sine  # [B or 1, levels, w]
        self.committed = committed  # [B or 1, columns], with a window [B or 1, levels, columns]
        self.start = committed.shape[-1]  # the draft's first cache column
        # the first column of each level, counted from the draft's first
        self.begins: list[int] = []

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Read the nodes of one level of these rows' trees, and return the logits [B, K, D] of their children.

        The nodes' keys and values are added to the cache, after those of the levels above. D is the draft vocabulary.

        Args:
            depth: Of the nodes; the root has depth 0.
            rows: The B rows whose trees still grow, as indices among those that the drafts began with.
            tokens: [B, K], of the K nodes of the level in each tree.
            parents: [B, K], the index of each node's parent in the level above.
            tree_mask: [B, K, R] bool, true at each node and its ancestors among the R nodes read so far.
        """
        state = self.state
        head = state.head
        # a new draft, as a captured function runs more than once
        if depth == 1:
            self.rows = list(range(len(self.cache_rows)))
            self.hidden = self.root_states
            self.begins = []
        (self.hidden,) = self.keep_rows(rows, self.hidden)
        tables, committed = self._inputs_at(slice(depth - 1, depth))
        # the first column of this level, after those of the nodes of the levels above
        begin = tree_mask.shape[2] - tokens.shape[1]
        self.begins.append(begin)
        if state.window is not None:
            # [B or 1, columns], for this level; in a deep draft the first levels may have left the window too
            committed = committed[:, depth - 1]
            tree_mask = _hide_levels(tree_mask, self.begins[max(depth - state.window.recent, 0)])
        mask = level_mask(committed, tree_mask, head.query_groups)

        # a node is read with the state of its parent: [B, K, hidden size]
        parent_states = self.hidden.take_along_dim(parents[..., None], 1)
        state.cache.set_write_offset(
            [self.cache_rows[row] for row in rows], [self.start + begin] * len(rows)
        )
        self.hidden = head.read(
            tokens, head.next_input(parent_states), tables, mask, state.blocks, head.target_head
        )
        logits: Tensor = head.logits(self.hidden, head.target_head)
        return logits

    def _inputs_at(self, levels: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the rotary tables of some levels, and the mask of the cached tokens before the draft, for `self.rows`.

        `levels` are counted from 0, the root's children. The tables are cosines and sines [B or 1, levels, w of a
        head]; the mask has an entry for each of the B rows, or one for all.
        """
        cosine, sine = self.tables
        committed = self.committed
        # with one row they serve all rows
        if len(committed) > 1:
            cosine, sine, committed = (
                pick_rows(tensor, self.rows) for tensor in (cosine, sine, committed)
            )
        return (cosine[:, levels], sine[:, levels]), committed


def _hide_levels(tree_mask: Tensor, begin: int) -> Tensor:
    """Return a tree mask [B, K, R] that is false at the nodes before `begin`, as their levels left the window.

    For each of B rows it tells which of R drafted nodes each of K nodes sees.
    """
    return F.pad(tree_mask[..., begin:], (begin, 0)) if begin else tree_mask


def _draft_tables(
    rotary: Rotary,
    like: Tensor,
    lengths: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Return the rotary tables of a draft's levels: cosines and sines [B, depth, w] each, w the width of a head.

    Args:
        rotary: The head's rotary embedding.
        like: A tensor with the dtype and the device of the tables.
        lengths: [B, 1], the position of the first level in each of B sequences.
        depth: The number of levels, one position each.
    """
    positions = lengths + torch.arange(depth, device=lengths.device)
    # these types have fixed frequencies
    if rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    # the frequencies depend on the longest position of a forward, and each level is a forward: make its tables alone
    cosine, sine = zip(
        *(rotary_tables(rotary, like, level) for level in positions.split(1, dim=1)), strict=True
    )
    return torch.cat(cosine, 1), torch.cat(sine, 1)


def _can_replay(requests: Sequence[DraftRequest], cache_rows: Sequence[int]) -> bool:
    """Return whether the drafts of these rows (sequences) can be replayed as one captured CUDA graph.

    That needs one budget for all, the cache rows 0, 1, ..., and rows that are all greedy or that all rank children by
    noise that the position decides.

    Args:
        requests: The root, position, budget and noise of each row.
        cache_rows: The index of each row in the KV cache.
    """
    budget = requests[0].budget
    if budget.is_empty or any(request.budget != budget for request in requests):
        return False
    if list(cache_rows) != list(range(len(cache_rows))):
        return False
    # a request without noise is greedy; draw "sampled" takes new noise in every cycle, which cannot be replayed
    is_greedy = [request.noise is None for request in requests]
    return all(is_greedy) or (not any(is_greedy) and budget.draw != "sampled")


def count_unlike(lengths: Sequence[int]) -> int:
    """Return for how many sequences masks and positions are made: for one, which serves all, if lengths are equal."""
    return 1 if min(lengths) == max(lengths) else len(lengths)
