"""Which states of a text are kept, and how they are packed: rows of each tap that heads read, in a storage dtype."""

# N rows, T tokens, L taps, D target width

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eagle.core.examples import gate_mask, trim_mask
from eagle.device import upload

Slots = Literal["all", "read", "taught"]
"""All tokens; those of a batch, up to the last that is learned; or the two before each learned token."""

# -- which rows -------------------------------------------------------------------------------------------------------


def _sort_taps(taps: Iterable[int]) -> tuple[int, ...]:
    # -1, the LM head's input, comes behind the last layer
    return tuple(sorted({*taps}, key=lambda tap: (tap == -1, tap)))


@dataclass(frozen=True, slots=True)
class TapRoles:
    """What heads read of a target: taps at every slot, and taps at the slots before learned tokens."""

    inputs: tuple[int, ...]
    taught: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """Return all taps in order, the LM head's input last."""
        return _sort_taps((*self.inputs, *self.taught))

    @classmethod
    def join(cls, roles: Iterable[TapRoles]) -> TapRoles:
        """Return what several heads read together."""
        inputs: set[int] = set()
        taught: set[int] = set()
        for role in roles:
            inputs.update(role.inputs)
            taught.update(role.taught)
        return cls(_sort_taps(inputs), _sort_taps(taught))


@dataclass(frozen=True, slots=True)
class Part:
    """Taps that are kept at the same slots, in tensors of a shard whose names begin with a prefix."""

    prefix: str
    taps: tuple[int, ...]
    slots: Slots


def parts_of(identity: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a store with this identity."""
    taps = tuple(identity["taps"])
    # stores of the first version name no inputs, and keep all taps of all tokens
    if "inputs" not in identity:
        return (Part("", taps, "all"),)
    inputs = tuple(tap for tap in taps if tap in identity["inputs"])
    taught = tuple(tap for tap in taps if tap not in identity["inputs"])
    parts = [Part("", inputs, "read"), Part("taught_", taught, "taught")]
    return tuple(part for part in parts if part.taps)


def slots_of(loss_mask: Tensor, slots: Slots) -> Tensor:
    """Return the slots of a text that are kept.

    Token t is learned if it is supervised or, with `train.gate: read`, token t - 2 is. The target's state at slot t - 1
    predicts it, and a head begins from slot t - 2. Heads with attention read all of a batch, which ends with the last
    learned token.
    """
    if slots == "all":
        return torch.arange(len(loss_mask))
    learned = trim_mask(loss_mask | gate_mask(loss_mask, "read"))
    if slots == "read":
        return torch.arange(len(learned))
    padded = torch.cat([learned, learned.new_zeros(2)])
    is_kept = padded[1:-1] | padded[2:]
    return is_kept.nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class TextSizes:
    """[N], of each text: its tokens, its slots of each kind, and its first tokens that the text before it has too."""

    tokens: Tensor
    read: Tensor
    taught: Tensor
    shared: Tensor

    @classmethod
    def of(cls, texts: Iterable[tuple[Tensor, int]]) -> TextSizes:
        """Return the sizes of texts by their loss masks and the tokens that each shares with the one before it."""
        # an array holds four bytes a number, as there may be ten million texts
        sizes = array("i")
        read = 0
        for loss_mask, shared in texts:
            previous_read = read
            read = len(slots_of(loss_mask, "read"))
            taught = len(slots_of(loss_mask, "taught"))
            sizes.extend((len(loss_mask), read, taught, min(shared, previous_read, read)))
        return cls(*(torch.tensor(sizes[field::4], dtype=torch.int32) for field in range(4)))

    def rows(self, slots: Slots) -> Tensor:
        """Return [N], the rows that a store keeps of each text. What the text before has is kept there."""
        return {"all": self.tokens, "read": self.read - self.shared, "taught": self.taught}[slots]


def pick_rows(
    states: Tensor,
    starts: Iterable[int],
    taps: Sequence[int],
    part: Part,
    loss_masks: Sequence[Tensor],
    shared: Sequence[int],
) -> Tensor:
    """Return [N, L', D], the rows of a part.

    Args:
        states: [M, L, D], the states of texts.
        starts: Where each text begins in `states`.
        taps: The L taps of `states`.
        part: The taps L' to pick, and at which slots.
        loss_masks: [T] of each text.
        shared: The first tokens of each text whose rows the text before it has.
    """
    rows = []
    for start, loss_mask, shared_count in zip(starts, loss_masks, shared, strict=True):
        slots = slots_of(loss_mask, part.slots)
        if part.slots == "read":
            slots = slots[shared_count:]
        rows.append(start + slots)
    picked = states.index_select(0, upload(torch.cat(rows), states.device))
    if part.taps == tuple(taps):
        return picked
    return torch.stack([picked[:, taps.index(tap)] for tap in part.taps], dim=1)


def restore_features(
    parts: Sequence[Part],
    packed: Sequence[Sequence[Tensor]],
    taps: Sequence[int],
    loss_masks: Sequence[Tensor],
) -> list[Tensor]:
    """Return [T, L, D] of each text from the packed rows of the parts."""
    values = [unpack_features(*tensors) for tensors in packed]
    lengths = [len(loss_mask) for loss_mask in loss_masks]
    if [part.slots for part in parts] == ["all"]:
        return list(values[0].split(lengths))
    width = values[0].shape[-1]
    # what is not kept is NaN, so that nobody uses it
    texts = [values[0].new_full((length, len(taps), width), torch.nan) for length in lengths]
    for part, rows in zip(parts, values, strict=True):
        slots = [slots_of(loss_mask, part.slots) for loss_mask in loss_masks]
        rows_by_text = rows.split([len(text_slots) for text_slots in slots])
        for text, text_slots, text_rows in zip(texts, slots, rows_by_text, strict=True):
            index = upload(text_slots, text.device)
            for tap, states in zip(part.taps, text_rows.unbind(1), strict=True):
                text[:, taps.index(tap)].index_copy_(0, index, states)
    return texts


# -- packing ----------------------------------------------------------------------------------------------------------

MAX_FLOAT8 = 448.0
MAX_FLOAT6 = 7.5
BLOCK = 32  # numbers of a float6 state that share a scale; 64 would make rows 2% smaller and the error 3% larger
# E2M3 has the lowest four of E4M3's exponents, 64 times as large: the cast to float8 rounds to float6 as well
FLOAT6_UNIT = 64.0
TINY = torch.finfo(torch.float32).tiny


class Field(NamedTuple):
    """One tensor [N, L, ..] that packed states consist of."""

    name: str
    dtype: torch.dtype
    code: str  # of safetensors
    # numbers of a state that `entries` entries hold; None: one entry for each state
    per: int | None = 1
    entries: int = 1

    def shape(self, rows: int, taps: int, width: int) -> list[int]:
        """Return the shape of the tensor of so many rows."""
        if self.per is None:
            return [rows, taps]
        return [rows, taps, width * self.entries // self.per]

    def row_bytes(self, taps: int, width: int) -> int:
        """Return the bytes of a row."""
        return math.prod(self.shape(1, taps, width)) * self.dtype.itemsize


SCALES = Field("scales", torch.float32, "F32", per=None)
DTYPES: dict[str, tuple[Field, ...]] = {
    "float32": (Field("features", torch.float32, "F32"),),
    "bfloat16": (Field("features", torch.bfloat16, "BF16"),),
    "float8": (Field("features", torch.float8_e4m3fn, "F8_E4M3"), SCALES),
    "float6": (
        Field("features", torch.uint8, "U8", per=4, entries=3),
        Field("block_scales", torch.float8_e4m3fn, "F8_E4M3", per=BLOCK),
        SCALES,
    ),
}


def row_bytes(part: Part, dtype: str, width: int) -> int:
    """Return the bytes of a slot's row of a part."""
    return sum(field.row_bytes(len(part.taps), width) for field in DTYPES[dtype])


def token_bytes(parts: Iterable[Part], dtype: str, width: int, supervised: float) -> float:
    """Return the bytes on disk of a token, by the share of tokens that are supervised; texts end with such a token."""
    shares = {"all": 1.0, "read": 1.0, "taught": supervised}
    return sum(row_bytes(part, dtype, width) * shares[part.slots] for part in parts)


def mean_bytes(parts: Sequence[Part], dtype: str, width: int, sizes: TextSizes) -> float:
    """Return the bytes on disk of a token of these texts, a mean over all of them."""
    total = sum(row_bytes(part, dtype, width) * int(sizes.rows(part.slots).sum()) for part in parts)
    return total / max(int(sizes.tokens.sum()), 1)


def check_width(dtype: str, width: int) -> None:
    """Refuse a width that a storage dtype cannot cut into blocks."""
    if dtype == "float6" and width % BLOCK:
        raise ValueError(
            f"features.dtype is float6, in which {BLOCK} numbers share a scale, and this target's states have {width}: "
            f"expected a multiple of {BLOCK}. Set features.dtype=float8"
        )


def round_features(features: Tensor, dtype: str) -> Tensor:
    """Return features [.., D] as a store of this dtype gives them back."""
    return unpack_features(*pack_features(features, dtype))


def pack_features(features: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Return features [.., D] in their storage dtype, as the tensors of its fields.

    float8 is E4M3 with a scale for each state. float6 is E2M3 with a scale for each block of numbers, which is itself
    E4M3 with a scale for the whole state.
    """
    if dtype == "float8":
        scales = (features.abs().amax(-1).float() / MAX_FLOAT8).clamp_min(TINY)
        return (features / scales[..., None]).to(torch.float8_e4m3fn), scales
    if dtype == "float6":
        return _pack_float6(features)
    return (features.to(DTYPES[dtype][0].dtype),)


def unpack_features(values: Tensor, *scales: Tensor) -> Tensor:
    """Return features [.., D] in their training dtype; float8 and float6 are scaled back to bfloat16."""
    if len(scales) == 2:
        return _unpack_float6(values, *scales)
    if scales:
        return (values.float() * scales[0][..., None]).bfloat16()
    return values


def _pack_float6(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed numbers [.., 3/4 D], the scales of blocks [.., D / BLOCK], and those of whole states [..].

    A number is E2M3, times its block's scale, times its state's scale. Four numbers take three bytes.
    """
    blocks = features.float().unflatten(-1, (-1, BLOCK))
    wanted_scales = blocks.abs().amax(-1) / MAX_FLOAT6
    scales = (wanted_scales.amax(-1) / MAX_FLOAT8).clamp_min(TINY)
    block_scales = (wanted_scales / scales[..., None]).to(torch.float8_e4m3fn)
    units = _float8_units(block_scales, scales)
    # numbers up to `limit` have 0 in the upper two exponent bits of E4M3, and its other bits are those of E2M3, so that
    # the cast rounds to E2M3. A scale may have been rounded down, and then the largest numbers are cut.
    limit = MAX_FLOAT6 / FLOAT6_UNIT
    scaled = (blocks / units.clamp_min(TINY)[..., None]).clamp(-limit, limit).flatten(-2)
    float8 = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    # the sign, and the lower five of E4M3's seven other bits
    codes = (float8 & 0b11111) | (float8 >> 2 & 0b100000)
    # number i of the four quarters lies in the same three bytes, the first quarter's bits lowest; shifts of uint8 drop
    # the bits above the eighth
    first, second, third, fourth = codes.chunk(4, dim=-1)
    low = first | second << 6
    middle = second >> 2 | third << 4
    high = third >> 4 | fourth << 2
    return torch.cat([low, middle, high], dim=-1), block_scales, scales


def _unpack_float6(packed: Tensor, block_scales: Tensor, scales: Tensor) -> Tensor:
    """Return [.., D], the numbers that `_pack_float6` packed, rounded."""
    low, middle, high = packed.chunk(3, dim=-1)
    quarters = [low, low >> 6 | middle << 2, middle >> 4 | high << 4, high >> 2]
    codes = torch.cat(quarters, dim=-1)
    float8 = ((codes & 0b11111) | (codes & 0b100000) << 2).view(torch.float8_e4m3fn)
    blocks = float8.float().unflatten(-1, (-1, BLOCK))
    units = _float8_units(block_scales, scales)
    return (blocks * units[..., None]).flatten(-2).bfloat16()


def _float8_units(block_scales: Tensor, scales: Tensor) -> Tensor:
    """Return [.., D / BLOCK], what a float8 of 1.0 stands for in each block."""
    return FLOAT6_UNIT * block_scales.float() * scales[..., None]
