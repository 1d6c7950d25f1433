"""The published EAGLE-1 training step in plain PyTorch: what ours is compared with, in its figures and in its speed.

Conversations padded to the longest, attention under a mask, logits at every slot; tensors named as in our head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.core.examples import Example

Padded = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # tokens [B, T], features [B, T, D], loss mask [B, T], lengths [B]


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Linear maps without bias, by name."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Layer(nn.Module):
    """One Llama block, without input norm unless it is `normed`."""

    def __init__(self, shape: Any, normed: bool = False) -> None:
        super().__init__()
        self.input_layernorm = (
            nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) if normed else nn.Identity()
        )
        width, wide, self.head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        query, key = (
            heads * shape.head_dim
            for heads in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        self.self_attn = linears(
            q_proj=(width, query), k_proj=(width, key), v_proj=(width, key), o_proj=(query, width)
        )
        self.post_attention_layernorm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.mlp = linears(gate_proj=(width, wide), up_proj=(width, wide), down_proj=(wide, width))
        self.theta = shape.rope_parameters["rope_theta"]

    def rotated(self, x: Tensor) -> Tensor:
        """Rotary positions 0.. on [B, heads, T, width]."""
        frequencies = self.theta ** -(
            torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        )
        angles = torch.arange(x.shape[2], device=x.device).float()[:, None] * frequencies
        cosine, sine = (
            torch.cat([table, table], -1).to(x.dtype) for table in (angles.cos(), angles.sin())
        )
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat([-right, left], -1) * sine

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D]."""
        y = self.input_layernorm(x)
        rows = (
            self.self_attn[name](y).unflatten(-1, (-1, self.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key, value = (row.transpose(1, 2) for row in rows)
        query, key = self.rotated(query), self.rotated(key)
        seen = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=query.shape != key.shape
        )
        x = x + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x.to(self.post_attention_layernorm.weight.dtype))
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class PublishedHead(nn.Module):
    """The head that reads cat(embedding of token i + 1, feature i) at slot i."""

    def __init__(self, shape: Any, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.layers = nn.ModuleList([Layer(shape)])

    def forward(
        self, following: Tensor, features: Tensor, lengths: Tensor, embedding: Tensor
    ) -> Tensor:
        """[B, T, D] predicted features from tokens shifted left by one and features that are not shifted."""
        places = torch.arange(following.shape[1], device=following.device)
        mask = (places[:, None] >= places) & (places < lengths[:, None])[:, None, None]
        return self.layers[0](
            self.fc(torch.cat([F.embedding(following, embedding), features], -1)), mask
        )


def padded(examples: Sequence[Example], device: str | torch.device = "cpu") -> Padded:
    """One batch of examples that carry one tap, as long as the longest."""
    columns = zip(*((x.tokens, x.features[:, 0], x.loss_mask) for x in examples), strict=True)  # type: ignore[index]
    tokens, features, mask = (
        nn.utils.rnn.pad_sequence([*column], batch_first=True).to(device) for column in columns
    )
    return tokens, features, mask, torch.tensor([len(x.tokens) for x in examples], device=device)


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
    """Smooth-L1 + 0.1 cross-entropy of a padded batch, with the target's embedding and LM head matrices [V, D].

    A slot counts where the token that it reads is supervised (gate "read", as published) or the one it "predicted".
    """
    tokens, features, mask, lengths = batch
    places = torch.arange(tokens.shape[1], device=tokens.device)
    counted = _shifted(mask, {"read": 0, "predicted": 2}[gate]) & (places < lengths[:, None] - 1)
    known, true, wide = (
        features,
        _shifted(features, 1),
        torch.promote_types(features.dtype, torch.float32),
    )
    if noise_seed is not None:
        generator = torch.Generator(known.device).manual_seed(noise_seed)
        noise = torch.empty_like(known).uniform_(-0.1, 0.1, generator=generator)
        known = known + noise * (512 / lengths.to(known.dtype))[:, None, None]
    predicted = head(_shifted(tokens, 1), known, lengths, embedding)
    target_probs = F.linear(true, weight).detach().softmax(-1, dtype=wide)
    entropy = -(target_probs * F.linear(predicted, weight).log_softmax(-1, dtype=wide)).sum(-1)
    regression = F.smooth_l1_loss(predicted.to(wide), true.to(wide), reduction="none").mean(-1)
    slots = counted.sum() + 1e-5
    first, second = (counted * regression).sum() / slots, (counted * entropy).sum() / slots
    return {"total": first + 0.1 * second, "regression": first, "cross_entropy": second}


def published_optimizer(head: nn.Module) -> torch.optim.Optimizer:
    """The published AdamW; the weight decay is torch's default."""
    return torch.optim.AdamW(head.parameters(), lr=3e-5, betas=(0.9, 0.95))


def published_step(
    loss: Any, optimizer: torch.optim.Optimizer, *, bf16: bool = True, clip: str = "value"
) -> float:
    """One update from what `loss()` gives; gradients are clipped by value, as published, or by norm."""
    weights = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    with torch.autocast(weights[0].device.type, torch.bfloat16, enabled=bf16):
        total = loss()["total"]
    total.backward()
    nn.utils.clip_grad_value_(weights, 0.5) if clip == "value" else nn.utils.clip_grad_norm_(
        weights, 0.5
    )
    optimizer.step()
    return float(total.detach())
