"""The drafting state of heads with blocks: the KV cache of many sequences, and forwards over committed tokens.

A row is a sequence of the decoding batch. It has a row of the cache from its first draft on.
"""

# B sequences, N new tokens of all sequences, T of one, S cache columns, L taps, H width

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
from eagle.target.slots import RowCache, with_room

# rows with at most this many new tokens share a forward, even if their numbers of tokens differ much
SHORT_ROW_TOKENS = 16
# the most tokens of one forward over several rows, padding included
MAX_PADDED_TOKENS = 4096
# tokens of a sequence that heads with a window read in one forward; then columns that no later token sees are dropped
WINDOW_CHUNK_TOKENS = 512


class SequenceHead(Protocol):
    """A head that reads committed tokens; see `eagle.drafters.recurrent.unroll.UnrolledDrafter`."""

    layers: Any
    rotary: Rotary

    @property
    def target_head(self) -> TargetHead:
        """The target's embedding and LM head, which the head borrows."""

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key head (grouped-query attention)."""

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the states [N, H] that the head reads at N tokens (H: the hidden size).

        `features` [N, L, H] are the target's hidden states there at the head's L taps, the layers that it reads.
        """

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        caches: Sequence[Cache | None],
        target_head: TargetHead,
    ) -> Tensor:
        """Return the head's states [B, T, H] after T new tokens of each of B sequences (H: the hidden size).

        The keys and values of the tokens are written to the caches.

        Args:
            tokens: [B, T].
            hidden: The states that the tokens are read with [B, T, H], each the state of the token before: the
                target's, or in a draft the head's own.
            tables: Rotary tables, cosines and sines [B or 1, T, w of a head].
            mask: The additive mask [B, 1, T, S] over S cache columns; None for a causal mask.
            caches: The KV cache of each block.
            target_head: The target's embedding and LM head.
        """


class SequenceLengths:
    """The length and the noise of each sequence of a batch by its row, for states without a KV cache of their own."""

    def __init__(self) -> None:
        """Begin without sequences."""
        # the target's sampling noise, which trees are ranked with; None if the target is greedy
        self.noises: dict[int, Noise | None] = {}
        self.lengths: dict[int, int] = {}  # committed tokens, the root not counted

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin the sequence of a row, without tokens yet."""
        self.noises[row] = noise
        self.lengths[row] = 0

    def fork(self, row: int, other: int) -> None:
        """Copy the state of a row to the new row `other`, as beam search does."""
        self.noises[other] = self.noises[row]
        self.lengths[other] = self.lengths[row]

    def release(self, row: int) -> None:
        """Drop the sequence of a row."""
        del self.noises[row], self.lengths[row]

    def request(self, row: int, root: int, budget: Budget) -> DraftRequest:
        """Return the request for a row's tree: the root's position is the length, its children have the next."""
        return DraftRequest(root, self.lengths[row] + 1, budget, self.noises[row])


class SequenceState:
    """The KV cache of many sequences, and their noise. The cache rows in use are always the first ones of the cache.

    With a window, columns that no later token sees are dropped, so that the cost of a sequence does not grow with its
    length.
    """

    def __init__(self, head: SequenceHead, window: Window | None = None) -> None:
        """Begin without sequences.

        Args:
            head: The head that drafts.
            window: The sliding window of the head's attention; None if tokens see their whole sequence.
        """
        self.head = head
        self.window = window
        self.cache = RowCache()
        self.blocks = [Cache(self.cache, block) for block in head.layers]  # the cache of each block
        weight = head.layers[0].mlp.up_proj.weight
        self.device = weight.device
        self.dtype = weight.dtype
        self.noises: dict[int, Noise | None] = {}
        self.rows: list[int] = []  # the row of each cache row in use
        # by row: how many columns a window has dropped, all of them after the sinks
        self.dropped: dict[int, int] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a sequence, named `row`, without tokens yet; `noise` is the target's sampling noise, None if greedy.

        It gets a row of the KV cache at its first draft.
        """
        self.noises[row] = noise
        self.dropped[row] = 0

    def fork(self, row: int, other: int) -> None:
        """Copy the state of the sequence `row`, with its keys and values, to a new one, `other`, for beam search."""
        self.noises[other] = self.noises[row]
        self.dropped[other] = self.dropped[row]
        # a row without a cache row has read nothing yet
        if row in self.rows:
            # the new row gets the last cache row in use
            self._take_cache_rows([other])
            self.cache.copy(self.rows.index(row), len(self.rows) - 1)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Drop a sequence, named `row`, which has ended.

        The sequence in the last row of the cache takes its place there, so that the rows in use come first.
        """
        del self.noises[row], self.dropped[row]
        # a row that never drafted has no cache row
        if row not in self.rows:
            return
        cache_row = self.rows.index(row)
        last = self.rows.pop()  # the row whose sequence is in the last cache row
        self.cache.clear(cache_row)
        self.cache.swap(cache_row, len(self.rows))
        if last != row:
            self.rows[cache_row] = last
        self._reserve()

    # -- cache rows ---------------------------------------------------------------------------------------------------

    def _take_cache_rows(self, rows: Sequence[int]) -> None:
        """Assign the next free row of the KV cache, emptied, to each of these new rows (sequences of the batch)."""
        for row in rows:
            self.rows.append(row)
            self.cache.clear(len(self.rows) - 1)
        # further columns are allocated when they are written
        if rows:
            self._reserve()

    def _reserve(self) -> None:
        """Reserve cache memory for the rows in use, with 1.5 times the columns (cached tokens) of the longest sequence.

        `RowCache.reserve` also frees memory if far more is allocated.
        """
        used = len(self.rows)
        longest = max(self.cache.lengths[:used], default=0)
        self.cache.reserve(max(used, 1), longest * 3 // 2)

    def _drop_unseen(self, cache_rows: Sequence[int]) -> None:
        """Drop the columns (cached tokens) of these cache rows (sequences) that have left the attention window.

        No later token sees them. Later columns move to their place, and `self.dropped` counts the dropped ones.
        """
        if self.window is None:
            return
        # by cache row: the first column to drop, and the first after it to keep
        gaps: dict[int, tuple[int, int]] = {}
        for cache_row in cache_rows:
            length = self.cache.lengths[cache_row]
            # dropping moves all later columns, so it is done only once a window's number of columns can be dropped
            if length > self.window.most:
                # the sinks, a sequence's first columns, and the latest ones stay
                gaps[cache_row] = (self.window.sinks, length - self.window.recent)
        self.cache.drop(gaps)
        for cache_row, (start, stop) in gaps.items():
            self.dropped[self.rows[cache_row]] += stop - start

    def sequence_length(self, cache_row: int) -> int:
        """Return how many committed tokens of the sequence in a cache row the head has read, dropped ones included.

        A sliding window drops old tokens from the cache. The result is the position that the head gives to the next
        token.
        """
        return self.cache.lengths[cache_row] + self.dropped[self.rows[cache_row]]

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def read_updates(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> tuple[list[int], list[DraftRequest], Tensor]:
        """Read all tokens that were committed since the last draft, so that drafts can begin.

        Their keys and values are added to the cache, those of the roots included: a root is the token that the target
        chose last and has not read yet.

        Args:
            updates: By row (a sequence of the batch) the newly committed tokens, with the target's features, and the
                root.
            budgets: The size of each row's tree.

        Returns:
            The rows in the order of their cache rows, the draft request of each, and the head's states
            [B, hidden size] after the roots of the B rows, from which drafts begin.
        """
        self._take_cache_rows([row for row in updates if row not in self.rows])
        rows = sorted(updates, key=self.rows.index)
        hidden = self._last_states({row: updates[row] for row in rows})
        requests = []
        for row in rows:
            length = self.sequence_length(self.rows.index(row))
            # the root has the position `length`, and its children the next one
            requests.append(
                DraftRequest(updates[row].root, length + 1, budgets[row], self.noises[row])
            )
        return rows, requests, hidden

    def _last_states(self, updates: Mapping[int, Committed]) -> Tensor:
        """Read the committed tokens and the root of each of B sequences; return the states [B, hidden size] after them.

        The states are in the order of `updates`, the newly committed tokens by row. The root is the token that the
        target chose last: drafts begin after it.
        """
        # with a window, a long prompt is read in chunks, and columns that left the window are dropped between them
        if self.window is not None:
            updates = self._read_long(updates)
        # rows of very different lengths are read in several forwards, as padding would cost more
        groups = list(split_ragged({row: len(update.tokens) for row, update in updates.items()}))
        if len(groups) == 1:
            return self._read_group(updates)
        state_of: dict[int, Tensor] = {}
        for group in groups:
            states = self._read_group({row: updates[row] for row in group})
            state_of |= zip(group, states, strict=True)
        return torch.stack([state_of[row] for row in updates])

    def _read_long(self, updates: Mapping[int, Committed]) -> Mapping[int, Committed]:
        """Read the beginnings of long updates in chunks, and return the rest, at most WINDOW_CHUNK_TOKENS tokens each.

        Reading drops the columns that leave the window, so the cache stays small. `updates` are newly committed tokens
        by row.
        """
        while max(len(update.tokens) for update in updates.values()) > WINDOW_CHUNK_TOKENS:
            firsts: dict[int, Committed] = {}  # the next chunk of each long update
            left = dict(updates)
            for row, update in updates.items():
                if len(update.tokens) > WINDOW_CHUNK_TOKENS:
                    firsts[row], left[row] = split_update(update, WINDOW_CHUNK_TOKENS)
            # only the cache matters here, not the states
            self._last_states(firsts)
            updates = left
        return updates

    def _read_group(self, updates: Mapping[int, Committed]) -> Tensor:
        """Read the new tokens of B sequences in one right-padded forward; return the states [B, width] after them."""
        return self._read_rows(updates)[:, 0]

    def _read_rows(
        self, updates: Mapping[int, Committed], mask_tokens: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Read the new tokens of B rows (sequences) in one right-padded forward, and add their keys and values.

        Returns the states [B, 1 + M, H] after each row's root and after M mask tokens, H the hidden size.

        Args:
            updates: The newly committed tokens of each row, and its root.
            mask_tokens: Tokens [M] that all rows read after their roots, and the states [M, H] that they are read with.
                The cache does not count them, so the next committed tokens overwrite them. None for no tokens.
        """
        head = self.head
        cache_rows = [self.rows.index(row) for row in updates]
        starts = [self.cache.lengths[cache_row] for cache_row in cache_rows]
        # how many tokens of each row the cache will count, and how many the forward reads, mask tokens included;
        # the head reads the root and not an update's first token, so these are as many as the update's tokens
        new = [len(update.tokens) for update in updates.values()]
        extra = len(mask_tokens[0]) if mask_tokens is not None else 0
        counts = [count + extra for count in new]
        tokens, hidden = self._pad_inputs(updates, mask_tokens)
        positions = new_positions(
            [self.sequence_length(cache_row) for cache_row in cache_rows], counts, self.device
        )
        mask = self._mask(starts, counts)
        tables = rotary_tables(head.rotary, hidden, positions)
        self.cache.set_write_offset(cache_rows, starts)
        states = head.read(tokens, hidden, tables, mask, self.blocks, head.target_head)
        for cache_row, count in zip(cache_rows, new, strict=True):
            self.cache.lengths[cache_row] += count
        self._drop_unseen(cache_rows)
        # without padding the root and the mask tokens are in the last columns of `states` in all rows
        if min(counts) == max(counts):
            return states[:, min(new) - 1 :]
        # rows end at different columns of the padded forward: [B, 1 + M], those after the root and the mask tokens
        last = torch.tensor(new)[:, None] + torch.arange(-1, extra)
        indices = upload(last[..., None], self.device)
        return states.gather(1, indices.expand(-1, -1, states.shape[2]))

    def _pad_inputs(
        self, updates: Mapping[int, Committed], mask_tokens: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, T] of a forward over B sequences and the states [B, T, H] that they are read with.

        T is the largest number of tokens that a row reads; the others are right-padded. H is the hidden size.

        Args:
            updates: The newly committed tokens of each row, with the target's features, and its root.
            mask_tokens: M tokens [M] that all rows read after their roots, and the states [M, H] that they are read
                with; None for no tokens.
        """
        features = [update.features for update in updates.values() if update.features is not None]
        assert len(features) == len(updates), "a head with taps gets features in every update"
        # the taps of all rows are fused in one product
        joined = features[0] if len(features) == 1 else torch.cat(features)
        hidden = self.head.fuse_taps(joined.to(self.device, self.dtype))
        states = list(hidden.split([len(update.tokens) for update in updates.values()]))
        # A head reads a token with the target's state of the token before it. So tokens are shifted by one: an update's
        # first token was read earlier, as the root of the update before, and its root comes last.
        tokens = [
            torch.cat([update.tokens[1:], torch.tensor([update.root])])
            for update in updates.values()
        ]
        if mask_tokens is not None:
            tokens = [torch.cat([row_tokens, mask_tokens[0]]) for row_tokens in tokens]
            states = [torch.cat([row_states, mask_tokens[1]]) for row_states in states]
        return upload(pad_rows(tokens), self.device), pad_rows(states)

    def _mask(self, starts: list[int], counts: list[int]) -> Tensor | None:
        """Return the additive mask [B, 1, T, S] of T new tokens (padding included) over S columns, or None.

        With None a causal mask does: the new tokens are all that there is.

        Args:
            starts: How many columns (cached tokens) each of the B rows has, after which its new tokens come.
            counts: The number of new tokens of each row.
        """
        fits_window = self.window is None or max(counts) <= self.window.recent
        # all rows are new and no token is beyond the window of another
        if max(starts) == 0 and fits_window:
            return None
        columns = new_positions(starts, counts, self.device)
        return causal_mask(columns, max(starts) + max(counts), self.dtype, self.window)


def sequence_bytes(layers: Any, columns: int) -> int:
    """Return the bytes of one sequence's keys and values in these blocks (`layers`), allocated for `columns` tokens.

    The cache allocates more columns than it needs, for later tokens.
    """
    column_bytes = 0
    for block in layers:
        for projection in (block.self_attn.k_proj, block.self_attn.v_proj):
            # a key or value has as many numbers as the projection has rows
            column_bytes += len(projection.weight) * projection.weight.element_size()
    return with_room(columns) * column_bytes


def split_update(update: Committed, count: int) -> tuple[Committed, Committed]:
    """Split an update into its first `count` tokens and the rest, so that a long update can be read in chunks.

    An update has newly committed tokens, the target's features at each, and the root, the token after them. The root of
    the first part is the first token of the rest, as that follows it. `count` is less than the number of tokens.
    """
    assert update.features is not None
    root = int(update.tokens[count])
    first = replace(
        update, tokens=update.tokens[:count], features=update.features[:count], root=root
    )
    rest = replace(update, tokens=update.tokens[count:], features=update.features[count:])
    return first, rest


def split_ragged(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """Split rows (sequences) with different numbers of new tokens into padded forwards: yield the rows of each.

    The rows of a forward are in the order of `counts`.

    A row gets at most as much padding as it has tokens, unless its forward is no more than SHORT_ROW_TOKENS wide.
    A forward of several rows has at most MAX_PADDED_TOKENS tokens, padding included.

    Args:
        counts: The number of new tokens of each row.
    """
    group: set[int] = set()  # the rows of the next forward
    shortest = 0  # the number of tokens of its shortest row
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


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return B tensors [T, ..] of different lengths T as one [B, longest T, ..], right-padded with zeros.

    A single one is not copied.
    """
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def new_positions(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Return the positions [B, T] of the new tokens of B sequences, [1, T] if they are the same in all of them.

    Sequence i has `counts[i]` new tokens, the first at position `starts[i]`. T is the largest count; the others are
    padded.
    """
    count = max(counts)
    if min(starts) == max(starts) and min(counts) == count:
        return torch.arange(starts[0], starts[0] + count, device=device)[None]
    # padding gets the position of its row's last token: some rotary embeddings depend on the longest position
    steps = torch.minimum(torch.arange(count), torch.tensor(counts)[:, None] - 1)
    return upload(torch.tensor(starts)[:, None] + steps, device)


def causal_mask(
    own_columns: Tensor, count: int, dtype: torch.dtype, window: Window | None = None
) -> Tensor:
    """Return the additive mask [B or 1, 1, T, S] by which each token sees the cached tokens (columns) up to itself.

    Args:
        own_columns: [B or 1, T], the cache column of each of the T tokens of B sequences; 1 if all are alike.
        count: S, the number of columns.
        dtype: Of the mask.
        window: Hides columns that are neither recent nor sinks; None to show all columns up to a token's own.
    """
    column = torch.arange(count, device=own_columns.device)
    own = own_columns[..., None]
    is_hidden = column > own
    if window is not None:
        # a sequence begins at column 0, and committed tokens see no draft tokens
        is_hidden |= window.hides(column, own, begin=0, drafted=0)
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=own_columns.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None]
