"""The texts being decoded with one target, by row: tokens, keys and values, tapped states."""

# B rows of a forward, N tree nodes or new tokens, R tokens that are not committed, L taps, D target width, V vocabulary

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from eagle.core.arguments import media_of
from eagle.core.drafter import Committed
from eagle.core.grown import lay_out
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose
from eagle.device import pick_rows, upload
from eagle.target.prompt import PromptOutput
from eagle.target.view import TargetTexts

PREFILL_CHUNK = 1024  # tokens of a prompt's forward, padding included


class TargetState:
    """Rows of text: `admit` a prompt, `read_prompts`, `read` a tree for each row, `keep` the accepted paths, `release`.

    Rows being decoded lie in the first slots, then rows whose prompts are still being read, then free slots, which keep
    their last text. The caller chooses a row's number.
    """

    def __init__(
        self, target: Any, taps: tuple[int, ...] = (), max_tokens: int | None = None, mark: Any = None
    ) -> None:
        target.check_taps(taps)
        self.target, self.taps, self.max_tokens, self.mark = target, taps, max_tokens, mark  # the weights' `WeightMark`
        self.reader = target.reader  # to the end, whatever becomes of the model meanwhile
        self.cache = self.reader.new_cache()
        self.texts: list[list[int]] = [[]]  # of every slot
        self.rows: list[int] = []  # in the first slots
        self.needs: dict[int, int] = {}  # the columns that a row may come to
        self.prompts: dict[int, list[int]] = {}  # to be read, in the order of their admission
        self.written = 0  # how many rows are being written
        self.is_loose = False  # rows have left since the cache was made to fit
        self.trees: dict[int, DraftTree] = {}  # read last

    def check_room(self, columns: int) -> None:
        """Refuse a row that would not fit even alone."""
        columns += self.cache.state_columns(columns)
        if self.max_tokens is not None and columns > self.max_tokens:
            raise ValueError(
                f"a prompt, its answer and a draft take up to {columns} tokens, the cache may hold {self.max_tokens}: "
                "raise max_tokens_in_cache, lower max_new_tokens or shorten the prompt"
            )

    def fits(self, columns: int) -> bool:
        """Whether another row with this many columns fits, with all rows padded to the longest."""
        widest = max(columns, *self.needs.values(), 0)
        columns = (len(self.rows) + 1) * (widest + self.cache.state_columns(widest))
        return self.max_tokens is None or columns <= self.max_tokens

    def admit(self, row: int, prompt: list[int], room: int = 0) -> None:
        """Admit a prompt with space for `room` more tokens; a prefix that a free slot still holds is not read again."""
        self.target.check_prompt(prompt)
        slot = len(self.rows)
        with self.target.lock:
            self.reader.check(rows=slot + 1)
        if self.cache.mixers is not self.reader.mixers:  # other means were found to be needed
            self.cache = self.reader.new_cache()
        self.needs[row] = len(prompt) + room
        shared = [self._shared(place, prompt) for place in range(slot, len(self.texts))] or [0]
        self._swap(slot, slot + shared.index(max(shared)))
        self._reserve(slot + 1)
        self.texts[slot] = self.texts[slot][: max(shared)]
        self.cache.cut(slot, max(shared))
        self.rows.append(row)
        self.prompts[row] = prompt

    def begin(self, prompt: list[int], choose: Choose, room: int = 0, row: int = 0) -> Committed:
        """Replace all rows by one prompt and read it; returns it with the token chosen after it."""
        self.clear()
        self.admit(row, prompt, room)
        return self.finish_prompts()[row].commit(choose)

    def release(self, row: int, *, wipe: bool = False) -> None:
        """Release a row: its slot becomes free and keeps its text until it is reused, or nothing after `wipe`."""
        slot = self.rows.index(row)
        if wipe:  # a later text's mask hides what a slot holds, but not a nan
            self.cache.clear(slot)
            self.texts[slot] = []
        del self.needs[row]
        self.prompts.pop(row, None)
        if slot < self.written:  # the last row that is written takes its place, and the last that waits that one's
            self.written -= 1
            self._swap(slot, self.written)
            slot = self.written
        self._swap(slot, len(self.rows) - 1)
        self.rows.pop()
        self.is_loose = True

    def fork(self, row: int, other: int) -> None:
        """Copy a row's committed text to a new row `other`."""
        slot = len(self.rows)
        self.needs[other] = self.needs[row]
        self._reserve(slot + 1)
        self.rows.append(other)
        self.cache.copy(self.rows.index(row), slot)
        self.texts[slot] = list(self.text(row))
        self._swap(slot, self.written)
        self.written += 1

    def clear(self) -> None:
        """Release all rows."""
        self.rows, self.needs, self.prompts, self.written = [], {}, {}, 0

    def _reserve(self, slots: int) -> None:
        """Reserve space for all admitted rows; the cache releases what is far beyond that."""
        self.is_loose = False
        columns = max([*self.needs.values(), *self.cache.lengths[: len(self.rows)]])
        self.cache.reserve(slots, columns, self.max_tokens)
        texts = self.texts + [[] for _ in self.cache.lengths]
        self.texts = [text[:length] for text, length in zip(texts, self.cache.lengths, strict=False)]

    def _swap(self, slot: int, other: int) -> None:
        """Swap two slots together with their rows."""
        if slot != other:
            self.cache.swap(slot, other)
            texts, rows = self.texts, self.rows
            texts[slot], texts[other] = texts[other], texts[slot]
            if max(slot, other) < len(rows):
                rows[slot], rows[other] = rows[other], rows[slot]

    def _shared(self, slot: int, prompt: list[int]) -> int:
        """The number of a prompt's tokens that a slot already holds; the last token is always read again."""
        border, text = self.target.border, self.texts[slot]
        has_images = media_of(prompt) or slot in self.cache.offsets  # others, for which the same tokens may stand
        if has_images or (len(text) > border) != (len(prompt) > border):
            return 0
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
        held = self.cache.reusable(slot, min(same, len(prompt) - 1))
        return held if self.reader.reads_on(held, len(prompt)) else 0

    @torch.inference_mode()
    def read_prompts(self, most: int | None = None) -> dict[int, PromptOutput]:
        """One forward of up to `most` prompt tokens with padding; returns the outputs of prompts read to their end."""
        most = PREFILL_CHUNK if most is None else most
        rows, left = list[int](), list[list[int]]()
        for row, prompt in self.prompts.items():
            tokens = prompt[self.length(row) :]
            longest = max(map(len, [*left, tokens]))
            end = max(map(self.length, [*rows, row])) + longest  # of what is written, padding included
            fits = (len(rows) + 1) * longest <= most and end <= max(self.needs.values())
            alone = self.target.is_alone(len(prompt)) or bool(media_of(prompt))
            if rows and (alone or not fits):
                break
            rows, left = [*rows, row], [*left, tokens]
            if alone:
                break
        if not rows:
            return {}
        first = self.prompts[rows[0]]
        whole = len(first) > self.target.border or media_of(first)  # one set of frequencies reads a text beyond it
        if not whole and not self.reader.mixers.by_levels:  # which ignore what they have read
            left[0] = left[0][:most]
        logits = self.extend(dict(zip(rows, left, strict=True)))
        ended = [row for row in rows if self.length(row) == len(self.prompts[row])]
        return {row: self._end_prompt(row, logits[row]) for row in ended}

    def finish_prompts(self, most: int | None = None) -> dict[int, PromptOutput]:
        """Read all admitted prompts to their ends, by forwards of up to `most` tokens; returns their outputs."""
        outputs: dict[int, PromptOutput] = {}
        while self.prompts:
            outputs |= self.read_prompts(most)
        return outputs

    def _end_prompt(self, row: int, logits: Tensor) -> PromptOutput:
        """Move a row whose prompt is read to the rows being decoded, and return its prompt's output."""
        prompt, slot = self.prompts.pop(row), self.rows.index(row)
        features = self.features_at(row, range(len(prompt)))
        self.cache.snapshot(slot, len(prompt))
        self._swap(slot, self.written)
        self.written += 1
        output = TargetOutput(DraftTree.chain(prompt[-1:]), logits[None], None, len(prompt) - 1, prompt[:-1])
        return PromptOutput(prompt, features, output)

    @torch.inference_mode()
    def extend(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read and commit tokens of some rows; returns for each row the logits [V] after its last token."""
        rows = sorted(tokens, key=self.rows.index)
        slots, sizes = [self.rows.index(row) for row in rows], [len(tokens[row]) for row in rows]
        starts, count = [self.cache.lengths[slot] for slot in slots], max(sizes)
        for row, start, size in zip(rows, starts, sizes, strict=True):
            if row not in self.prompts:  # what they share with another text was read with the frequencies they have
                self.target.check_growth(start, start + size)
        padded = torch.tensor([[*tokens[row], *[0] * (count - len(tokens[row]))] for row in rows])
        # padding stands where the last token does: the model may have no later position
        steps = torch.minimum(torch.arange(count), torch.tensor(sizes)[:, None] - 1)
        hidden, _ = self._forward(slots, padded, torch.tensor(starts)[:, None] + steps, None, sizes=sizes, commits=True)
        for row, slot, size in zip(rows, slots, sizes, strict=True):
            self.texts[slot] += tokens[row]
            self.cache.lengths[slot] += size
        last = pick_rows(hidden.flatten(0, 1), [number * count + size - 1 for number, size in enumerate(sizes)])
        return dict(zip(rows, self.reader.logits(self.target.head, last), strict=True))

    @torch.inference_mode()
    def read(self, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        """One forward over a tree for each row: a node sees its row's committed text, its ancestors and itself."""
        if self.is_loose:  # only now, as a newcomer may have shared what a free slot holds
            self._reserve(len(self.rows))
        outputs: dict[int, TargetOutput] = {}
        for rows in self.groups(sorted(trees, key=self.rows.index)):
            outputs |= self._read([(row, trees[row]) for row in rows])
        self.trees = dict(trees)
        return outputs

    def _read(self, trees: list[tuple[int, DraftTree]]) -> dict[int, TargetOutput]:
        """The outputs of rows that share a forward."""
        slots, sizes = [self.rows.index(row) for row, _ in trees], [tree.columns for _, tree in trees]
        starts, count = [self.cache.lengths[slot] for slot in slots], max(sizes)
        tokens, depths, seen = lay_out([tree for _, tree in trees], self.target.device, self.target.vocab_size)
        for start, (_, tree) in zip(starts, trees, strict=True):
            if start <= self.target.border < sys.maxsize:
                self.target.check_growth(start, start + tree.levels + 1)
        positions = upload(torch.tensor(starts)[:, None], depths.device) + depths
        hidden, states = self._forward(slots, tokens, positions, seen, sizes=sizes)
        nodes = [number * count + node for number, size in enumerate(sizes) for node in range(size)]
        logits = self.reader.logits(self.target.head, pick_rows(hidden.flatten(0, 1), nodes)).split(sizes)
        outputs = {}
        for number, (row, tree) in enumerate(trees):
            features = None if states is None else states[number, :, : sizes[number]].transpose(0, 1)
            outputs[row] = TargetOutput(tree, logits[number], features, starts[number], self.texts[slots[number]])
        return outputs

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit a path of each row's tree and drop all other nodes from the cache, in place."""
        self.keep_columns(paths, {row: self.trees[row].tokens[[*path]].tolist() for row, path in paths.items()})

    def keep_columns(self, columns: Mapping[int, Sequence[int]], tokens: Mapping[int, list[int]]) -> None:
        """Commit columns of each row that were read last, one for each of its tokens; further ones move up behind."""
        slots = {row: self.rows.index(row) for row in columns}
        counts = {slots[row]: len(kept) for row, kept in tokens.items()}
        with self.target.lock:  # modules that keep a state run again
            self.cache.keep({slots[row]: kept for row, kept in columns.items()}, counts)
        for row, kept in tokens.items():
            self.texts[slots[row]] += kept

    def commit(self, row: int, tokens: list[int]) -> None:
        """Commit tokens whose columns lie behind a row's text already."""
        slot = self.rows.index(row)
        self.cache.lengths[slot] += len(tokens)
        self.texts[slot] += tokens

    @torch.inference_mode()
    def ahead(self, rows: Sequence[int], tokens: Tensor, depths: list[int], seen: Tensor) -> Tensor:
        """[B, K, V] logits of the last K draft tokens [B, K], which see `seen` [B, K, R] of R; nothing is committed.

        Token i of a draft stands `depths[i]` positions after the text; earlier calls have read those before the last K.
        """
        slots = [self.rows.index(row) for row in rows]
        starts = torch.tensor([self.cache.lengths[slot] for slot in slots])
        hidden, _ = self._forward(slots, tokens, starts[:, None] + torch.tensor(depths), seen)
        return self.reader.logits(self.target.head, hidden)

    def features_at(self, row: int, columns: Sequence[int]) -> Tensor | None:
        """[A, L, D], the tapped states of a row's columns, committed or not; None without taps."""
        if not self.taps:
            return None
        held = self.cache.tapped.buffer[self.rows.index(row)]
        return held.index_select(1, upload(torch.tensor(columns), held.device)).transpose(0, 1)

    def lend(self) -> TargetTexts:
        """The rows, for a drafter that reads the target's cache."""
        return TargetTexts(self.target.view(), self)

    def _forward(
        self, slots: list[int], tokens: Tensor, positions: Tensor, seen: Tensor | None, **texts: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The LM head's input [B, N, D] and tapped states [B, L, N, D] at tokens [B, N]; `texts` as in `aim`."""
        cache, reader, count = self.cache, self.reader, tokens.shape[1]
        unread = positions.shape[1] - count
        media = {} if cache.lengths[slots[0]] else media_of(self.prompts.get(self.rows[slots[0]], []))
        cache.aim(slots, [cache.lengths[slot] + unread for slot in slots], **texts)
        tapping: Any = reader.tapping(self.taps) if self.taps else nullcontext({})
        with self.target.lock, tapping as tapped:
            tapped[-1] = reader.read_images(tokens, media, cache) if media else reader(tokens, positions, seen, cache)
        if not self.taps:
            return tapped[-1], None
        states = torch.stack([tapped[tap][:, -count:].to(self.target.device) for tap in self.taps], dim=1)
        cache.tapped.write(states)
        return tapped[-1], states

    def length(self, row: int) -> int:
        """The number of a row's committed tokens."""
        return self.cache.lengths[self.rows.index(row)]

    def text(self, row: int) -> list[int]:
        """A row's committed tokens."""
        return self.texts[self.rows.index(row)]

    def check_tree(self, row: int, tree: DraftTree) -> None:
        """Refuse a tree that the row has no space for, or that crosses longrope's switch of frequencies."""
        start = self.length(row)
        if start <= self.target.border < sys.maxsize:
            self.target.check_growth(start, start + tree.levels + 1)
        if self.max_tokens is not None and start + tree.columns > self.needs[row]:
            raise ValueError(
                f"the draft has {tree.columns - 1} nodes, and the cache's limit leaves {self.needs[row] - start - 1}: "
                "draft within budget.nodes, or raise max_tokens_in_cache"
            )

    def levels(self, row: int, wanted: int) -> int:
        """The number of wanted draft levels that fit; no draft may cross longrope's switch of frequencies."""
        start, border = self.length(row), self.target.border
        return wanted if start > border or start + 1 + wanted <= border else int(border) - start - 1

    def groups(self, rows: list[int]) -> list[list[int]]:
        """Groups of rows that share a forward; all rows, unless the model's positions depend on the longest text."""
        alone = [row for row in rows if self.target.is_alone(self.length(row))]
        together = [row for row in rows if row not in alone]
        return [[row] for row in alone] + ([together] if together else [])
