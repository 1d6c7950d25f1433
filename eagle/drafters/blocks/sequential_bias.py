"""Biases for levels whose states come from one forward: made of the tokens drafted before, along each path."""

# B rows of text, K levels, R nodes of one level, H width, V vocabulary, r rank, M memory

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.device import pick_rows, upload
from eagle.drafters.parts.scoring import Seed


class SequentialBias(Protocol):
    """What makes codes of tokens, of which a matrix makes biases."""

    @property
    def matrix(self) -> Tensor:
        """[V, r]."""
        ...

    @property
    def memory_size(self) -> int:
        """How wide is what it remembers of a path."""
        ...

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, memory: Tensor, frozen: TargetHead
    ) -> tuple[Tensor, Tensor]:
        """Codes [.., r] of a level with states [.., H] behind tokens [..], and the memory [.., M] of these paths."""
        ...


class MarkovBias(nn.Module):
    """W2 W1[token], whatever came before it (DSpark's "vanilla")."""

    memory_size = 0

    def __init__(self, shape: Any, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocab_size, bias=False)
        for part in (self.markov_w1, self.markov_w2):
            nn.init.normal_(part.weight, std=0.02)  # small: logits begin as the target's LM head makes them

    @property
    def matrix(self) -> Tensor:
        """[V, r], which makes biases of codes."""
        return self.markov_w2.weight

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, memory: Tensor, frozen: TargetHead
    ) -> tuple[Tensor, Tensor]:
        """Codes [.., r], and the memory."""
        return self.combine(state, self.markov_w1(tokens), memory)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and the memory, from what a token is [.., r]."""
        return token, memory


class GatedBias(MarkovBias):
    """W2 of W1[token], of which a gate lets as much through as the level's state and the token say."""

    def __init__(self, shape: Any, rank: int) -> None:
        super().__init__(shape, rank)
        self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and the memory."""
        return token * self.gate_proj(torch.cat([state, token], dim=-1)).sigmoid(), memory


class RecurrentBias(MarkovBias):
    """W2 of what a memory of the path, the token and the level's state say together."""

    def __init__(self, shape: Any, rank: int) -> None:
        super().__init__(shape, rank)
        self.memory_size = rank
        self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and the memory."""
        gate, new, code = self.joint_proj(torch.cat([memory, token, state], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return code.tanh(), gate * memory + (1 - gate) * new.tanh()


MARKOV = {"vanilla": MarkovBias, "gated": GatedBias, "rnn": RecurrentBias}


@dataclass(frozen=True)
class GruBias:
    """Domino's: a GRU reads the target's embedding of the path's tokens, and two matrices its state and the level's."""

    gru: nn.GRU
    projections: nn.Sequential
    unbiased: int  # so many levels stay as they are

    @property
    def matrix(self) -> Tensor:
        """[V, r], which makes biases of codes."""
        return self.projections[-1].weight  # type: ignore[return-value]

    @property
    def memory_size(self) -> int:
        """How wide the GRU's state is."""
        return self.gru.hidden_size

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, memory: Tensor, frozen: TargetHead
    ) -> tuple[Tensor, Tensor]:
        """Codes [.., r], zero where a level has no bias, and the GRU's states [.., M]."""
        embedded = frozen.embed(tokens).to(memory.dtype)
        weights = self.gru.all_weights[0]  # its own steps are not for every precision
        reset, keep, new = F.linear(embedded, weights[0]).chunk(3, dim=-1)
        reset_before, keep_before, new_before = F.linear(memory, weights[1]).chunk(3, dim=-1)
        keep = (keep + keep_before).sigmoid()
        memory = keep * memory + (1 - keep) * (new + (reset + reset_before).sigmoid() * new_before).tanh()
        if level < self.unbiased:
            return memory.new_zeros(*memory.shape[:-1], self.matrix.shape[1]), memory
        return self.projections[:-1](torch.cat([state, memory], dim=-1)), memory


class PathLevels:
    """The logits of all levels of all trees: what a level's slot gives to all nodes, and a bias for each one's path."""

    def __init__(self, head: Any, seeds: Sequence[Seed], states: Tensor) -> None:
        self.head, self.states = head, states  # [B, K, H]
        self.slot_logits: Tensor = head.logits(states, head.frozen[0])  # [B, K, V]
        self.rows = self.all_rows = list(range(len(states)))
        self.roots = self.tokens = upload(torch.tensor([[seed.root] for seed in seeds]), states.device)
        self.memory = states.new_zeros(len(states), 1, 0 if head.bias is None else head.bias.memory_size)
        self.first = self._read_tokens(0)[:, 0]  # [B, V]
        self.first_memory = self.memory

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, R, V], the logits after the nodes of one level; [B, 1, V] if they are the same for all nodes."""
        if depth == 1:
            self.rows, self.memory = self.all_rows, self.first_memory
        above = pick_rows(self.memory, [self.rows.index(row) for row in rows])
        self.rows, self.tokens = rows, tokens
        self.memory = above.gather(1, before[..., None].expand(-1, -1, above.shape[2]))
        return self._read_tokens(depth)

    def confidence(self, depth: int, rows: list[int]) -> Tensor:
        """[B, R], of the nodes whose logits were given last, or [B, 1] of all, and of the roots at depth 0."""
        state = pick_rows(self.states[:, depth : depth + 1], rows)
        return self.head.rate(state, self.tokens if depth else pick_rows(self.roots, rows)).sigmoid()

    def _read_tokens(self, depth: int) -> Tensor:
        """Logits behind the last level's tokens, which the memories of their paths hold from now on."""
        logits, bias = pick_rows(self.slot_logits[:, depth : depth + 1], self.rows), self.head.bias
        if bias is None:
            return logits
        state = pick_rows(self.states[:, depth : depth + 1], self.rows).expand(-1, self.tokens.shape[1], -1)
        code, self.memory = bias.read_token(depth, state, self.tokens, self.memory, self.head.frozen[0])
        return logits + (code @ bias.matrix.T).to(logits.dtype)
