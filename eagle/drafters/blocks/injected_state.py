"""The texts that a head drafts blocks for: keys and values of their fused features, and one forward for all levels."""

# B rows of text, T new tokens, S slots of a block, K levels, R nodes of one level, L taps, H width

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
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_state import TextState, pad_rows, slot_positions, split_ragged


class InjectedState(TextState):
    """Keys and values of many texts, in a slot for each; what a block computes is forgotten with its draft."""

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.head: Any = head

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees of the levels that one forward gives, once the features of the committed tokens are injected."""
        self.take_rows(list(updates))
        for group in split_ragged({row: len(update.tokens) for row, update in updates.items()}):
            features = [updates[row].features for row in group]
            self.inject(self.take_rows(group), [part for part in features if part is not None])
        trees = {row: DraftTree.chain([update.root]) for row, update in updates.items()}
        rows = sorted((row for row in updates if not budgets[row].is_empty), key=self.rows.index)
        if rows:
            slots = self.take_rows(rows)
            roots = torch.tensor([updates[row].root for row in rows])
            seeds = [
                Seed(updates[row].root, self.text_length(slot) + 1, budgets[row], self.noises[row])
                for row, slot in zip(rows, slots, strict=True)
            ]
            states = self.read_blocks(slots, upload(roots, self.device))
            trees |= zip(rows, grow_slots(self.head, seeds, states, self.head.open_levels), strict=True)
        return trees

    def take_rows(self, rows: Sequence[int]) -> list[int]:
        """The slots of these rows; a new one for each that is asked for the first time."""
        self._take_slots([row for row in rows if row not in self.rows])
        return [self.rows.index(row) for row in rows]

    def inject(self, slots: Sequence[int], features: Sequence[Tensor]) -> None:
        """Write keys and values of features [T, L, H] behind the texts of these slots, and count them as read."""
        head, cache = self.head, self.cache
        counts, starts = [len(part) for part in features], [cache.lengths[slot] for slot in slots]
        fused = head.fuse_taps(torch.cat(list(features)).to(self.device, self.dtype))
        padded = pad_rows(fused.split(counts) if len(counts) > 1 else [fused])
        tables = rotary_tables(head.rotary, padded, slot_positions(starts, counts, self.device))
        cache.aim(slots, starts)
        for block, held in zip(head.layers, self.blocks, strict=True):
            attention = block.self_attn
            key, value = (
                project(padded).unflatten(-1, (-1, attention.width)).transpose(1, 2)
                for project in (attention.k_proj, attention.v_proj)
            )
            held.extend(rotate_heads(key if attention.k_norm is None else attention.k_norm(key), tables), value)
        for slot, count in zip(slots, counts, strict=True):
            cache.lengths[slot] += count

    def read_blocks(self, slots: Sequence[int], roots: Tensor) -> Tensor:
        """[B, K, H], the normed states of blocks behind the texts of these slots and their roots [B]."""
        head, cache, size = self.head, self.cache, int(self.head.settings.slots)
        lengths = [cache.lengths[slot] for slot in slots]
        state, start = head.embed_slots(roots, head.frozen[0]), max(lengths)
        tables = rotary_tables(head.rotary, state, slot_positions(lengths, [size] * len(slots), self.device))
        columns = torch.arange(start, device=self.device)
        committed = torch.zeros(1, start, dtype=self.dtype, device=self.device)
        if min(lengths) < start:
            ends = upload(torch.tensor(lengths)[:, None], self.device)
            lowest = torch.finfo(self.dtype).min
            committed = committed.masked_fill(columns >= ends, lowest)
        seen = torch.ones(len(slots), size, size, dtype=torch.bool, device=self.device)
        mask = level_mask(committed, seen.tril() if head.settings.causal else seen, head.query_groups)
        cache.aim(slots, [start] * len(slots))
        for block, held in zip(head.layers, self.blocks, strict=True):
            state = block(state, tables, mask, held)
        states: Tensor = head.norm(state[:, head.first_slot :])
        return states


class SlotLevels:
    """The logits of all levels of all trees, the same behind all nodes of a level."""

    def __init__(self, head: Any, seeds: Sequence[Seed], states: Tensor) -> None:
        self.logits: Tensor = head.logits(states, head.frozen[0])  # [B, K, V]
        self.first = self.logits[:, 0]

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, 1, V], the logits behind the nodes of one level."""
        return pick_rows(self.logits[:, depth : depth + 1], rows)


def grow_slots(
    head: Any, seeds: Sequence[Seed], states: Tensor, open_levels: Callable[..., Any] = SlotLevels
) -> list[DraftTree]:
    """The tree of each seed from the states [B, K, H] of its levels."""
    seeds = [replace(seed, budget=seed.budget.within(head.levels)) for seed in seeds]
    levels = open_levels(head, seeds, states[:, : max(1, *(seed.budget.depth for seed in seeds))])
    confidence = levels.confidence if head.rates_nodes else None
    return grow_rows(seeds, levels.first, levels, head.drafts, head.sharpness, confidence)
