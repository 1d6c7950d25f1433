"""The state of a draft model: its own cache of the texts."""

# B rows of text, K nodes of one level, R of all levels, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise
from eagle.core.tree import DraftTree
from eagle.device import to_host
from eagle.drafters.parts.growth import grow_rows
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_state import split_ragged
from eagle.target.target import Target


class ModelState:
    """Rows of text in a state of the model's; behind each lie the rows of its last draft, until some are confirmed."""

    def __init__(self, own: Target, size: int, clip_to_vocab: Callable[[Tensor], Tensor]) -> None:
        self.own, self.size, self.clip_to_vocab = own, size, clip_to_vocab
        self.state = own.open()
        self.noises: dict[int, Noise | None] = {}
        self.confirmed: dict[int, int] = {}  # tokens, the root not counted
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of the last draft: tokens, and what they follow

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; its text is read at the first proposal."""
        self.noises[row], self.confirmed[row], self.levels[row] = noise, 0, []

    def fork(self, row: int, other: int) -> None:
        """A text goes on in two ways; the row's last draft stays behind it alone."""
        self.noises[other], self.confirmed[other], self.levels[other] = self.noises[row], self.confirmed[row], []
        if row in self.state.rows:
            self._state_needs()
            self.state.fork(row, other)

    def release(self, row: int) -> None:
        """A text has ended; another may take its place, but leaves its draft behind."""
        del self.noises[row], self.confirmed[row], self.levels[row]
        if row in self.state.rows:
            slots = list(self.state.rows)
            self._state_needs()
            self.state.release(row)
            for moved in [kept for kept, before in zip(self.state.rows, slots, strict=False) if kept != before]:
                self.levels[moved] = []

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the model's own logits; nothing where a text outgrows what the model can read on."""
        trees, depths = {}, dict[int, int]()
        for row, update in updates.items():
            self.confirmed[row] += len(update.tokens)
            depths[row] = self._room(row, budgets[row].depth)
            if depths[row] <= 0:
                trees[row] = DraftTree.chain([update.root])
        texts = {row: [*updates[row].tokens.tolist(), updates[row].root] for row in updates if row not in trees}
        logits = self._read_prompts({row: text for row, text in texts.items() if row not in self.state.rows})
        known = [row for row in self.state.rows if row in texts and row not in logits]
        for rows in self._groups(known):
            logits |= self._read_confirmed({row: texts[row] for row in rows})
        for rows in self._groups([row for row in self.state.rows if row in texts]):
            seeds = [
                Seed(updates[row].root, self.state.length(row), budgets[row].within(depths[row]), self.noises[row])
                for row in rows
            ]
            trees |= dict(zip(rows, self._grow(rows, seeds, [logits[row] for row in rows]), strict=True))
        return trees

    def _grow(self, rows: list[int], seeds: list[Seed], logits: Sequence[Tensor]) -> list[DraftTree]:
        """The trees of rows that may share a forward, from the logits [V] behind their roots."""
        depths = list[int]()

        def level(depth: int, numbers: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            if depth == 1:
                depths.clear()
            depths.extend([depth - 1] * tokens.shape[1])
            asked = [rows[number] for number in numbers]
            for row, columns in zip(asked, zip(tokens, before, strict=True), strict=True):
                self.levels[row].append(columns)
            return self.state.ahead(asked, self.clip_to_vocab(tokens), depths, seen)[..., : self.size]

        known = min(self.own.vocab_size, self.size)
        drafts = torch.arange(known, device=self.own.device) if known < self.size else None
        return grow_rows(seeds, torch.stack(list(logits))[:, : self.size], level, drafts)

    # -- what may be read together ------------------------------------------------------------------------------------

    def _room(self, row: int, levels: int) -> int:
        """At most that many levels behind the root: fewer before the last position, or a border of frequencies."""
        own, read = self.own, self.state.length(row) if row in self.state.rows else 0
        ends = [own.max_positions or math.inf]
        # a text that has grown up to the border cannot be read on: one that was longer from the first can
        if (0 < read <= own.border) or self.confirmed[row] < own.border:
            ends.append(own.border)
        return int(min(levels, *(end - self.confirmed[row] for end in ends)))

    def _groups(self, rows: list[int]) -> list[list[int]]:
        """The rows of each forward: all, but for texts whose frequencies would change with others beside them."""
        alone = [row for row in rows if self.own.is_alone(self.confirmed[row])]
        together = [row for row in rows if row not in alone]
        return [[row] for row in alone] + ([together] if together else [])

    def _state_needs(self) -> None:
        """Tell the state how many columns each row may come to, its draft included: more are given back."""
        for row in self.state.rows:
            drafted = sum(len(tokens) for tokens, _ in self.levels.get(row, ()))
            self.state.needs[row] = (self.state.length(row) + drafted) * 3 // 2

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def _read_prompts(self, texts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """[V] each, the logits behind texts that are read from their first token on."""
        logits: dict[int, Tensor] = {}
        if texts:
            self._state_needs()
        for row, text in texts.items():
            self.state.admit(row, self.clip_to_vocab(torch.tensor(text)).tolist())
        while len(logits) < len(texts):
            logits |= {row: prompt.output.logits[0] for row, prompt in self.state.read_prompts().items()}
        return logits

    def _read_confirmed(self, texts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """[V] each, the logits once the confirmed tokens are read; rows of the last draft that were confirmed stay."""
        columns: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        left: dict[int, list[int]] = {}
        for row, levels in self._drafted(list(texts)).items():
            new = texts[row][1:]  # the root was read already
            columns[row] = _confirm_rows(levels, new[:-1])
            tokens[row] = new[: len(columns[row])]
            left[row] = self.clip_to_vocab(torch.tensor(new[len(tokens[row]) :])).tolist()
            self.levels[row] = []
        self.state.keep_columns(columns, tokens)
        logits: dict[int, Tensor] = {}
        for group in split_ragged({row: len(part) for row, part in left.items()}):
            logits |= self.state.extend({row: left[row] for row in group})
        return logits

    def _drafted(self, rows: list[int]) -> dict[int, list[list[list[int]]]]:
        """Each row's levels as lists, all in one transfer."""
        parts = [part for row in rows for level in self.levels[row] for part in level]
        values = iter(to_host(parts))
        return {row: [[part.tolist() for part in islice(values, 2)] for _ in self.levels[row]] for row in rows}


def _confirm_rows(levels: list[list[list[int]]], tokens: list[int]) -> list[int]:
    """The rows of the last draft that read these tokens, as far as there are such."""
    path, at, first = [], None, 0
    for (read, before), wanted in zip(levels, tokens, strict=False):
        rows = [row for row, token in enumerate(read) if token == wanted and (at is None or before[row] == at)]
        if not rows:
            break
        at = rows[0]
        path.append(first + at)
        first += len(read)
    return path
