"""Drafting blocks of k tokens: the last k slots of a sequence are read together, then a block after each path."""

# B sequences, T new tokens, k slots of a block, H hidden, V vocabulary
# F blocks of the pass before, K nodes of one level (each gets a block), R blocks of a draft so far

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import Committed, Noise
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.drafters.parts.decoder_block import rotary_tables
from eagle.drafters.parts.growth import grow_rows, level_mask
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.text_state import pad_rows, slot_positions
from eagle.drafters.recurrent.head_state import HeadState, Levels, count_unlike


class BlockState(HeadState):
    """Keys and values of several sequences; the last k slots are read together whenever tokens are committed."""

    head: Any

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.size: int = head.size
        self.recent: dict[
            int, Tensor
        ] = {}  # [up to k - 1, H], what the block reads of the last slots

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        super().admit(row, noise)
        self.recent[row] = torch.empty(
            0, self.head.shape.hidden_size, dtype=self.dtype, device=self.device
        )

    def fork(self, row: int, other: int) -> None:
        """Copy a row to a new one, with its last slots."""
        super().fork(row, other)
        self.recent[other] = self.recent[row]

    def release(self, row: int) -> None:
        """Release a row."""
        super().release(row)
        del self.recent[row]

    def _enter_committed(self, updates: Mapping[int, Committed]) -> tuple[Tensor, ...]:
        """Return [T, H] for each row, what the block reads of its new slots."""
        tokens = []
        features = []
        for update in updates.values():
            assert update.features is not None
            # slot i reads token i + 1, so the last one reads the root
            tokens += [update.tokens[1:], torch.tensor([update.root])]
            features.append(update.features[:, 0])
        hidden = torch.cat(features).to(self.device, self.dtype)
        embedded = self.head.frozen[0].embed(upload(torch.cat(tokens), self.device)).to(self.dtype)
        entered: Tensor = self.head.enter(embedded, hidden)
        return entered.split([len(update.tokens) for update in updates.values()])

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Return [B, k, H], the states of each row's last slots, which see its sequence up to the last."""
        head = self.head
        cache = self.cache
        cache_rows = [self.rows.index(row) for row in updates]
        inputs = []
        for row, cache_row, new in zip(
            updates, cache_rows, self._enter_committed(updates), strict=True
        ):
            # a block's slots see one another, so its earlier slots are read again with the new ones
            inputs.append(torch.cat([self.recent[row], new]))
            self.recent[row] = inputs[-1][1 - self.size :].clone()
            cache.lengths[cache_row] += len(new)
        counts = [len(rows) for rows in inputs]
        lengths = [cache.lengths[cache_row] for cache_row in cache_rows]
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        cache.set_write_offset(cache_rows, starts)

        # every slot sees the whole sequence, later slots included: [B, 1, groups * T, columns]
        committed = self._hide_after(lengths[: count_unlike(lengths)], max(starts) + max(counts))
        mask = committed[:, None, None].expand(-1, 1, head.query_groups * max(counts), -1)
        padded = pad_rows(inputs)
        tables = rotary_tables(head.rotary, padded, slot_positions(starts, counts, self.device))
        states: Tensor = head.layers[0](padded, tables, mask, self.blocks[0])
        block = torch.tensor(counts)[:, None] + torch.arange(-self.size, 0)
        return states.take_along_dim(upload(block.clamp(min=0)[..., None], self.device), 1)

    def _grow(
        self,
        requests: Sequence[DraftRequest],
        cache_rows: list[int],
        hidden: Tensor,
    ) -> list[DraftTree]:
        """Return the trees of some cache rows; only the root if fewer than k tokens are committed."""
        limited = []
        for request in requests:
            # the root's children stand at position length + 1
            max_depth = self.head.levels if request.position > self.size else 0
            limited.append(replace(request, budget=request.budget.within(max_depth)))
        depth = max(request.budget.depth for request in limited)
        columns = max(self.cache.lengths[cache_row] for cache_row in cache_rows)
        inputs = self._draft_inputs(self._unlike_rows(cache_rows), columns, depth)
        levels = _BlockLevels(self, cache_rows, hidden, *inputs)
        return grow_rows(limited, levels.root_logits[:, 0, 0], levels)


class _BlockLevels(Levels):
    """The levels of several drafts; every k of them come from one forward, over a block after each path."""

    def __init__(
        self,
        state: BlockState,
        cache_rows: list[int],
        hidden: Tensor,
        *inputs: Tensor,
    ) -> None:
        super().__init__(state, cache_rows, hidden, *inputs)
        # root_states are those of the roots' blocks, [B, 1, k, H]
        self.root_logits: Tensor = state.head.logits(self.root_states, state.head.frozen[0])

    def _begin(self) -> None:
        """Start at the roots."""
        count = len(self.cache_rows)
        device = self.root_states.device
        self.rows = list(range(count))
        self.states = self.root_states  # of the last blocks, [B, F, k, H]
        self.logits = self.root_logits  # [B, F, k, V]
        # [B, K], which one a node follows
        self.block_index = torch.zeros(count, 1, dtype=torch.long, device=device)
        self.path: list[Tensor] = []  # the tokens [B, K] after it, level by level
        # [B, F, R], blocks of its path
        self.block_mask = torch.zeros(count, 1, 0, dtype=torch.bool, device=device)

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return [B, K, V], the logits after the nodes of one level; [B, 1, V] if they are the same for all nodes."""
        if depth == 1:
            self._begin()
        tensors = self.keep_rows(
            rows, self.states, self.logits, self.block_index, self.block_mask, *self.path
        )
        self.states, self.logits, self.block_index, self.block_mask, *path = tensors
        # a node follows the block of its parent
        self.block_index = self.block_index.gather(1, parents)
        self.path = [level_tokens.gather(1, parents) for level_tokens in path]
        self.path.append(tokens)
        slot = depth % self.state.size
        if slot == 0:
            self._read_block(depth)
        logits = self.logits[:, :, slot]
        if slot == 0 or logits.shape[1] == 1:
            return logits
        return logits.take_along_dim(self.block_index[..., None], 1)

    def _read_block(self, depth: int) -> None:
        """Read a block after each node: the last k tokens of its path, with the states that guessed them."""
        state = self.state
        size = state.size
        batch, count = self.block_index.shape
        device = self.block_index.device

        # the new blocks [B, K] see those that the node's block saw, and themselves
        block_index = self.block_index[..., None]
        itself = torch.eye(count, dtype=torch.bool, device=device).expand(batch, -1, -1)
        self.block_mask = torch.cat([self.block_mask.take_along_dim(block_index, 1), itself], dim=2)
        # [B, K * k, R * k]
        slot_mask = self.block_mask.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)

        # [B, K * k, H]
        hidden = self.states.take_along_dim(block_index[..., None], 1).flatten(1, 2)
        tokens = torch.stack(self.path, dim=2).flatten(1)  # [B, K * k]
        # k positions, the same for all blocks
        (cosine, sine), committed = self._inputs_at(slice(depth - size, depth))
        tables = cosine.repeat(1, count, 1), sine.repeat(1, count, 1)

        blocks_before = self.block_mask.shape[2] - count
        start = self.start + blocks_before * size
        state.cache.set_write_offset(
            [self.cache_rows[row] for row in self.rows], [start] * len(self.rows)
        )
        mask = level_mask(committed, slot_mask, state.head.query_groups)
        output = state.head.read(
            tokens, hidden, tables, mask, state.blocks, frozen=state.head.frozen[0]
        )
        self.states = output.unflatten(1, (count, size))
        self.logits = state.head.logits(self.states, state.head.frozen[0])
        self.path = []
        self.block_index = torch.arange(count, device=device).expand(batch, -1)
