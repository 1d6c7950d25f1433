"""SPiRe (Neelam et al. 2025, arXiv 2504.06419): the target's last blocks, a window of its states, feedback memory."""

# S slots, K passes or nodes of one level, R of all levels, N rows, n blocks, H width, k of keys of width w
# B texts, T tokens, C columns of memory

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, Noise, Reads, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
from eagle.device import upload
from eagle.drafters.parts.decoder_block import FOLLOW_LENGTH, Norm, NormedBlock, Rotary, head_shape, rotary_tables
from eagle.drafters.parts.growth import FollowsRows, grow_rows, level_mask, level_rows
from eagle.drafters.parts.objectives import Objective, distillation_loss
from eagle.drafters.parts.operations import rotate_heads
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.target_blocks import Weights, copy_target_blocks
from eagle.drafters.parts.text_blocks import Pair, key_value, position_tables, read_rows, text_slots
from eagle.drafters.parts.text_state import pad_rows
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.parts.window import Window
from eagle.recipe import Section


class SpireSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["spire"] = "spire"
    blocks: int = Field(2, ge=1)  # the target's last blocks, this many
    window: Window | None = Window(sinks=1, recent=64)  # attend to the first S and the latest R tokens
    steps: int = Field(4, ge=2)  # passes of training, each of which predicts the next token
    stride: int = Field(4, ge=1)  # train every so many-th supervised slot
    cross_entropy: float = Field(0.5, ge=0, le=1)  # its share of the loss; the rest is 1 - sum min(p, q)


class Spire(TrainableDrafter):
    """The target's last blocks over tokens alone, each of which looks at memories of its own.

    A text's memories are the target's inputs to these blocks. A drafted token's are learned mixes of its embedding and
    all blocks' outputs, known once it is read: it sees those before it and never its own.
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
        self.mix = nn.Parameter(torch.zeros(count, 1 + count))  # of a block's memory, before the softmax
        self.rotary = Rotary(shape)

    @classmethod
    def taps_for(cls, settings: SpireSettings, target_config: Any) -> tuple[int, ...]:
        """The target's inputs to its last blocks."""
        layers = target_config.num_hidden_layers
        if settings.blocks > layers:
            raise ValueError(f"drafter.blocks is {settings.blocks}, expected at most the target's {layers}: ask fewer")
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
        """A head with the target's last blocks and final norm; random weights of the same sizes without `weights`."""
        cls.taps_for(settings, target_config)
        layers = target_config.num_hidden_layers
        head = cls(settings, head_shape(target_config, num_hidden_layers=settings.blocks, target_layers=layers))
        if weights is not None:
            copy_target_blocks(head.layers, head.norm, weights, target_config)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network: the blocks it was copied from, and their window."""
        window = self.settings.window
        return {"network": "spire", "taps": self.taps, "window": window and (window.sinks, window.recent)}

    def mix_states(self, states: Tensor) -> Tensor:
        """[.., n, H], the memories of tokens with these embeddings and outputs [.., 1 + n, H]."""
        return torch.einsum("ml,...lh->...mh", self.mix.softmax(-1), states).to(states.dtype)

    def project_memories(self, memories: Tensor, tables: Pair) -> list[Pair]:
        """[k, N, w] each, every block's keys and values of memories [N, n, H] at positions of tables [N, w]."""
        normed = [block.input_layernorm(part) for block, part in zip(self.layers, memories.unbind(-2), strict=True)]
        return [key_value(block, (part,), tables) for block, part in zip(self.layers, normed, strict=True)]

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Sum over the passes of cross-entropy from the target's probs and 1 - overlap, weighted."""
        settings, device = self.settings, batch.tokens.device
        spans, weights = self.training_slots(batch, device)
        places, states = self.unroll(batch, frozen, spans, settings.steps)
        true, objective = batch.select_taps((-1,))[:, 0], Objective("hybrid", blend=settings.cross_entropy)
        losses = []
        for step, (state, weight) in enumerate(zip(states, weights, strict=True), start=1):
            # a pass that is not reached counts for nothing, and its state may not be kept: it reads that of the first
            teacher = true.index_select(0, places + torch.where(weight > 0, step, 1))
            losses.append(distillation_loss(state[None], teacher, weight[None], (frozen, frozen), objective)[0])
        total = torch.stack(losses).sum()
        return {"total": total, **{f"draft_probs/{step}": loss.detach() for step, loss in enumerate(losses)}}

    def training_slots(self, batch: Batch, device: torch.device) -> tuple[Spans, Tensor]:
        """Every `stride`-th slot, from one that a text's seed decides, and its weight in each pass [K, S].

        A pass counts if all tokens up to the one it predicts are supervised. Texts are weighted by supervised tokens.
        """
        settings, firsts, weights = self.settings, list[int](), list[Tensor]()
        masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
        supervised, passes = max(sum(int(mask.sum()) for mask in masks), 1), torch.arange(settings.steps)[:, None]
        for mask, seed in zip(masks, batch.seeds, strict=True):
            marked = mask.nonzero()[:, 0]
            drawn = torch.randint(max(len(marked), 1), (1,), generator=torch.Generator().manual_seed(seed))
            firsts.append(int(marked[drawn]) % settings.stride if len(marked) else 0)
            slots = marked[marked % settings.stride == firsts[-1]]
            reached = F.pad(mask, (0, settings.steps))[slots + passes].long().cumprod(0)
            weights.append(reached * (len(marked) / max(len(slots), 1) / supervised))
        return Spans.of(masks, device, settings.stride, firsts, settings.window), upload(
            torch.cat(weights, dim=1), device
        )

    def unroll(self, batch: Batch, frozen: TargetHead, spans: Spans, steps: int) -> tuple[Tensor, list[Tensor]]:
        """The places [S] of slots among all tokens, and their states [S, H] in each pass, normed for the LM head.

        Slot i sees the target's states of tokens up to i. In pass s it reads token i + 1 + s, sees its own memories of
        the passes before, and names the token behind.
        """
        slots, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, slots).to(self.mix.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        context = [(key.contiguous(), value) for key, value in self.project_memories(features, tables_at(positions))]
        places, positions = slots.index_select(0, spans.rows), positions.index_select(0, spans.rows)
        step_pairs: list[list[Pair]] = [[] for _ in self.layers]
        pass_states: list[Tensor] = []
        for step in range(1, steps + 1):
            tables = tables_at(positions + step)
            following = batch.places_behind(places, step)
            states = [frozen.embed(batch.tokens.index_select(0, following)).to(features.dtype)]
            for block, pairs, mine in zip(self.layers, context, step_pairs, strict=True):
                states.append(read_rows(block, block.inputs(states[-1]), tables, pairs, spans, mine))
            pass_states.append(self.norm(states[-1]))
            if step < steps:
                memories = self.project_memories(self.mix_states(torch.stack(states, dim=-2)), tables)
                for mine, pair in zip(step_pairs, memories, strict=True):
                    mine.append(pair)
        return places, pass_states

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Validation sums at all supervised slots: tokens that each tree would keep, and agreement of the probs."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        states = [state for state, _ in self.draft_levels(batch, frozen, steps)]
        return validate_batch(batch, states, ([frozen.logits] * steps, frozen.logits), trees)

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Each level's states [S, H], and the target's LM head."""
        spans = replace(text_slots(batch, batch.tokens.device)[2], window=self.settings.window)
        return [(state, frozen.logits) for state in self.unroll(batch, frozen, spans, levels)[1]]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> MemoryState:
        """The state for several texts drafted together."""
        return MemoryState(self, self.settings.window)

    def remember(self, memories: Tensor, tables: Pair) -> Tensor:
        """[N, n, 2, k, w], keys and values of memories [N, n, H] at positions of tables [N, w]."""
        pairs = [torch.stack(pair) for pair in self.project_memories(memories, tables)]
        return torch.stack(pairs).permute(3, 0, 1, 2, 4)

    def read_level(self, tokens: Tensor, memory: Tensor, tables: Pair, mask: Tensor) -> Tensor:
        """[B, T, 1 + n, H], embeddings and outputs at tokens [B, T] that see memory [B, C, n, 2, k, w] by a mask."""
        states, width = [self.frozen[0].embed(tokens).to(memory.dtype)], self.shape.head_dim
        for number, block in enumerate(self.layers):
            normed, residual = block.inputs(states[-1])
            query = rotate_heads(block.self_attn.q_proj(normed).unflatten(-1, (-1, width)).transpose(1, 2), tables)
            key, value = memory[:, :, number].permute(2, 0, 3, 1, 4)
            rows = query.reshape(len(query), key.shape[1], -1, width)
            seen = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).reshape(query.shape)
            states.append(block.add_mlp(residual + block.self_attn.o_proj(seen.transpose(1, 2).flatten(2))))
        return torch.stack(states, dim=2)

    def logits(self, states: Tensor) -> Tensor:
        """[.., V], the target's LM head behind the last of states [.., 1 + n, H]."""
        return self.frozen[0].logits(self.norm(states[..., -1, :]))

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Only the root: accepted tokens pass through no block."""
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """The memories of every block, of a text or of what its window shows."""
        window, shape = self.settings.window, self.shape
        seen = tokens if window is None else min(tokens, window.sinks + window.recent)
        width = 2 * shape.num_key_value_heads * shape.head_dim * self.mix.element_size()
        return int(seen * len(self.layers) * width)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """A level of so many rows behind so much text, or as much of it as is seen."""
        window, weight = self.settings.window, self.layers[0].mlp.up_proj.weight
        seen = context if window is None else min(context, window.sinks + window.recent)
        tokens = torch.ones(1, rows, dtype=torch.long, device=weight.device)
        keys = self.shape.num_key_value_heads
        memory = weight.new_zeros(1, seen, len(self.layers), 2, keys, self.shape.head_dim)
        tables = rotary_tables(self.rotary, weight, torch.full_like(tokens, context))
        mask = level_mask(memory.new_zeros(1, seen), tokens.new_ones(1, rows, 0, dtype=torch.bool), self.query_groups)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.logits(self.read_level(tokens, memory, tables, mask)[:, -scored:])

        return run


class MemoryState:
    """Memory [C, n, 2, k, w] of each text: of its first tokens and its last ones where there is a window."""

    def __init__(self, head: Any, window: Window | None) -> None:
        self.head, self.window = head, window
        self.noises: dict[int, Noise | None] = {}
        self.lengths: dict[int, int] = {}  # committed tokens
        self.memory: dict[int, Tensor] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row], self.lengths[row] = noise, 0

    def fork(self, row: int, other: int) -> None:
        """A text goes on in two ways, from the same memory."""
        self.noises[other], self.lengths[other] = self.noises[row], self.lengths[row]
        if row in self.memory:
            self.memory[other] = self.memory[row]

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.lengths[row]
        self.memory.pop(row, None)

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown behind the root of each row, once the target's states of its committed tokens are remembered."""
        self._commit(updates)
        seeds = [
            Seed(update.root, self.lengths[row] + 1, budgets[row], self.noises[row]) for row, update in updates.items()
        ]
        levels = _MemoryLevels(self, list(updates), [seed.root for seed in seeds])
        return dict(zip(updates, grow_rows(seeds, levels.first_logits, levels), strict=True))

    def _commit(self, updates: Mapping[int, Committed]) -> None:
        """Add the target's states of the committed tokens to the memory."""
        head, counts = self.head, [len(update.tokens) for update in updates.values()]
        features = torch.cat([update.features for update in updates.values() if update.features is not None])
        features = features.to(head.mix.device, head.mix.dtype)
        positions = [torch.arange(count) + self.lengths[row] for row, count in zip(updates, counts, strict=True)]
        new = head.remember(features, _tables_of(head.rotary, features, positions)).split(counts)
        for row, part, count in zip(updates, new, counts, strict=True):
            self.memory[row] = self._trim(torch.cat([self.memory[row], part]) if row in self.memory else part)
            self.lengths[row] += count

    def _trim(self, memory: Tensor) -> Tensor:
        """The columns that the window shows."""
        window = self.window
        if window is None or len(memory) <= window.sinks + window.recent:
            return memory
        return torch.cat([memory[: window.sinks], memory[-window.recent :]])

    def positions(self, row: int) -> Tensor:
        """[C], where the columns of a text stand in it."""
        positions = torch.arange(self.lengths[row])
        return positions if self.window is None else self._trim(positions)


def _tables_of(rotary: Rotary, like: Tensor, positions: Sequence[Tensor]) -> Pair:
    """[N, w] each, cosines and sines at positions of several texts, each text's as if it were alone."""
    groups = positions if rotary.rope_type in FOLLOW_LENGTH else [torch.cat(list(positions))]
    cosine, sine = zip(*(rotary_tables(rotary, like, upload(part, like.device)[None]) for part in groups), strict=True)
    return torch.cat(cosine, 1)[0], torch.cat(sine, 1)[0]


class _MemoryLevels(FollowsRows):
    """The levels of the drafts of some texts; what was drafted is remembered behind the texts."""

    def __init__(self, state: MemoryState, rows: list[int], roots: list[int]) -> None:
        self.head, self.window = state.head, state.window
        memory, places = pad_rows([state.memory[row] for row in rows]), pad_rows([*map(state.positions, rows)])
        counts, lengths = [len(state.memory[row]) for row in rows], [state.lengths[row] for row in rows]
        committed = memory.new_zeros(memory.shape[:2])
        if min(counts) < max(counts):
            ends = upload(torch.tensor(counts)[:, None], memory.device)
            behind = torch.arange(memory.shape[1], device=memory.device) >= ends
            committed.masked_fill_(behind, torch.finfo(memory.dtype).min)
        on_host = torch.tensor(roots)[:, None], places, torch.tensor(lengths)[:, None]
        tokens, places, ends = (upload(part, memory.device) for part in on_host)
        self.first = memory, committed, places, ends
        self._begin()
        self.first_states = self.states = self._read(0, tokens, committed.new_zeros(len(rows), 1, 0, dtype=torch.bool))
        self.first_logits = self.head.logits(self.states)[:, 0]

    def _begin(self) -> None:
        """Start at the roots."""
        self.rows, self.widths = list(range(len(self.first[0]))), list[int]()
        self.memory, self.committed, self.places, self.ends = self.first

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, K, V], the logits behind the nodes of one level of these rows."""
        if depth == 1:
            self._begin()
            self.states = self.first_states
        parts = self.states, self.memory, self.committed, self.places, self.ends
        self.states, self.memory, self.committed, self.places, self.ends = self.keep_rows(rows, *parts)
        self._remember(depth - 1)
        # the root and the nodes above, as nobody sees its own column
        ancestors = F.pad(seen[..., : seen.shape[2] - tokens.shape[1]], (1, 0), value=True)
        if self.window and depth > self.window.recent:
            ancestors[..., : sum(self.widths[: depth - self.window.recent])] = False
        self.states = self._read(depth, tokens, ancestors)
        return self.head.logits(self.states)

    def _remember(self, depth: int) -> None:
        """Put the memories of a level's nodes behind those of the text and the levels before."""
        head, count = self.head, self.states.shape[1]
        cosine, sine = (part.expand(-1, count, -1).flatten(0, 1) for part in self._tables(depth))
        new = head.remember(head.mix_states(self.states).flatten(0, 1), (cosine, sine))
        self.memory = torch.cat([self.memory, new.unflatten(0, (-1, count))], dim=1)
        self.widths.append(count)

    def _read(self, depth: int, tokens: Tensor, seen: Tensor) -> Tensor:
        """[B, K, 1 + n, H], the states of a level's nodes, which see the text and, of the draft, [B, K, R]."""
        committed = self.committed
        if self.window and depth:
            hidden = self.window.hides(self.places, self.ends - 1, 0, depth)
            committed = committed.masked_fill(hidden, torch.finfo(committed.dtype).min)
        mask = level_mask(committed, seen, self.head.query_groups)
        read: Tensor = self.head.read_level(tokens, self.memory, self._tables(depth), mask)
        return read

    def _tables(self, depth: int) -> Pair:
        """[B, 1, w] each, cosines and sines at the positions of a level."""
        return rotary_tables(self.head.rotary, self.memory, self.ends + depth)
