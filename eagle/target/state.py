"""The sequences being decoded with one target, by row: tokens, keys and values, tapped states."""

# B rows of a forward, T tokens, N tree nodes or new tokens, R tokens that are not committed, L taps, D target width,
# V vocabulary

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.arguments import media_of
from eagle.core.drafter import Committed
from eagle.core.grown import lay_out
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, check_choice
from eagle.device import pick_rows, upload
from eagle.target.view import TargetTexts

PREFILL_CHUNK = 1024  # tokens of a prompt's forward, padding included


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """A prompt after its forward: tapped states, and the target's output after the last token."""

    tokens: list[int]
    features: Tensor | None  # [T, L, D]
    output: TargetOutput

    def commit(self, choose: Choose) -> Committed:
        """Return the prompt as a `Committed`, with the token chosen after it."""
        (root,) = choose(self.output, [0])
        check_choice(root, self.output, 1)
        return Committed(torch.tensor(self.tokens), self.features, root)


class TargetState:
    """Rows of tokens: `admit` a prompt, `read_prompts`, `read` a tree for each row, `keep` accepted paths, `release`.

    Rows being decoded lie in the first slots, then rows whose prompts are still being read, then free slots, which keep
    their last sequence. The caller chooses a row's number.
    """

    def __init__(
        self,
        target: Any,
        taps: tuple[int, ...] = (),
        max_tokens: int | None = None,
        mark: Any = None,
    ) -> None:
        """Open a state without rows.

        A row is a sequence that is decoded, a slot its place in the cache's batch.

        Args:
            target: the target.
            taps: the layer inputs that are handed out.
            max_tokens: the most that the cache may hold, in columns times rows.
            mark: the weights' `WeightMark`: a later state reuses this one's cache only while they have not changed.
        """
        target.check_taps(taps)
        self.target = target
        self.taps = taps
        self.max_tokens = max_tokens
        self.mark = mark
        # to the end, even if the target makes another one because its model was changed
        self.reader = target.reader
        self.cache = self.reader.new_cache()
        self.texts: list[list[int]] = [[]]  # by slot, the tokens that are in the cache
        # by slot, the numbers of the rows, which fill the first slots; the others are free
        self.rows: list[int] = []
        self.columns_by_row: dict[int, int] = {}  # the most KV columns that a row may need
        # of rows whose prompt is not fully read, in the order of their admission
        self.prompts: dict[int, list[int]] = {}
        self.num_decoding = 0  # rows whose prompt is read: they fill the slots before this one
        self.is_loose = False  # whether rows have left since the cache was made to fit
        self.trees: dict[int, DraftTree] = {}  # by row, of the last `read`

    def check_room(self, columns: int) -> None:
        """Refuse a row that would not fit even alone."""
        columns += self.cache.state_columns(columns)
        if self.max_tokens is not None and columns > self.max_tokens:
            raise ValueError(
                f"a prompt, its answer and a draft take up to {columns} tokens, the cache may hold {self.max_tokens}: "
                "raise max_tokens_in_cache, lower max_new_tokens or shorten the prompt"
            )

    def fits(self, columns: int) -> bool:
        """Return whether another row with this many columns fits, with all rows padded to the longest."""
        if self.max_tokens is None:
            return True
        widest = max(columns, *self.columns_by_row.values(), 0)  # 0: max needs two arguments
        # states of recurrent mixers take as much memory as this many columns
        widest += self.cache.state_columns(widest)
        return (len(self.rows) + 1) * widest <= self.max_tokens

    def admit(self, row: int, prompt: list[int], room: int = 0) -> None:
        """Admit a prompt with space for `room` more tokens; a prefix that a free slot still holds is not read again."""
        self.target.check_prompt(prompt)
        slot = len(self.rows)
        with self.target.lock:
            self.reader.check(rows=slot + 1)
        # the check may have found that the model needs another mode, and so another cache
        if self.cache.mixers is not self.reader.mixers:
            self.cache = self.reader.new_cache()
        self.columns_by_row[row] = len(prompt) + room
        # the free slot that shares the longest prefix moves to the front
        shared = [self._shared(free, prompt) for free in range(slot, len(self.texts))] or [0]
        prefix = max(shared)
        self._swap(slot, slot + shared.index(prefix))
        self._reserve(slot + 1)
        self.texts[slot] = self.texts[slot][:prefix]
        self.cache.cut(slot, prefix)
        self.rows.append(row)
        self.prompts[row] = prompt

    def begin(self, prompt: list[int], choose: Choose, room: int = 0, row: int = 0) -> Committed:
        """Replace all rows by one prompt and read it; return it with the token chosen after it."""
        self.clear()
        self.admit(row, prompt, room)
        return self.finish_prompts()[row].commit(choose)

    def release(self, row: int, *, wipe: bool = False) -> None:
        """Release a row: its slot becomes free and keeps its sequence until it is reused, or nothing after `wipe`."""
        slot = self._slot(row)
        # a later sequence's mask hides what a slot holds, but not a nan
        if wipe:
            self.cache.clear(slot)
            self.texts[slot] = []
        del self.columns_by_row[row]
        self.prompts.pop(row, None)
        # the last row that is decoded takes its slot, and the last whose prompt is being read that one's
        if slot < self.num_decoding:
            self.num_decoding -= 1
            self._swap(slot, self.num_decoding)
            slot = self.num_decoding
        self._swap(slot, len(self.rows) - 1)
        self.rows.pop()
        self.is_loose = True

    def fork(self, row: int, new_row: int) -> None:
        """Copy a row's committed sequence to a new row."""
        slot = len(self.rows)
        self.columns_by_row[new_row] = self.columns_by_row[row]
        self._reserve(slot + 1)
        self.rows.append(new_row)
        self.cache.copy(self._slot(row), slot)
        self.texts[slot] = list(self.text(row))
        self._swap(slot, self.num_decoding)
        self.num_decoding += 1

    def clear(self) -> None:
        """Release all rows."""
        self.rows = []
        self.columns_by_row = {}
        self.prompts = {}
        self.num_decoding = 0

    def _reserve(self, slots: int) -> None:
        """Make the cache fit this number of slots, each wide enough for any admitted row, and `texts` fit the cache.

        The cache releases what is far beyond that.
        """
        self.is_loose = False
        columns = max([*self.columns_by_row.values(), *self.cache.lengths[: len(self.rows)]])
        self.cache.reserve(slots, columns, self.max_tokens)
        # new slots get an empty sequence, released ones lose theirs, and one that the cache has cut is cut here
        texts = self.texts + [[] for _ in self.cache.lengths]
        self.texts = [
            text[:length] for text, length in zip(texts, self.cache.lengths, strict=False)
        ]

    def _swap(self, first: int, second: int) -> None:
        """Swap two slots together with their rows."""
        if first == second:
            return
        self.cache.swap(first, second)
        self.texts[first], self.texts[second] = self.texts[second], self.texts[first]
        if max(first, second) < len(self.rows):
            self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def _shared(self, slot: int, prompt: list[int]) -> int:
        """Return how many of a prompt's tokens a slot already holds; the last token is always read again."""
        border = self.target.border
        text = self.texts[slot]
        # the same tokens may stand for other images
        if media_of(prompt) or slot in self.cache.offsets:
            return 0
        # beyond the border other rotary frequencies read the whole sequence
        if (len(text) > border) != (len(prompt) > border):
            return 0
        limit = min(len(text), len(prompt) - 1)
        same = next((i for i in range(limit) if text[i] != prompt[i]), limit)
        reusable = self.cache.reusable(slot, same)
        return reusable if self.reader.reads_on(reusable, len(prompt)) else 0

    @torch.inference_mode()
    def read_prompts(self, most: int | None = None) -> dict[int, PromptOutput]:
        """Make one forward over tokens of admitted prompts.

        Args:
            most: the most tokens of the forward, padding included.

        Returns:
            The outputs of the prompts that were read to their end.
        """
        batch = self._batch_prompts(PREFILL_CHUNK if most is None else most)
        if not batch:
            return {}
        logits = self.extend(batch)
        ended = [row for row in batch if self.length(row) == len(self.prompts[row])]
        return {row: self._end_prompt(row, logits[row]) for row in ended}

    def _batch_prompts(self, most: int) -> dict[int, list[int]]:
        """Return what the next forward reads of the first prompts, within `most` tokens with padding."""
        batch: dict[int, list[int]] = {}
        longest = 0
        start = 0
        for row, prompt in self.prompts.items():
            tokens = prompt[self.length(row) :]
            longest = max(longest, len(tokens))
            start = max(start, self.length(row))
            is_alone = self.target.is_alone(len(prompt)) or bool(media_of(prompt))
            # padding is written too, up to column start + longest
            fits = (len(batch) + 1) * longest <= most and start + longest <= max(
                self.columns_by_row.values()
            )
            if batch and (is_alone or not fits):
                break
            # A long first prompt is read in chunks. A sequence beyond longrope's border is not, as one set of
            # frequencies reads it whole; nor one with images; nor by mixers that would ignore what they have read.
            is_whole = (
                len(prompt) > self.target.border or media_of(prompt) or self.reader.mixers.by_levels
            )
            if not batch and not is_whole:
                tokens = tokens[:most]
            batch[row] = tokens
            if is_alone:
                break
        return batch

    def finish_prompts(self, most: int | None = None) -> dict[int, PromptOutput]:
        """Read all admitted prompts to their ends, by forwards of up to `most` tokens; return their outputs."""
        outputs: dict[int, PromptOutput] = {}
        while self.prompts:
            outputs |= self.read_prompts(most)
        return outputs

    def _end_prompt(self, row: int, logits: Tensor) -> PromptOutput:
        """Move a row whose prompt is read to the rows being decoded, and return its prompt's output."""
        prompt = self.prompts.pop(row)
        slot = self._slot(row)
        features = self.features_at(row, range(len(prompt)))
        self.cache.snapshot(slot, len(prompt))
        self._swap(slot, self.num_decoding)
        self.num_decoding += 1
        tree = DraftTree.chain(prompt[-1:])
        output = TargetOutput(
            tree,
            logits[None],
            features=None,
            start=len(prompt) - 1,
            text=prompt[:-1],
        )
        return PromptOutput(prompt, features, output)

    @torch.inference_mode()
    def extend(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read and commit tokens of some rows; return for each row the logits [V] after its last token."""
        rows = sorted(tokens, key=self._slot)
        slots = [self._slot(row) for row in rows]
        sizes = [len(tokens[row]) for row in rows]
        starts = [self.cache.lengths[slot] for slot in slots]
        for row, start, size in zip(rows, starts, sizes, strict=True):
            # what a prompt shares with another sequence was read with the frequencies it has
            if row not in self.prompts:
                self.target.check_growth(start, start + size)
        padded = pad_sequence(
            [torch.tensor(tokens[row], dtype=torch.long) for row in rows],
            batch_first=True,
        )
        width = padded.shape[1]
        # padding takes the position of the last token: the model may have no later one
        steps = torch.minimum(torch.arange(width), torch.tensor(sizes)[:, None] - 1)
        positions = torch.tensor(starts)[:, None] + steps
        hidden, _ = self._forward(slots, padded, positions, None, sizes=sizes, commits=True)
        for row, slot, size in zip(rows, slots, sizes, strict=True):
            self.texts[slot] += tokens[row]
            self.cache.lengths[slot] += size
        last = [index * width + size - 1 for index, size in enumerate(sizes)]
        logits = self.reader.logits(self.target.head, pick_rows(hidden.flatten(0, 1), last))
        return dict(zip(rows, logits, strict=True))

    @torch.inference_mode()
    def read(self, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        """Make one forward over a tree for each row: a node sees its row's sequence, its ancestors and itself."""
        # only now, as a newcomer may have shared what a free slot holds
        if self.is_loose:
            self._reserve(len(self.rows))
        outputs: dict[int, TargetOutput] = {}
        for rows in self.groups(sorted(trees, key=self._slot)):
            outputs |= self._read({row: trees[row] for row in rows})
        self.trees = dict(trees)
        return outputs

    def _read(self, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        """Return the outputs of rows that share a forward."""
        slots = [self._slot(row) for row in trees]
        starts = [self.cache.lengths[slot] for slot in slots]
        sizes = [tree.columns for tree in trees.values()]
        tokens, depths, tree_mask = lay_out(
            [*trees.values()],
            self.target.device,
            self.target.vocab_size,
        )
        for start, tree in zip(starts, trees.values(), strict=True):
            self._check_border(start, tree)
        positions = upload(torch.tensor(starts)[:, None], depths.device) + depths
        hidden, states = self._forward(slots, tokens, positions, tree_mask, sizes=sizes)
        # the LM head reads no padding
        nodes: list[int] = []
        for index, size in enumerate(sizes):
            first = index * max(sizes)
            nodes += range(first, first + size)
        logits = self.reader.logits(self.target.head, pick_rows(hidden.flatten(0, 1), nodes)).split(
            sizes
        )
        outputs = {}
        for index, (row, tree) in enumerate(trees.items()):
            features = None
            if states is not None:
                features = states[index, :, : sizes[index]].transpose(0, 1)
            text = self.texts[slots[index]]
            outputs[row] = TargetOutput(
                tree,
                logits[index],
                features,
                start=starts[index],
                text=text,
            )
        return outputs

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit a path of each row's tree and drop all other nodes from the cache, in place."""
        tokens = {row: self.trees[row].tokens[[*path]].tolist() for row, path in paths.items()}
        self.keep_columns(paths, tokens)

    def keep_columns(
        self,
        columns: Mapping[int, Sequence[int]],
        tokens: Mapping[int, list[int]],
    ) -> None:
        """Commit columns of each row that were read last, one for each of its tokens; further ones move up after."""
        slots = {row: self._slot(row) for row in columns}
        paths = {slots[row]: path for row, path in columns.items()}
        counts = {slots[row]: len(committed) for row, committed in tokens.items()}
        # modules that keep a state run again
        with self.target.lock:
            self.cache.keep(paths, counts)
        for row, committed in tokens.items():
            self.texts[slots[row]] += committed

    def commit(self, row: int, tokens: list[int]) -> None:
        """Commit tokens whose columns lie after a row's sequence already."""
        slot = self._slot(row)
        self.cache.lengths[slot] += len(tokens)
        self.texts[slot] += tokens

    @torch.inference_mode()
    def ahead(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        depths: list[int],
        tree_mask: Tensor,
    ) -> Tensor:
        """Read the last K draft tokens of some rows; nothing is committed.

        Args:
            rows: the rows.
            tokens: [B, K], the last draft tokens; earlier calls have read those before.
            depths: how many positions after the sequence each token of a draft is.
            tree_mask: [B, K, R], which of all R draft tokens each of the last K sees.

        Returns:
            [B, K, V], the logits after each.
        """
        slots = [self._slot(row) for row in rows]
        starts = torch.tensor([self.cache.lengths[slot] for slot in slots])
        positions = starts[:, None] + torch.tensor(depths)
        hidden, _ = self._forward(slots, tokens, positions, tree_mask)
        return self.reader.logits(self.target.head, hidden)

    def features_at(self, row: int, columns: Sequence[int]) -> Tensor | None:
        """Return [T, L, D], the tapped states of T of a row's columns, committed or not; None without taps."""
        if not self.taps:
            return None
        buffer = self.cache.tapped.buffer[self._slot(row)]
        return buffer.index_select(1, upload(torch.tensor(columns), buffer.device)).transpose(0, 1)

    def lend(self) -> TargetTexts:
        """Return the rows, for a drafter that reads the target's cache."""
        return TargetTexts(self.target.view(), self)

    def _forward(
        self,
        slots: list[int],
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor | None,
        **offset: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over tokens [B, N], the last of R at positions [B, R].

        `offset` are further arguments of the cache's `set_write_offset`.

        Returns:
            The LM head's input [B, N, D], and the tapped states [B, L, N, D] or None.
        """
        count = tokens.shape[1]
        read_before = positions.shape[1] - count
        # images are read with the whole of their prompt
        media: Mapping[str, Any] = {}
        if not self.cache.lengths[slots[0]]:
            media = media_of(self.prompts.get(self.rows[slots[0]], []))
        self.cache.set_write_offset(
            slots, [self.cache.lengths[slot] + read_before for slot in slots], **offset
        )
        tapping: Any = self.reader.tapping(self.taps) if self.taps else nullcontext({})
        with self.target.lock, tapping as tapped:
            if media:
                hidden = self.reader.read_images(tokens, media, self.cache)
            else:
                hidden = self.reader(tokens, positions, tree_mask, self.cache)
        if not self.taps:
            return hidden, None
        tapped[-1] = hidden
        states = torch.stack(
            [tapped[tap][:, -count:].to(self.target.device) for tap in self.taps],
            dim=1,
        )
        self.cache.tapped.write(states)
        return hidden, states

    def _slot(self, row: int) -> int:
        """Return the slot of a row."""
        return self.rows.index(row)

    def length(self, row: int) -> int:
        """Return the number of a row's committed tokens."""
        return self.cache.lengths[self._slot(row)]

    def text(self, row: int) -> list[int]:
        """Return a row's committed tokens."""
        return self.texts[self._slot(row)]

    def check_tree(self, row: int, tree: DraftTree) -> None:
        """Refuse a tree that the row has no space for, or that crosses longrope's switch of frequencies."""
        start = self.length(row)
        self._check_border(start, tree)
        if self.max_tokens is not None and start + tree.columns > self.columns_by_row[row]:
            left = self.columns_by_row[row] - start - 1
            raise ValueError(
                f"the draft has {tree.columns - 1} nodes, and the cache's limit leaves {left}: "
                "draft within budget.nodes, or raise max_tokens_in_cache"
            )

    def _check_border(self, start: int, tree: DraftTree) -> None:
        """Refuse a tree after `start` tokens that crosses longrope's switch of frequencies."""
        # its levels are counted only where there is a switch
        if start <= self.target.border < sys.maxsize:
            self.target.check_growth(start, start + tree.levels + 1)

    def levels(self, row: int, wanted: int) -> int:
        """Return the number of wanted draft levels that fit; no draft may cross longrope's switch of frequencies."""
        start = self.length(row)
        border = self.target.border
        if start > border or start + 1 + wanted <= border:
            return wanted
        return int(border) - start - 1

    def groups(self, rows: list[int]) -> list[list[int]]:
        """Return groups of rows that share a forward: all, unless the model's positions depend on the longest."""
        alone = [row for row in rows if self.target.is_alone(self.length(row))]
        together = [row for row in rows if row not in alone]
        groups = [[row] for row in alone]
        if together:
            groups.append(together)
        return groups
