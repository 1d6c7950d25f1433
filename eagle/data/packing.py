"""How states are packed for the disk: one row of each tap in a storage dtype, and back."""

# N rows, L taps, D target width

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_FLOAT8 = 448.0
LARGEST_FLOAT6 = 7.5
BLOCK = 32  # numbers of a float6 state that share a scale; 64 would make rows 2% smaller and the error 3% larger
# E2M3 has the lowest four of E4M3's exponents, 64 times as large: the cast to float8 rounds to float6 as well
FLOAT6_UNIT = 64.0


class Field(NamedTuple):
    """One tensor [N, L, ..] that packed states consist of."""

    name: str
    dtype: torch.dtype
    code: str  # of safetensors
    per: int | None = 1  # one entry for so many numbers of a state, None: one for each state
    entries: int = 1  # for so many numbers

    def shape(self, rows: int, taps: int, width: int) -> list[int]:
        """The shape of the tensor of so many rows."""
        return [rows, taps] if self.per is None else [rows, taps, width * self.entries // self.per]

    def row_bytes(self, taps: int, width: int) -> int:
        """The bytes of a row."""
        count = 1
        for size in self.shape(1, taps, width):
            count *= size
        return count * self.dtype.itemsize


SCALES = Field("scales", torch.float32, "F32", None)
DTYPES: dict[str, tuple[Field, ...]] = {
    "float32": (Field("features", torch.float32, "F32"),),
    "bfloat16": (Field("features", torch.bfloat16, "BF16"),),
    "float8": (Field("features", torch.float8_e4m3fn, "F8_E4M3"), SCALES),
    "float6": (
        Field("features", torch.uint8, "U8", 4, 3),
        Field("block_scales", torch.float8_e4m3fn, "F8_E4M3", BLOCK),
        SCALES,
    ),
}


def pack_features(features: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Features [.., D] in their storage dtype, as the tensors of its fields.

    float8 is E4M3 with a scale for each state. float6 is E2M3 with a scale for each block of numbers, which is itself
    E4M3 beside a scale of the whole state.
    """
    if dtype == "float8":
        scales = (features.abs().amax(-1).float() / LARGEST_FLOAT8).clamp_min(torch.finfo(torch.float32).tiny)
        return (features / scales[..., None]).to(torch.float8_e4m3fn), scales
    if dtype == "float6":
        return _pack_float6(features)
    return (features.to(DTYPES[dtype][0].dtype),)


def unpack_features(values: Tensor, *scales: Tensor) -> Tensor:
    """Features [.., D] in their training dtype: float8 and float6 are scaled back to bfloat16."""
    if len(scales) == 2:
        return _unpack_float6(values, *scales)
    return (values.float() * scales[0][..., None]).bfloat16() if scales else values


def check_width(dtype: str, width: int) -> None:
    """Refuse a width that a storage dtype cannot cut into blocks."""
    if dtype == "float6" and width % BLOCK:
        raise ValueError(
            f"features.dtype is float6, in which {BLOCK} numbers share a scale, and this target's states have {width}: "
            f"expected a multiple of {BLOCK}. Set features.dtype=float8"
        )


def _pack_float6(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed numbers [.., 3/4 D], the scales of blocks [.., D / BLOCK], and those of whole states [..].

    Number i of the state's quarters lies in the same three bytes: 6 bits from each, the first quarter's lowest.
    """
    blocks = features.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1) / LARGEST_FLOAT6
    tiny = torch.finfo(torch.float32).tiny
    scales = (largest.amax(-1) / LARGEST_FLOAT8).clamp_min(tiny)
    block_scales = (largest / scales[..., None]).to(torch.float8_e4m3fn)
    steps = FLOAT6_UNIT * block_scales.float() * scales[..., None]
    limit = LARGEST_FLOAT6 / FLOAT6_UNIT  # a scale may be rounded down
    scaled = (blocks / steps.clamp_min(tiny)[..., None]).clamp(-limit, limit).flatten(-2)
    bits = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    first, second, third, fourth = ((bits & 0b11111) | (bits >> 2 & 0b100000)).chunk(4, dim=-1)
    packed = (first | second << 6, second >> 2 | third << 4, third >> 4 | fourth << 2)
    return torch.cat(packed, dim=-1), block_scales, scales


def _unpack_float6(packed: Tensor, block_scales: Tensor, scales: Tensor) -> Tensor:
    """[.., D], the numbers that `_pack_float6` packed, rounded."""
    low, middle, high = packed.chunk(3, dim=-1)
    quarters = (low, low >> 6 | middle << 2, middle >> 4 | high << 4, high >> 2)
    codes = torch.cat(quarters, dim=-1)
    bits = (codes & 0b11111) | (codes & 0b100000) << 2
    steps = FLOAT6_UNIT * block_scales.float() * scales[..., None]
    blocks = bits.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK))
    return (blocks * steps[..., None]).flatten(-2).bfloat16()
