"""SPiRe (Neelam et al. 2025, arXiv 2504.06419): copies of the target's last blocks, with a window."""

# S slots, K passes or nodes of one level, R of all levels, N rows, n blocks, H hidden, k key heads of width w
# B sequences, T tokens, C columns of memory

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import (
    ColumnBytes,
    Committed,
    Reads,
    TargetHead,
)
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.drafters.parts.decoder_block import (
    FOLLOW_LENGTH,
    Norm,
    NormedBlock,
    Rotary,
    head_shape,
    rotary_tables,
)
from eagle.drafters.parts.divisors import reached_levels
from eagle.drafters.parts.growth import FollowsRows, grow_rows, level_mask, level_rows
from eagle.drafters.parts.objectives import Objective, distillation_loss
from eagle.drafters.parts.operations import rotate_heads
from eagle.drafters.parts.sequence_blocks import (
    Pair,
    key_value,
    position_tables,
    read_rows,
    sequence_positions,
)
from eagle.drafters.parts.sequence_state import SequenceLengths, pad_rows
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.target_blocks import Weights, copy_target_blocks
from eagle.drafters.parts.validation import ValidatedHead
from eagle.drafters.parts.window import Window
from eagle.recipe import Section


class SpireSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["spire"] = "spire"
    blocks: int = Field(2, ge=1)  # number of the target's last decoder blocks to copy
    # {sinks: S, recent: R}: attend only to the first S and the latest R tokens
    window: Window | None = Window(sinks=1, recent=64)
    steps: int = Field(4, ge=2)  # number of drafted tokens per training draft
    stride: int = Field(4, ge=1)  # a training draft starts at every so many-th supervised slot
    # weight of the cross-entropy in the loss; the rest is the weight of 1 - sum min(p, q)
    cross_entropy: float = Field(0.5, ge=0, le=1)


class Spire(ValidatedHead):
    """The target's last blocks over tokens alone, each of which attends to its own memories.

    A memory is a hidden state of one token for one block, of which the block makes the token's key and value. A
    sequence's memories are the target's inputs to these blocks. A drafted token's are learned mixes of its embedding
    and all blocks' outputs, known once it is read: it sees those before it and never its own.
    """

    reads = Reads(weights=True)  # `for_target` gets the target's tensors
    # the input of the target's LM head, from which a loss takes the target's probs
    teacher_taps = (-1,)
    Settings = SpireSettings
    settings: SpireSettings
    layers: Any

    def __init__(self, settings: SpireSettings, shape: Any) -> None:
        super().__init__(settings, shape)
        # the inputs of the target's last layers, one for each block
        self.taps = tuple(range(shape.target_layers - settings.blocks, shape.target_layers))
        count = shape.num_hidden_layers
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(count)])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        # [n, 1 + n], the weights of the mix that is a block's memory, before the softmax
        self.mix = nn.Parameter(torch.zeros(count, 1 + count))
        self.rotary = Rotary(shape)

    @classmethod
    def taps_for(cls, settings: SpireSettings, target_config: Any) -> tuple[int, ...]:
        """Return the indices of the target's last `blocks` layers, whose inputs the head reads."""
        layers = target_config.num_hidden_layers
        if settings.blocks > layers:
            raise ValueError(
                f"drafter.blocks is {settings.blocks}, expected at most the target's {layers}: ask fewer"
            )
        return tuple(range(layers - settings.blocks, layers))

    @classmethod
    def for_target(
        cls,
        settings: SpireSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
        weights: Weights | None = None,
    ) -> Spire:
        """Return a head with the target's last blocks and final norm; random ones without `weights`.

        Args:
            settings: The head's settings.
            target_config: The target's transformers config.
            target_head: Not used: the LM head is borrowed without a copy.
            supervised: Not used: the head drafts all tokens.
            weights: Returns a tensor of the target by its name.
        """
        # called for its refusal of too many blocks
        cls.taps_for(settings, target_config)
        layers = target_config.num_hidden_layers
        head = cls(
            settings,
            head_shape(target_config, num_hidden_layers=settings.blocks, target_layers=layers),
        )
        if weights is not None:
            copy_target_blocks(head.layers, head.norm, weights, target_config)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """What decides the meaning of its weights: the target's layers it was copied from, and their window."""
        window = self.settings.window
        return {
            "network": "spire",
            "taps": self.taps,
            "window": window and (window.sinks, window.recent),
        }

    def mix_states(self, states: Tensor) -> Tensor:
        """Return [.., n, H], the memories of drafted tokens: for each of n blocks the state that it makes a key of.

        `states` [.., 1 + n, H] are each token's embedding and its output of every block.
        """
        # m_b = sum_l softmax(w_b)_l s_l (feedback memory)
        return torch.einsum("ml,...lh->...mh", self.mix.softmax(-1), states).to(states.dtype)

    def project_memories(self, memories: Tensor, tables: Pair) -> list[Pair]:
        """Return the keys and values [k, N, w] that each of n blocks makes of its memories of N tokens.

        Args:
            memories: [N, n, H], a state of each token for each block.
            tables: The cosines and sines [N, w] of rotary embedding at the positions of the tokens.
        """
        pairs = []
        for block, memory in zip(self.layers, memories.unbind(-2), strict=True):
            pairs.append(key_value(block, (block.input_layernorm(memory),), tables))
        return pairs

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the loss: cross-entropy from the target's probs, blended with 1 - overlap, summed over the passes.

        Pass s, counted from 1, runs level s of all drafts: it predicts the token s + 1 positions after a slot. There is
        a draft at each of S slots.
        """
        settings = self.settings
        # where attention is computed, and the weight of each slot in each pass [passes, S]
        spans, weights = self.training_slots(batch, batch.tokens.device)
        # [S], and [S, H] for each pass
        slot_indices, states = self.unroll(batch, target_head, spans, settings.steps)
        target_hidden = batch.select_taps((-1,))[:, 0]
        objective = Objective("hybrid", blend=settings.cross_entropy)
        losses = []
        for step, (state, weight) in enumerate(zip(states, weights, strict=True), start=1):
            # Slot i predicts token i + step + 1, which the target predicts from its state at i + step. A slot without
            # weight in this pass takes the target's state of the first pass, as that of this pass may not be stored.
            teacher = target_hidden.index_select(0, slot_indices + torch.where(weight > 0, step, 1))
            # one step in each call
            loss, _ = distillation_loss(
                state[None],
                teacher,
                weight[None],
                # student and teacher share the target's LM head
                (target_head, target_head),
                objective=objective,
            )
            losses.append(loss)
        total = torch.stack(losses).sum()
        # loss terms are named by level, from 0 on, as those of other methods
        return {
            "total": total,
            **{f"draft_probs/{step}": loss.detach() for step, loss in enumerate(losses)},
        }

    def training_slots(self, batch: Batch, device: torch.device) -> tuple[Spans, Tensor]:
        """Return the slots to train, every `stride`-th of a sequence, and the weights [K, S] of S slots in K passes.

        The slots i of a sequence have the same i modulo `stride`, its offset. It is that of a supervised slot which the
        sequence's seed picks, so that at least one slot is trained. A slot has weight in a pass if all tokens up to the
        one that it predicts there are supervised. Sequences are weighted by their supervised tokens.
        """
        settings = self.settings
        # slot i predicts token i + 2 first
        masks = [mask[2:] for mask in batch.masks]
        # all supervised tokens, by which weights are divided; at least 1, as a batch may have none
        supervised = max(sum(int(mask.sum()) for mask in masks), 1)
        offsets = []  # of each sequence: its first slot that is considered
        weights = []  # of each sequence: [passes, its trained slots]
        for mask, seed in zip(masks, batch.seeds, strict=True):
            marked = mask.nonzero()[:, 0]
            generator = torch.Generator().manual_seed(seed)
            sampled = torch.randint(max(len(marked), 1), (1,), generator=generator)
            # a sequence without supervised slots trains none, whatever its offset
            offset = int(marked[sampled]) % settings.stride if len(marked) else 0
            slots = marked[marked % settings.stride == offset]
            # whether all tokens up to the one predicted in a pass are supervised
            reached = reached_levels(mask, slots, settings.steps).T
            offsets.append(offset)
            # each trained slot also counts for those that the stride leaves out
            weights.append(reached * (len(marked) / max(len(slots), 1) / supervised))
        # these are the same slots in the same order: where a mask is true, every `stride`-th from the offset on
        spans = Spans.of(masks, device, settings.stride, offsets, window=settings.window)
        return spans, upload(torch.cat(weights, dim=1), device)

    def unroll(
        self,
        batch: Batch,
        target_head: TargetHead,
        spans: Spans,
        steps: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the passes of training at the slots of `spans`, and return the states that predict the next tokens.

        Slot i sees the target's states of tokens up to i. In pass s, from 0 on, it reads token i + 1 + s, sees its own
        memories of the passes before (mixed states of the tokens that it read there), and predicts the next token.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's embedding.
            spans: The S slots from which drafts continue, with the head's window.
            steps: The number of passes.

        Returns:
            The index [S] of each slot among all tokens, and the states [S, H] of each pass, normed for the LM head.
        """
        # [N] each for the N slots of all sequences: the index among all tokens, and the position in the sequence
        slots, positions, _ = sequence_positions(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, slots).to(self.mix.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        # keys and values [k, N, w] of the target's states, by block
        context = [
            (key.contiguous(), value)
            for key, value in self.project_memories(features, tables_at(positions))
        ]
        slot_indices = slots.index_select(0, spans.rows)
        positions = positions.index_select(0, spans.rows)
        # by block and pass so far: keys and values [k, S, w] of the memories
        memory_pairs: list[list[Pair]] = [[] for _ in self.layers]
        pass_states: list[Tensor] = []
        # a step is the pass counted from 1: the distance from a slot to the token that it reads
        for step in range(1, steps + 1):
            tables = tables_at(positions + step)
            following = batch.places_behind(slot_indices, step)
            # [S, H] each: the embedding, then every block's output
            states = [target_head.embed(batch.tokens.index_select(0, following)).to(features.dtype)]
            for block, pair, drafted in zip(self.layers, context, memory_pairs, strict=True):
                inputs = block.inputs(states[-1])
                states.append(
                    read_rows(block, inputs, tables, pair, spans=spans, step_pairs=drafted)
                )
            pass_states.append(self.norm(states[-1]))
            # no pass is left that could see the memories of the last one
            if step == steps:
                break
            # the memories of a pass mix the outputs of all its blocks, so only later passes can see them
            memories = self.mix_states(torch.stack(states, dim=-2))
            # adds this pass to each block's list, in place
            for pairs, pair in zip(
                memory_pairs, self.project_memories(memories, tables), strict=True
            ):
                pairs.append(pair)
        return slot_indices, pass_states

    # -- validation ---------------------------------------------------------------------------------------------------

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's states [S, H] at the S supervised slots, and the `logits` of the target's LM head."""
        # of the slots' indices, positions and spans only the last
        _, _, spans = sequence_positions(batch, batch.tokens.device)
        # the spans of all supervised slots, which were made without the window
        _, states = self.unroll(
            batch, target_head, replace(spans, window=self.settings.window), levels
        )
        return [(state, target_head.logits) for state in states]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MemoryState:
        """Return the state for several sequences drafted in a batch."""
        return MemoryState(self, self.settings.window)

    def keys_values(self, memories: Tensor, tables: Pair) -> Tensor:
        """Return keys and values of N tokens in one tensor [N, n, 2, k, w], for n blocks with k key heads of width w.

        Args:
            memories: [N, n, H], the state of each token of which each block makes its key and value.
            tables: The cosines and sines [N, w] at the positions of the tokens.
        """
        pairs = [torch.stack(pair) for pair in self.project_memories(memories, tables)]
        # [n, 2, k, N, w] -> [N, n, 2, k, w]
        return torch.stack(pairs).permute(3, 0, 1, 2, 4)

    def read_level(self, tokens: Tensor, memory: Tensor, tables: Pair, mask: Tensor) -> Tensor:
        """Return [B, T, 1 + n, H], the embedding of each of T tokens of B rows, and the outputs of n blocks there.

        Args:
            tokens: [B, T].
            memory: [B, C, n, 2, k, w], C columns of keys and values that they may attend to, in k key heads of width w.
                A token's own are not among them.
            tables: Cosines and sines at their positions.
            mask: [B, 1, groups * T, C], added to the scores; `groups` query heads share a key.
        """
        width = self.shape.head_dim
        states = [self.target_head.embed(tokens).to(memory.dtype)]
        for layer_index, block in enumerate(self.layers):
            normed, residual = block.inputs(states[-1])
            query = block.self_attn.q_proj(normed).unflatten(-1, (-1, width)).transpose(1, 2)
            query = rotate_heads(query, tables)
            key, value = memory[:, :, layer_index].permute(2, 0, 3, 1, 4)  # [B, k, C, w] each
            # queries that share a key become rows of one head, so that no key is repeated
            rows = query.reshape(len(query), key.shape[1], -1, width)
            attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).reshape(
                query.shape
            )
            output = block.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            states.append(block.add_mlp(residual + output))
        return torch.stack(states, dim=2)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [.., V] of tokens by the final norm and the target's LM head.

        Of `states` [.., 1 + n, H], the embedding and the outputs of n blocks, they read the last block's output.
        """
        return self.target_head.logits(self.norm(states[..., -1, :]))

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft after the first reads, level by level."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens a draft's first forward reads: 1, the root.

        Accepted tokens pass through no block, as their keys and values are made of the target's states.
        """
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of every block's keys and values of a sequence, or of the tokens that its window shows.

        The sequence has `tokens` tokens. `column`, the bytes of a token in the target, does not count.
        """
        shape = self.shape
        # bytes of one token's key and value in a block
        width = 2 * shape.num_key_value_heads * shape.head_dim * self.mix.element_size()
        return int(self._visible(tokens) * len(self.layers) * width)

    def _visible(self, tokens: int) -> int:
        """Return of how many of a sequence's `tokens` tokens keys and values are kept: all, or those in the window."""
        window = self.settings.window
        return tokens if window is None else min(tokens, window.sinks + window.recent)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: a level of `rows` nodes after `context` tokens, the last `scored` with logits."""
        # arbitrary values of the right shapes: the time does not depend on them
        weight = self.layers[0].mlp.up_proj.weight
        visible = self._visible(context)
        tokens = torch.ones(1, rows, dtype=torch.long, device=weight.device)
        keys = self.shape.num_key_value_heads
        memory = weight.new_zeros(1, visible, len(self.layers), 2, keys, self.shape.head_dim)
        tables = rotary_tables(self.rotary, weight, torch.full_like(tokens, context))
        # the nodes of a first level have no ancestors in the memory
        no_ancestors = tokens.new_ones(1, rows, 0, dtype=torch.bool)
        mask = level_mask(memory.new_zeros(1, visible), no_ancestors, self.query_groups)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.logits(self.read_level(tokens, memory, tables, mask)[:, -scored:])

        return run


class MemoryState(SequenceLengths):
    """The memory [C, n, 2, k, w] of each sequence: keys and values of its tokens, or of those that the window shows.

    It is a KV cache with C columns, one for each token, for n blocks with k key heads of width w.
    """

    def __init__(self, head: Any, window: Window | None) -> None:
        super().__init__()
        self.head = head
        self.window = window
        self.memory: dict[int, Tensor] = {}  # by row, from its first draft on

    def fork(self, row: int, other: int) -> None:
        """Copy a row to the new row `other`; both share the memory so far, which is never changed in place."""
        super().fork(row, other)
        # a row that has not drafted has no memory yet
        if row in self.memory:
            self.memory[other] = self.memory[row]

    def release(self, row: int) -> None:
        """Release a row."""
        super().release(row)
        self.memory.pop(row, None)

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Add the committed tokens to the memory of each row, and return trees grown after the roots.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, with its states, and the
                new root.
            budgets: By row, the limits on its tree.
        """
        self._commit(updates)
        requests = [self.request(row, update.root, budgets[row]) for row, update in updates.items()]
        # the root is read first: its logits are those of the first level
        levels = _MemoryLevels(self, list(updates), [request.root for request in requests])
        return dict(zip(updates, grow_rows(requests, levels.first_logits, levels), strict=True))

    def _commit(self, updates: Mapping[int, Committed]) -> None:
        """Add the committed tokens of each row to its memory: keys and values made of the target's states.

        It replaces `self.memory` of these rows, cut to the window, and counts the tokens in `self.lengths`.
        """
        head = self.head
        counts = []  # of each row: its new tokens
        features = []  # [T, n, H]: of each of T new tokens the target's inputs to n layers
        positions = []  # of each row: those of its new tokens
        for row, update in updates.items():
            assert update.features is not None
            counts.append(len(update.tokens))
            features.append(update.features)
            positions.append(torch.arange(counts[-1]) + self.lengths[row])
        # [N, n, H]: memories of committed tokens are the target's own inputs to the blocks
        memories = torch.cat(features).to(head.mix.device, head.mix.dtype)
        # by row: keys and values [T, n, 2, k, w]
        new = head.keys_values(memories, _tables_of(head.rotary, memories, positions)).split(counts)
        for row, chunk, count in zip(updates, new, counts, strict=True):
            memory = torch.cat([self.memory[row], chunk]) if row in self.memory else chunk
            self.memory[row] = self._trim(memory)
            self.lengths[row] += count

    def _trim(self, memory: Tensor) -> Tensor:
        """Return the columns [C, ..] of a sequence that the window shows: its first and its latest tokens."""
        window = self.window
        if window is None or len(memory) <= window.sinks + window.recent:
            return memory
        return torch.cat([memory[: window.sinks], memory[-window.recent :]])

    def positions(self, row: int) -> Tensor:
        """Return [C], the position of the token in each of the C columns of a row's memory."""
        # the window keeps the same columns of the positions as of the memory
        return self._trim(torch.arange(self.lengths[row]))


def _tables_of(rotary: Rotary, like: Tensor, positions: Sequence[Tensor]) -> Pair:
    """Return the cosines and sines [N, w] at these positions of several sequences, one after the other.

    Args:
        rotary: The rotary embedding of the head.
        like: A tensor with the tables' dtype and device.
        positions: Of each sequence, the positions of its tokens; N in all.
    """
    # kinds whose frequencies depend on the longest sequence must see each sequence alone
    groups = positions if rotary.rope_type in FOLLOW_LENGTH else [torch.cat(list(positions))]
    tables = [rotary_tables(rotary, like, upload(group, like.device)[None]) for group in groups]
    cosine, sine = zip(*tables, strict=True)
    return torch.cat(cosine, 1)[0], torch.cat(sine, 1)[0]


class _MemoryLevels(FollowsRows):
    """Reads a batch's drafts level by level, with the memories of drafted nodes appended to those of the sequences.

    A memory is a key and a value of a token in every block. Tree growth (`grow_rows`) calls this object for each level.
    """

    def __init__(self, state: MemoryState, rows: list[int], roots: list[int]) -> None:
        """Read the roots of B drafts.

        Args:
            state: The memories of the sequences.
            rows: The B rows of the decoding batch; from here on a row is an index in this list.
            roots: The root of each row.
        """
        self.head = state.head
        self.window = state.window
        memory = pad_rows([state.memory[row] for row in rows])  # [B, C, n, 2, k, w]
        positions = pad_rows([state.positions(row) for row in rows])  # [B, C]
        counts = torch.tensor([len(state.memory[row]) for row in rows])[:, None]  # [B, 1], columns
        # [B, 1], the tokens of each sequence, which is the root's position
        lengths = torch.tensor([state.lengths[row] for row in rows])[:, None]
        device = memory.device
        # an additive mask [B, C] that hides the columns that pad shorter sequences
        committed_mask = memory.new_zeros(memory.shape[:2])
        if counts.min() < counts.max():
            is_after = torch.arange(memory.shape[1], device=device) >= upload(counts, device)
            committed_mask.masked_fill_(is_after, torch.finfo(memory.dtype).min)
        # the tensors before any level, to which drafts of another budget return: the memories, the mask of their
        # columns, the columns' positions, and the lengths of the sequences
        self.at_roots = memory, committed_mask, upload(positions, device), upload(lengths, device)
        self._restart()  # sets the attributes of these tensors
        tokens = upload(torch.tensor(roots)[:, None], device)
        no_ancestors = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)
        # [B, 1, 1 + n, H] and [B, V], after the roots
        self.first_states = self.states = self._read(0, tokens, no_ancestors)
        self.first_logits = self.head.logits(self.states)[:, 0]

    def _restart(self) -> None:
        """Set the tensors of this object to those of all rows after the committed tokens, before any level was read."""
        self.rows = list(range(len(self.at_roots[0])))
        # the number of nodes of each level whose memories were appended, the root's level first
        self.widths: list[int] = []
        self.memory, self.committed_mask, self.positions, self.lengths = self.at_roots

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return [B, K, V], the logits after the K nodes of one level of each of B rows' trees.

        Args:
            depth: The level, 1 for the root's children.
            rows: The B rows of the batch whose trees still grow.
            tokens: [B, K], of the level's nodes.
            parents: Not needed, as the tree mask says what a node sees.
            tree_mask: [B, K, N], the nodes read so far without the root, this level's K last: true at a node's
                ancestors and itself.
        """
        # one object grows the trees of a batch group by group, one group for each kind of budget: each starts again
        # from the roots
        if depth == 1:
            self._restart()
            self.states = self.first_states
        tensors = self.keep_rows(
            rows, self.states, self.memory, self.committed_mask, self.positions, self.lengths
        )
        self.states, self.memory, self.committed_mask, self.positions, self.lengths = tensors
        # those of the level above, whose states are known now
        self._append_memories(depth - 1)
        # [B, K, R], the root and the nodes of the levels above. The columns of this level are cut off: memories mix the
        # outputs of all blocks, so those of its own nodes are not known yet.
        ancestors = F.pad(
            tree_mask[..., : tree_mask.shape[2] - tokens.shape[1]], (1, 0), value=True
        )
        if self.window and depth > self.window.recent:
            # of the draft, the window shows the last `recent` levels above: no longer the root (widths[0]) and the
            # first levels
            ancestors[..., : sum(self.widths[: depth - self.window.recent])] = False
        self.states = self._read(depth, tokens, ancestors)
        return self.head.logits(self.states)

    def _append_memories(self, depth: int) -> None:
        """Append the keys and values of the nodes that were read last to those of the sequence and the levels before.

        The nodes of later levels attend to them. `depth` is that of the nodes. K nodes in each of B trees make K more
        columns of `self.memory`.
        """
        head = self.head
        count = self.states.shape[1]  # K of [B, K, 1 + n, H]
        # all nodes of a level have the same position
        cosine, sine = (table.expand(-1, count, -1).flatten(0, 1) for table in self._tables(depth))
        # the head takes nodes as rows: [B * K, n, H] -> [B * K, n, 2, k, w]
        new = head.keys_values(head.mix_states(self.states).flatten(0, 1), (cosine, sine))
        self.memory = torch.cat([self.memory, new.unflatten(0, (-1, count))], dim=1)
        self.widths.append(count)

    def _read(self, depth: int, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Return the states [B, K, 1 + n, H] of the K nodes of a level: embeddings, and the outputs of n blocks.

        Args:
            depth: The depth of the nodes, 0 for the roots.
            tokens: [B, K], of the nodes.
            ancestors: [B, K, R], which of the R draft nodes in the memory each of them attends to.
        """
        committed_mask = self.committed_mask
        if self.window and depth:
            # the drafted tokens take their part of the window's latest tokens
            # positions count from the sequence's first token, 0; the last committed one is at `lengths` - 1
            is_old = self.window.hides(self.positions, row=self.lengths - 1, begin=0, drafted=depth)
            committed_mask = committed_mask.masked_fill(
                is_old, torch.finfo(committed_mask.dtype).min
            )
        mask = level_mask(committed_mask, ancestors, self.head.query_groups)
        states: Tensor = self.head.read_level(tokens, self.memory, self._tables(depth), mask)
        return states

    def _tables(self, depth: int) -> Pair:
        """Return the cosines and sines [B, 1, w] at the position that a level's nodes have in each of B rows."""
        return rotary_tables(self.head.rotary, self.memory, self.lengths + depth)
