"""Heads whose attention reads memories: the target's states of a text, and mixes of own states for drafted tokens."""

# N rows, S slots, n blocks, H width, w of a head, k of keys, B texts, T tokens, C columns of memory

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.drafters.parts.decoder_block import Norm, NormedBlock, Rotary, rotary_tables
from eagle.drafters.parts.growth import level_mask, level_rows
from eagle.drafters.parts.operations import rotate_heads
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.text_blocks import Pair, key_value, position_tables, read_rows, text_slots
from eagle.drafters.parts.validation import validate_batch
from eagle.drafters.self_speculation.memory_state import MemoryState


class MemoryHead(TrainableDrafter):
    """Llama blocks over tokens alone, each of which looks at memories of its own.

    A text's memories for the blocks are the target's states at as many taps. A drafted token's are learned mixes of its
    embedding and all blocks' outputs, known once it is read: it sees those before it and never its own.
    """

    layers: Any

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        count = shape.num_hidden_layers
        self.layers = nn.ModuleList([NormedBlock(shape) for _ in range(count)])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mix = nn.Parameter(torch.zeros(count, 1 + count))  # of a block's memory, before the softmax
        self.rotary = Rotary(shape)

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
        return int(self.shape.num_attention_heads // self.shape.num_key_value_heads)

    def mix_states(self, states: Tensor) -> Tensor:
        """[.., n, H], the memories of tokens with these embeddings and outputs [.., 1 + n, H]."""
        return torch.einsum("ml,...lh->...mh", self.mix.softmax(-1), states).to(states.dtype)

    def project_memories(self, memories: Tensor, tables: Pair) -> list[Pair]:
        """[k, N, w] each, every block's keys and values of memories [N, n, H] at positions of tables [N, w]."""
        normed = [block.input_layernorm(part) for block, part in zip(self.layers, memories.unbind(-2), strict=True)]
        return [key_value(block, (part,), tables) for block, part in zip(self.layers, normed, strict=True)]

    # -- training ------------------------------------------------------------------------------------------------------

    def unroll(self, batch: Batch, frozen: TargetHead, spans: Spans, steps: int) -> tuple[Tensor, list[Tensor]]:
        """The places [S] of slots among all tokens, and their states [S, H] in each pass, normed for the LM head.

        Slot i sees the target's states of tokens up to i. In pass s it reads token i + 1 + s, sees its own memories of
        the passes before, and names the token behind.
        """
        known, positions, _ = text_slots(batch, batch.tokens.device)
        features = batch.select_taps(self.taps).index_select(0, known).to(self.mix.dtype)
        tables_at = position_tables(self.rotary, features, max(batch.lengths, default=0) + steps)
        context = [(key.contiguous(), value) for key, value in self.project_memories(features, tables_at(positions))]
        places, positions = known.index_select(0, spans.rows), positions.index_select(0, spans.rows)
        own: list[list[Pair]] = [[] for _ in self.layers]
        found: list[Tensor] = []
        for step in range(1, steps + 1):
            tables = tables_at(positions + step)
            following = (places + step).clamp(max=len(batch.tokens) - 1)  # what lies beyond a text counts for nothing
            states = [frozen.embed(batch.tokens.index_select(0, following)).to(features.dtype)]
            for block, pairs, mine in zip(self.layers, context, own, strict=True):
                states.append(read_rows(block, block.inputs(states[-1]), tables, pairs, spans, mine))
            found.append(self.norm(states[-1]))
            if step < steps:
                memories = self.project_memories(self.mix_states(torch.stack(states, dim=-2)), tables)
                for mine, pair in zip(own, memories, strict=True):
                    mine.append(pair)
        return places, found

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
