"""The parts that trained heads are made of: a Llama block with its own cache, and the growing of trees."""

# B batch, T tokens, N rows of all texts, S of them wanted, H width, w of a head, K rows of one level, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle.attention import Rows
from eagle.drafter import Budget
from eagle.spans import Spans, attend
from eagle.tree import DraftTree, Paths

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

    def at(self, x: Tensor, rotary: tuple[Tensor, Tensor], spans: Spans) -> Tensor:
        """[S, H] at the rows of the spans alone, of x [N, H]: texts end to end, each row sees its text up to itself."""
        cosine, sine = (table[0] for table in rotary)  # [N, w]
        key, value = (projection(x).unflatten(-1, (-1, self.width)) for projection in (self.k_proj, self.v_proj))
        query = self.q_proj(x.index_select(0, spans.rows)).unflatten(-1, (-1, self.width))
        key, query = _rotated(key, cosine, sine), _rotated(query, cosine[spans.rows], sine[spans.rows])
        query, key, value = (tensor.transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
        return self.o_proj(attend(query, key, value, spans).transpose(0, 1).flatten(1))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [N, heads, w] turned by the tables [N, w]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine[:, None] + turned * sine[:, None]


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

    def at(self, x: Tensor, rotary: tuple[Tensor, Tensor], spans: Spans) -> Tensor:
        """[S, H] at the rows of the spans: all others are needed as keys and values alone."""
        # the gradient of index_select is faster than that of x[rows]
        x = x.index_select(0, spans.rows) + self.self_attn.at(x, rotary, spans)
        return x + self.mlp(self.post_attention_layernorm(x))


class Rotary(LlamaRotaryEmbedding):
    """Rotary tables of the head's shape; nothing to train, nothing to save."""


def level_mask(cached: int, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, K, cached + rows so far]: a level's rows see the committed text and, of the draft, their own path."""
    visible = F.pad(seen, (cached, 0), value=True)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], rows of the level before that they follow [K], whom they see [K, rows] -> [K, V] scores."""


# A choice is surer than its law: the target takes the likeliest token, at T > 0 once known noise is added. EAGLE-2 has
# 1 here. On 80 prompts of the tiny target 3 keeps, greedy and at T = 1, with 8 nodes 3.14 and 3.20 tokens per step
# where 1 keeps 2.60 and 2.88, with 25 nodes 4.31 and 3.94 where 1 keeps 2.89 and 3.60; 2 and 4 are near.
SURENESS = 3.0


def grow(root: int, scores: Tensor, level: Level, budget: Budget) -> DraftTree:
    """EAGLE-2's tree: read the `top_k` likeliest rows of each level, keep the `nodes` likeliest of all candidates.

    `scores` [V] are log-odds of what may follow the root; likelihoods are those of whole paths, in fp32. A budget with
    a fixed shape gets that shape instead.
    """
    width = min(budget.top_k, budget.nodes)
    if width == 0 or budget.depth == 0:
        return DraftTree.chain([root])
    if budget.paths is not None:
        return _shaped(root, scores, level, _plan(budget.paths, budget.depth, scores.device))
    scores, totals = SURENESS * scores[None].float(), scores.new_zeros(1, dtype=torch.float32)
    frontier = torch.full((1,), -1, device=scores.device)  # candidates that the scores belong to; -1 is the root
    seen = torch.zeros(1, 0, dtype=torch.bool, device=scores.device)
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: tokens, parents, likelihoods
    count = 0
    for depth in range(1, budget.depth + 1):
        best = scores.topk(min(width, scores.shape[-1]))
        likelihoods = (totals[:, None] + best.values - scores.logsumexp(-1, keepdim=True)).flatten()
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
        scores = SURENESS * level(depth, tokens[chosen.indices], before, seen).float()
    return _likeliest(root, *(torch.cat(column) for column in zip(*candidates, strict=True)), nodes=budget.nodes)


def _likeliest(root: int, tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> DraftTree:
    """The tree of the best candidates; a tie goes to the one found first, so that no child loses its parent."""
    kept = likelihoods.sort(descending=True, stable=True).indices[:nodes].sort().values
    place = torch.zeros(len(tokens) + 1, dtype=torch.long, device=kept.device)  # the last entry is parent -1, the root
    place[kept] = torch.arange(1, len(kept) + 1, device=kept.device)
    packed = torch.stack([tokens[kept], place[parents[kept]]]).cpu()
    start = torch.tensor([[root], [-1]])
    return DraftTree(*torch.cat([start, packed], dim=1))


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of a fixed shape: its nodes, and those of them that are read because they have children."""

    best: int  # how many children of a row are ranked
    rows: Tensor  # [nodes], the row of the level before, of those read, that each node follows
    ranks: Tensor  # [nodes]
    read: Tensor  # [K]
    seen: Tensor  # [K, rows read so far]


@lru_cache(maxsize=32)  # as many as a shape has depths, for a few shapes
def _plan(paths: Paths, depth: int, device: torch.device) -> tuple[list[Rung], Tensor]:
    """A fixed shape level by level down to `depth`, and the parents [N] of its nodes."""
    rungs, parents, seen = [], [-1], torch.zeros(1, 0, dtype=torch.bool)
    above: list[tuple[int, ...]] = [()]
    place = {path: 0 for path in above}
    for length in range(1, depth + 1):
        nodes = [path for path in dict.fromkeys(paths) if len(path) == length]
        followed = {path[:-1] for path in paths} if length < depth else set()
        read = [path for path in nodes if path in followed]
        rows = torch.tensor([above.index(path[:-1]) for path in nodes])
        ranks = torch.tensor([path[-1] for path in nodes])
        chosen = torch.tensor([nodes.index(path) for path in read], dtype=torch.long)
        seen = torch.cat([seen[rows[chosen]], torch.eye(len(read), dtype=torch.bool)], dim=1)
        rungs.append(Rung(int(ranks.max()) + 1, *(part.to(device) for part in (rows, ranks, chosen, seen))))
        parents += [place[path[:-1]] for path in nodes]
        place |= {path: len(place) + index for index, path in enumerate(nodes)}
        if not read:
            break
        above = read
    return rungs, torch.tensor(parents)


def _shaped(root: int, scores: Tensor, level: Level, plan: tuple[list[Rung], Tensor]) -> DraftTree:
    """The tree of a fixed shape: one reading per level, of the nodes that have children."""
    (rungs, parents), scores, found = plan, scores[None], []
    for depth, rung in enumerate(rungs, start=1):
        found.append(scores.topk(rung.best).indices[rung.rows, rung.ranks])
        if depth < len(rungs):
            scores = level(depth, found[-1][rung.read], rung.rows[rung.read], rung.seen)
    return DraftTree(torch.cat([torch.tensor([root]), torch.cat(found).cpu()]), parents)
