"""Texts whose committed tokens blocks of a head read: keys and values of each in a slot, and the state at its end."""

# B rows of text, T new tokens, S columns, L taps, H width

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise, TargetHead
from eagle.device import upload
from eagle.drafters.parts.blocks import Cache, Rotary, rotary_tables
from eagle.drafters.parts.scoring import Seed
from eagle.target.cache import SlotCache

SHORT = 16  # tokens up to which rows are read together, however different in number
MOST = 4096  # tokens of one forward, padding included, unless a row alone has more


class TextHead(Protocol):
    """What a head is asked for to read committed tokens; see `eagle.drafters.parts.unroll.UnrolledDrafter`."""

    layers: Any
    rotary: Rotary
    frozen: tuple[TargetHead, ...]

    @property
    def query_groups(self) -> int:
        """How many queries share a key."""
        ...

    def fuse_taps(self, features: Tensor) -> Tensor:
        """[N, H], from features [N, L, H]."""
        ...

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        frozen: TargetHead,
    ) -> Tensor:
        """[B, T, H], the states behind tokens and states."""
        ...


class TextState:
    """Keys and values of many texts, in a slot for each from its first draft on; the slots in use are the first."""

    def __init__(self, head: TextHead) -> None:
        self.head, self.cache = head, SlotCache()
        self.blocks = [Cache(self.cache, block) for block in head.layers]
        weight = head.layers[0].mlp.up_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.noises: dict[int, Noise | None] = {}
        self.rows: list[int] = []  # of every slot in use

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """A text begins."""
        self.noises[row] = noise

    def fork(self, row: int, other: int) -> None:
        """A text goes on in two ways: the other gets a slot with the same keys and values."""
        self.noises[other] = self.noises[row]
        if row in self.rows:
            self._take_slots([other])
            self.cache.copy(self.rows.index(row), len(self.rows) - 1)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """A text has ended: that in the last slot takes its place."""
        del self.noises[row]
        if row in self.rows:
            slot, last = self.rows.index(row), len(self.rows) - 1
            self._clear(slot)
            self.cache.swap(slot, last)
            self.rows[slot] = self.rows[last]
            self.rows.pop()
            self._reserve()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _take_slots(self, rows: Sequence[int]) -> None:
        """A slot for each row that is asked for the first time."""
        for row in rows:
            self.rows.append(row)
            self._clear(len(self.rows) - 1)
        if rows:
            self._reserve()

    def _clear(self, slot: int) -> None:
        """Zeros in a slot: a mask hides what a text left there, but not infinities among it."""
        for buffer in (rows.buffer for rows in self.cache.buffers):
            if slot < len(buffer):
                buffer[slot].zero_()
        if slot < len(self.cache.lengths):
            self.cache.lengths[slot] = 0

    def _reserve(self) -> None:
        """Room for the rows in use, half as long again as the longest; what is far more is given back."""
        used = len(self.rows)
        self.cache.reserve(max(used, 1), max(self.cache.lengths[:used], default=0) * 3 // 2)

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def read_updates(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[list[int], list[Seed], Tensor]:
        """The rows by their slots, what each grows, and [B, H] its state behind the root, once all tokens are read."""
        self._take_slots([row for row in updates if row not in self.rows])
        rows = sorted(updates, key=self.rows.index)
        hidden = self._last_states({row: updates[row] for row in rows})
        lengths = [self.cache.lengths[self.rows.index(row)] for row in rows]
        seeds = [
            Seed(updates[row].root, length + 1, budgets[row], self.noises[row])
            for row, length in zip(rows, lengths, strict=True)
        ]
        return rows, seeds, hidden

    def _last_states(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, H], each row's state behind its root, once the committed tokens are read."""
        groups = list(split_ragged({row: len(update.tokens) for row, update in updates.items()}))
        if len(groups) == 1:
            return self._read_group(updates)
        read: dict[int, Tensor] = {}
        for group in groups:
            states = self._read_group({row: updates[row] for row in group})
            read |= dict(zip(group, states, strict=True))
        return torch.stack([read[row] for row in updates])

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, H], the last states of one forward over rows that are right-padded."""
        head, cache = self.head, self.cache
        slots = [self.rows.index(row) for row in updates]
        counts = [len(update.tokens) for update in updates.values()]
        starts = [cache.lengths[slot] for slot in slots]
        tokens = [torch.cat([update.tokens[1:], torch.tensor([update.root])]) for update in updates.values()]
        features = [update.features for update in updates.values() if update.features is not None]
        assert len(features) == len(updates)
        together = features[0] if len(features) == 1 else torch.cat(features)
        hidden = head.fuse_taps(together.to(self.device, self.dtype))
        positions = slot_positions(starts, counts, self.device)
        mask = None if max(starts) == 0 else _causal_mask(positions, max(starts) + max(counts), self.dtype)
        cache.aim(slots, starts)
        padded = upload(pad_rows(tokens), self.device)
        states = head.read(
            padded,
            pad_rows(hidden.split(counts) if len(counts) > 1 else [hidden]),
            rotary_tables(head.rotary, hidden, positions),
            mask,
            self.blocks,
            head.frozen[0],
        )
        for slot, count in zip(slots, counts, strict=True):
            cache.lengths[slot] += count
        if min(counts) == max(counts):
            return states[:, -1]
        last = upload(torch.tensor(counts)[:, None, None].sub(1), self.device)
        return states.gather(1, last.expand(-1, 1, states.shape[2]))[:, 0]


def split_ragged(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """The rows of each forward over so many tokens of each: padding is at most as much again, but where all is short.

    They come in the order of `counts`.
    """
    group: set[int] = set()
    least = 0
    for row in sorted(counts, key=counts.__getitem__):
        count = counts[row]
        if group and (count > max(2 * least, SHORT) or (len(group) + 1) * count > MOST):
            yield [row for row in counts if row in group]
            group = set()
        least = least if group else count
        group.add(row)
    yield [row for row in counts if row in group]


def pad_rows(parts: Sequence[Tensor]) -> Tensor:
    """[B, T, ..], right-padded with zeros."""
    return parts[0][None] if len(parts) == 1 else pad_sequence(list(parts), batch_first=True)


def slot_positions(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """[B, T], or [1, T] where all are alike; padding stands where the last token does, so that no text seems longer."""
    count = max(counts)
    if min(starts) == max(starts) and min(counts) == count:
        return torch.arange(starts[0], starts[0] + count, device=device)[None]
    steps = torch.minimum(torch.arange(count), torch.tensor(counts)[:, None] - 1)
    return upload(torch.tensor(starts)[:, None] + steps, device)


def _causal_mask(positions: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, S], each token sees the columns up to its own."""
    hidden = torch.arange(columns, device=positions.device) > positions[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
