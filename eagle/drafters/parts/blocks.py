"""The parts that trained heads are made of: Llama blocks with their own cache, and rotary tables."""

# B batch, T tokens, N rows of all texts, H width, w of a head

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle.target.attention import Rows

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
    """The sizes of a Llama head for a target, of one layer unless more are asked for: engines load no other shape."""
    width, heads = target_config.hidden_size, target_config.num_attention_heads
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    found = {key: getattr(target_config, key, None) for key in SHAPE_KEYS}
    found = {key: defaults.get(key) if value is None else value for key, value in found.items()}
    return LlamaConfig(**{**found, "num_hidden_layers": 1, **overrides}, tie_word_embeddings=False)


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

    def __init__(self, shape: Any, width: int | None = None) -> None:
        super().__init__()
        read, self.width = width or shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(read, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(read, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(read, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    @torch.no_grad()
    def start_from_keys(self) -> None:
        """Make every other query twice its key: the row that asks is then the one that matches best."""
        queries, keys = (part.weight.unflatten(0, (-1, self.width)) for part in (self.q_proj, self.k_proj))
        queries[::2] = 2 * keys.repeat_interleave(len(queries) // len(keys), dim=0)[::2]

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


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[heads, N, w], x [N, heads * w] turned by the tables [N, w]."""
    cosine, sine = rotary
    half = cosine.shape[-1] // 2
    heads = x.unflatten(-1, (-1, 2 * half))
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return (heads * cosine[:, None] + turned * sine[:, None]).to(x.dtype).transpose(0, 1)


class Norm(LlamaRMSNorm):
    """RMSNorm that keeps its input and one number of each row for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return _Normed.apply(x, self.weight, self.variance_epsilon)


def _inverse(x: Tensor, eps: float) -> Tensor:
    """[.., 1], what each row is multiplied by."""
    wide = torch.promote_types(x.dtype, torch.float32)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed_back(given: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients at x [N, H] and at the weight, computed in the precision of `inverse`."""
    given, normed, gain = given.to(inverse.dtype), x * inverse, weight.to(inverse.dtype)
    both = given * normed
    along = (both @ gain).unsqueeze(-1)
    by_x = torch.addcmul(given * gain, normed, along, value=-1 / x.shape[-1]).mul_(inverse)
    return by_x.to(x.dtype), both.sum(0).to(weight.dtype)


class _Normed(torch.autograd.Function):
    """Forward and backward take half of the time of the stock norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        given, rows = upstream[0].flatten(0, -2), x.flatten(0, -2)
        by_x, by_weight = _normed_back(given, rows, weight, inverse.flatten(0, -2))
        return by_x.view_as(x), by_weight, None


class _Ended(torch.autograd.Function):
    """x + MLP(norm(x)), which keeps x, one number of each row, and what gate and input became."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inverse = _inverse(x, eps)
        normed = (x * inverse).mul_(gain).to(x.dtype)
        opened, raised = F.linear(normed, gate), F.linear(normed, up)
        ctx.save_for_backward(x, gain, inverse, opened, raised, gate, up, down)
        return x + F.linear(F.silu(opened).mul_(raised), down)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse, opened, raised, *matrices = ctx.saved_tensors
        (given,), dtype = upstream, opened.dtype
        gate, up, down = (matrix.to(dtype) for matrix in matrices)  # as autocast had them
        normed, told = (x * inverse).mul_(gain).to(dtype), given.to(dtype)
        active, by_product = F.silu(opened), told @ down
        by_down = told.T @ (active * raised)
        by_up = active.mul_(by_product)
        by_gate = torch.ops.aten.silu_backward(by_product.mul_(raised), opened)
        by_normed = torch.addmm(by_up @ up, by_gate, gate)
        by_x, by_gain = _normed_back(by_normed, x, gain, inverse)
        by_matrices = (by.to(gain.dtype) for by in (by_gate.T @ normed, by_up.T @ normed, by_down))
        return by_x.add_(given), by_gain, None, *by_matrices


class Block(nn.Module):
    """A Llama decoder block without input norm, as EAGLE-1 has it."""

    def __init__(self, shape: Any, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, H]."""
        return self.ended(x + self.self_attn(x, rotary, mask, cache))

    def ended(self, x: Tensor) -> Tensor:
        """What the block makes of the states behind its attention."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        if x.dim() > 2 or not torch.is_grad_enabled():
            return x + mlp(norm(x))
        matrices = (part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return _Ended.apply(x, norm.weight, norm.variance_epsilon, *matrices)


class TwoNormBlock(Block):
    """EAGLE-3's: attention over token and state side by side, each normed by itself."""

    def __init__(self, shape: Any, norm_before_residual: bool) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def entered(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The state that attention reads, and the one that its output is added to."""
        normed = self.hidden_norm(hidden)
        return normed, normed if self.norm_before_residual else hidden

    def over(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """[B, T, H]."""
        normed, kept = self.entered(hidden)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.ended(kept + self.self_attn(read, rotary, mask, cache))


class Rotary(LlamaRotaryEmbedding):
    """Rotary tables of the head's shape; nothing to train, nothing to save."""
