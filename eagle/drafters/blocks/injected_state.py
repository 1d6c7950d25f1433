"""The drafting state of heads that draft blocks: the KV cache of fused features, and one forward for all levels."""

# B sequences, T new tokens, K levels, L taps, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.device import pick_rows, upload
from eagle.drafters.parts.decoder_block import rotary_tables
from eagle.drafters.parts.growth import grow_rows, level_mask
from eagle.drafters.parts.operations import rotate_heads
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.sequence_state import (
    SequenceState,
    new_positions,
    pad_rows,
    split_ragged,
)


class InjectedState(SequenceState):
    """The KV cache of many sequences, each in a row of the cache ("cache row").

    It has keys and values of the target's features. Those of a draft's block are overwritten by the next tokens.
    """

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.head: Any = head

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row.

        The features of committed tokens are added to the cache, then one forward over a block gives all levels.
        """
        self.take_rows(list(updates))
        # rows with very different numbers of new tokens do not share a padded forward
        for group in split_ragged({row: len(update.tokens) for row, update in updates.items()}):
            features = [updates[row].features for row in group]
            self.inject(
                self.take_rows(group), [tensor for tensor in features if tensor is not None]
            )
        trees = {row: DraftTree.chain([update.root]) for row, update in updates.items()}
        # with an empty budget the tree is the root alone, and no block is read
        rows = sorted((row for row in updates if not budgets[row].is_empty), key=self.rows.index)
        if rows:
            cache_rows = self.take_rows(rows)
            roots = torch.tensor([updates[row].root for row in rows])
            states = self.read_blocks(cache_rows, upload(roots, self.device))
            requests = [
                DraftRequest(
                    updates[row].root,
                    self.sequence_length(cache_row) + 1,
                    budgets[row],
                    self.noises[row],
                )
                for row, cache_row in zip(rows, cache_rows, strict=True)
            ]
            trees |= zip(
                rows, grow_slots(self.head, requests, states, self.head.open_levels), strict=True
            )
        return trees

    def take_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the cache row of each of these rows; a new row gets the next free one."""
        self._take_cache_rows([row for row in rows if row not in self.rows])
        return [self.rows.index(row) for row in rows]

    def inject(self, cache_rows: Sequence[int], features: Sequence[Tensor]) -> None:
        """Add the keys and values of features to the cache, in every transformer block.

        Args:
            cache_rows: The cache rows of the sequences.
            features: The features [T, L, H] of each sequence's new tokens.
        """
        head = self.head
        cache = self.cache
        counts = [len(rows) for rows in features]
        starts = [cache.lengths[cache_row] for cache_row in cache_rows]
        fused = head.fuse_taps(torch.cat(list(features)).to(self.device, self.dtype))
        padded = pad_rows(fused.split(counts) if len(counts) > 1 else [fused])  # [B, T, H]
        tables = rotary_tables(head.rotary, padded, new_positions(starts, counts, self.device))
        cache.set_write_offset(cache_rows, starts)
        for block, block_cache in zip(head.layers, self.blocks, strict=True):
            # the fused features are only keys and values, so no queries are made of them
            attention = block.self_attn
            key = attention.k_proj(padded).unflatten(-1, (-1, attention.width)).transpose(1, 2)
            value = attention.v_proj(padded).unflatten(-1, (-1, attention.width)).transpose(1, 2)
            if attention.k_norm is not None:
                key = attention.k_norm(key)
            block_cache.extend(rotate_heads(key, tables), value)
        for cache_row, count in zip(cache_rows, counts, strict=True):
            cache.lengths[cache_row] += count

    def read_blocks(self, cache_rows: Sequence[int], roots: Tensor) -> Tensor:
        """Read a block of tokens after each cache row's sequence, and return the normed states [B, K, H] of its levels.

        `roots` [B] are the first tokens of the blocks.
        """
        head = self.head
        cache = self.cache
        size = int(head.settings.slots)
        lengths = [cache.lengths[cache_row] for cache_row in cache_rows]
        start = max(lengths)
        state = head.embed_slots(roots, head.target_head)
        tables = rotary_tables(
            head.rotary, state, new_positions(lengths, [size] * len(cache_rows), self.device)
        )

        cache.set_write_offset(cache_rows, [start] * len(cache_rows))
        # one mask for all transformer blocks that see the same
        masks: dict[tuple[bool, bool], Tensor] = {}
        for index, (block, block_cache) in enumerate(zip(head.layers, self.blocks, strict=True)):
            kind = head.has_window(index), head.is_causal(index)
            if kind not in masks:
                masks[kind] = self._block_mask(lengths, *kind)
            state = block(state, tables, masks[kind], block_cache)
        states: Tensor = head.norm(state[:, head.first_slot :])
        return states

    def _block_mask(self, lengths: Sequence[int], has_window: bool, is_causal: bool) -> Tensor:
        """Return the additive mask [B, 1, groups * slots, S + slots] of a block of slots after each sequence.

        Args:
            lengths: The lengths of the B sequences.
            has_window: Whether slots see the window of the settings alone.
            is_causal: Whether slots see only earlier slots of their block.
        """
        head = self.head
        start = max(lengths)
        lowest = torch.finfo(self.dtype).min
        # the blocks of all rows begin at the same cache column, `start`; the columns between the end of a shorter
        # sequence and its block are hidden
        committed = torch.zeros(1, start, dtype=self.dtype, device=self.device)
        ends = upload(torch.tensor(lengths)[:, None], self.device)
        column = torch.arange(start, device=self.device)
        if min(lengths) < start:
            committed = committed.masked_fill(column >= ends, lowest)
        if has_window:
            # [B, slots, S]: each slot's own, as its block takes up a part of its window
            drafted = upload(torch.tensor(head.drafted_in_window)[:, None], self.device)
            is_old = head.settings.window.hides(column, ends[..., None] - 1, 0, drafted)
            committed = committed[:, None].masked_fill(is_old, lowest)
        size = int(head.settings.slots)
        block_mask = torch.ones(len(lengths), size, size, dtype=torch.bool, device=self.device)
        if is_causal:
            block_mask = block_mask.tril()
        return level_mask(committed, block_mask, head.query_groups)


class SlotLevels:
    """The logits of all levels of all trees, which are the same for all nodes of a level; see `RowsLevel`."""

    def __init__(self, head: Any, requests: Sequence[DraftRequest], states: Tensor) -> None:
        self.logits: Tensor = head.logits(states, head.target_head)  # [B, K, V]
        self.first = self.logits[:, 0]

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits [B, 1, V] that all nodes of a level share.

        One forward made them for all levels, so they do not depend on the tokens of the path. The rows are those whose
        trees still grow; see `RowsLevel`.
        """
        return pick_rows(self.logits[:, depth : depth + 1], rows)


def grow_slots(
    head: Any,
    requests: Sequence[DraftRequest],
    states: Tensor,
    open_levels: Callable[..., Any] = SlotLevels,
) -> list[DraftTree]:
    """Return the draft tree of each request.

    Args:
        head: The draft head.
        requests: Those of the B rows.
        states: The states [B, K, H] of the levels.
        open_levels: Makes the `RowsLevel` that gives the logits of each level, from the other three arguments.
    """
    requests = [replace(request, budget=request.budget.within(head.levels)) for request in requests]
    # logits are made only for levels that some tree has
    max_depth = max(1, *(request.budget.depth for request in requests))
    levels = open_levels(head, requests, states[:, :max_depth])
    confidence = levels.confidence if head.rates_nodes else None
    return grow_rows(
        requests, levels.first, levels, head.drafts, sharpness=head.sharpness, confidence=confidence
    )
