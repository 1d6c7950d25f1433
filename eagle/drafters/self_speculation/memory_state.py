"""The state of a head with memories: for each text, keys and values of the tokens in its window."""

# B texts, N tokens of all, K nodes of one level, R of all levels, C columns of memory, n blocks, k keys of width w

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise
from eagle.core.tree import DraftTree
from eagle.device import pick_rows, upload
from eagle.drafters.parts.decoder_block import FOLLOW_LENGTH, Rotary, rotary_tables
from eagle.drafters.parts.growth import grow_rows, level_mask
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_blocks import Pair
from eagle.drafters.parts.text_state import pad_rows
from eagle.drafters.parts.window import Window


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


class _MemoryLevels:
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
        if rows != self.rows:
            kept = [self.rows.index(row) for row in rows]
            parts = self.states, self.memory, self.committed, self.places, self.ends
            self.rows = rows
            self.states, self.memory, self.committed, self.places, self.ends = (pick_rows(part, kept) for part in parts)
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
