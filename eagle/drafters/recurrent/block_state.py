"""The state of a semi-autoregressive head: each forward over a block of slots gives several levels."""

# B rows of text, T slots, F paths with a block of k slots behind each, K nodes of one level, R of all blocks, H width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import Committed, Noise
from eagle.core.tree import DraftTree
from eagle.device import pick_rows, upload
from eagle.drafters.parts.decoder_block import rotary_tables
from eagle.drafters.parts.growth import grow_rows, level_mask
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_state import pad_rows, slot_positions
from eagle.drafters.recurrent.head_state import HeadState, count_unlike


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


class _BlockLevels:
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
        if rows != self.rows:
            kept = [self.rows.index(row) for row in rows]
            self.states, self.logits, self.owner, self.seen, *self.path = (
                pick_rows(part, kept) for part in (self.states, self.logits, self.owner, self.seen, *self.path)
            )
            self.rows = rows
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
