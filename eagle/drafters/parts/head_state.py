"""The texts that a trained head drafts for: one forward over what they commit, and one for each level of all trees."""

# B rows of text, T new tokens, K nodes of one level, R of all levels, S columns, L taps, H width

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise, TargetHead
from eagle.core.tree import DraftTree
from eagle.device import pick_rows, upload
from eagle.drafters.parts.blocks import FOLLOW_LENGTH, Cache, Rotary, rotary_tables
from eagle.drafters.parts.growth import Grown, grow_columns, grow_rows, level_mask, plan_parents, read_trees
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.static_loop import Capture, HeldNoise, StaticLoop, text_room
from eagle.target.cache import SlotCache

SHORT = 16  # tokens up to which rows are read together, however different in number
MOST = 4096  # tokens of one forward, padding included, unless a row alone has more


class LevelHead(Protocol):
    """What a head is asked for in drafting; see `eagle.drafters.parts.unroll.UnrolledDrafter`."""

    layers: Any
    rotary: Rotary
    capture: Capture | None
    frozen: tuple[TargetHead, ...]

    @property
    def query_groups(self) -> int:
        """How many queries share a key."""
        ...

    @property
    def drafts(self) -> Tensor | None:
        """[D], the draft vocabulary; None for all tokens."""
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

    def next_input(self, state: Tensor) -> Tensor:
        """What the next level reads of a state."""
        ...

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """[.., D], the logits of states."""
        ...


class HeadState:
    """Keys and values of many texts, in a slot for each from its first draft on; the slots in use are the first."""

    def __init__(self, head: LevelHead) -> None:
        self.head, self.cache = head, SlotCache()
        self.blocks = [Cache(self.cache, block) for block in head.layers]
        self.drafts = head.drafts
        self.loop = None if head.capture is None else StaticLoop(head.capture)
        weight = head.layers[0].mlp.up_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.noises: dict[int, Noise | None] = {}
        self.rows: list[int] = []  # of every slot in use

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """A text begins."""
        self.noises[row] = noise

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

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the target's features of the committed tokens, then from the head's own."""
        self._take_slots([row for row in updates if row not in self.rows])
        rows = sorted(updates, key=self.rows.index)
        hidden = self._read_updates({row: updates[row] for row in rows})
        slots = [self.rows.index(row) for row in rows]
        seeds = [
            Seed(updates[row].root, self.cache.lengths[slot] + 1, budgets[row], self.noises[row])
            for row, slot in zip(rows, slots, strict=True)
        ]
        return dict(zip(rows, self._grow(seeds, slots, hidden), strict=True))

    def _grow(self, seeds: Sequence[Seed], slots: list[int], hidden: Tensor) -> list[DraftTree]:
        """The trees of some slots, from the states behind their roots."""
        if self.loop is not None and _are_static(seeds, slots):
            return read_trees(seeds, [self._grow_static(seeds, hidden, self.loop)])
        lengths = [self.cache.lengths[slot] for slot in slots]
        depth, room = max(seed.budget.depth for seed in seeds), max(lengths)
        levels = _Levels(self, slots, hidden, *self._behind_texts(lengths[: count_unlike(lengths)], room, depth))
        return grow_rows(seeds, self.head.logits(hidden, self.head.frozen[0]), levels, self.drafts)

    def _grow_static(self, seeds: Sequence[Seed], hidden: Tensor, loop: StaticLoop) -> Grown:
        """The draft of rows with one budget; its columns begin behind the room that texts have."""
        budget, slots, noises = seeds[0].budget, list(range(len(seeds))), [seed.noise for seed in seeds]
        lengths = self.cache.lengths[: len(seeds)]
        room = text_room(max(lengths))
        shared = [
            seed.noise(list(range(seed.place, seed.place + budget.depth))) for seed in seeds if seed.noise is not None
        ]

        def draft(hidden: Tensor, cosine: Tensor, sine: Tensor, committed: Tensor, *shared: Tensor) -> Tensor:
            held = [
                HeldNoise(rows, noise, noise.temperature)
                for rows, noise in zip(shared, noises, strict=False)
                if noise is not None
            ]
            alike = [Seed(0, 0, budget, held[slot] if held else None) for slot in slots]
            levels = _Levels(self, slots, hidden, cosine, sine, committed)
            first = self.head.logits(hidden, self.head.frozen[0])
            return grow_columns(alike, first, levels, self.drafts)[0].columns

        places = tuple(rows.buffer.data_ptr() for rows in self.cache.buffers)
        key = budget, len(slots), room, places, tuple(noises)
        columns = loop(key, draft, [hidden, *self._behind_texts(lengths, room, budget.depth), *shared])
        return Grown(slots, columns, plan_parents(budget, columns.shape[2], self.device))

    def _behind_texts(self, lengths: Sequence[int], room: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotary tables [B, depth, w] of a draft's levels, and [B, room] what hides the columns behind each text."""
        committed = self._hide_behind(lengths, room)
        places = upload(torch.tensor(lengths)[:, None], self.device)
        return *_draft_tables(self.head.rotary, committed, places, depth), committed

    def _hide_behind(self, lengths: Sequence[int], columns: int) -> Tensor:
        """[B, columns], 0 at those that a row's text fills, the lowest number behind it."""
        committed = torch.zeros(len(lengths), columns, dtype=self.dtype, device=self.device)
        if min(lengths) < columns:
            places = upload(torch.tensor(lengths)[:, None], self.device)
            behind = torch.arange(columns, device=self.device) >= places
            committed.masked_fill_(behind, torch.finfo(self.dtype).min)
        return committed

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

    def _read_updates(self, updates: Mapping[int, Committed]) -> Tensor:
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


class _Levels:
    """The levels of the drafts behind some slots; their columns begin where the longest text ends, for all alike."""

    def __init__(
        self, state: HeadState, slots: list[int], hidden: Tensor, cosine: Tensor, sine: Tensor, committed: Tensor
    ) -> None:
        self.state, self.slots, self.first = state, slots, hidden[:, None]
        self.rows, self.hidden = list(range(len(slots))), self.first  # of the level before
        self.tables, self.committed, self.start = (cosine, sine), committed, committed.shape[1]

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, K, D], the logits behind the nodes of one level of these rows."""
        state, head, width = self.state, self.state.head, tokens.shape[1]
        if depth == 1:
            self.rows, self.hidden = list(range(len(self.slots))), self.first
        if rows != self.rows:
            self.hidden = pick_rows(self.hidden, [self.rows.index(row) for row in rows])
            self.rows = rows
        (cosine, sine), committed = self.tables, self.committed
        if len(committed) > 1:
            cosine, sine, committed = (pick_rows(part, rows) for part in (cosine, sine, committed))
        tables = cosine[:, depth - 1 : depth], sine[:, depth - 1 : depth]
        mask = level_mask(committed, seen, head.query_groups)
        above = self.hidden.gather(1, before[..., None].expand(-1, -1, self.hidden.shape[2]))
        state.cache.aim([self.slots[row] for row in rows], [self.start + seen.shape[2] - width] * len(rows))
        self.hidden = head.read(tokens, head.next_input(above), tables, mask, state.blocks, head.frozen[0])
        return head.logits(self.hidden, head.frozen[0])


def _draft_tables(rotary: Rotary, like: Tensor, places: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """[B, depth, w] each, of the levels behind texts of these lengths [B, 1]; each level's as if it were the last."""
    positions = places + torch.arange(depth, device=places.device)
    if rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    cosine, sine = zip(*(rotary_tables(rotary, like, level) for level in positions.split(1, dim=1)), strict=True)
    return torch.cat(cosine, 1), torch.cat(sine, 1)


def _are_static(seeds: Sequence[Seed], slots: Sequence[int]) -> bool:
    """Whether rows draft by one budget from the first slots on, and need no noise that is new in every cycle."""
    budget, noises = seeds[0].budget, {seed.noise is None for seed in seeds}
    is_alike = len(noises) == 1 and all(seed.budget == budget for seed in seeds) and not budget.is_empty
    return is_alike and list(slots) == list(range(len(slots))) and (budget.draw != "sampled" or noises == {True})


def count_unlike(lengths: Sequence[int]) -> int:
    """How many rows need a mask and positions of their own: one stands for all where lengths are equal."""
    return 1 if min(lengths) == max(lengths) else len(lengths)


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
