"""The sequences being decoded with one target, by row: tokens, keys and values, tapped states."""

# B rows of a forward, T tokens, N tree nodes or new tokens, R tokens that are not committed, L taps, D target width,
# V vocabulary

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.arguments import media_of
from eagle.core.drafter import Committed, Followers
from eagle.core.grown import lay_out
from eagle.core.sampling import rank_tokens
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, check_choice
from eagle.device import pick_rows, upload
from eagle.target.view import TargetSequences

PREFILL_CHUNK = 1024  # tokens of a prompt's forward, padding included
LOGIT_ROWS = 64  # tokens of a prompt whose logits are computed at once


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """A prompt after its forward: tapped states, and the target's output after the last token."""

    tokens: list[int]
    features: Tensor | None  # [T, L, D], the inputs of L layers at the T tokens; None without taps
    output: TargetOutput
    # the target's likeliest next tokens after each token of the prompt, if the drafter reads them
    followers: Followers | None = None

    def commit(self, choose: Choose) -> Committed:
        """Choose the token after the prompt, and return the prompt with it as a drafter takes committed tokens.

        `choose` is the rule by which the target chooses. The token is the root of the first draft.
        """
        # the output has one node, the prompt's last token. The token chosen after it is the root of the next tree
        (root,) = choose(self.output, [0])
        # refuse the mark that stands for nan logits, after this one node
        check_choice(root, self.output, accepted=1)
        tokens = torch.tensor(self.tokens)
        return Committed(tokens, self.features, root, followers=self.followers)


class TargetState:
    """Rows of tokens: `admit` a prompt, `read_prompts`, `read` a tree for each row, `keep` accepted paths, `release`.

    A sequence has three numbers. Its row is the caller's, and stays. Its cache row is the index in the cache's batch
    dimension, which changes when other rows end. Its index `i` in a forward is that among the sequences read there.
    Rows being decoded lie in the first cache rows, followed by rows whose prompts are still being read, and then by
    free cache rows, which keep their last sequence.
    """

    def __init__(
        self,
        target: Any,
        taps: tuple[int, ...] = (),
        max_tokens: int | None = None,
        mark: Any = None,
    ) -> None:
        """Open a state without rows (sequences).

        Args:
            target: the target.
            taps: indices of the layers whose inputs are returned with the logits; -1 is the LM head's input.
            max_tokens: the most that the cache may hold, in columns (one token each) times rows; None: no limit.
            mark: the weights' `WeightMark`: a later state reuses this one's cache only while they have not changed.
        """
        target.check_taps(taps)
        self.target = target
        self.taps = taps
        self.max_tokens = max_tokens
        self.mark = mark
        # this state keeps its reader, even if the target makes another one because its model was changed
        self.reader = target.reader
        self.cache = self.reader.new_cache()
        self.sequences: list[list[int]] = [[]]  # by cache row, the tokens that are in the cache
        # by cache row, the numbers of the rows, which fill the first cache rows; the others are free
        self.rows: list[int] = []
        self.columns_by_row: dict[int, int] = {}  # the most KV columns that a row may need
        # of rows whose prompt is not fully read, in the order of their admission
        self.prompts: dict[int, list[int]] = {}
        self.num_decoding = 0  # rows whose prompt is read: they fill the cache rows before this one
        self.needs_shrinking = False  # whether rows were released since the cache was made to fit
        self.trees: dict[int, DraftTree] = {}  # by row, of the last `read`
        # how many likely next tokens of each token of a prompt are returned with the prompt, for a drafter
        self.num_followers = 0
        self.followers: dict[int, list[Followers]] = {}  # by row, of the parts of its prompt

    def check_room(self, columns: int) -> None:
        """Refuse a row (sequence) that would exceed the cache's limit even alone.

        `columns` is the number of its tokens, those of its answer and of a draft included.
        """
        # recurrent states count as the columns that take as much memory
        columns += self.cache.state_columns(columns)
        if self.max_tokens is not None and columns > self.max_tokens:
            raise ValueError(
                f"a prompt, its answer and a draft take up to {columns} tokens, the cache may hold {self.max_tokens}: "
                "raise max_tokens_in_cache, lower max_new_tokens or shorten the prompt"
            )

    def fits(self, columns: int) -> bool:
        """Return whether the cache's limit leaves space for another row (sequence) of `columns` tokens.

        All rows are counted with the columns of the longest, as they are padded to it.
        """
        if self.max_tokens is None:
            return True
        widest = max(columns, *self.columns_by_row.values(), 0)  # 0: max needs two arguments
        # a sequence's recurrent states take as much memory as this many columns
        widest += self.cache.state_columns(widest)
        return (len(self.rows) + 1) * widest <= self.max_tokens

    def admit(self, row: int, prompt: list[int], room: int = 0) -> None:
        """Add a row (sequence) whose prompt `read_prompts` then reads.

        A prefix that the cache still holds of an earlier sequence is not read again.

        Args:
            row: a number for the row, which the caller chooses.
            prompt: its tokens.
            room: how many more columns (one for each token) its answer and drafts may need.
        """
        self.target.check_prompt(prompt)
        cache_row = len(self.rows)
        with self.target.lock:
            self.reader.check(rows=cache_row + 1)
        # the check may have found that the model needs another mode, and so another cache: its mixers, the modules that
        # keep recurrent states, are wrapped anew then
        if self.cache.mixers is not self.reader.mixers:
            self.cache = self.reader.new_cache()
        self.columns_by_row[row] = len(prompt) + room
        # of the free cache rows, that with the longest shared prefix is taken: it moves after the rows in use
        free_rows = range(cache_row, len(self.sequences))
        shared = [self._shared_prefix(free, prompt) for free in free_rows] or [0]
        prefix = max(shared)
        self._swap(cache_row, cache_row + shared.index(prefix))
        self._reserve(cache_row + 1)
        self.sequences[cache_row] = self.sequences[cache_row][:prefix]
        self.cache.cut(cache_row, prefix)
        self.rows.append(row)
        self.prompts[row] = prompt

    def begin(self, prompt: list[int], choose: Choose, room: int = 0, row: int = 0) -> Committed:
        """Replace all sequences by one and read its prompt; return the prompt with the token chosen after it.

        Args:
            prompt: the tokens.
            choose: the rule by which the target's token is chosen.
            room: how many more columns (one for each token) the answer and drafts may need.
            row: a number for the row.
        """
        self.clear()
        self.admit(row, prompt, room)
        return self.finish_prompts()[row].commit(choose)

    def release(self, row: int, *, wipe: bool = False) -> None:
        """End a row: its place in the cache becomes free, and keeps its tokens unless `wipe` empties it.

        A row is a sequence by its caller's number. A later prompt may share a prefix with the sequence that is kept.
        """
        cache_row = self._cache_row(row)
        # `wipe` is for a row that failed: a later sequence's mask hides old numbers, but not NaN
        if wipe:
            self.cache.clear(cache_row)
            self.sequences[cache_row] = []
        del self.columns_by_row[row]
        self.prompts.pop(row, None)
        self.followers.pop(row, None)
        # The rows must stay without gaps and in their order: the last row being decoded takes the released cache row,
        # and the last row whose prompt is being read takes the cache row of that one.
        if cache_row < self.num_decoding:
            self.num_decoding -= 1
            self._swap(cache_row, self.num_decoding)
            cache_row = self.num_decoding
        self._swap(cache_row, len(self.rows) - 1)
        self.rows.pop()
        self.needs_shrinking = True

    def fork(self, row: int, new_row: int) -> None:
        """Copy a row's committed sequence to a new row, as beam search does, with the same space to grow."""
        cache_row = len(self.rows)
        self.columns_by_row[new_row] = self.columns_by_row[row]
        self._reserve(cache_row + 1)
        self.rows.append(new_row)
        self.cache.copy(self._cache_row(row), cache_row)
        self.sequences[cache_row] = list(self.sequence(row))
        # after the rows being decoded, and before those whose prompts are still being read
        self._swap(cache_row, self.num_decoding)
        self.num_decoding += 1

    def rewind(self, row: int, length: int) -> int:
        """Cut a row's committed sequence to its first tokens: `length`, or fewer if recurrent states are kept there.

        Returns how many tokens stay.
        """
        cache_row = self._cache_row(row)
        length = self.cache.reusable(cache_row, length)
        self.sequences[cache_row] = self.sequences[cache_row][:length]
        self.cache.cut(cache_row, length)
        return length

    def clear(self) -> None:
        """Release all rows (sequences); the cache keeps their tokens, as later prompts may begin with them."""
        self.rows = []
        self.columns_by_row = {}
        self.prompts = {}
        self.followers = {}
        self.num_decoding = 0

    def _reserve(self, cache_rows: int) -> None:
        """Let the cache have space for this number of sequences, each as long as any admitted one may become.

        The cache releases memory that is far beyond that.
        """
        self.needs_shrinking = False
        columns = max([*self.columns_by_row.values(), *self.cache.lengths[: len(self.rows)]])
        self.cache.reserve(cache_rows, columns, self.max_tokens)
        # `sequences` follows the cache: it gains or loses entries, and a sequence that the cache has cut is cut here
        sequences = self.sequences + [[] for _ in self.cache.lengths]
        self.sequences = [
            tokens[:length] for tokens, length in zip(sequences, self.cache.lengths, strict=False)
        ]

    def _locate(self, rows: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the cache row of each row of a forward, and the length of its sequence, after which it writes."""
        cache_rows = [self._cache_row(row) for row in rows]
        return cache_rows, [self.cache.lengths[cache_row] for cache_row in cache_rows]

    def _swap(self, first: int, second: int) -> None:
        """Exchange the places of two sequences in the cache, with their tokens and their callers' row numbers."""
        if first == second:
            return
        self.cache.swap(first, second)
        self.sequences[first], self.sequences[second] = (
            self.sequences[second],
            self.sequences[first],
        )
        if max(first, second) < len(self.rows):
            self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def _shared_prefix(self, cache_row: int, prompt: list[int]) -> int:
        """Return how many of a prompt's first tokens need not be read, as a free row of the cache still holds them.

        The last token is always read again, because its logits are needed.
        """
        border = self.target.border
        cached = self.sequences[cache_row]
        # the same tokens may stand for other images
        if media_of(prompt) or cache_row in self.cache.offsets:
            return 0
        # a longrope model reads sequences longer than the border with other rotary frequencies throughout: keys of one
        # side are wrong for the other
        if (len(cached) > border) != (len(prompt) > border):
            return 0
        limit = min(len(cached), len(prompt) - 1)
        same = next((i for i in range(limit) if cached[i] != prompt[i]), limit)
        # recurrent states are held after some lengths alone
        reusable = self.cache.reusable(cache_row, same)
        return reusable if self.reader.reads_on(reusable, len(prompt)) else 0

    @torch.inference_mode()
    def read_prompts(self, most: int | None = None) -> dict[int, PromptOutput]:
        """Run one prefill forward over tokens of admitted prompts, whole ones or chunks.

        Args:
            most: the most tokens of the forward, padding included; None: PREFILL_CHUNK.

        Returns:
            By row, the outputs of the prompts that are now read to their end.
        """
        batch = self._batch_prompts(PREFILL_CHUNK if most is None else most)
        if not batch:
            return {}
        logits = self.extend(batch)
        ended = [row for row in batch if self.length(row) == len(self.prompts[row])]
        return {row: self._finish_prompt(row, logits[row]) for row in ended}

    def _batch_prompts(self, most: int) -> dict[int, list[int]]:
        """Return by row (sequence) the tokens of the next prefill forward: those of the first prompts that fit in.

        Args:
            most: the most tokens of the batch, padding included.
        """
        batch: dict[int, list[int]] = {}
        longest = 0  # tokens of a row in this forward
        start = 0  # the most tokens of a row that are in the cache
        for row, prompt in self.prompts.items():
            tokens = prompt[self.length(row) :]
            longest = max(longest, len(tokens))
            start = max(start, self.length(row))
            # read in a forward of its own: with images, beyond longrope's border, or if the model reads no batches
            is_alone = self.target.is_alone(len(prompt)) or bool(media_of(prompt))
            # padding is written to the cache too, up to column start + longest
            fits_forward = (len(batch) + 1) * longest <= most
            fits_cache = start + longest <= max(self.columns_by_row.values())
            if batch and (is_alone or not (fits_forward and fits_cache)):
                break
            # A long first prompt is read in chunks. A sequence beyond longrope's border is not, as one set of
            # frequencies must read all of it; nor is one with images; nor is any prompt by mixers that ignore
            # their state when they get several tokens.
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
        """Read all admitted prompts to their ends; return their outputs by row (sequence).

        `most` is the most tokens of each forward, padding included; None: PREFILL_CHUNK.
        """
        outputs: dict[int, PromptOutput] = {}
        while self.prompts:
            outputs |= self.read_prompts(most)
        return outputs

    def _finish_prompt(self, row: int, logits: Tensor) -> PromptOutput:
        """Move a row (sequence) whose prompt is read to those being decoded, and return its prompt's output.

        Args:
            row: the row.
            logits: [V], over the vocabulary, after the prompt's last token.
        """
        prompt = self.prompts.pop(row)
        cache_row = self._cache_row(row)
        features = self.features_at(row, range(len(prompt)))
        # recurrent states at the prompt's end are held: a later prompt that begins with this one can go on from them
        self.cache.snapshot(cache_row, len(prompt))
        self._swap(cache_row, self.num_decoding)
        self.num_decoding += 1
        # the prompt's last token as a tree of one node, whose output chooses the first token of the answer
        tree = DraftTree.chain(prompt[-1:])
        output = TargetOutput(
            tree,
            logits[None],
            features=None,
            start=len(prompt) - 1,
            sequence=prompt[:-1],
        )
        return PromptOutput(prompt, features, output, Followers.join(self.followers.pop(row, [])))

    @torch.inference_mode()
    def extend(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read and commit the next tokens of some rows (sequences), as of prompts; return by row the logits after them.

        The logits are [V], over the vocabulary, after the last of these tokens. `tokens` are by row.
        """
        rows = sorted(tokens, key=self._cache_row)
        cache_rows, starts = self._locate(rows)
        sizes = [len(tokens[row]) for row in rows]
        for row, start, size in zip(rows, starts, sizes, strict=True):
            # a prompt is not checked: `_shared_prefix` reuses only tokens that its own rotary frequencies have read
            if row not in self.prompts:
                self.target.check_growth(start, start + size)
        padded = pad_sequence(
            [torch.tensor(tokens[row], dtype=torch.long) for row in rows],
            batch_first=True,
        )
        width = padded.shape[1]
        # right padding; positions are [B, width]
        # padding takes the position of the last token: the model may have no later one
        steps = torch.minimum(torch.arange(width), torch.tensor(sizes)[:, None] - 1)
        positions = torch.tensor(starts)[:, None] + steps
        # [B, width, D], the LM head's input; the tapped states lie in the cache
        hidden, _ = self._forward(
            cache_rows, padded, positions, tree_mask=None, sizes=sizes, commits=True
        )
        for row, cache_row, size in zip(rows, cache_rows, sizes, strict=True):
            self.sequences[cache_row] += tokens[row]
            self.cache.lengths[cache_row] += size
        if self.num_followers:
            for row, states in zip(rows, hidden, strict=True):
                self._rank_followers(row, tokens[row], states)
        # of each row's last token in the flattened [B * width] states
        last = [index * width + size - 1 for index, size in enumerate(sizes)]
        logits = self.reader.logits(self.target.head, pick_rows(hidden.flatten(0, 1), last))
        return dict(zip(rows, logits, strict=True))

    def _rank_followers(self, row: int, tokens: list[int], states: Tensor) -> None:
        """Store the likeliest next tokens after each token of a part of a prompt, for a drafter that reads them.

        Args:
            row: the sequence, by its caller's number.
            tokens: T tokens of its prompt.
            states: [T or more, D], the LM head's input at these, and at padding.
        """
        # by pieces, as the logits of a whole prompt would take much memory
        ranked = [
            rank_tokens(self.reader.logits(self.target.head, chunk), self.num_followers)
            for chunk in states[: len(tokens)].split(LOGIT_ROWS)
        ]
        followers = Followers(torch.tensor(tokens), torch.cat(ranked))
        self.followers.setdefault(row, []).append(followers)

    @torch.inference_mode()
    def read(self, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        """Read a draft tree for each row (sequence): return by row the target's logits and tapped states at every node.

        A node attends to its row's sequence, its ancestors and itself. All rows share a forward where they may.
        """
        # released memory is freed only now, as a prompt admitted since may have shared a free row's prefix
        if self.needs_shrinking:
            self._reserve(len(self.rows))
        outputs: dict[int, TargetOutput] = {}
        for rows in self.groups(sorted(trees, key=self._cache_row)):
            outputs |= self._read({row: trees[row] for row in rows})
        self.trees = dict(trees)
        return outputs

    def _read(self, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        """Read the trees of rows (sequences) that share a forward; return its logits and tapped states by row."""
        cache_rows, starts = self._locate(trees)
        sizes = [tree.columns for tree in trees.values()]  # nodes that are read, the root included
        # [B, N] tokens and depths of B trees, padded to N nodes; [B, N, N] or None for chains
        tokens, depths, tree_mask = lay_out(
            [*trees.values()],
            self.target.device,
            self.target.vocab_size,
        )
        for start, tree in zip(starts, trees.values(), strict=True):
            self._check_border(start, tree)
        # siblings share a position: the sequence's length plus the node's depth
        positions = upload(torch.tensor(starts)[:, None], depths.device) + depths
        # the LM head's input [B, N, D], and the states [B, taps, N, D] or None
        hidden, states = self._forward(cache_rows, tokens, positions, tree_mask, sizes=sizes)
        # indices of the trees' nodes in the flattened states: the LM head reads no padding
        nodes: list[int] = []
        for i, size in enumerate(sizes):
            first = i * max(sizes)
            nodes += range(first, first + size)
        # [nodes of all trees, V], then of each tree
        logits = self.reader.logits(self.target.head, pick_rows(hidden.flatten(0, 1), nodes))
        logits_by_tree = logits.split(sizes)
        outputs = {}
        # `i` is the index of a tree in the forward
        for i, (row, tree) in enumerate(trees.items()):
            # [nodes, taps, D]
            features = None if states is None else states[i, :, : sizes[i]].transpose(0, 1)
            outputs[row] = TargetOutput(
                tree,
                logits_by_tree[i],
                features,
                start=starts[i],
                sequence=self.sequences[cache_rows[i]],
            )
        return outputs

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit an accepted path of each row's last tree, and drop all other nodes from the KV cache.

        `paths` are the nodes of the path by row, as indices into its tree, the root (node 0) included.
        """
        tokens = {row: self.trees[row].tokens[[*path]].tolist() for row, path in paths.items()}
        self.keep_columns(paths, tokens)

    def keep_columns(
        self,
        columns: Mapping[int, Sequence[int]],
        tokens: Mapping[int, list[int]],
    ) -> None:
        """Commit tokens and their columns of the last forward, and keep further columns uncommitted after them.

        A column is one token's place in the KV cache, and a row a sequence. Beam search keeps nodes of several beams.

        Args:
            columns: by row the columns (one for each token read) to keep, in order, counted from its first uncommitted
                one.
            tokens: by row the tokens to commit, one for each of its first columns here.
        """
        cache_rows = {row: self._cache_row(row) for row in columns}
        paths = {cache_rows[row]: path for row, path in columns.items()}
        counts = {cache_rows[row]: len(committed) for row, committed in tokens.items()}
        # modules that keep a state run again
        with self.target.lock:
            self.cache.keep(paths, counts)
        for row, committed in tokens.items():
            self.sequences[cache_rows[row]] += committed

    def commit(self, row: int, tokens: list[int]) -> None:
        """Commit tokens whose keys and values already lie right after a row's sequence, so that none has to move.

        So it is where the accepted path was moved on the device (`RowCache.move`) before the host knew its length.
        """
        cache_row = self._cache_row(row)
        self.cache.lengths[cache_row] += len(tokens)
        self.sequences[cache_row] += tokens

    @torch.inference_mode()
    def read_ahead(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        depths: list[int],
        tree_mask: Tensor,
    ) -> Tensor:
        """Read uncommitted tokens after some rows under a tree mask, without committing anything.

        A draft model grows its tree level by level this way, and beam search its beams.

        Args:
            rows: B rows, sequences by their caller's numbers.
            tokens: [B, K], the last K draft tokens of each row; earlier calls have read those before.
            depths: of each of all R draft tokens, in all rows alike, how many draft tokens precede it on its path.
                Depth 0 is the first position after the committed sequence.
            tree_mask: [B, K, R], which of all R draft tokens each of the last K attends to.

        Returns:
            [B, K, V], the logits after each, over V tokens of the vocabulary.
        """
        cache_rows, starts = self._locate(rows)
        positions = torch.tensor(starts)[:, None] + torch.tensor(depths)
        hidden, _ = self._forward(cache_rows, tokens, positions, tree_mask)
        return self.reader.logits(self.target.head, hidden)

    def features_at(self, row: int, columns: Sequence[int]) -> Tensor | None:
        """Return [T, L, D], the inputs of L tapped layers, of width D, at T tokens of a sequence; None without taps.

        `columns` are indices into the row, one for each token, committed or not.
        """
        if not self.taps:
            return None
        buffer = self.cache.tapped.tensor[self._cache_row(row)]  # [L, columns, D]
        return buffer.index_select(1, upload(torch.tensor(columns), buffer.device)).transpose(0, 1)

    def lend(self) -> TargetSequences:
        """Return read access to the sequences' keys and values, and forwards after them, for drafters that use both."""
        return TargetSequences(self.target.view(), self)

    def _forward(
        self,
        cache_rows: list[int],
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor | None,
        **offset: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over tokens, and store tapped states (inputs of some layers) beside its keys and values.

        Args:
            cache_rows: of B sequences, the index of each in the cache's batch dimension.
            tokens: [B, N], the last N of R uncommitted tokens.
            positions: [B, R], of all uncommitted tokens.
            tree_mask: [B, N, R], the uncommitted tokens that each new one attends to; None for a chain.
            offset: `sizes` and `commits` of the cache's `set_write_offset`.

        Returns:
            The LM head's input [B, N, D], and the inputs [B, L, N, D] of L tapped layers, or None without taps.
        """
        count = tokens.shape[1]
        # uncommitted tokens that earlier forwards have read
        read_before = positions.shape[1] - count
        # a prompt with images is read whole and alone, so only an empty cache row can have any
        media: Mapping[str, Any] = {}
        if not self.cache.lengths[cache_rows[0]]:
            media = media_of(self.prompts.get(self.rows[cache_rows[0]], []))
        self.cache.set_write_offset(
            cache_rows,
            [self.cache.lengths[cache_row] + read_before for cache_row in cache_rows],
            **offset,
        )
        tapping: Any = self.reader.tapping(self.taps) if self.taps else nullcontext({})
        with self.target.lock, tapping as tapped:
            if media:
                hidden = self.reader.read_images(tokens, media, self.cache)
            else:
                hidden = self.reader(tokens, positions, tree_mask, self.cache)
        if not self.taps:
            return hidden, None
        # tap -1 is the LM head's input
        tapped[-1] = hidden
        # a model that runs over paths gives states at all R uncommitted tokens: the last N are new
        states = torch.stack(
            [tapped[tap][:, -count:].to(self.target.device) for tap in self.taps],
            dim=1,
        )
        self.cache.tapped.write(states)
        return hidden, states

    def _cache_row(self, row: int) -> int:
        """Return the index in the cache's batch dimension of a row, a sequence by its caller's number."""
        return self.rows.index(row)

    def length(self, row: int) -> int:
        """Return the number of committed tokens of a row, a sequence by its caller's number."""
        return self.cache.lengths[self._cache_row(row)]

    def sequence(self, row: int) -> list[int]:
        """Return the committed tokens of a row, a sequence by its caller's number."""
        return self.sequences[self._cache_row(row)]

    def check_tree(self, row: int, tree: DraftTree) -> None:
        """Refuse a draft tree that exceeds a row's space in the KV cache, or that crosses longrope's border.

        Beyond this length a longrope model reads a sequence with other rotary frequencies.
        """
        start = self.length(row)
        self._check_border(start, tree)
        if self.max_tokens is not None and start + tree.columns > self.columns_by_row[row]:
            left = self.columns_by_row[row] - start - 1  # without the root, which is no draft
            raise ValueError(
                f"the draft has {tree.columns - 1} nodes, and the cache's limit leaves {left}: "
                "draft within budget.nodes, or raise max_tokens_in_cache"
            )

    def _check_border(self, start: int, tree: DraftTree) -> None:
        """Refuse a tree after `start` tokens whose deepest path crosses longrope's border, a length in tokens.

        A longrope model reads longer sequences with other rotary frequencies throughout, so the cache would be wrong.
        """
        # most models have no border, and then the tree's levels need not be counted
        if start <= self.target.border < sys.maxsize:
            # the root, and the levels below it
            self.target.check_growth(start, start + tree.levels + 1)

    def levels(self, row: int, wanted: int) -> int:
        """Return how many of the wanted levels (depths of a tree below its root) a row (sequence) may draft.

        No path may cross longrope's border, the length beyond which a longrope model uses other rotary frequencies.
        """
        start = self.length(row)
        border = self.target.border
        # the root takes a position too; a sequence beyond the border may grow
        if start > border or start + 1 + wanted <= border:
            return wanted
        return int(border) - start - 1

    def groups(self, rows: list[int]) -> list[list[int]]:
        """Return groups of rows (sequences) that may share a forward: one group, except rows that must be read alone.

        Such a row is beyond longrope's border, as the longest sequence of a batch decides the frequencies of all. Or a
        trial has shown that a batch changes the model's states.
        """
        alone = [row for row in rows if self.target.is_alone(self.length(row))]
        together = [row for row in rows if row not in alone]
        groups = [[row] for row in alone]
        if together:
            groups.append(together)
        return groups
