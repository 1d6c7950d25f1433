"""The parts that trained heads are made of: a Llama block with its own cache, and the growing of trees."""

# B batch, T tokens, N rows of all texts, S of them wanted, H width, w of a head, K rows of one level, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle.attention import Rows
from eagle.drafter import Budget, Draw, Noise
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
    mask = torch.zeros(len(seen), cached + seen.shape[1], dtype=dtype, device=seen.device)
    mask[:, cached:].masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None]


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], rows of the level before that they follow [K], whom they see [K, rows] -> [K, V] logits."""
Ranked = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""Depth, logits [K, V] -> log-odds [K, V] of being the target's choice, and the laws [K, V] children are drawn by."""


# A choice is surer than its law: the target takes the likeliest token, at T > 0 once known noise is added, and only the
# head's error in the logits, of about 1 / SURENESS at any T, leaves a doubt. EAGLE-2 has 1 here. With 25 nodes on 6
# levels 1 / 2 / 3 / 4 keep on the tiny target 2.93 / 3.32 / 3.32 / 3.30 tokens per step, with noise at T = 1 3.47 /
# 3.92 / 3.83 / 3.82 (40 prompts), and on a target of 25 M parameters 3.22 / 3.82 / 4.04 / 4.01 (20 prompts).
SURENESS = 3.0


def grow(
    root: int, logits: Tensor, level: Level, budget: Budget, noise: Noise | None = None, place: int = 0
) -> DraftTree:
    """The tree under `root`, whose children the head gives these logits [V]; they will stand at position `place`.

    A budget with a fixed shape gets that shape. Any other gets EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858).
    """
    if min(budget.top_k, budget.nodes, budget.depth) == 0:
        return DraftTree.chain([root])
    ranked = partial(_ranked, budget.draw, noise, place)
    if budget.paths is not None:
        return _shaped(root, logits[None], level, _plan(budget.paths, budget.depth, logits.device), ranked)
    return _likeliest(root, logits[None], level, budget, ranked)


def _ranked(draw: Draw, noise: Noise | None, place: int, depth: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `Ranked`; the best k of a law's log-odds plus Gumbel noise are k draws from it without replacement."""
    logits = logits.float()
    if noise is None:
        return SURENESS * logits, None
    logits = noise.filtered(logits)
    if draw == "noise":
        return SURENESS * (logits + noise([place + depth])), None
    if draw == "likeliest":  # unknown noise is one more error, beside the head's own
        return logits / math.hypot(noise.temperature, 1 / SURENESS), None
    return logits + noise.own(len(logits)), (logits / noise.temperature).softmax(-1)


def _likeliest(root: int, logits: Tensor, level: Level, budget: Budget, ranked: Ranked) -> DraftTree:
    """Read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all; fp32 throughout."""
    width = min(budget.top_k, budget.nodes)
    totals = logits.new_zeros(1, dtype=torch.float32)
    frontier = torch.full((1,), -1, device=logits.device)  # candidates that the logits belong to; -1 is the root
    seen = torch.zeros(1, 0, dtype=torch.bool, device=logits.device)
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: tokens, parents, likelihoods
    count = 0
    for depth in range(budget.depth):
        scores, _ = ranked(depth, logits)
        best = scores.log_softmax(-1).topk(min(width, scores.shape[-1]))  # never above 0: no child beats its parent
        likelihoods = (totals[:, None] + best.values).flatten()
        tokens, parents = best.indices.flatten(), frontier.repeat_interleave(best.indices.shape[1])
        candidates.append((tokens, parents, likelihoods))
        if depth + 1 == budget.depth:
            break
        chosen = likelihoods.topk(min(width, len(likelihoods)))
        before = chosen.indices // best.indices.shape[1]
        totals, frontier = chosen.values, count + chosen.indices
        count += len(likelihoods)
        own = torch.eye(len(before), dtype=torch.bool, device=seen.device)
        seen = torch.cat([seen[before], own], dim=1)
        logits = level(depth + 1, tokens[chosen.indices], before, seen)
    return _kept(root, *(torch.cat(column) for column in zip(*candidates, strict=True)), nodes=budget.nodes)


def _kept(root: int, tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> DraftTree:
    """The tree of the best candidates; a tie goes to the one found first, so that no child loses its parent."""
    kept = likelihoods.sort(descending=True, stable=True).indices[:nodes].sort().values
    place = torch.full((len(tokens) + 1,), -2, device=kept.device)  # -2 is nobody's parent: a tree would refuse it
    place[-1] = 0  # the root, which candidates call -1
    place[kept] = torch.arange(1, len(kept) + 1, device=kept.device)
    bits = likelihoods[kept].view(torch.int32).long()  # all in one transfer
    packed = torch.stack([tokens[kept], place[parents[kept]], bits]).cpu()
    tokens, parents, bits = torch.cat([torch.tensor([[root], [-1], [0]]), packed], dim=1)
    return DraftTree(tokens, parents, likelihoods=bits.int().view(torch.float32))


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
        nodes = sorted(path for path in set(paths) if len(path) == length)  # siblings in the order of their ranks
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


def _shaped(root: int, logits: Tensor, level: Level, plan: tuple[list[Rung], Tensor], ranked: Ranked) -> DraftTree:
    """The tree of a fixed shape: one reading per level, of the nodes that have children."""
    (rungs, parents), found = plan, [torch.tensor([root], device=logits.device)]
    laws: list[Tensor] = []
    for depth, rung in enumerate(rungs):
        scores, law = ranked(depth, logits)
        found.append(scores.topk(rung.best).indices[rung.rows, rung.ranks])
        if law is not None:
            laws += [law[rung.rows]] if laws else [law, law[rung.rows]]  # a row for the root, at which nobody looks
        if depth + 1 < len(rungs):
            logits = level(depth + 1, found[-1][rung.read], rung.rows[rung.read], rung.seen)
    return DraftTree(torch.cat(found).cpu(), parents, torch.cat(laws) if laws else None)
