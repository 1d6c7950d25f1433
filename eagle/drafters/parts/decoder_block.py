"""The building blocks of trained heads: Llama blocks with their own cache, and rotary tables."""

# B batch, T tokens, N rows of all texts, H width, w of a head

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle.core.drafter import HeadShape
from eagle.drafters.parts.operations import RMSNorm, SwiGLUResidual, rotate_heads
from eagle.target.slots import SlotCache
from eagle.target.structure import typical_config

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


def check_taps(taps: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The taps of a head for a target of so many layers; ValueError unless each is another one that there is."""
    if len(set(taps)) < len(taps) or not all(-1 <= tap < layers for tap in taps):
        raise ValueError(
            f"drafter.taps is {taps} for a target of {layers} layers, expected different ones of 0 (the embedding) "
            f"to {layers - 1}, or -1 (behind the final norm): name them in the recipe"
        )
    return taps


def head_shape(target_config: Any, **overrides: Any) -> HeadShape:
    """The config of a Llama head for a target, with one layer by default: engines load no other shape."""
    target_config = typical_config(target_config, SHAPE_KEYS)
    width = target_config.hidden_size
    named = getattr(target_config, "num_attention_heads", None)
    heads = named or count_heads(width)
    defaults = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 2048,  # as a Llama's where none are named
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    sizes: dict[str, Any] = {key: getattr(target_config, key, None) for key in SHAPE_KEYS}
    sizes = {key: defaults.get(key) if value is None else value for key, value in sizes.items()}
    sizes["intermediate_size"] = widest(sizes["intermediate_size"])
    if not named:  # a head's width is then that of something else
        sizes["head_dim"] = width // heads
    shape: Any = LlamaConfig(**{**sizes, "num_hidden_layers": 1, **overrides}, tie_word_embeddings=False)
    return shape


def count_heads(width: int) -> int:
    """The number of heads for a target that has no attention: of the widest usual size."""
    return next(width // size for size in (128, 64, 32, 16, 8, 4, 2, 1) if width % size == 0)


def widest(sizes: int | list[int]) -> int:
    """The width of an MLP, the largest where a config has one for each layer."""
    return sizes if isinstance(sizes, int) else max(sizes)


class Cache:
    """The cache of one block while drafting: keys and values, one slot a text, and its concatenated matrices.

    All blocks of a head write at their owner's aim. Matrices are copied anew for new texts, so they are never stale.
    """

    def __init__(self, owner: SlotCache, block: Block) -> None:
        self.keys, self.values = owner.add(), owner.add()
        attention, mlp = block.self_attn, block.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.query_key_value, self.bias = _join_weights(*projections), _join_biases(*projections)
        self.gate_up = _join_weights(mlp.gate_proj, mlp.up_proj)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, width], and return these slots up to the last column that is written."""
        return self.keys.write(keys), self.values.write(values)


def _join_weights(*projections: nn.Linear) -> Tensor:
    """One matrix, whose product is that of all of them side by side: launches cost more than products of few rows."""
    return torch.cat([projection.weight.detach() for projection in projections])


def _join_biases(*projections: nn.Linear) -> Tensor | None:
    """The biases added to their product, or None."""
    biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
    return torch.cat(biases) if biases else None


class Attention(nn.Module):
    """Llama attention with the mask as an argument; the tree is given only by the mask.

    As a shape says, queries and keys are normed by head (`qk_norm`), and they and values have a bias (`qkv_bias`).
    """

    def __init__(self, shape: HeadShape, width: int | None = None) -> None:
        super().__init__()
        read, self.width, bias = width or shape.hidden_size, shape.head_dim, getattr(shape, "qkv_bias", False)
        self.q_proj = nn.Linear(read, shape.num_attention_heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(read, shape.num_key_value_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(read, shape.num_key_value_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if getattr(shape, "qk_norm", False):
            self.q_norm, self.k_norm = (Norm(shape.head_dim, shape.rms_norm_eps) for _ in range(2))

    @torch.no_grad()
    def start_from_keys(self) -> None:
        """Set every other query matrix to twice its key's, so that a token first attends to itself."""
        queries, keys = (part.weight.unflatten(0, (-1, self.width)) for part in (self.q_proj, self.k_proj))
        queries[::2] = 2 * keys.repeat_interleave(len(queries) // len(keys), dim=0)[::2]

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, H]; without a mask, causal."""
        if cache is not None:
            return self.o_proj(self._read_cached(x, rotary, mask, cache))
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(*self.norm_heads(query, key), *rotary)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def norm_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [.., w], each by its norm where there are such."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _read_cached(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache) -> Tensor:
        """[B, T, heads * w], attention of rows after their texts, with few kernel launches.

        Queries that share a key become rows of one head, so that no keys are repeated; a mask may be for these rows.
        """
        count, keys, width = x.shape[1], self.k_proj.out_features // self.width, self.width
        heads = F.linear(x, cache.query_key_value, cache.bias).unflatten(-1, (-1, width)).transpose(1, 2)
        queries = heads.shape[1] - 2 * keys
        groups, turned = queries // keys, heads[:, :-keys]
        if self.q_norm is not None:
            turned = torch.cat(self.norm_heads(*turned.tensor_split([queries], dim=1)), dim=1)
        query, key = rotate_heads(turned, rotary).tensor_split([queries], dim=1)
        key, value = cache.extend(key, heads[:, -keys:])
        if mask is None:
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups > 1)
            return seen.transpose(1, 2).flatten(2)
        mask = mask if mask.shape[2] == groups * count else mask.repeat(1, 1, groups, 1)
        rows = query.reshape(len(x), keys, groups * count, width)
        seen = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
        return seen.reshape(len(x), queries, count, width).transpose(1, 2).flatten(2)


class Norm(LlamaRMSNorm):
    """RMSNorm that saves only its input and one number a row for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        if not torch.is_grad_enabled() and x.dtype == self.weight.dtype:  # of two dtypes torch warns, and has no kernel
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)  # one launch
        return RMSNorm.apply(x, self.weight, self.variance_epsilon)


class Block(nn.Module):
    """A Llama decoder block without input norm, as EAGLE-1 has it."""

    def __init__(self, shape: HeadShape, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, H]."""
        hidden, residual = self.inputs(x)
        return self.add_mlp(residual + self.self_attn(hidden, rotary, mask, cache), cache)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The state that attention reads, and the one that its output is added to."""
        return x, x

    def key_value(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """[N, heads * w] each, keys before they are rotated, and values."""
        return self.self_attn.k_proj(inputs[0]), self.self_attn.v_proj(inputs[0])

    def query_and_residual(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """[N, heads * w] queries before they are rotated, and [N, H] what attention's output is added to."""
        return self.self_attn.q_proj(inputs[0]), inputs[1]

    def add_mlp(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """x + MLP(norm(x)), after attention."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        if cache is not None:
            gate, up = F.linear(norm(x), cache.gate_up).chunk(2, dim=-1)
            return x + mlp.down_proj(F.silu(gate).mul_(up))
        if x.dim() > 2 or not torch.is_grad_enabled():
            return x + mlp(norm(x))
        matrices = (part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return SwiGLUResidual.apply(x, norm.weight, norm.variance_epsilon, *matrices)


class NormedBlock(Block):
    """A Llama decoder block, used for all blocks of a head after the first."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The normed state, and the state."""
        return self.input_layernorm(x), x


class TwoNormBlock(Block):
    """EAGLE-3's block: attention over token and state, concatenated and normed separately."""

    def __init__(self, shape: HeadShape, norm_before_residual: bool) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def read_pair(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """[B, T, H], of tokens and states side by side."""
        normed, residual = self.norm_hidden(hidden)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.add_mlp(residual + self.self_attn(pair, rotary, mask, cache), cache)

    def norm_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The state that attention reads, and the one that its output is added to."""
        normed = self.hidden_norm(hidden)
        return normed, normed if self.norm_before_residual else hidden

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """[N, P], the tokens' half of queries, keys and values."""
        matrix = torch.cat([part.weight[:, : embedded.shape[-1]] for part in self._projections()])
        return F.linear(self.input_layernorm(embedded), matrix)

    def key_value(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of projected tokens and normed states."""
        query, key, value = self._projections()
        tokens, normed, _ = inputs
        matrix = torch.cat([part.weight[:, normed.shape[-1] :] for part in (key, value)])
        both = tokens[:, query.out_features :] + F.linear(normed, matrix)
        return both[:, : key.out_features], both[:, key.out_features :]

    def query_and_residual(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Queries of projected tokens and normed states, and the residual beside them."""
        query, tokens, normed, residual = self.self_attn.q_proj, *inputs
        return tokens[:, : query.out_features] + F.linear(normed, query.weight[:, normed.shape[-1] :]), residual

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj


FOLLOW_LENGTH = ("dynamic", "longrope")  # kinds of frequencies that depend on the longest text


class Rotary(LlamaRotaryEmbedding):
    """Rotary tables of the head's shape; nothing to train, nothing to save."""

    def __init__(self, shape: Any) -> None:
        # a head is a Llama's block, which turns whole vectors: a target's share of each is not the head's
        whole = copy.copy(shape)
        given = shape.rope_parameters
        whole.rope_parameters = {key: given[key] for key in given if key != "partial_rotary_factor"}
        super().__init__(whole)


def rotary_tables(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T, w] each, cosines and sines at positions [B, T], each row's as if it were alone."""
    if len(positions) == 1 or rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    # these frequencies depend on the longest text of a batch
    cosine, sine = zip(*(rotary(like[:1], row[None]) for row in positions), strict=True)
    return torch.cat(cosine), torch.cat(sine)


Linears = Literal["uniform", "normal"]
"""Linear layers as torch draws them, uniform to 1 / sqrt(width), or as transformers does: N(0, 0.02), biases 0."""

STD = 0.02  # transformers' `initializer_range`, which the configs of published trainers leave as it is


@torch.no_grad()
def draw_linears(head: nn.Module, drawn: Linears) -> None:
    """Draw the linear layers of a new head anew if `drawn` is "normal"; torch drew them as they were made."""
    if drawn == "uniform":
        return
    for part in head.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
