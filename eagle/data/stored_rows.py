"""Which states of a text are kept: of each tap those that heads read, at no other slot."""

# T tokens, L taps, D target width

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagle.core.examples import gate_mask, trim_mask
from eagle.data.packing import DTYPES, pack_features, unpack_features
from eagle.device import upload

Slots = Literal["all", "read", "taught"]
"""All tokens; those of a batch, up to the last that is learned; or the two before each learned token."""


def _sort_taps(taps: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*taps}, key=lambda tap: (tap == -1, tap)))


@dataclass(frozen=True, slots=True)
class TapRoles:
    """What heads read of a target: taps at every slot, and taps at the slots before learned tokens."""

    inputs: tuple[int, ...]
    taught: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """All of them in order, the LM head's input last."""
        return _sort_taps((*self.inputs, *self.taught))

    @classmethod
    def join(cls, roles: Iterable[TapRoles]) -> TapRoles:
        """What several heads read together."""
        listed = list(roles)
        inputs = _sort_taps(tap for role in listed for tap in role.inputs)
        return cls(inputs, _sort_taps(tap for role in listed for tap in role.taught))


@dataclass(frozen=True, slots=True)
class Part:
    """Taps that are kept at the same slots, in tensors of a shard whose names begin with a prefix."""

    prefix: str
    taps: tuple[int, ...]
    slots: Slots


def parts_of(identity: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts of a store with this identity; one that names no inputs keeps all taps of all tokens."""
    taps = tuple(identity["taps"])
    if "inputs" not in identity:
        return (Part("", taps, "all"),)
    inputs = tuple(tap for tap in taps if tap in identity["inputs"])
    taught = tuple(tap for tap in taps if tap not in identity["inputs"])
    parts = Part("", inputs, "read"), Part("taught_", taught, "taught")
    return tuple(part for part in parts if part.taps)


def slots_of(loss_mask: Tensor, slots: Slots) -> Tensor:
    """The slots of a text that are kept.

    Token t is learned if it is supervised or, with `train.gate: read`, token t - 2 is. The target's state at slot t - 1
    predicts it, and a head begins from slot t - 2. Heads with attention read all of a batch, which ends with the last
    learned token.
    """
    if slots == "all":
        return torch.arange(len(loss_mask))
    learned = trim_mask(loss_mask | gate_mask(loss_mask, "read"))
    if slots == "read":
        return torch.arange(len(learned))
    begun = torch.cat([learned, learned.new_zeros(2)])
    return (begun[1:-1] | begun[2:]).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class TextSizes:
    """[N], of each text: its tokens, its slots of each kind, and its first tokens that the text before it has too."""

    tokens: Tensor
    read: Tensor
    taught: Tensor
    shared: Tensor

    @classmethod
    def of(cls, texts: Iterable[tuple[Tensor, int]]) -> TextSizes:
        """The sizes of texts by their loss masks and the tokens that each shares with the one before it."""
        sizes = array("i")
        read = 0  # of the example before
        for loss_mask, shared in texts:
            before, read = read, len(slots_of(loss_mask, "read"))
            sizes.extend((len(loss_mask), read, len(slots_of(loss_mask, "taught")), min(shared, before, read)))
        return cls(*(torch.tensor(sizes[place::4], dtype=torch.int32) for place in range(4)))

    def rows(self, slots: Slots) -> Tensor:
        """[N], the rows that a store keeps of each text: what the text before has is kept there."""
        return {"all": self.tokens, "read": self.read - self.shared, "taught": self.taught}[slots]


def row_bytes(part: Part, dtype: str, width: int) -> int:
    """The bytes of a slot's row of a part."""
    return sum(field.row_bytes(len(part.taps), width) for field in DTYPES[dtype])


def token_bytes(parts: Iterable[Part], dtype: str, width: int, supervised: float) -> float:
    """The bytes on disk of a token, by the share of tokens that are supervised; texts end with such a token."""
    shares = {"all": 1.0, "read": 1.0, "taught": supervised}
    return sum(row_bytes(part, dtype, width) * shares[part.slots] for part in parts)


def mean_bytes(parts: Sequence[Part], dtype: str, width: int, sizes: TextSizes) -> float:
    """The bytes on disk of a token of these texts, a mean over all of them."""
    total = sum(row_bytes(part, dtype, width) * int(sizes.rows(part.slots).sum()) for part in parts)
    return total / max(int(sizes.tokens.sum()), 1)


def pick_rows(
    states: Tensor,
    starts: Iterable[int],
    taps: Sequence[int],
    part: Part,
    loss_masks: Sequence[Tensor],
    shared: Sequence[int],
) -> Tensor:
    """[N, L', D], the rows of a part from states [M, L, D] of these taps, in which the texts begin at `starts`."""
    kept = []
    for start, mask, first in zip(starts, loss_masks, shared, strict=True):
        slots = slots_of(mask, part.slots)
        kept.append(start + (slots[first:] if part.slots == "read" else slots))
    rows = states.index_select(0, upload(torch.cat(kept), states.device))
    return rows if part.taps == tuple(taps) else torch.stack([rows[:, taps.index(tap)] for tap in part.taps], dim=1)


def restore_features(
    parts: Sequence[Part], packed: Sequence[Sequence[Tensor]], taps: Sequence[int], loss_masks: Sequence[Tensor]
) -> list[Tensor]:
    """[T, L, D] of each text from the packed rows of the parts; what is not kept is NaN, so that nobody uses it."""
    values = [unpack_features(*tensors) for tensors in packed]
    if [part.slots for part in parts] == ["all"]:
        return list(values[0].split([len(mask) for mask in loss_masks]))
    width = values[0].shape[-1]
    texts = [values[0].new_full((len(mask), len(taps), width), torch.nan) for mask in loss_masks]
    for part, rows in zip(parts, values, strict=True):
        slots = [slots_of(mask, part.slots) for mask in loss_masks]
        for text, kept, mine in zip(texts, slots, rows.split([len(kept) for kept in slots]), strict=True):
            at = upload(kept, text.device)
            for tap, states in zip(part.taps, mine.unbind(1), strict=True):
                text[:, taps.index(tap)].index_copy_(0, at, states)
    return texts


def round_features(features: Tensor, dtype: str) -> Tensor:
    """Features [.., D] as a store of this dtype gives them back."""
    return unpack_features(*pack_features(features, dtype))
