"""Transformer blocks whose attention and MLP stand between two short convolutions over the slots of a block."""

# H width, T taps of a kernel, g channels that share a kernel, G = H / g groups of them, B slots of a block

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.core.drafter import HeadShape
from eagle.drafters.parts.decoder_block import Cache, NormedBlock


def check_kernel(size: int, slots: int) -> None:
    """Raise ValueError for a kernel that reads more slots than a block has."""
    if size > slots:
        raise ValueError(
            f"conv_kernel_size is {size}, expected at most slots, {slots}: a convolution reads one block"
        )


class GroupedConv(nn.Module):
    """Two causal convolutions over the slots of a block, one before and one after a sublayer (DFlash2).

    Slot t gets y_t = sum_i (b_i + k_i) * x_{t - i} over T taps i, where x is 0 before the first slot. The kernel b is
    learned for each channel. The kernel k is made of the sublayer's input at slot t, for each group of g channels.
    """

    def __init__(self, width: int, slots: int, taps: int, group_size: int) -> None:
        """Make both convolutions such that they change nothing at first.

        Args:
            width: H, the number of channels.
            slots: B, the rows that belong to one block of tokens; a convolution never reads another block.
            taps: T.
            group_size: g, the number of channels that share a kernel made of the input.
        """
        super().__init__()
        if width % group_size:
            raise ValueError(
                f"drafter.conv_group_size is {group_size}, expected a divisor of the width, {width}: set it to one"
            )
        self.slots = slots
        self.taps = taps
        self.groups = width // group_size
        # side 0 is before the sublayer, side 1 after it; tap 0 is the slot itself
        kernel = torch.zeros(2, taps, width)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        self.forget_inputs()

    def forget_inputs(self) -> None:
        """Set the kernels that are made of the input to 0, as a new head has them."""
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's convolved input, and the kernel for its output, both made of its input x [.., H].

        The kernel is [blocks, B, T, G].
        """
        kernels = self.kernel_projection(x).view(-1, self.slots, 2, self.taps, self.groups)
        # kappa_0 and kappa_1 of one product: the output's kernel depends on the input too
        input_kernel, output_kernel = kernels.unbind(2)
        return self._convolve(x, input_kernel, side=0), output_kernel

    def after(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the sublayer's convolved output [.., H]; `kernel` is that which `before` returned."""
        return self._convolve(x, kernel, side=1)

    def _convolve(self, x: Tensor, kernel: Tensor, side: int) -> Tensor:
        """Return the convolution of x [.., H], whose rows are whole blocks of slots.

        Args:
            x: The input or the output of the sublayer.
            kernel: The part of the kernel that is made of the sublayer's input [blocks, B, T, G].
            side: 0 before the sublayer, 1 after it.
        """
        # [blocks, B, G, g]
        rows = x.reshape(-1, self.slots, self.groups, x.shape[-1] // self.groups)
        # [T, G, g] + [blocks, B, T, G, 1]
        taps = self.base_kernel[side].view(self.taps, *rows.shape[2:]) + kernel[..., None]
        output = taps[:, :, 0] * rows
        for tap in range(1, self.taps):
            # x_{t - tap}, and 0 for the first slots of each block
            earlier = F.pad(rows[:, :-tap], (0, 0, 0, 0, tap, 0))
            output = output + taps[:, :, tap] * earlier
        return output.reshape(x.shape)


class ConvolvedBlock(NormedBlock):
    """A Llama decoder block whose attention and MLP each stand between two convolutions.

    Keys and values of the target's features are made without them: they are over the slots of a block alone.
    """

    def __init__(self, shape: HeadShape, slots: int, taps: int, group_size: int) -> None:
        """Make a `NormedBlock` and the convolutions; the arguments but `shape` are those of `GroupedConv`."""
        super().__init__(shape)
        width = shape.hidden_size
        self.attention_conv = GroupedConv(width, slots, taps, group_size)
        self.mlp_conv = GroupedConv(width, slots, taps, group_size)

    def inputs(self, x: Tensor) -> tuple[Any, ...]:
        """Return attention's input, and what `add_attention` needs: the state x [.., H] and the output's kernel."""
        convolved, kernel = self.attention_conv.before(self.input_layernorm(x))
        return convolved, (x, kernel)

    def add_attention(self, attended: Tensor, residual: Any, cache: Cache | None = None) -> Tensor:
        """Return the block's output [.., H], from attention's output, the state and the kernel for the output.

        The arguments are those of `Block.add_attention`.
        """
        x, kernel = residual
        return self.add_mlp(x + self.attention_conv.after(attended, kernel), cache)

    def add_mlp(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return x + convolved MLP(convolved norm(x)), the second half of the block.

        The arguments are those of `Block.add_mlp`; the joined matrices of the cache are not needed.
        """
        convolved, kernel = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(convolved), kernel)
