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

    It has keys and values made of the target's hidden states at the head's taps ("features") of committed tokens. Those
    of a draft's block are written after them, and overwritten by the next tokens. A "row" without further words is a
    sequence of the decoding batch.
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
        """Return a draft tree for each row, a sequence of the decoding batch.

        The features of committed tokens are added to the cache, then one forward over a block gives all levels.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, with its states, and the
                new root.
            budgets: By row, the limits on its tree.
        """
        # assigns cache rows to new rows; the returned indices are not needed
        self.take_rows(list(updates))
        # rows with very different numbers of new tokens do not share a padded forward
        for group in split_ragged({row: len(update.tokens) for row, update in updates.items()}):
            features = [updates[row].features for row in group]
            self.inject(
                self.take_rows(group), [tensor for tensor in features if tensor is not None]
            )
        trees = {row: DraftTree.chain([update.root]) for row, update in updates.items()}
        # with an empty budget the tree is the root alone, and no block is read; the others in the order of cache rows
        rows = sorted((row for row in updates if not budgets[row].is_empty), key=self.rows.index)
        if rows:
            cache_rows = self.take_rows(rows)
            roots = torch.tensor([updates[row].root for row in rows])
            states = self.read_blocks(cache_rows, upload(roots, self.device))
            # the root's position is the sequence's length, and its children have the next one
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
        """Return the index of each row's sequence in the cache ("cache row"); a new row gets the next free one."""
        self._take_cache_rows([row for row in rows if row not in self.rows])
        return [self.rows.index(row) for row in rows]

    def inject(self, cache_rows: Sequence[int], features: Sequence[Tensor]) -> None:
        """Add the keys and values of committed tokens to the cache, in every transformer block.

        Args:
            cache_rows: The rows of the cache in which the B sequences are.
            features: The target's states [T, L, H] of each sequence's T new tokens, at the head's L taps.
        """
        head = self.head
        cache = self.cache
        counts = [len(rows) for rows in features]  # new tokens of each sequence
        # the cache column of each sequence's first new token, which is its position
        starts = [cache.lengths[cache_row] for cache_row in cache_rows]
        fused = head.fuse_taps(torch.cat(list(features)).to(self.device, self.dtype))
        padded = pad_rows(fused.split(counts) if len(counts) > 1 else [fused])  # [B, T, H]
        tables = rotary_tables(head.rotary, padded, new_positions(starts, counts, self.device))
        # `extend` below writes to these cache rows, from these columns on
        cache.set_write_offset(cache_rows, starts)
        for block, block_cache in zip(head.layers, self.blocks, strict=True):
            # the fused features are only keys and values, so no queries are made of them
            attention = block.self_attn
            key = attention.k_proj(padded).unflatten(-1, (-1, attention.width)).transpose(1, 2)
            value = attention.v_proj(padded).unflatten(-1, (-1, attention.width)).transpose(1, 2)
            if attention.k_norm is not None:
                key = attention.k_norm(key)
            block_cache.extend(rotate_heads(key, tables), value)
        # padding of shorter sequences does not count, and later tokens overwrite it
        for cache_row, count in zip(cache_rows, counts, strict=True):
            cache.lengths[cache_row] += count

    def read_blocks(self, cache_rows: Sequence[int], roots: Tensor) -> Tensor:
        """Read a block of tokens after each cache row's sequence, and return the normed states [B, K, H] of its levels.

        The cache keeps its lengths, so that the next tokens overwrite the block.

        Args:
            cache_rows: The rows of the cache in which the B sequences are.
            roots: [B], the first tokens of the blocks; mask tokens follow them.
        """
        head = self.head
        cache = self.cache
        size = int(head.settings.slots)  # tokens of a block
        lengths = [cache.lengths[cache_row] for cache_row in cache_rows]
        # the cache column at which all blocks begin, whatever the length of their sequence
        start = max(lengths)
        state = head.embed_slots(roots, head.target_head)
        tables = rotary_tables(
            head.rotary, state, new_positions(lengths, [size] * len(cache_rows), self.device)
        )

        cache.set_write_offset(cache_rows, [start] * len(cache_rows))
        # one mask for all transformer blocks that see the same: by (has a window, is causal)
        masks: dict[tuple[bool, bool], Tensor] = {}
        for index, (block, block_cache) in enumerate(zip(head.layers, self.blocks, strict=True)):
            kind = head.has_window(index), head.is_causal(index)
            if kind not in masks:
                masks[kind] = self._block_mask(lengths, *kind)
            state = block(state, tables, masks[kind], block_cache)
        states: Tensor = head.norm(state[:, head.first_state :])
        return states

    def _block_mask(self, lengths: Sequence[int], has_window: bool, is_causal: bool) -> Tensor:
        """Return the additive mask [B, 1, groups * slots, S + slots] of a block of slots after each sequence.

        S is the length of the longest sequence, and `groups` query heads share a key head: the queries of the slots are
        repeated for each of them.

        Args:
            lengths: The lengths of the B sequences in the cache.
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
            # columns count from the sequence's first token, 0; its last token is at `ends` - 1
            is_old = head.settings.window.hides(
                column, row=ends[..., None] - 1, begin=0, drafted=drafted
            )
            committed = committed[:, None].masked_fill(is_old, lowest)
        size = int(head.settings.slots)
        block_mask = torch.ones(len(lengths), size, size, dtype=torch.bool, device=self.device)
        if is_causal:
            block_mask = block_mask.tril()
        return level_mask(committed, block_mask, head.query_groups)


class SlotLevels:
    """The logits of all levels of all trees, which are the same for all nodes of a level.

    It is a `RowsLevel`, the function that tree growth calls for the logits of each level.
    """

    def __init__(self, head: Any, requests: Sequence[DraftRequest], states: Tensor) -> None:
        """Compute the logits of all levels at once.

        Args:
            head: The draft head, bound to a target's head.
            requests: Not used: these levels do not depend on the roots.
            states: [B, K, H], the states that predict each of K levels of B trees.
        """
        self.logits: Tensor = head.logits(states, head.target_head)  # [B, K, V]
        self.first = self.logits[:, 0]  # [B, V], after the roots

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits [B, 1, V] of the children of all nodes of a level, which these share.

        One forward made them for all levels, so they do not depend on the tokens of the path: tokens, parents and tree
        mask are not used. `depth` is that of the nodes, 1 for the root's children. `rows` are the B rows whose trees
        still grow, as indices of the requests.
        """
        return pick_rows(self.logits[:, depth : depth + 1], rows)


def grow_slots(
    head: Any,
    requests: Sequence[DraftRequest],
    states: Tensor,
    open_levels: Callable[..., Any] = SlotLevels,
) -> list[DraftTree]:
    """Return the draft tree of each request, no deeper than the head has levels.

    Args:
        head: The draft head.
        requests: The roots, positions and budgets of B trees.
        states: The states [B, K, H] that predict each of K levels.
        open_levels: Makes the `RowsLevel` that gives the logits of each level, from the other three arguments.
    """
    requests = [replace(request, budget=request.budget.within(head.levels)) for request in requests]
    if not head.reads_all_levels:
        # logits are made only for levels that some tree has
        states = states[:, : max(1, *(request.budget.depth for request in requests))]
    levels = open_levels(head, requests, states)
    # a head that estimates how likely a child is accepted also has levels that say so
    confidence = levels.confidence if head.rates_nodes else None
    return grow_rows(
        requests, levels.first, levels, head.drafts, sharpness=head.sharpness, confidence=confidence
    )
