"""The target drafts for itself behind a sparse cache (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049)."""

# B rows of text, T tokens, N observed tokens, K nodes of one level, R of all levels, S held columns, M copied columns
# X heads of keys, H of queries, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, Drafter, Noise, Reads
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.drafters.parts.growth import grow_rows, level_rows
from eagle.drafters.parts.scoring import Seed
from eagle.target.slots import with_room
from eagle.target.view import TargetTexts

Select = Literal["recent", "snap"]


class SparseKv(Drafter):
    """All layers of the target behind `budget` columns of its keys and values.

    "recent" holds the first `sinks` tokens and the latest (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453); "snap"
    what the prompt's last tokens attend to, and all that follows the prompt (SnapKV, Li et al. 2024, arXiv 2404.14469).
    """

    reads = Reads(view=True, texts=True)

    def __init__(self, budget: int = 512, sinks: int = 4, select: Select = "recent") -> None:
        if select not in get_args(Select):
            raise ValueError(f"select is {select!r}, expected one of {', '.join(get_args(Select))}")
        if not 0 <= sinks < budget:
            raise ValueError(f"budget and sinks are {budget} and {sinks}, expected 0 <= sinks < budget")
        if select == "snap" and budget <= OBSERVED:
            raise ValueError(f"budget is {budget}, expected more than {OBSERVED}, the last tokens, which are all held")
        self.columns, self.sinks, self.select = budget, sinks, select
        self.views: tuple[Any, ...] = ()  # in a tuple, as heads keep what they borrow

    def bind_target(self, view: Any) -> None:
        """Take the target's layers for timing; models that keep states and, for "snap", others are refused."""
        if view.keeps_states:
            raise ValueError(
                "some layers of the target keep a state, which holds all tokens of a text and not a choice of them: "
                "expected attention in all layers; take another drafter, as early_exit"
            )
        if self.select == "snap":
            if not view.shows_attention:
                raise ValueError("the target's attention shows no queries to choose by: load it with 'sdpa'")
            if view.has_windows:
                raise ValueError("some layers have sliding windows, whose columns each head would choose: use 'recent'")
        self.views = (view,)

    def open_with(self, texts: Any) -> SparseState:
        """The state for several texts, with a separate cache."""
        if self.select == "snap":
            return SnapState(texts, self.columns)
        return SparseState(texts, self.columns, self.sinks)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Only the root: accepted columns are copied from the target's cache."""
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """The target's columns that are held, the root's and a draft's; "snap" holds all that follow the prompt."""
        drafted = 1 + sum(self.forwards(self.budget or Budget()))
        held = tokens if self.select == "snap" else min(tokens, self.columns + drafted)
        return with_room(held) * column.cached

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor] | None:
        """A function to time: the target's forward of `rows` rows after the kept columns; None before it is bound."""
        if not self.views:
            return None
        (view,) = self.views
        cache, held = view.new_cache(), min(context, self.columns)
        tokens, positions = torch.ones(1, held + rows, dtype=torch.long), torch.arange(held + rows)[None]
        view.next_logits(tokens[:, :held], positions[:, :held], None, cache, scored=1)
        cache.length = held

        def run() -> Tensor:
            return view.next_logits(tokens[:, held:], positions[:, held:], None, cache, scored=scored)

        return run


OBSERVED = 32  # last tokens of a prompt, whose attention chooses
POOLED = 5  # neighbours whose attention is averaged


class SparseState:
    """Rows of text in a cache of the drafter's own: the first `sinks` tokens and the latest others, `budget` in all.

    What the target commits is copied from its cache, the latest over the oldest; a draft lies behind and is dropped.
    """

    def __init__(self, texts: TargetTexts, budget: int, sinks: int) -> None:
        self.texts, self.view, self.budget, self.sinks = texts, texts.view, budget, sinks
        self.ring = budget - sinks
        self.cache = self.view.new_cache()
        self.rows: list[int] = []  # by slot: those that were asked for
        self.noises: dict[int, Noise | None] = {}
        self.lengths: dict[int, int] = {}  # committed tokens
        self.copied: dict[int, int] = {}  # of them, those that were copied or passed over

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """A text begins; its keys and values are copied when it is first asked for."""
        self.noises[row], self.lengths[row], self.copied[row] = noise, 0, 0

    def fork(self, row: int, other: int) -> None:
        """Nothing to copy: the rows are the target's."""
        raise ValueError("drafts over the target's own rows cannot follow a text that goes on in two ways")

    def release(self, row: int) -> None:
        """A text has ended: the last slot's text takes its place."""
        del self.noises[row], self.lengths[row], self.copied[row]
        if row in self.rows:
            slot, last = self.rows.index(row), len(self.rows) - 1
            self.cache.clear(slot)
            self.cache.swap(slot, last)
            self.rows[slot] = self.rows[last]
            self.rows.pop()

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the target's own logits behind the columns that are held."""
        for row, update in updates.items():
            self.lengths[row] += len(update.tokens)
            if row not in self.rows:
                self.rows.append(row)
        self._copy_committed([row for row in self.rows if row in updates])
        trees: dict[int, DraftTree] = {}
        for group in self.texts.groups([*updates]):
            rows = sorted(group, key=self.rows.index)
            seeds = [Seed(updates[row].root, self.lengths[row] + 1, budgets[row], self.noises[row]) for row in rows]
            trees |= zip(rows, self._grow(rows, seeds), strict=True)
        return trees

    def _grow(self, rows: list[int], seeds: list[Seed]) -> list[DraftTree]:
        """The trees of rows that share forwards; each root is read behind its text and held until the next draft."""
        held = self._held_positions(rows) if self.view.has_windows else None
        roots = torch.tensor([[seed.root] for seed in seeds])
        logits = self._read(rows, roots, [0], None, held)[:, 0]
        for row in rows:
            self.cache.lengths[self.rows.index(row)] += 1
        depths = list[int]()

        def level(depth: int, numbers: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            if depth == 1:
                depths.clear()
            depths.extend([depth] * tokens.shape[1])
            asked = None if held is None else held[numbers]
            return self._read([rows[number] for number in numbers], tokens, depths, seen, asked)

        return grow_rows(seeds, logits, level)

    def _read(
        self, rows: list[int], tokens: Tensor, depths: list[int], seen: Tensor | None, held: Tensor | None
    ) -> Tensor:
        """[B, K, V], the logits after the last K tokens [B, K] of drafts, at so many positions behind the text."""
        slots = [self.rows.index(row) for row in rows]
        unread = len(depths) - tokens.shape[1]
        self.cache.aim(slots, [self.cache.lengths[slot] + unread for slot in slots])
        positions = torch.tensor([self.lengths[row] for row in rows])[:, None] + torch.tensor(depths)
        return self.view.next_logits(tokens, positions, seen, self.cache, held)

    # -- what is held -------------------------------------------------------------------------------------------------

    def _copy_committed(self, rows: Sequence[int]) -> None:
        """Bring the cache to what is committed of these rows, all in one copy per layer."""
        moves = {}
        self.cache.lengths = (self.cache.lengths + [0] * len(self.rows))[: len(self.rows)]
        for row in rows:
            slot = self.rows.index(row)
            if not self.copied[row]:
                self._begin(row, slot)
            if len(positions := self._new_positions(row)):
                moves[row] = slot, positions, self._columns(row, positions)
            self.copied[row] = self.lengths[row]
            self.cache.lengths[slot] = self._held(row)
        self.texts.copy_columns(self.cache, moves)

    def _begin(self, row: int, slot: int) -> None:
        """Choose the prompt columns to keep permanently; none here."""

    def _held(self, row: int) -> int:
        """The number of columns held for a row."""
        return min(self.lengths[row], self.budget)

    def _new_positions(self, row: int) -> Tensor:
        """[M], the positions that still have to be copied."""
        start, end = self.copied[row], self.lengths[row]
        first, latest = range(start, min(end, self.sinks)), range(max(start, self.sinks, end - self.ring), end)
        return torch.tensor([*first, *latest], dtype=torch.long)

    def _columns(self, row: int, positions: Tensor) -> Tensor:
        """[M], where positions lie: the sinks in order, the others in a ring behind them."""
        ring = self.sinks + (positions - self.sinks) % self.ring
        return torch.where(positions < self.sinks, positions, ring)

    def _held_positions(self, rows: Sequence[int]) -> Tensor:
        """[B, S + 1], the position that each row's columns hold, the root's behind them."""
        most = max(map(self._held, rows)) + 1
        held = torch.arange(most).repeat(len(rows), 1)
        for row, places in zip(rows, held, strict=True):
            end = self.lengths[row]
            latest = torch.arange(max(end - self.ring, min(self.sinks, end)), end)  # none while the sinks fill
            places[self._columns(row, latest)] = latest
            places[self._held(row)] = end
        return held


class SnapState(SparseState):
    """Rows whose prompts are reduced once to the columns that their last tokens attend to; all later tokens stay."""

    def __init__(self, texts: TargetTexts, budget: int) -> None:
        super().__init__(texts, budget, 0)
        self.skipped: dict[int, int] = {}  # tokens of a prompt that are not held, as many in every head

    def release(self, row: int) -> None:
        """Release a row."""
        super().release(row)
        self.skipped.pop(row, None)

    def _begin(self, row: int, slot: int) -> None:
        """Copy `budget` columns of a longer prompt, the last of them and the highest scores, each head its own."""
        length = self.lengths[row]
        self.skipped[row] = max(length - self.budget, 0)
        if not self.skipped[row]:
            return
        latest = upload(torch.arange(length - OBSERVED, length), self.view.device)
        self.cache.aim([slot], [0])

        def copy(layer: int, queries: Tensor, keys: Tensor, scale: float) -> None:
            chosen = score_columns(queries[0], keys[0], scale).topk(self.budget - OBSERVED).indices
            columns = torch.cat([chosen, latest.to(chosen.device).expand(len(chosen), -1)], 1)[:, :, None]
            held = self.texts.keys_values(row, layer)
            layers: Any = self.cache.layers
            layers[layer].update(*(part.take_along_dim(columns, 1)[None] for part in held))

        self.texts.observe_attention(row, OBSERVED, copy)
        self.copied[row] = length

    def _held(self, row: int) -> int:
        return self.lengths[row] - self.skipped[row]

    def _new_positions(self, row: int) -> Tensor:
        return torch.arange(self.copied[row], self.lengths[row])

    def _columns(self, row: int, positions: Tensor) -> Tensor:
        return positions - self.skipped[row]


def score_columns(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[X, T - N], how much the last N tokens attend to each before them: queries [H, N, D], keys [X, T, D].

    Probs summed over queries and the heads that share keys, and averaged over five neighbours; beyond the ends is 0.
    """
    heads, (count, width) = len(keys), queries.shape[1:]
    scores = (queries.reshape(heads, -1, width) * scale) @ keys.transpose(1, 2)
    scores = scores.view(heads, -1, count, keys.shape[1])
    ahead = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., -count:].masked_fill_(ahead, -torch.inf)
    attended = scores.softmax(-1, dtype=torch.float32)[..., :-count].sum((1, 2))
    return F.avg_pool1d(attended, POOLED, stride=1, padding=POOLED // 2)
