"""Which states of a sequence are kept, and how these are packed: rows of each tap that heads read, by storage dtype."""

# N sequences or rows (one slot's states), T tokens, L taps, L' taps of a part, M positions of all sequences,
# D target width

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
"""Which slots of a sequence are kept: all of them; those that a batch reads, up to the last learned token; or only the
two before each learned token, at which the target teaches it."""

# -- which rows -------------------------------------------------------------------------------------------------------


def _sort_taps(taps: Iterable[int]) -> tuple[int, ...]:
    """Return taps, indices of the target's layers whose inputs are read, in order and each once."""
    # -1, the LM head's input, comes after the last layer
    return tuple(sorted({*taps}, key=lambda tap: (tap == -1, tap)))


@dataclass(frozen=True, slots=True)
class TapRoles:
    """The taps that training needs of a target: indices of the layers whose inputs it reads, -1 for the LM head's."""

    inputs: tuple[int, ...]  # at every slot, as the head reads them
    # at the slots before learned tokens alone, as the head learns from them
    teacher: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """All taps (target layers whose inputs are read) in order, the LM head's input last."""
        return _sort_taps((*self.inputs, *self.teacher))

    @classmethod
    def join(cls, roles: Iterable[TapRoles]) -> TapRoles:
        """Return the taps (target layers) that several heads need, so that one store of features serves all of them.

        `roles` are those of each head.
        """
        inputs: set[int] = set()
        teacher: set[int] = set()
        for role in roles:
            inputs.update(role.inputs)
            teacher.update(role.teacher)
        return cls(_sort_taps(inputs), _sort_taps(teacher))


@dataclass(frozen=True, slots=True)
class Part:
    """Taps that are kept at the same slots, in tensors of a shard whose names begin with a prefix."""

    prefix: str
    taps: tuple[int, ...]
    slots: Slots


def parts_of(identity: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a store with this identity: taps (layer inputs) at every slot, and before learned tokens.

    A part without taps is left out.
    """
    taps = tuple(identity["taps"])
    # stores of the first version have no key `inputs`, and keep all taps of all tokens
    if "inputs" not in identity:
        return (Part("", taps, "all"),)
    inputs = tuple(tap for tap in taps if tap in identity["inputs"])
    teacher = tuple(tap for tap in taps if tap not in identity["inputs"])
    # each with the prefix of its tensors' names
    parts = [Part("", inputs, "read"), Part("taught_", teacher, "taught")]
    return tuple(part for part in parts if part.taps)


def slots_of(loss_mask: Tensor, slots: Slots) -> Tensor:
    """Return the slots (indices of tokens) of a sequence whose hidden states a store keeps.

    A token t counts as learned if it is supervised, or if token t - 2 is: training may be run with `train.gate: read`,
    which learns these tokens, too, so that a store keeps what they need. The target's state at slot t - 1 predicts
    token t, and a head drafts it from slot t - 2.

    Args:
        loss_mask: [T], true at supervised tokens.
        slots: "all": all slots. "read": those up to the last learned token, where a batch ends, as heads with attention
            read all of a batch. "taught": only slots t - 1 and t - 2 of every learned token t.
    """
    if slots == "all":
        return torch.arange(len(loss_mask))
    # up to the last learned token, without the first two, which no slot predicts
    learned = trim_mask(loss_mask | gate_mask(loss_mask, "read"))
    if slots == "read":
        return torch.arange(len(learned))
    # slot s is needed if token s + 1 or s + 2 is learned
    padded = torch.cat([learned, learned.new_zeros(2)])
    is_kept = padded[1:-1] | padded[2:]
    return is_kept.nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class SequenceSizes:
    """The sizes of sequences, as tensors [N], from which a store and its shards are planned."""

    tokens: Tensor  # how many tokens each has
    read: Tensor  # how many slots are kept of each as "read"
    teacher: Tensor  # and as "taught"
    shared: Tensor  # how many of its first "read" slots the sequence before it has, too

    @classmethod
    def of(cls, sequences: Iterable[tuple[Tensor, int]]) -> SequenceSizes:
        """Return the sizes of sequences, in tokens and in slots (tokens) that a store keeps.

        Args:
            sequences: The loss mask of each sequence, and how many of its first tokens the sequence before it has, too.
        """
        # there may be ten million sequences, and an array takes four bytes a number
        sizes = array("i")
        read = 0
        for loss_mask, shared in sequences:
            previous_read = read
            read = len(slots_of(loss_mask, "read"))
            teacher = len(slots_of(loss_mask, "taught"))
            # only slots that both sequences keep are shared
            # in the order of the fields
            sizes.extend((len(loss_mask), read, teacher, min(shared, previous_read, read)))
        return cls(*(torch.tensor(sizes[field::4], dtype=torch.int32) for field in range(4)))

    def rows(self, slots: Slots) -> Tensor:
        """Return [N], how many rows a store keeps for each of N sequences, without those that the one before has.

        A row is the states at one slot (token), and `slots` says which slots are kept.
        """
        return {"all": self.tokens, "read": self.read - self.shared, "taught": self.teacher}[slots]


def pick_rows(
    states: Tensor,
    starts: Iterable[int],
    taps: Sequence[int],
    part: Part,
    loss_masks: Sequence[Tensor],
    shared: Sequence[int],
) -> Tensor:
    """Return the N rows [N, L', D] that a store keeps of a part, those of one sequence after those of another.

    A row is the states, of width D, at one slot (token).

    Args:
        states: [M, L, D], the states of all sequences at M positions, which may include padding.
        starts: The index in `states` at which each sequence begins.
        taps: The L taps of `states`.
        part: The L' taps to pick, and at which slots.
        loss_masks: [T] of each sequence of T tokens.
        shared: How many of its first tokens each sequence shares with the one before it, which has their rows.
    """
    rows = []  # of each sequence: the indices in `states` of the rows that are kept
    for start, loss_mask, shared_count in zip(starts, loss_masks, shared, strict=True):
        slots = slots_of(loss_mask, part.slots)
        # only "read" parts share the rows of common prefixes
        if part.slots == "read":
            slots = slots[shared_count:]
        rows.append(start + slots)
    picked = states.index_select(0, upload(torch.cat(rows), states.device))
    # no copy if all taps are kept
    if part.taps == tuple(taps):
        return picked
    return torch.stack([picked[:, taps.index(tap)] for tap in part.taps], dim=1)


def restore_features(
    parts: Sequence[Part],
    packed: Sequence[Sequence[Tensor]],
    taps: Sequence[int],
    loss_masks: Sequence[Tensor],
) -> list[Tensor]:
    """Return the features [T, L, D] of each sequence from the rows (states at one token) of a store; NaN without one.

    They are the target's states, of width D, of its T tokens at L taps.

    Args:
        parts: The parts of the store: sets of taps (layer inputs), each kept at the same slots.
        packed: Of each part, the packed rows of these sequences, one tensor for each field of the storage dtype.
        taps: The L taps of the features, in order.
        loss_masks: [T] of each sequence, which decide at which slots (tokens) it has rows.
    """
    # of each part [N, L', D], with N rows of all sequences and L' taps
    values = [unpack_features(*tensors) for tensors in packed]
    lengths = [len(loss_mask) for loss_mask in loss_masks]
    # a store of the first version keeps everything
    if [part.slots for part in parts] == ["all"]:
        return list(values[0].split(lengths))
    width = values[0].shape[-1]
    # NaN and not 0, so that a loss that reads a state which is not kept shows it
    features = [values[0].new_full((length, len(taps), width), torch.nan) for length in lengths]
    for part, rows in zip(parts, values, strict=True):
        slots = [slots_of(loss_mask, part.slots) for loss_mask in loss_masks]
        rows_by_sequence = rows.split([len(sequence_slots) for sequence_slots in slots])
        for sequence_features, sequence_slots, sequence_rows in zip(
            features, slots, rows_by_sequence, strict=True
        ):
            index = upload(sequence_slots, sequence_features.device)
            # written into the features in place, tap by tap
            for tap, states in zip(part.taps, sequence_rows.unbind(1), strict=True):
                sequence_features[:, taps.index(tap)].index_copy_(0, index, states)
    return features


# -- packing ----------------------------------------------------------------------------------------------------------

MAX_FLOAT8 = 448.0  # the largest number of E4M3
MAX_FLOAT6 = 7.5  # and of E2M3
BLOCK = 32  # numbers of a float6 state that share a scale; 64 would make rows 2% smaller and the error 3% larger
# E2M3 has the lowest four of E4M3's exponents, 64 times as large: the cast to float8 rounds to float6 as well
FLOAT6_UNIT = 64.0
TINY = torch.finfo(torch.float32).tiny


class Field(NamedTuple):
    """One tensor [N, L, ..] that packed states consist of."""

    name: str
    dtype: torch.dtype
    code: str  # of safetensors
    # `entries` entries of the tensor hold `per` numbers of a state; None: one entry for each state
    per: int | None = 1
    entries: int = 1

    def shape(self, rows: int, taps: int, width: int) -> list[int]:
        """Return the shape of this tensor for `rows` rows of `taps` states, each of `width` numbers.

        A row is the states at one token; a field is one of the tensors that a storage dtype consists of.
        """
        # one entry for each state
        if self.per is None:
            return [rows, taps]
        return [rows, taps, width * self.entries // self.per]

    def row_bytes(self, taps: int, width: int) -> int:
        """Return the bytes of a row, the states at one token: `taps` states, each of `width` numbers."""
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
    """Return the bytes of one row of a part, the states at one slot (token). `width` is the target's."""
    return sum(field.row_bytes(len(part.taps), width) for field in DTYPES[dtype])


def token_bytes(parts: Iterable[Part], dtype: str, width: int, supervised: float) -> float:
    """Estimate the bytes on disk of a token, for forecasts that know no data.

    Args:
        parts: The parts of the store: sets of taps (layer inputs), each kept at the same slots.
        dtype: The storage dtype, one of `DTYPES`.
        width: The target's width, the numbers of a state.
        supervised: The share of tokens that are supervised. The last token of a sequence is taken to be one of them.
    """
    # by the slots that are kept: the rows for each token
    shares = {"all": 1.0, "read": 1.0, "taught": supervised}
    return sum(row_bytes(part, dtype, width) * shares[part.slots] for part in parts)


def mean_bytes(parts: Sequence[Part], dtype: str, width: int, sizes: SequenceSizes) -> float:
    """Return the mean bytes on disk of a token of sequences with these sizes.

    Args:
        parts: The parts of the store: sets of taps (layer inputs), each kept at the same slots.
        dtype: The storage dtype, one of `DTYPES`.
        width: The target's width, the numbers of a state.
        sizes: How many tokens and rows each sequence has.
    """
    total = sum(row_bytes(part, dtype, width) * int(sizes.rows(part.slots).sum()) for part in parts)
    # no sequences have no tokens
    return total / max(int(sizes.tokens.sum()), 1)


def check_width(dtype: str, width: int) -> None:
    """Refuse a target's width (numbers of a state) that a storage dtype cannot cut into whole blocks.

    float6 has a scale for each block of numbers.
    """
    if dtype == "float6" and width % BLOCK:
        raise ValueError(
            f"features.dtype is float6, in which {BLOCK} numbers share a scale, and this target's states have {width}: "
            f"expected a multiple of {BLOCK}. Set features.dtype=float8"
        )


def round_features(features: Tensor, dtype: str) -> Tensor:
    """Return features [.., D] (states of width D) with the rounding of a store of this dtype.

    Features that are computed while training then equal stored ones.
    """
    return unpack_features(*pack_features(features, dtype))


def pack_features(features: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Return features [.., D], states of width D, in a storage dtype: one tensor for each of its fields (`DTYPES`).

    float8 is E4M3 with a scale for each state. float6 is E2M3 with a scale for each block of numbers, which is itself
    E4M3 with a scale for the whole state.
    """
    if dtype == "float8":
        # [..], the scales by which the largest number of each state becomes the largest of E4M3; clamped, so that a
        # state of zeros is not divided by 0
        scales = (features.abs().amax(-1).float() / MAX_FLOAT8).clamp_min(TINY)
        return (features / scales[..., None]).to(torch.float8_e4m3fn), scales
    if dtype == "float6":
        return _pack_float6(features)
    return (features.to(DTYPES[dtype][0].dtype),)


def unpack_features(values: Tensor, *scales: Tensor) -> Tensor:
    """Return features [.., D] from the tensors of `pack_features`; float8 and float6 are scaled back to bfloat16.

    The number of scales says which dtype it is: float8 has one tensor of them, float6 has two.
    """
    if len(scales) == 2:
        return _unpack_float6(values, *scales)
    if scales:
        return (values.float() * scales[0][..., None]).bfloat16()
    return values


def _pack_float6(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed numbers [.., 3/4 D], the scales of blocks [.., D / BLOCK], and those of whole states [..].

    The features [.., D] are states of D numbers. A number is stored as E2M3 (six bits: sign, two of exponent, three of
    mantissa), times its block's scale, times its state's scale. Four numbers take three bytes.
    """
    # [.., D / BLOCK, BLOCK]
    blocks = features.float().unflatten(-1, (-1, BLOCK))
    # the scale that each block should have; it is stored as E4M3, relative to the scale of the whole state
    wanted_scales = blocks.abs().amax(-1) / MAX_FLOAT6
    scales = (wanted_scales.amax(-1) / MAX_FLOAT8).clamp_min(TINY)
    block_scales = (wanted_scales / scales[..., None]).to(torch.float8_e4m3fn)
    units = _float8_units(block_scales, scales)  # [.., D / BLOCK]
    # Numbers up to `limit` have 0 in the upper two exponent bits of E4M3, and its other bits are those of E2M3, so that
    # the cast to E4M3 rounds to E2M3. The clamp is for scales that were rounded down: the largest numbers are cut off.
    limit = MAX_FLOAT6 / FLOAT6_UNIT
    scaled = (blocks / units.clamp_min(TINY)[..., None]).clamp(-limit, limit).flatten(-2)
    float8 = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    # the sign, and the lower five of E4M3's seven other bits
    codes = (float8 & 0b11111) | (float8 >> 2 & 0b100000)
    # A state is cut into four quarters. Number i of each quarter lies in byte i of `low`, `middle` and `high`, the
    # first quarter's bits lowest. Shifts of uint8 drop the bits above the eighth.
    first, second, third, fourth = codes.chunk(4, dim=-1)
    low = first | second << 6
    middle = second >> 2 | third << 4
    high = third >> 4 | fourth << 2
    return torch.cat([low, middle, high], dim=-1), block_scales, scales


def _unpack_float6(packed: Tensor, block_scales: Tensor, scales: Tensor) -> Tensor:
    """Return the states [.., D] that `_pack_float6` packed, as bfloat16, by the same steps backwards.

    Args:
        packed: [.., 3/4 D], bytes, four numbers in three of them.
        block_scales: [.., D / BLOCK], the scale of each block, as E4M3.
        scales: [..], the scale of each state.
    """
    low, middle, high = packed.chunk(3, dim=-1)
    # one byte for each number, in four quarters of a state
    quarters = [low, low >> 6 | middle << 2, middle >> 4 | high << 4, high >> 2]
    # the masks below drop the upper two bits, which belong to other quarters
    codes = torch.cat(quarters, dim=-1)
    # the sign moves back to the eighth bit
    float8 = ((codes & 0b11111) | (codes & 0b100000) << 2).view(torch.float8_e4m3fn)
    blocks = float8.float().unflatten(-1, (-1, BLOCK))
    units = _float8_units(block_scales, scales)
    return (blocks * units[..., None]).flatten(-2).bfloat16()


def _float8_units(block_scales: Tensor, scales: Tensor) -> Tensor:
    """Return [.., D / BLOCK], what the E4M3 number 1.0 stands for in each block of float6: the unit times both scales.

    Args:
        block_scales: [.., D / BLOCK], of blocks.
        scales: [..], of whole states.
    """
    return FLOAT6_UNIT * block_scales.float() * scales[..., None]
