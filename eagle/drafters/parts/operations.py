"""Operations of blocks with backward passes by hand or few kernel launches: rotation, RMSNorm, SwiGLU."""

# N rows of all sequences, B sequences, T tokens, H width, w width of a head

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding to queries or keys x [N, heads * w] of N tokens, and return [heads, N, w].

    `rotary` are the cosines and sines [N, w] of the tokens' positions; w is the width of a head.
    """
    cosine, sine = rotary
    heads = x.unflatten(-1, (-1, cosine.shape[-1]))
    return _Rotated.apply(heads, cosine, sine).transpose(0, 1)


class _Rotated(torch.autograd.Function):
    """Rotation with a backward pass by hand: half of autograd's time (a quarter in bf16), and only tables are saved."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return queries or keys [N, heads, width] of N tokens, rotated by the angles in the tables [N, width]."""
        ctx.save_for_backward(cosine, sine)
        return _turn(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at the heads, which is that at the output rotated back, and None for the two tables."""
        cosine, sine = ctx.saved_tensors
        return _turn(grads[0], cosine, -sine), None, None


def _turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads [N, heads, w] with each pair of elements i and i + w / 2 rotated by the angle in the tables.

    The tables are cosines and sines [N, w], for the position of each of the N tokens. It computes in the precision of
    the tables or better, and returns that of the input. This is the rotary embedding, or with negated sines its
    inverse.
    """
    # (x, y) -> (x cos - y sin, y cos + x sin)
    wide = heads.to(torch.promote_types(heads.dtype, cosine.dtype))
    turned = wide * cosine[:, None]
    half = wide.shape[-1] // 2
    sine = sine[:, None, :half]  # both halves of a table are equal
    turned[..., :half].addcmul_(wide[..., half:], sine, value=-1)
    turned[..., half:].addcmul_(wide[..., :half], sine)
    return turned.to(heads.dtype)


def rotate_heads(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys [B, heads, T, w] with the rotary embedding, made in few kernel launches, for drafting.

    `rotary` are the cosines and sines [B, T, w] at the positions of T tokens of each of B sequences; w is the width of
    a head. It changes tensors in place and is not meant for a backward pass.
    """
    cosine, sine = rotary
    half = x.shape[-1] // 2
    # (x, y) -> (-y, x), times the sines, plus (x, y) times the cosines
    turned = x.roll(half, -1)
    turned[..., :half].neg_()
    return turned.mul_(sine[:, None]).addcmul_(x, cosine[:, None])


def _inverse(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm's factor 1 / sqrt(mean(x^2) + eps) [.., 1] of each row of x [.., width], in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm's gradients at x [N, H] and at the weight [H], in the precision of `inverse`.

    N are tokens, and H is the hidden size.

    Args:
        grad_out: [N, H], the gradient at the output of the N rows.
        x: [N, H], the input.
        weight: [H], the gain.
        inverse: [N, 1], what `_inverse` returned for x.
    """
    grad_out = grad_out.to(inverse.dtype)
    normed = x * inverse
    gain = weight.to(inverse.dtype)
    # with n the normed row, g the gain and o the gradient at the output: dx = (o g - n (sum o n g) / H) inverse
    grad_gain = grad_out * normed
    along = (grad_gain @ gain).unsqueeze(-1)
    grad_x = torch.addcmul(grad_out * gain, normed, along, value=-1 / x.shape[-1]).mul_(inverse)
    return grad_x.to(x.dtype), grad_gain.sum(0).to(weight.dtype)


class RMSNorm(torch.autograd.Function):
    """RMSNorm with a backward pass by hand, which takes half the time of transformers' norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [.., hidden size] with each row normed and multiplied by the weight [hidden size]."""
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at the input x and at the weight from that at the output; eps gets None."""
        x, weight, inverse = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grad_x, grad_weight = _norm_backward(
            grads[0].flatten(0, -2), rows, weight, inverse.flatten(0, -2)
        )
        # eps has no gradient
        return grad_x.view_as(x), grad_weight, None


class SwiGLUResidual(torch.autograd.Function):
    """The norm, MLP and residual of a block: y = x + W_down(silu(W_gate n) * W_up n), n = rms(x).

    For the backward pass it saves x, one number for each row, and the two products of n, fewer tensors than autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, w_gate: Tensor, w_up: Tensor, w_down: Tensor
    ) -> Tensor:
        """Return y [N, hidden size] from the states x [N, hidden size] of N tokens.

        `gain` [hidden size] and `eps` are the norm's; the others are the matrices of gate, up and down projection.
        """
        inverse = _inverse(x, eps)
        normed = (x * inverse).mul_(gain).to(x.dtype)
        gate = F.linear(normed, w_gate)
        up = F.linear(normed, w_up)
        ctx.save_for_backward(x, gain, inverse, gate, up, w_gate, w_up, w_down)
        return x + F.linear(F.silu(gate).mul_(up), w_down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at x, the gain and the three matrices, from that at y; eps gets None."""
        x, gain, inverse, gate, up, *matrices = ctx.saved_tensors
        dtype = gate.dtype
        # in the precision that the forward pass used: autocast had cast the fp32 matrices
        w_gate, w_up, w_down = (matrix.to(dtype) for matrix in matrices)
        normed = (x * inverse).mul_(gain).to(dtype)
        grad_out = grads[0].to(dtype)
        active = F.silu(gate)
        # products and sums are written over tensors that are no longer needed, to save memory
        grad_product = grad_out @ w_down
        grad_w_down = grad_out.T @ (active * up)
        grad_up = active.mul_(grad_product)
        # from here on `active` holds `grad_up`, and `grad_product` the gradient at silu(gate)
        grad_gate = torch.ops.aten.silu_backward(grad_product.mul_(up), gate)
        grad_normed = torch.addmm(grad_up @ w_up, grad_gate, w_gate)
        grad_x, grad_gain = _norm_backward(grad_normed, x, gain, inverse)
        grad_matrices = [grad_gate.T @ normed, grad_up.T @ normed, grad_w_down]
        # a gradient has its parameter's precision, fp32 under autocast
        return (
            grad_x.add_(grads[0]),  # the residual passes y's gradient on as it is
            grad_gain,
            None,
            *(grad.to(gain.dtype) for grad in grad_matrices),
        )
