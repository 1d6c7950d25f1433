"""The published EAGLE-1 training step in plain PyTorch: what ours is compared with, in its figures and in its speed.

Conversations are padded to the longest, attention has a mask, and every position has logits. Tensors are named as in
our head.
"""

# B sequences, T tokens of the longest, H hidden, n heads, w of a head, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eagle.core.examples import Example

Padded = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens [B, T], features [B, T, H], loss mask [B, T], lengths [B]."""


class Layer(nn.Module):
    """One Llama block, without input norm unless it is `normed`."""

    def __init__(self, shape: Any, normed: bool = False) -> None:
        super().__init__()
        hidden = shape.hidden_size
        query = shape.num_attention_heads * shape.head_dim
        key = shape.num_key_value_heads * shape.head_dim
        self.input_layernorm = nn.Identity()
        if normed:
            self.input_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        # the names of transformers' own Llama layer
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, query, bias=False),
                "k_proj": nn.Linear(hidden, key, bias=False),
                "v_proj": nn.Linear(hidden, key, bias=False),
                "o_proj": nn.Linear(query, hidden, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, hidden, bias=False),
            }
        )
        self.head_dim = shape.head_dim
        self.theta = shape.rope_parameters["rope_theta"]

    def rotated(self, x: Tensor) -> Tensor:
        """Return [B, n, T, w], rotated by the positions 0, 1, .."""
        # angles are made in fp32 and applied in the input's dtype
        pair = torch.arange(0, self.head_dim, 2, device=x.device).float()
        frequencies = self.theta ** -(pair / self.head_dim)
        angles = torch.arange(x.shape[2], device=x.device).float()[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        left, right = x.chunk(2, -1)
        swapped = torch.cat([-right, left], -1)
        return x * angles.cos().to(x.dtype) + swapped * angles.sin().to(x.dtype)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, H]."""
        normed = self.input_layernorm(x)
        query, key, value = [
            self.self_attn[f"{name}_proj"](normed)
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        ]
        query = self.rotated(query)
        key = self.rotated(key)
        # fewer heads of keys than of queries, where the shape says so
        output = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=query.shape != key.shape
        )
        x = x + self.self_attn["o_proj"](output.transpose(1, 2).flatten(2))
        # the norm runs in the dtype of its weight, as under autocast
        normed = self.post_attention_layernorm(x.to(self.post_attention_layernorm.weight.dtype))
        gate = F.silu(self.mlp["gate_proj"](normed))
        return x + self.mlp["down_proj"](gate * self.mlp["up_proj"](normed))


class PublishedHead(nn.Module):
    """The head that reads cat(embedding of token i + 1, feature i) at position i."""

    def __init__(self, shape: Any, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList([Layer(shape)])

    def forward(
        self,
        following: Tensor,
        features: Tensor,
        lengths: Tensor,
        embedding: Tensor,
    ) -> Tensor:
        """Return [B, T, H], predicted features, from tokens shifted left by one and features that are not shifted."""
        position = torch.arange(following.shape[1], device=following.device)
        causal = position[:, None] >= position
        mask = causal & (position < lengths[:, None])[:, None, None]
        both = torch.cat([F.embedding(following, embedding), features], -1)
        return self.layers[0](self.fc(both), mask)


def padded(examples: Sequence[Example], device: str | torch.device = "cpu") -> Padded:
    """Return one batch of examples that carry one tap, as long as the longest."""
    features = [example.features[:, 0] for example in examples if example.features is not None]
    return (
        pad_sequence([example.tokens for example in examples], batch_first=True).to(device),
        pad_sequence(features, batch_first=True).to(device),
        pad_sequence([example.loss_mask for example in examples], batch_first=True).to(device),
        torch.tensor([len(example.tokens) for example in examples], device=device),
    )


def _shifted(x: Tensor, by: int) -> Tensor:
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def published_loss(
    head: nn.Module,
    batch: Padded,
    embedding: Tensor,
    weight: Tensor,
    gate: str = "read",
    noise_seed: int | None = None,
) -> dict[str, Tensor]:
    """Return Smooth-L1 + 0.1 cross-entropy of a padded batch.

    Args:
        head: a published head.
        batch: what `padded` returns.
        embedding: the target's, [V, H].
        weight: the target's LM head, [V, H].
        gate: whether a position counts by the token that it "read", as published, or the one that it "predicted".
        noise_seed: that of the noise on the features; without it there is none.
    """
    tokens, features, mask, lengths = batch
    position = torch.arange(tokens.shape[1], device=tokens.device)
    # the last position has no next token
    supervised = _shifted(mask, {"read": 0, "predicted": 2}[gate])
    counted = supervised & (position < lengths[:, None] - 1)
    known = features
    if noise_seed is not None:
        # uniform noise, scaled by 512 over the length as published
        generator = torch.Generator(features.device).manual_seed(noise_seed)
        noise = torch.empty_like(features).uniform_(-0.1, 0.1, generator=generator)
        known = features + noise * (512 / lengths.to(features.dtype))[:, None, None]
    predicted = head(_shifted(tokens, 1), known, lengths, embedding)
    # position i is compared with the feature at i + 1
    true = _shifted(features, 1)
    # losses are in fp32 at least
    dtype = torch.promote_types(features.dtype, torch.float32)
    target_probs = F.linear(true, weight).detach().softmax(-1, dtype=dtype)
    log_probs = F.linear(predicted, weight).log_softmax(-1, dtype=dtype)
    entropy = -(target_probs * log_probs).sum(-1)
    error = F.smooth_l1_loss(predicted.to(dtype), true.to(dtype), reduction="none").mean(-1)
    # as published: a batch without supervised tokens does not divide by zero
    count = counted.sum() + 1e-5
    regression = (counted * error).sum() / count
    cross_entropy = (counted * entropy).sum() / count
    total = regression + 0.1 * cross_entropy
    return {"total": total, "regression": regression, "cross_entropy": cross_entropy}


def published_optimizer(head: nn.Module) -> torch.optim.Optimizer:
    """Return the published AdamW; the weight decay is torch's default."""
    return torch.optim.AdamW(head.parameters(), lr=3e-5, betas=(0.9, 0.95))


def published_step(
    loss: Any,
    optimizer: torch.optim.Optimizer,
    *,
    bf16: bool = True,
    clip: str = "value",
) -> float:
    """Take one update from what `loss()` returns; gradients are clipped by value, as published, or by norm.

    Args:
        loss: returns the losses of a batch.
        optimizer: the published one.
        bf16: whether the forward runs under autocast.
        clip: gradients are clipped by "value", as published, or by "norm".
    """
    # the published loop: zero, autocast, backward, clip, step
    weights = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    with torch.autocast(weights[0].device.type, torch.bfloat16, enabled=bf16):
        total = loss()["total"]
    total.backward()
    if clip == "value":
        nn.utils.clip_grad_value_(weights, 0.5)
    else:
        nn.utils.clip_grad_norm_(weights, 0.5)
    optimizer.step()
    return float(total.detach())
