"""The parts that trained heads are made of: a Llama block with its own cache, and the growing of trees."""

# B batch, T tokens, H width, K rows of one level, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle.attention import Rows
from eagle.drafter import Budget
from eagle.tree import DraftTree

SHAPE_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
]


def head_shape(target_config: Any, **overrides: Any) -> LlamaConfig:
    """The sizes of a one-layer Llama head for a target: engines load no other shape."""
    width, heads = target_config.hidden_size, target_config.num_attention_heads
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    found = {key: getattr(target_config, key, None) for key in SHAPE_KEYS}
    found = {key: defaults.get(key) if value is None else value for key, value in found.items()}
    return LlamaConfig(**{**found, **overrides}, num_hidden_layers=1, tie_word_embeddings=False)


class Cache:
    """The keys and values of one block; what lies behind `length` is forgotten by setting it back."""

    def __init__(self) -> None:
        self.keys, self.values, self.length = Rows(), Rows(), 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, width] and return all rows held."""
        start, self.length = self.length, self.length + keys.shape[2]
        return self.keys.write(start, keys), self.values.write(start, values)


class Attention(nn.Module):
    """Llama attention under a mask given as an argument: the mask is the only tree."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.width = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, H]; without a mask, causal."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        if cache is not None:
            key, value = cache.extend(key, value)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A Llama decoder block without input norm, as EAGLE-1 has it."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, H]."""
        x = x + self.self_attn(x, rotary, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Rotary(LlamaRotaryEmbedding):
    """Rotary tables of the head's shape; nothing to train, nothing to save."""


def level_mask(cached: int, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, K, cached + rows so far]: a level's rows see the committed text and, of the draft, their own path."""
    visible = F.pad(seen, (cached, 0), value=True)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], rows of the level before that they follow [K], whom they see [K, rows] -> [K, V] log-laws."""


def grow(root: int, log_law: Tensor, level: Level, budget: Budget) -> DraftTree:
    """EAGLE-2's tree: read the `top_k` likeliest rows of each level, keep the `nodes` likeliest of all candidates.

    `log_law` [V] is the law after the root; likelihoods are those of whole paths, in fp32.
    """
    width = min(budget.top_k, budget.nodes)
    if width == 0 or budget.depth == 0:
        return DraftTree.chain([root])
    log_laws, totals = log_law[None].float(), log_law.new_zeros(1, dtype=torch.float32)
    frontier = torch.full((1,), -1, device=log_law.device)  # candidates that the laws belong to; -1 is the root
    seen = torch.zeros(1, 0, dtype=torch.bool, device=log_law.device)
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: tokens, parents, likelihoods
    count = 0
    for depth in range(1, budget.depth + 1):
        best = log_laws.topk(min(width, log_laws.shape[-1]))
        likelihoods = (totals[:, None] + best.values).flatten()
        tokens, parents = best.indices.flatten(), frontier.repeat_interleave(best.indices.shape[1])
        candidates.append((tokens, parents, likelihoods))
        if depth == budget.depth:
            break
        chosen = likelihoods.topk(min(width, len(likelihoods)))
        before = chosen.indices // best.indices.shape[1]
        totals, frontier = chosen.values, count + chosen.indices
        count += len(likelihoods)
        own = torch.eye(len(before), dtype=torch.bool, device=seen.device)
        seen = torch.cat([seen[before], own], dim=1)
        log_laws = level(depth, tokens[chosen.indices], before, seen).float()
    return _likeliest(root, *(torch.cat(column) for column in zip(*candidates, strict=True)), nodes=budget.nodes)


def _likeliest(root: int, tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> DraftTree:
    """The tree of the best candidates; a tie goes to the one found first, so that no child loses its parent."""
    kept = likelihoods.sort(descending=True, stable=True).indices[:nodes].sort().values
    place = torch.zeros(len(tokens) + 1, dtype=torch.long, device=kept.device)  # the last entry is parent -1, the root
    place[kept] = torch.arange(1, len(kept) + 1, device=kept.device)
    packed = torch.stack([tokens[kept], place[parents[kept]]]).cpu()
    start = torch.tensor([[root], [-1]])
    return DraftTree(*torch.cat([start, packed], dim=1))
