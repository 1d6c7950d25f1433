"""SPiRe (Neelam et al. 2025, arXiv 2504.06419): the target's last blocks, a window of its states, feedback memory."""

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
    Noise,
    Reads,
    TargetHead,
    TrainableDrafter,
)
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
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
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.target_blocks import Weights, copy_target_blocks
from eagle.drafters.parts.text_blocks import (
    Pair,
    key_value,
    position_tables,
    read_rows,
    text_slots,
)
from eagle.drafters.parts.text_state import pad_rows
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.parts.window import Window
from eagle.recipe import Section


class SpireSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["spire"] = "spire"
    blocks: int = Field(2, ge=1)  # the target's last blocks, this many
    # attend to the first S and the latest R tokens
    window: Window | None = Window(sinks=1, recent=64)
    steps: int = Field(4, ge=2)  # passes of training, each of which predicts the next token
    stride: int = Field(4, ge=1)  # train every so many-th supervised slot
    # its share of the loss; the rest is 1 - sum min(p, q)
    cross_entropy: float = Field(0.5, ge=0, le=1)


class Spire(TrainableDrafter):
    """The target's last blocks over tokens alone, each of which attends to its own memories.

    A sequence's memories are the target's inputs to these blocks. A drafted token's are learned mixes of its embedding
    and all blocks' outputs, known once it is read: it sees those before it and never its own.
    """

    reads = Reads(weights=True)
    teacher_taps = (-1,)
    Settings = SpireSettings
    settings: SpireSettings
    layers: Any

    def __init__(self, settings: SpireSettings, shape: Any) -> None:
        super().__init__(settings, shape)
        self.taps = tuple(range(shape.target_layers - settings.blocks, shape.target_layers))
        count = shape.num_hidden_layers
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(count)])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        # of a block's memory, before the softmax
        self.mix = nn.Parameter(torch.zeros(count, 1 + count))
        self.rotary = Rotary(shape)

    @classmethod
    def taps_for(cls, settings: SpireSettings, target_config: Any) -> tuple[int, ...]:
        """Return the target's inputs to its last blocks."""
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
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
        weights: Weights | None = None,
    ) -> Spire:
        """Return a head with the target's last blocks and final norm; random ones without `weights`."""
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
        """The network: the blocks it was copied from, and their window."""
        window = self.settings.window
        return {
            "network": "spire",
            "taps": self.taps,
            "window": window and (window.sinks, window.recent),
        }

    def mix_states(self, states: Tensor) -> Tensor:
        """Return [.., n, H], the memories of tokens with these embeddings and outputs [.., 1 + n, H]."""
        # m_b = sum_l softmax(w_b)_l s_l (feedback memory)
        return torch.einsum("ml,...lh->...mh", self.mix.softmax(-1), states).to(states.dtype)

    def project_memories(self, memories: Tensor, tables: Pair) -> list[Pair]:
        """Return every block's keys and values [k, N, w] of memories [N, n, H] at positions of tables [N, w]."""
        pairs = []
        for block, memory in zip(self.layers, memories.unbind(-2), strict=True):
            pairs.append(key_value(block, (block.input_layernorm(memory),), tables))
        return pairs

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Return the sum over the passes of cross-entropy from the target's probs and 1 - overlap, weighted."""
        settings = self.settings
        spans, weights = self.training_slots(batch, batch.tokens.device)
        places, states = self.unroll(batch, frozen, spans, settings.steps)
        target_hidden = batch.select_taps((-1,))[:, 0]
        objective = Objective("hybrid", blend=settings.cross_entropy)
        losses = []
        for step, (state, weight) in enumerate(zip(states, weights, strict=True), start=1):
            # a pass that is not reached has no weight, and its state may not be stored: it reads that of the first
            teacher = target_hidden.index_select(0, places + torch.where(weight > 0, step, 1))
            loss, _ = distillation_loss(
                state[None],
                teacher,
                weight[None],
                (frozen, frozen),
                objective=objective,
            )
            losses.append(loss)
        total = torch.stack(losses).sum()
        return {
            "total": total,
            **{f"draft_probs/{step}": loss.detach() for step, loss in enumerate(losses)},
        }

    def training_slots(self, batch: Batch, device: torch.device) -> tuple[Spans, Tensor]:
        """Return every `stride`-th slot, from one that a sequence's seed decides, and its weight in each pass [K, S].

        A pass counts if all tokens up to the one it predicts are supervised. Sequences are weighted by supervised
        tokens.
        """
        settings = self.settings
        masks = [mask[2:] for mask in batch.masks]
        supervised = max(sum(int(mask.sum()) for mask in masks), 1)
        firsts = []
        weights = []
        for mask, seed in zip(masks, batch.seeds, strict=True):
            marked = mask.nonzero()[:, 0]
            generator = torch.Generator().manual_seed(seed)
            sampled = torch.randint(max(len(marked), 1), (1,), generator=generator)
            first = int(marked[sampled]) % settings.stride if len(marked) else 0
            slots = marked[marked % settings.stride == first]
            reached = reached_levels(mask, slots, settings.steps).T
            firsts.append(first)
            # the slots that are left out are counted by those that are trained
            weights.append(reached * (len(marked) / max(len(slots), 1) / supervised))
        spans = Spans.of(masks, device, settings.stride, firsts, window=settings.window)
        return spans, upload(torch.cat(weights, dim=1), device)

    def unroll(
        self,
        batch: Batch,
        frozen: TargetHead,
        spans: Spans,
        steps: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states of slots in each pass.

        Slot i sees the target's states of tokens up to i. In pass s it reads token i + 1 + s, sees its own memories of
        the passes before, and predicts the next token.

        Returns:
            The index [S] of each slot among all tokens, and the states [S, H] of each pass, normed for the LM head.
        """
        slots, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, slots).to(self.mix.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        context = [
            (key.contiguous(), value)
            for key, value in self.project_memories(features, tables_at(positions))
        ]
        places = slots.index_select(0, spans.rows)
        positions = positions.index_select(0, spans.rows)
        # keys and values of the passes so far, by block
        memory_pairs: list[list[Pair]] = [[] for _ in self.layers]
        pass_states: list[Tensor] = []
        for step in range(1, steps + 1):
            tables = tables_at(positions + step)
            following = batch.places_behind(places, step)
            states = [frozen.embed(batch.tokens.index_select(0, following)).to(features.dtype)]
            for block, pair, drafted in zip(self.layers, context, memory_pairs, strict=True):
                inputs = block.inputs(states[-1])
                states.append(
                    read_rows(block, inputs, tables, pair, spans=spans, step_pairs=drafted)
                )
            pass_states.append(self.norm(states[-1]))
            if step == steps:
                break
            # what the pass leaves is known once all blocks are read, so the next one sees it and this one does not
            memories = self.mix_states(torch.stack(states, dim=-2))
            for pairs, pair in zip(
                memory_pairs, self.project_memories(memories, tables), strict=True
            ):
                pairs.append(pair)
        return places, pass_states

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(
        self,
        batch: Batch,
        frozen: TargetHead,
        trees: dict[str, Paths],
    ) -> dict[str, Tensor]:
        """Return sums at all supervised slots: tokens that each tree would keep, and agreement of the probs."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        states, students = zip(*self.draft_levels(batch, frozen, steps), strict=True)
        return validate_batch(batch, states, (students, frozen.logits), trees)

    def draft_levels(
        self,
        batch: Batch,
        frozen: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's states [S, H], and the target's LM head."""
        _, _, spans = text_slots(batch, batch.tokens.device)
        _, states = self.unroll(batch, frozen, replace(spans, window=self.settings.window), levels)
        return [(state, frozen.logits) for state in states]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MemoryState:
        """Return the state for several sequences drafted in a batch."""
        return MemoryState(self, self.settings.window)

    def remember(self, memories: Tensor, tables: Pair) -> Tensor:
        """Return [N, n, 2, k, w], keys and values of memories [N, n, H] at positions of tables [N, w]."""
        pairs = [torch.stack(pair) for pair in self.project_memories(memories, tables)]
        return torch.stack(pairs).permute(3, 0, 1, 2, 4)

    def read_level(self, tokens: Tensor, memory: Tensor, tables: Pair, mask: Tensor) -> Tensor:
        """Return [B, T, 1 + n, H], embeddings and outputs at tokens [B, T].

        Args:
            tokens: [B, T].
            memory: what they see, [B, C, n, 2, k, w].
            tables: cosines and sines at their positions.
            mask: [B, 1, groups * T, C].
        """
        width = self.shape.head_dim
        states = [self.frozen[0].embed(tokens).to(memory.dtype)]
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
        """Return [.., V], the target's LM head after the last of states [.., 1 + n, H]."""
        return self.frozen[0].logits(self.norm(states[..., -1, :]))

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return the rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return only the root: accepted tokens pass through no block."""
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of every block's memories, of a sequence or of what its window shows."""
        shape = self.shape
        width = 2 * shape.num_key_value_heads * shape.head_dim * self.mix.element_size()
        return int(self._visible(tokens) * len(self.layers) * width)

    def _visible(self, tokens: int) -> int:
        """Return how many of a sequence's tokens are remembered."""
        window = self.settings.window
        return tokens if window is None else min(tokens, window.sinks + window.recent)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: a level of `rows` rows after `context` tokens, or what the window shows."""
        weight = self.layers[0].mlp.up_proj.weight
        visible = self._visible(context)
        tokens = torch.ones(1, rows, dtype=torch.long, device=weight.device)
        keys = self.shape.num_key_value_heads
        memory = weight.new_zeros(1, visible, len(self.layers), 2, keys, self.shape.head_dim)
        tables = rotary_tables(self.rotary, weight, torch.full_like(tokens, context))
        # a draft's own rows are not seen: its first level has none before it
        nothing = tokens.new_ones(1, rows, 0, dtype=torch.bool)
        mask = level_mask(memory.new_zeros(1, visible), nothing, self.query_groups)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.logits(self.read_level(tokens, memory, tables, mask)[:, -scored:])

        return run


class MemoryState:
    """Memory [C, n, 2, k, w] of each sequence: of its first tokens and its last ones where there is a window."""

    def __init__(self, head: Any, window: Window | None) -> None:
        self.head = head
        self.window = window
        self.noises: dict[int, Noise | None] = {}
        self.lengths: dict[int, int] = {}  # committed tokens
        self.memory: dict[int, Tensor] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row] = noise
        self.lengths[row] = 0

    def fork(self, row: int, other: int) -> None:
        """Copy a row to a new one, which begins with the same memory."""
        self.noises[other] = self.noises[row]
        self.lengths[other] = self.lengths[row]
        if row in self.memory:
            self.memory[other] = self.memory[row]

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.lengths[row]
        self.memory.pop(row, None)

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees grown after the root of each row, once the states of its committed tokens are remembered."""
        self._commit(updates)
        requests = [
            DraftRequest(update.root, self.lengths[row] + 1, budgets[row], self.noises[row])
            for row, update in updates.items()
        ]
        # the root is read first: its logits are those of the first level
        levels = _MemoryLevels(self, list(updates), [request.root for request in requests])
        return dict(zip(updates, grow_rows(requests, levels.first_logits, levels), strict=True))

    def _commit(self, updates: Mapping[int, Committed]) -> None:
        """Add the target's states of the committed tokens to the memory."""
        head = self.head
        counts = []
        features = []
        positions = []
        for row, update in updates.items():
            assert update.features is not None
            counts.append(len(update.tokens))
            features.append(update.features)
            positions.append(torch.arange(counts[-1]) + self.lengths[row])
        # a sequence's memories are the target's own inputs to the blocks, [N, n, H]
        memories = torch.cat(features).to(head.mix.device, head.mix.dtype)
        new = head.remember(memories, _tables_of(head.rotary, memories, positions)).split(counts)
        for row, chunk, count in zip(updates, new, counts, strict=True):
            memory = torch.cat([self.memory[row], chunk]) if row in self.memory else chunk
            self.memory[row] = self._trim(memory)
            self.lengths[row] += count

    def _trim(self, memory: Tensor) -> Tensor:
        """Return the columns that the window shows."""
        window = self.window
        if window is None or len(memory) <= window.sinks + window.recent:
            return memory
        return torch.cat([memory[: window.sinks], memory[-window.recent :]])

    def positions(self, row: int) -> Tensor:
        """Return [C], the positions of the columns of a sequence."""
        return self._trim(torch.arange(self.lengths[row]))


def _tables_of(rotary: Rotary, like: Tensor, positions: Sequence[Tensor]) -> Pair:
    """Return [N, w] each, cosines and sines at positions of several sequences, as if each were alone."""
    groups = positions if rotary.rope_type in FOLLOW_LENGTH else [torch.cat(list(positions))]
    tables = [rotary_tables(rotary, like, upload(group, like.device)[None]) for group in groups]
    cosine, sine = zip(*tables, strict=True)
    return torch.cat(cosine, 1)[0], torch.cat(sine, 1)[0]


class _MemoryLevels(FollowsRows):
    """The levels of the drafts of some sequences; what was drafted is remembered after the sequences."""

    def __init__(self, state: MemoryState, rows: list[int], roots: list[int]) -> None:
        self.head = state.head
        self.window = state.window
        memory = pad_rows([state.memory[row] for row in rows])  # [B, C, n, 2, k, w]
        positions = pad_rows([state.positions(row) for row in rows])  # [B, C]
        counts = torch.tensor([len(state.memory[row]) for row in rows])[:, None]
        lengths = torch.tensor([state.lengths[row] for row in rows])[:, None]
        device = memory.device
        # columns after a shorter sequence's are hidden
        committed = memory.new_zeros(memory.shape[:2])
        if counts.min() < counts.max():
            is_after = torch.arange(memory.shape[1], device=device) >= upload(counts, device)
            committed.masked_fill_(is_after, torch.finfo(memory.dtype).min)
        self.first = memory, committed, upload(positions, device), upload(lengths, device)
        self._begin()
        tokens = upload(torch.tensor(roots)[:, None], device)
        nothing = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)
        self.first_states = self.states = self._read(0, tokens, nothing)
        self.first_logits = self.head.logits(self.states)[:, 0]

    def _begin(self) -> None:
        """Start at the roots."""
        self.rows = list(range(len(self.first[0])))
        self.widths: list[int] = []  # nodes of each level that is remembered
        self.memory, self.committed, self.positions, self.ends = self.first

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return [B, K, V], the logits after the nodes of one level of these rows."""
        if depth == 1:
            self._begin()
            self.states = self.first_states
        tensors = self.keep_rows(
            rows, self.states, self.memory, self.committed, self.positions, self.ends
        )
        self.states, self.memory, self.committed, self.positions, self.ends = tensors
        self._remember(depth - 1)
        # the root and the nodes above, as no node sees its own column
        ancestors = F.pad(
            tree_mask[..., : tree_mask.shape[2] - tokens.shape[1]], (1, 0), value=True
        )
        if self.window and depth > self.window.recent:
            # the window has left the levels that lie further back
            ancestors[..., : sum(self.widths[: depth - self.window.recent])] = False
        self.states = self._read(depth, tokens, ancestors)
        return self.head.logits(self.states)

    def _remember(self, depth: int) -> None:
        """Append the memories of a level's nodes, as keys and values, to those of the sequence and the levels before.

        The nodes of later levels attend to them.
        """
        head = self.head
        count = self.states.shape[1]  # K of [B, K, 1 + n, H]
        # all nodes of a level stand at one position
        cosine, sine = (table.expand(-1, count, -1).flatten(0, 1) for table in self._tables(depth))
        # the head takes nodes as rows: [B * K, n, H] -> [B * K, n, 2, k, w]
        new = head.remember(head.mix_states(self.states).flatten(0, 1), (cosine, sine))
        self.memory = torch.cat([self.memory, new.unflatten(0, (-1, count))], dim=1)
        self.widths.append(count)

    def _read(self, depth: int, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Return the states [B, K, 1 + n, H] of the K nodes of a level.

        `ancestors` [B, K, R] marks the rows of the draft that each of them attends to.
        """
        committed = self.committed
        if self.window and depth:
            is_old = self.window.hides(self.positions, self.ends - 1, 0, depth)
            committed = committed.masked_fill(is_old, torch.finfo(committed.dtype).min)
        mask = level_mask(committed, ancestors, self.head.query_groups)
        states: Tensor = self.head.read_level(tokens, self.memory, self._tables(depth), mask)
        return states

    def _tables(self, depth: int) -> Pair:
        """Return [B, 1, w] each, cosines and sines at the positions of a level."""
        return rotary_tables(self.head.rotary, self.memory, self.ends + depth)
