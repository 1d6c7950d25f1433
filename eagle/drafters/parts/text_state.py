"""Texts whose committed tokens are read by a head's blocks: keys and values in slots, and the last states."""

# B rows of text, T new tokens, S columns, L taps, H width

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise, TargetHead
from eagle.device import upload
from eagle.drafters.parts.decoder_block import Cache, Rotary, rotary_tables
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.window import Window
from eagle.target.slots import SlotCache, with_room

SHORT = 16  # tokens up to which rows are read together, however different in number
MOST = 4096  # tokens of one forward, padding included, unless a row alone has more
PART = 512  # tokens of a text that blocks with a window read at a time, whose columns are then dropped


class TextHead(Protocol):
    """The interface of a head that reads committed tokens; see `eagle.drafters.recurrent.unroll.UnrolledDrafter`."""

    layers: Any
    rotary: Rotary
    frozen: tuple[TargetHead, ...]

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
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
    """Keys and values of many texts, in a slot for each from its first draft on; the slots in use are the first.

    With a window, columns that no later row sees are dropped: a text's cost does not grow with its length.
    """

    def __init__(self, head: TextHead, window: Window | None = None) -> None:
        self.head, self.window, self.cache = head, window, SlotCache()
        self.blocks = [Cache(self.cache, block) for block in head.layers]
        weight = head.layers[0].mlp.up_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.noises: dict[int, Noise | None] = {}
        self.rows: list[int] = []  # of every slot in use
        self.dropped: dict[int, int] = {}  # by row: how many columns are no longer kept, all of them behind the sinks

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row], self.dropped[row] = noise, 0

    def fork(self, row: int, other: int) -> None:
        """Copy a row's slot, with its keys and values, to a new row."""
        self.noises[other], self.dropped[other] = self.noises[row], self.dropped[row]
        if row in self.rows:
            self._take_slots([other])
            self.cache.copy(self.rows.index(row), len(self.rows) - 1)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Release a row; the last slot's text moves to its slot."""
        del self.noises[row], self.dropped[row]
        if row in self.rows:
            slot, last = self.rows.index(row), len(self.rows) - 1
            self.cache.clear(slot)
            self.cache.swap(slot, last)
            self.rows[slot] = self.rows[last]
            self.rows.pop()
            self._reserve()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _take_slots(self, rows: Sequence[int]) -> None:
        """Assign a slot to each new row."""
        for row in rows:
            self.rows.append(row)
            self.cache.clear(len(self.rows) - 1)
        if rows:
            self._reserve()

    def _reserve(self) -> None:
        """Room for the rows in use, half as long again as the longest; what is far more is given back."""
        used = len(self.rows)
        self.cache.reserve(max(used, 1), max(self.cache.lengths[:used], default=0) * 3 // 2)

    def _drop_unseen(self, slots: Sequence[int]) -> None:
        """Forget the columns that no later row of these slots sees, where enough of them have come together."""
        if self.window is None:
            return
        gaps = {
            slot: (self.window.sinks, self.cache.lengths[slot] - self.window.recent)
            for slot in slots
            if self.cache.lengths[slot] > self.window.most
        }
        self.cache.drop(gaps)
        for slot, (start, stop) in gaps.items():
            self.dropped[self.rows[slot]] += stop - start

    def text_length(self, slot: int) -> int:
        """How many tokens of a slot's text are read, those included whose columns are dropped."""
        return self.cache.lengths[slot] + self.dropped[self.rows[slot]]

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def read_updates(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[list[int], list[Seed], Tensor]:
        """The rows by their slots, what each grows, and [B, H] its state behind the root, once all tokens are read."""
        self._take_slots([row for row in updates if row not in self.rows])
        rows = sorted(updates, key=self.rows.index)
        hidden = self._last_states({row: updates[row] for row in rows})
        lengths = [self.text_length(self.rows.index(row)) for row in rows]
        seeds = [
            Seed(updates[row].root, length + 1, budgets[row], self.noises[row])
            for row, length in zip(rows, lengths, strict=True)
        ]
        return rows, seeds, hidden

    def _last_states(self, updates: Mapping[int, Committed]) -> Tensor:
        """[B, H], each row's state behind its root, once the committed tokens are read."""
        while self.window is not None and max(len(update.tokens) for update in updates.values()) > PART:
            parts = {row: split_update(update, PART) for row, update in updates.items() if len(update.tokens) > PART}
            self._last_states({row: first for row, (first, _) in parts.items()})
            updates = {row: parts[row][1] if row in parts else update for row, update in updates.items()}
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
        return self._read_ahead(updates)[:, 0]

    def _read_ahead(self, updates: Mapping[int, Committed], further: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B, 1 + M, H], the states behind each row's root, and behind further tokens [M] and states [M, H] after it.

        Of the further ones nothing is kept.
        """
        head, cache = self.head, self.cache
        behind, states_behind = further or (torch.empty(0, dtype=torch.long), torch.empty(0))
        slots = [self.rows.index(row) for row in updates]
        new = [len(update.tokens) for update in updates.values()]
        counts, starts = [count + len(behind) for count in new], [cache.lengths[slot] for slot in slots]
        tokens = [torch.cat([update.tokens[1:], torch.tensor([update.root]), behind]) for update in updates.values()]
        features = [update.features for update in updates.values() if update.features is not None]
        assert len(features) == len(updates)
        together = features[0] if len(features) == 1 else torch.cat(features)
        hidden = head.fuse_taps(together.to(self.device, self.dtype))
        parts = hidden.split(new) if len(new) > 1 else (hidden,)
        if len(behind):
            parts = tuple(torch.cat([part, states_behind]) for part in parts)
        positions = slot_positions([self.text_length(slot) for slot in slots], counts, self.device)
        mask = self._mask(starts, counts)
        cache.aim(slots, starts)
        padded = upload(pad_rows(tokens), self.device)
        tables = rotary_tables(head.rotary, hidden, positions)
        states = head.read(padded, pad_rows(parts), tables, mask, self.blocks, head.frozen[0])
        for slot, count in zip(slots, new, strict=True):
            cache.lengths[slot] += count
        self._drop_unseen(slots)
        if min(counts) == max(counts):
            return states[:, min(new) - 1 :]
        last = torch.tensor(new)[:, None] + torch.arange(-1, len(behind))
        return states.gather(1, upload(last[..., None], self.device).expand(-1, -1, states.shape[2]))

    def _mask(self, starts: list[int], counts: list[int]) -> Tensor | None:
        """[B, 1, T, S], what new tokens behind so many columns see; None where each sees all up to itself."""
        if max(starts) == 0 and (self.window is None or max(counts) <= self.window.recent):
            return None
        places = slot_positions(starts, counts, self.device)
        return causal_mask(places, max(starts) + max(counts), self.dtype, self.window)


def text_bytes(layers: Any, columns: int) -> int:
    """Bytes of a slot with keys and values of so many columns in these blocks, and with its room to grow."""
    projections = [part for block in layers for part in (block.self_attn.k_proj, block.self_attn.v_proj)]
    return with_room(columns) * sum(len(part.weight) * part.weight.element_size() for part in projections)


def split_update(update: Committed, count: int) -> tuple[Committed, Committed]:
    """The first so many tokens of an update, whose root is the next of them, and the others."""
    assert update.features is not None
    tokens, features, root = update.tokens, update.features, int(update.tokens[count])
    first = replace(update, tokens=tokens[:count], features=features[:count], root=root)
    return first, replace(update, tokens=tokens[count:], features=features[count:])


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


def causal_mask(places: Tensor, columns: int, dtype: torch.dtype, window: Window | None = None) -> Tensor:
    """[B, 1, T, S], each token sees the columns up to its own, or those in its window."""
    column, place = torch.arange(columns, device=places.device), places[..., None]
    hidden = column > place
    if window is not None:
        hidden |= window.hides(column, place, 0, 0)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
