"""The drafting state of Falcon: one forward over a block of k slots gives the logits of k levels.

The first block has the last k slots of a sequence. After every k levels each node gets a new block, which has the last
k tokens of its path.
"""

# B sequences, T new tokens, k slots of a block, H hidden, V vocabulary
# F blocks of the forward before, K nodes of one level (each gets a block), R blocks of a draft so far

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
from eagle.drafters.parts.sequence_state import new_positions, pad_rows
from eagle.drafters.recurrent.head_state import HeadState, Levels, count_unlike


class BlockState(HeadState):
    """The KV cache of several sequences. The last k slots are read together whenever tokens are committed."""

    head: Any

    def __init__(self, head: Any) -> None:
        """Begin without sequences; `head` is a `Falcon`, which drafts blocks of k tokens."""
        super().__init__(head)
        self.size: int = head.size  # k
        # by row: the transformer block's inputs at the last slots, which the next forward reads again: up to k - 1 of
        # them, [slots, hidden size]
        self.recent: dict[int, Tensor] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin the sequence `row`, without tokens yet; `noise` is the target's sampling noise, None if greedy."""
        super().admit(row, noise)
        self.recent[row] = torch.empty(
            0, self.head.shape.hidden_size, dtype=self.dtype, device=self.device
        )

    def fork(self, row: int, other: int) -> None:
        """Copy the keys, values and last inputs of the sequence `row` to a new one, `other`, as beam search does."""
        super().fork(row, other)
        # shared, as these tensors are replaced and never changed
        self.recent[other] = self.recent[row]

    def release(self, row: int) -> None:
        """Drop the sequence `row`, which has ended."""
        super().release(row)
        del self.recent[row]

    def _enter_committed(self, updates: Mapping[int, Committed]) -> tuple[Tensor, ...]:
        """Return Falcon's inputs [T, H] of its transformer block at the T new slots of each row, in the updates' order.

        A row, a sequence of the batch, has a new slot for each newly committed token. H is the hidden size. `updates`
        have the tokens, the target's features at them, and the root, the token after them.
        """
        tokens = []
        features = []
        for update in updates.values():
            assert update.features is not None
            # slot i reads the target's state of token i and token i + 1, so the last slot reads the root
            tokens += [update.tokens[1:], torch.tensor([update.root])]
            # [T, 1, H], as there is a single tap
            features.append(update.features[:, 0])
        hidden = torch.cat(features).to(self.device, self.dtype)
        embedded = self.head.target_head.embed(upload(torch.cat(tokens), self.device)).to(
            self.dtype
        )
        entered: Tensor = self.head.enter(embedded, hidden)
        return entered.split([len(update.tokens) for update in updates.values()])

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Read the new slots of B rows in one padded forward; return the states [B, k, H] of each row's last k.

        These k slots are the first block of a draft. H is the hidden size. The slots' keys and values are added to the
        cache, and their inputs to `self.recent`. `updates` are the newly committed tokens by row, a sequence of the
        batch. A slot reads one token.
        """
        head = self.head
        cache = self.cache
        cache_rows = [self.rows.index(row) for row in updates]
        inputs = []
        for row, cache_row, new in zip(
            updates, cache_rows, self._enter_committed(updates), strict=True
        ):
            # The slots of a block see one another, also later ones. So those that were in the last block are read again
            # with the new ones, and their keys and values are overwritten.
            inputs.append(torch.cat([self.recent[row], new]))
            # a copy, so that the tensor of all slots can be freed
            self.recent[row] = inputs[-1][1 - self.size :].clone()
            cache.lengths[cache_row] += len(new)
        # how many slots of each row are read, those that are read again included, and the first one's cache column
        counts = [len(rows) for rows in inputs]
        lengths = [cache.lengths[cache_row] for cache_row in cache_rows]
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        cache.set_write_offset(cache_rows, starts)

        # every slot sees the whole sequence, later slots included: [B or 1, 1, groups * T, columns] for T slots; a mask
        # repeats the rows of a node for each query head that shares a key head
        committed = self._hide_after(lengths[: count_unlike(lengths)], max(starts) + max(counts))
        mask = committed[:, None, None].expand(-1, 1, head.query_groups * max(counts), -1)
        padded = pad_rows(inputs)
        tables = rotary_tables(head.rotary, padded, new_positions(starts, counts, self.device))
        states: Tensor = head.layers[0](padded, tables, mask, self.blocks[0])
        # [B, k], the last slots of each row; any index serves for a row with fewer than k slots, which gets no draft
        block = torch.tensor(counts)[:, None] + torch.arange(-self.size, 0)
        return states.take_along_dim(upload(block.clamp(min=0)[..., None], self.device), 1)

    def _grow(
        self,
        requests: Sequence[DraftRequest],
        cache_rows: list[int],
        hidden: Tensor,
    ) -> list[DraftTree]:
        """Return the draft tree of each request; it has only the root if the sequence has fewer than k slots (tokens).

        Args:
            requests: Those of the B rows, the sequences of the batch.
            cache_rows: The index of each row in the KV cache.
            hidden: The states [B, k, H] of the k slots of the rows' first blocks, H the hidden size.
        """
        limited = []
        for request in requests:
            # the position of the root's children is one more than the number of slots
            max_depth = self.head.levels if request.position > self.size else 0
            limited.append(replace(request, budget=request.budget.within(max_depth)))
        inputs = self._inputs_after_longest(limited, cache_rows)
        levels = _BlockLevels(self, cache_rows, hidden, *inputs)
        # root_logits are [B, 1, k, V]: the first slot's are those of the root's children
        return grow_rows(limited, levels.root_logits[:, 0, 0], levels)


class _BlockLevels(Levels):
    """Reads the levels of several drafts: one forward, over a block for each node, gives the logits of k levels."""

    def __init__(
        self,
        state: BlockState,
        cache_rows: list[int],
        hidden: Tensor,
        *inputs: Tensor,
    ) -> None:
        """Begin the drafts of B rows, the sequences of the batch, with the block of k slots (tokens) at their ends.

        Args:
            state: The drafting state of the head.
            cache_rows: The index of each row in the KV cache.
            hidden: The states [B, k, hidden size] of the k slots of the roots' blocks.
            inputs: Cosines and sines [B or 1, levels, w of a head], and the additive mask of the cached tokens before
                the draft.
        """
        super().__init__(state, cache_rows, hidden, *inputs)
        # of the roots' blocks, whose states `root_states` are [B, 1, k, hidden size]
        self.root_logits: Tensor = state.head.logits(self.root_states, state.head.target_head)

    def _begin(self) -> None:
        """Reset to the roots' blocks of k slots, for a new draft of B rows (sequences).

        The root's block has the last k slots of a row's committed tokens. It is in the cache and counts as none of the
        draft's R blocks. In the shapes below F blocks were read by the last forward, for one level of K nodes. H is the
        hidden size and V the vocabulary.
        """
        count = len(self.cache_rows)
        device = self.root_states.device
        self.rows = list(range(count))  # the rows whose trees still grow, at first all of the batch
        self.states = self.root_states  # of the F blocks that were read last, [B, F, k, H]
        self.logits = self.root_logits  # [B, F, k, V]
        # [B, K], the index among these of the block that a node of the last level follows
        self.block_index = torch.zeros(count, 1, dtype=torch.long, device=device)
        # the tokens [B, K] between that block and a node, level by level
        self.path: list[Tensor] = []
        # [B, F, R], which of the draft's R blocks (at first none) each of the F blocks sees: those of its path and
        # itself
        self.block_mask = torch.zeros(count, 1, 0, dtype=torch.bool, device=device)

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits after the nodes of one level: [B, K, V], or [B, 1, V] if they are the same for all nodes.

        A forward is needed only at every k-th level; its logits serve k levels.

        Args:
            depth: Of the nodes; the root has depth 0.
            rows: The B rows whose trees still grow, as indices among those that the drafts began with.
            tokens: [B, K], of the K nodes of the level in each tree.
            parents: [B, K], the index of each node's parent in the level above.
            tree_mask: Not used, as blocks have a mask of their own.
        """
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
        # the slot of the block whose logits are those of this level; at the first one a new block is read
        slot = depth % self.state.size
        if slot == 0:
            self._read_block(depth)
        logits = self.logits[:, :, slot]  # [B, F, V], after the F blocks that were read last
        # a new block for each node is in the order of the nodes, and a single block serves all nodes
        if slot == 0 or logits.shape[1] == 1:
            return logits
        return logits.take_along_dim(self.block_index[..., None], 1)

    def _read_block(self, depth: int) -> None:
        """Read a new block of k slots for each of the K nodes of a level, and set its states, logits and mask in place.

        A block has the last k tokens of the node's path, each with the state that predicted it. `depth` is that of the
        nodes, a multiple of k. B is the number of rows, R that of all blocks that a draft has read, these included.
        """
        state = self.state
        size = state.size
        batch, count = self.block_index.shape
        device = self.block_index.device

        # the new blocks [B, K] see those that the node's block saw, and themselves
        block_index = self.block_index[..., None]
        itself = torch.eye(count, dtype=torch.bool, device=device).expand(batch, -1, -1)
        self.block_mask = torch.cat([self.block_mask.take_along_dim(block_index, 1), itself], dim=2)
        # [B, K * k, R * k], by slot: all slots of a block see one another
        slot_mask = self.block_mask.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)

        # [B, K * k, hidden size], the states of the block that each node follows, which predicted the tokens
        hidden = self.states.take_along_dim(block_index[..., None], 1).flatten(1, 2)
        tokens = torch.stack(self.path, dim=2).flatten(1)  # [B, K * k]
        # the k positions are the same for all blocks
        (cosine, sine), committed = self._inputs_at(slice(depth - size, depth))
        tables = cosine.repeat(1, count, 1), sine.repeat(1, count, 1)

        # the new blocks' cache columns come after those of the draft's earlier blocks
        blocks_before = self.block_mask.shape[2] - count
        start = self.start + blocks_before * size
        state.cache.set_write_offset(
            [self.cache_rows[row] for row in self.rows], [start] * len(self.rows)
        )
        mask = level_mask(committed, slot_mask, state.head.query_groups)
        output = state.head.read(
            tokens, hidden, tables, mask, state.blocks, target_head=state.head.target_head
        )
        self.states = output.unflatten(1, (count, size))
        self.logits = state.head.logits(self.states, state.head.target_head)
        # every node now follows its own block
        self.path = []
        self.block_index = torch.arange(count, device=device).expand(batch, -1)
