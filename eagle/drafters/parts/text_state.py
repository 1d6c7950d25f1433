"""Sequences whose committed tokens a head's blocks read: keys and values in slots, and the last states."""

# B sequences, N new tokens of all, T of one, S columns, L taps, H width

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
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.window import Window
from eagle.target.slots import SlotCache, with_room

# rows of up to so many new tokens share a forward, however different in number
SHORT_ROW_TOKENS = 16
# of one forward, padding included, unless a single row has more
MAX_PADDED_TOKENS = 4096
# tokens of a sequence that blocks with a window read at a time; the columns that no later token sees are then dropped
WINDOW_CHUNK_TOKENS = 512


class TextHead(Protocol):
    """A head that reads committed tokens; see `eagle.drafters.recurrent.unroll.UnrolledDrafter`."""

    layers: Any
    rotary: Rotary
    frozen: tuple[TargetHead, ...]

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
        ...

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return [N, H] from features [N, L, H]."""
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
        """Return the states [B, T, H] after tokens, each of which is read with a state."""
        ...


class TextState:
    """Keys and values of many sequences, in a slot for each from its first draft on; slots in use are the first.

    With a window, columns that no later row sees are dropped: a sequence's cost does not grow with its length.
    """

    def __init__(self, head: TextHead, window: Window | None = None) -> None:
        self.head = head
        self.window = window
        self.cache = SlotCache()
        self.blocks = [Cache(self.cache, block) for block in head.layers]
        weight = head.layers[0].mlp.up_proj.weight
        self.device = weight.device
        self.dtype = weight.dtype
        self.noises: dict[int, Noise | None] = {}
        self.rows: list[int] = []  # the row of each slot in use
        self.dropped: dict[
            int, int
        ] = {}  # by row: how many columns were dropped, all of them after the sinks

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row] = noise
        self.dropped[row] = 0

    def fork(self, row: int, other: int) -> None:
        """Copy a row's slot, with its keys and values, to a new row."""
        # a row without a slot has read nothing yet
        self.noises[other] = self.noises[row]
        self.dropped[other] = self.dropped[row]
        if row in self.rows:
            self._take_slots([other])
            self.cache.copy(self.rows.index(row), len(self.rows) - 1)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Release a row; the last slot's sequence moves to its slot."""
        del self.noises[row], self.dropped[row]
        if row not in self.rows:
            return
        slot = self.rows.index(row)
        last = self.rows.pop()
        self.cache.clear(slot)
        self.cache.swap(slot, len(self.rows))
        if last != row:
            self.rows[slot] = last
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
        """Reserve memory for the rows in use, half as long again as the longest; give back what is far more."""
        used = len(self.rows)
        longest = max(self.cache.lengths[:used], default=0)
        self.cache.reserve(max(used, 1), longest * 3 // 2)

    def _drop_unseen(self, slots: Sequence[int]) -> None:
        """Drop the columns of these slots that no later row sees, where enough of them have come together."""
        if self.window is None:
            return
        gaps: dict[int, tuple[int, int]] = {}
        for slot in slots:
            length = self.cache.lengths[slot]
            # dropping moves all later columns, so that it waits until as many as a window can be dropped
            if length > self.window.most:
                gaps[slot] = (self.window.sinks, length - self.window.recent)
        self.cache.drop(gaps)
        for slot, (start, stop) in gaps.items():
            self.dropped[self.rows[slot]] += stop - start

    def text_length(self, slot: int) -> int:
        """Return how many tokens of a slot's sequence are read, those included whose columns are dropped."""
        return self.cache.lengths[slot] + self.dropped[self.rows[slot]]

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def read_updates(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[list[int], list[DraftRequest], Tensor]:
        """Read all tokens that were committed since the last draft.

        Returns:
            The rows in the order of their slots, what each asks for, and their states [B, H] after the roots, from
            which drafts grow.
        """
        self._take_slots([row for row in updates if row not in self.rows])
        rows = sorted(updates, key=self.rows.index)
        hidden = self._last_states({row: updates[row] for row in rows})
        requests = []
        for row in rows:
            length = self.text_length(self.rows.index(row))
            # the root gets the position `length`
            requests.append(
                DraftRequest(updates[row].root, length + 1, budgets[row], self.noises[row])
            )
        return rows, requests, hidden

    def _last_states(self, updates: Mapping[int, Committed]) -> Tensor:
        """Return each row's state after its root [B, H], once the committed tokens are read."""
        # with a window, a long prompt is read in chunks, so that its old columns are dropped before the next
        if self.window is not None:
            updates = self._read_long(updates)
        groups = list(split_ragged({row: len(update.tokens) for row, update in updates.items()}))
        if len(groups) == 1:
            return self._read_group(updates)
        state_of: dict[int, Tensor] = {}
        for group in groups:
            states = self._read_group({row: updates[row] for row in group})
            state_of |= zip(group, states, strict=True)
        return torch.stack([state_of[row] for row in updates])

    def _read_long(self, updates: Mapping[int, Committed]) -> Mapping[int, Committed]:
        """Read the beginnings of long updates, and return what is left of each, at most WINDOW_CHUNK_TOKENS."""
        while max(len(update.tokens) for update in updates.values()) > WINDOW_CHUNK_TOKENS:
            firsts: dict[int, Committed] = {}
            left = dict(updates)
            for row, update in updates.items():
                if len(update.tokens) > WINDOW_CHUNK_TOKENS:
                    firsts[row], left[row] = split_update(update, WINDOW_CHUNK_TOKENS)
            self._last_states(firsts)
            updates = left
        return updates

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Return the last states [B, H] of one forward over rows that are right-padded."""
        return self._read_ahead(updates)[:, 0]

    def _read_ahead(
        self, updates: Mapping[int, Committed], further: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the states [B, 1 + M, H] after each row's root, and after further tokens.

        Args:
            updates: What each row has committed.
            further: Tokens [M] that all rows read after their roots, and the states [M, H] that they are read with.
                They are read for this draft only: the cache does not count them.
        """
        head = self.head
        slots = [self.rows.index(row) for row in updates]
        starts = [self.cache.lengths[slot] for slot in slots]
        # tokens of each row that the cache will count
        new = [len(update.tokens) for update in updates.values()]
        extra = len(further[0]) if further is not None else 0
        counts = [count + extra for count in new]
        tokens, hidden = self._pad_inputs(updates, further)
        positions = slot_positions([self.text_length(slot) for slot in slots], counts, self.device)
        mask = self._mask(starts, counts)
        tables = rotary_tables(head.rotary, hidden, positions)
        self.cache.set_write_offset(slots, starts)
        states = head.read(tokens, hidden, tables, mask, self.blocks, head.frozen[0])
        for slot, count in zip(slots, new, strict=True):
            self.cache.lengths[slot] += count
        self._drop_unseen(slots)
        if min(counts) == max(counts):
            return states[:, min(new) - 1 :]
        # rows end at different columns of the padded forward: [B, 1 + M]
        last = torch.tensor(new)[:, None] + torch.arange(-1, extra)
        indices = upload(last[..., None], self.device)
        return states.gather(1, indices.expand(-1, -1, states.shape[2]))

    def _pad_inputs(
        self, updates: Mapping[int, Committed], further: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, T] and the states [B, T, H] that they are read with, right-padded."""
        features = [update.features for update in updates.values() if update.features is not None]
        assert len(features) == len(updates)
        # one product for all rows
        joined = features[0] if len(features) == 1 else torch.cat(features)
        hidden = self.head.fuse_taps(joined.to(self.device, self.dtype))
        states = list(hidden.split([len(update.tokens) for update in updates.values()]))
        # a head reads a token with the state before it: the first token of an update was read as the last root
        tokens = [
            torch.cat([update.tokens[1:], torch.tensor([update.root])])
            for update in updates.values()
        ]
        if further is not None:
            tokens = [torch.cat([row_tokens, further[0]]) for row_tokens in tokens]
            states = [torch.cat([row_states, further[1]]) for row_states in states]
        return upload(pad_rows(tokens), self.device), pad_rows(states)

    def _mask(self, starts: list[int], counts: list[int]) -> Tensor | None:
        """Return the mask [B, 1, T, S] of new tokens after `starts` columns; None where each sees all up to itself."""
        fits_window = self.window is None or max(counts) <= self.window.recent
        if max(starts) == 0 and fits_window:
            return None
        columns = slot_positions(starts, counts, self.device)
        return causal_mask(columns, max(starts) + max(counts), self.dtype, self.window)


def text_bytes(layers: Any, columns: int) -> int:
    """Return the bytes of a slot with keys and values of so many columns in these blocks, with its room to grow."""
    column_bytes = 0
    for block in layers:
        for projection in (block.self_attn.k_proj, block.self_attn.v_proj):
            column_bytes += len(projection.weight) * projection.weight.element_size()
    return with_room(columns) * column_bytes


def split_update(update: Committed, count: int) -> tuple[Committed, Committed]:
    """Return the first `count` tokens of an update, whose root is the next of them, and the others."""
    assert update.features is not None
    root = int(update.tokens[count])
    first = replace(
        update, tokens=update.tokens[:count], features=update.features[:count], root=root
    )
    rest = replace(update, tokens=update.tokens[count:], features=update.features[count:])
    return first, rest


def split_ragged(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """Split rows with different numbers of tokens into padded forwards: yield the rows of each, ordered as in `counts`.

    A row gets at most as much padding as it has tokens, unless its forward is no more than SHORT_ROW_TOKENS wide.
    A forward of several rows holds at most MAX_PADDED_TOKENS.

    Args:
        counts: The number of new tokens of each row.
    """
    group: set[int] = set()
    shortest = 0
    for row in sorted(counts, key=counts.__getitem__):
        count = counts[row]
        is_uneven = count > max(2 * shortest, SHORT_ROW_TOKENS)
        # rows come by length, so that this row would be the longest of the group
        if group and (is_uneven or (len(group) + 1) * count > MAX_PADDED_TOKENS):
            yield [row for row in counts if row in group]
            group = set()
        if not group:
            shortest = count
        group.add(row)
    yield [row for row in counts if row in group]


def pad_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return [B, T, ..], right-padded with zeros."""
    return parts[0][None] if len(parts) == 1 else pad_sequence(list(parts), batch_first=True)


def slot_positions(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Return the positions [B, T] of new tokens after `starts`, or [1, T] where all rows have the same."""
    count = max(counts)
    if min(starts) == max(starts) and min(counts) == count:
        return torch.arange(starts[0], starts[0] + count, device=device)[None]
    # padding gets the position of the last token, so that no sequence seems longer than it is
    steps = torch.minimum(torch.arange(count), torch.tensor(counts)[:, None] - 1)
    return upload(torch.tensor(starts)[:, None] + steps, device)


def causal_mask(
    own_columns: Tensor, count: int, dtype: torch.dtype, window: Window | None = None
) -> Tensor:
    """Return the additive mask [B, 1, T, S] by which each token sees columns up to its own, or those in its window.

    Args:
        own_columns: [B or 1, T], the column of each token.
        count: S, the columns.
        dtype: Of the mask.
        window: What a token sees; None: all columns up to its own.
    """
    column = torch.arange(count, device=own_columns.device)
    own = own_columns[..., None]
    is_hidden = column > own
    if window is not None:
        is_hidden |= window.hides(column, own, 0, 0)
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=own_columns.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None]
