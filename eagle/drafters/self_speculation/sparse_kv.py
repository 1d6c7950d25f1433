"""The target drafts for itself after a sparse cache (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049)."""

# B sequences, T tokens, N observed tokens, K nodes of one level, R of all levels, S sparse columns, M copied columns
# X key heads, H query heads, D head width, V vocabulary

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
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.self_speculation.exit_state import TargetRowsState
from eagle.target.slots import with_room
from eagle.target.view import TargetSequences

Select = Literal["recent", "snap"]


class SparseKv(Drafter):
    """Drafts with all layers of the target, which attend to only `budget` columns of its KV cache.

    "recent" keeps the first `sinks` tokens and the latest (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453). "snap"
    keeps what the prompt's last tokens attend to, and all that follows the prompt (SnapKV, Li et al. 2024, arXiv
    2404.14469).
    """

    reads = Reads(view=True, kv_cache=True)

    def __init__(self, budget: int = 512, sinks: int = 4, select: Select = "recent") -> None:
        if select not in get_args(Select):
            raise ValueError(f"select is {select!r}, expected one of {', '.join(get_args(Select))}")
        if not 0 <= sinks < budget:
            raise ValueError(
                f"budget and sinks are {budget} and {sinks}, expected 0 <= sinks < budget"
            )
        # the observed tokens are kept themselves, so that there must be room for others
        if select == "snap" and budget <= OBSERVED:
            raise ValueError(
                f"budget is {budget}, expected more than {OBSERVED}, the last tokens, which are all held"
            )
        self.columns = budget  # the name `budget` is taken by the limits on a draft tree
        self.sinks = sinks
        self.select = select
        self.views: tuple[
            Any, ...
        ] = ()  # one entry, the target's layers (`TargetView`), once it is bound

    def bind_target(self, view: Any) -> None:
        """Take the target's layers, for timing; refuse models whose layers cannot attend to a choice of columns."""
        if view.keeps_states:
            raise ValueError(
                "some layers of the target keep a state, which holds all tokens of a sequence and not a choice of "
                "them: expected attention in all layers; take another drafter, as early_exit"
            )
        if self.select == "snap":
            if not view.shows_attention:
                raise ValueError(
                    "the target's attention shows no queries to choose by: load it with 'sdpa'"
                )
            if view.has_windows:
                raise ValueError(
                    "some layers have sliding windows, whose columns each head would choose: use 'recent'"
                )
        self.views = (view,)

    def open_with(self, sequences: Any) -> SparseState:
        """Return the state for several sequences, with a separate KV cache.

        `sequences` are the rows of the target's KV cache, from which columns (keys and values of one token) are copied.
        """
        if self.select == "snap":
            return SnapState(sequences, self.columns)
        return SparseState(sequences, self.columns, self.sinks)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft after the first reads, level by level."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens a draft's first forward reads: 1, the root.

        Keys and values of the tokens before it are copied from the target's cache.
        """
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of the copied columns of a sequence and of a draft's; "snap" may keep all of its columns.

        Args:
            tokens: The length of the sequence, the tokens of a draft included.
            column: The bytes that one token takes in the target.
        """
        # nodes of a draft that are read, with the root
        drafted = 1 + sum(self.forwards(self.budget or Budget()))
        columns = tokens if self.select == "snap" else min(tokens, self.columns + drafted)
        return with_room(columns) * column.cached

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor] | None:
        """Return a function to time: a forward of `rows` tokens after a sparse cache; None before a target is bound.

        Args:
            context: How many tokens the sequence has before them; at most the budget of columns is cached.
            rows: How many tokens the forward reads.
            scored: How many of them, from the last, get logits.
        """
        if not self.views:
            return None
        (view,) = self.views
        cache = view.new_cache()
        # the cost of a draft does not grow with its sequence
        start = min(context, self.columns)
        tokens = torch.ones(1, start + rows, dtype=torch.long)
        positions = torch.arange(start + rows)[None]
        # fills the cache; its logits are not needed. None: a causal mask
        view.next_logits(tokens[:, :start], positions[:, :start], None, cache, scored=1)
        # the cache counts these tokens from now on, so that each call below overwrites those of the call before
        cache.length = start

        def run() -> Tensor:
            return view.next_logits(
                tokens[:, start:], positions[:, start:], None, cache, scored=scored
            )

        return run


OBSERVED = 32  # last tokens of a prompt: their attention selects the columns to keep
POOLED = 5  # neighbouring columns over which the attention is averaged


class SparseState(TargetRowsState):
    """Sequences in a separate KV cache: the first `sinks` tokens and the latest others, `budget` columns in all.

    A column has the keys and values of one token in all layers. Committed columns are copied from the target's cache,
    the latest over the oldest. A draft is written after them and overwritten by the next one.
    """

    def __init__(self, target_rows: TargetSequences, budget: int, sinks: int) -> None:
        super().__init__()
        self.target_rows = target_rows
        self.view = target_rows.view
        self.budget = budget
        self.sinks = sinks
        self.ring = budget - sinks  # columns for the latest tokens, used in turn
        self.cache = self.view.new_cache()
        self.rows: list[int] = []  # the row in each cache row; a row gets one at its first draft
        # by row: how many of its committed tokens were copied, or left out for good
        self.copied: dict[int, int] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; its keys and values are copied when it is first asked for."""
        super().admit(row, noise)
        self.copied[row] = 0

    def release(self, row: int) -> None:
        """Release a row; the sequence in the last cache row moves to the free one."""
        super().release(row)
        del self.copied[row]
        if row in self.rows:
            cache_row = self.rows.index(row)
            last = len(self.rows) - 1
            # the rows in use must stay the first of the cache
            self.cache.clear(cache_row)
            self.cache.swap(cache_row, last)
            self.rows[cache_row] = self.rows[last]
            self.rows.pop()

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees grown from the target's own logits after the copied columns.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, and the new root.
            budgets: By row, the limits on its tree.
        """
        for row, update in updates.items():
            self.lengths[row] += len(update.tokens)
            if row not in self.rows:
                self.rows.append(row)
        # the target's columns of the accepted tokens overwrite the drafts of the last cycle
        self._copy_committed([row for row in self.rows if row in updates])
        trees: dict[int, DraftTree] = {}
        # groups of rows that may share a forward
        for group in self.target_rows.groups([*updates]):
            # in the order of this cache, which may differ from the target's
            rows = sorted(group, key=self.rows.index)
            requests = [self.request(row, updates[row].root, budgets[row]) for row in rows]
            trees |= zip(rows, self._grow(rows, requests), strict=True)
        return trees

    def _grow(self, rows: list[int], requests: list[DraftRequest]) -> list[DraftTree]:
        """Return the trees of rows that share forwards; each root is read first and stays until the next draft.

        Args:
            rows: The B rows, in the order of their cache rows.
            requests: The root, position, budget and noise of each row's tree.
        """
        # sliding windows go by positions, and the columns of a ring are not in their order
        column_positions = self._column_positions(rows) if self.view.has_windows else None
        roots = torch.tensor([[request.root] for request in requests])
        logits = self._read(
            rows, roots, depths=[0], tree_mask=None, column_positions=column_positions
        )[:, 0]
        # the cache counts the root as read
        for row in rows:
            self.cache.lengths[self.rows.index(row)] += 1
        depths: list[int] = []  # of all nodes that are read after the root, level after level

        def level(
            depth: int,
            row_indices: list[int],
            tokens: Tensor,
            parents: Tensor,
            tree_mask: Tensor,
        ) -> Tensor:
            """Return the logits [B, K, V] after the K nodes of one level of B rows' trees (a `RowsLevel`).

            `row_indices` are the rows whose trees still grow. The parents are not needed, as `tree_mask` [B, K, R]
            marks each node's ancestors.
            """
            # trees of another budget grow after those before them, from the roots again
            if depth == 1:
                depths.clear()
            depths.extend([depth] * tokens.shape[1])
            return self._read(
                [rows[i] for i in row_indices],
                tokens,
                depths=depths,
                tree_mask=tree_mask,
                column_positions=None
                if column_positions is None
                else column_positions[row_indices],
            )

        return grow_rows(requests, logits, level)

    def _read(
        self,
        rows: list[int],
        tokens: Tensor,
        *,
        depths: list[int],
        tree_mask: Tensor | None,
        column_positions: Tensor | None,
    ) -> Tensor:
        """Return [B, K, V], the logits after the last K tokens [B, K] of drafts, and add these tokens to the cache.

        Args:
            rows: The B rows of the tokens.
            tokens: [B, K], the draft tokens, or the roots.
            depths: Of all R draft tokens of a row, those that were read before included: how many positions after the
                root each is.
            tree_mask: [B, K, R], which of the R each of the last K attends to.
            column_positions: [B, S + 1], the position of each column, for models with sliding windows; else None.
        """
        # drafted tokens lie after the copied columns, level after level
        cache_rows = [self.rows.index(row) for row in rows]
        drafted = len(depths) - tokens.shape[1]
        self.cache.set_write_offset(
            cache_rows, [self.cache.lengths[cache_row] + drafted for cache_row in cache_rows]
        )
        positions = torch.tensor([self.lengths[row] for row in rows])[:, None] + torch.tensor(
            depths
        )
        return self.view.next_logits(tokens, positions, tree_mask, self.cache, column_positions)

    # -- which columns are copied -------------------------------------------------------------------------------------

    def _copy_committed(self, rows: Sequence[int]) -> None:
        """Copy the columns that were committed since the last draft, of all rows in one copy per layer.

        A column has the keys and values of one token in all layers.
        """
        # by row: its index in this cache, the columns [M] of the target's cache to copy, and where they go [M]
        moves = {}
        # the cache keeps a length for each row in use: new rows begin with 0
        lengths = self.cache.lengths + [0] * len(self.rows)
        self.cache.lengths = lengths[: len(self.rows)]
        for row in rows:
            cache_row = self.rows.index(row)
            # the first update of a sequence is its prompt
            if not self.copied[row]:
                self._copy_prompt(row, cache_row)
            positions = self._uncopied_positions(row)
            if len(positions):
                moves[row] = cache_row, positions, self._columns(row, positions)
            self.copied[row] = self.lengths[row]
            # so many are in use; a draft is written after them
            self.cache.lengths[cache_row] = self._count_columns(row)
        self.target_rows.copy_columns(self.cache, moves)

    def _copy_prompt(self, row: int, cache_row: int) -> None:
        """Copy the columns of a prompt that are selected once and stay; here none are.

        A subclass copies them here, to the row `cache_row` of this cache, and notes in `copied` how many are done.
        """

    def _count_columns(self, row: int) -> int:
        """Return the number of columns in use for a row, one for each token that is kept: at most the budget."""
        return min(self.lengths[row], self.budget)

    def _uncopied_positions(self, row: int) -> Tensor:
        """Return [M], the positions of committed tokens that must be copied now, in ascending order.

        They are those that were not copied yet and are among the first `sinks` tokens, or among the latest ones for
        which the ring of columns has room.
        """
        start = self.copied[row]
        end = self.lengths[row]
        sinks = range(start, min(end, self.sinks))
        latest = range(max(start, self.sinks, end - self.ring), end)
        return torch.tensor([*sinks, *latest], dtype=torch.long)

    def _columns(self, row: int, positions: Tensor) -> Tensor:
        """Return [M], the cache column of each of M positions: the sinks in order, the others in a ring after them."""
        # a later token overwrites that of `self.ring` positions before it
        ring = self.sinks + (positions - self.sinks) % self.ring
        return torch.where(positions < self.sinks, positions, ring)

    def _column_positions(self, rows: Sequence[int]) -> Tensor:
        """Return [B, S + 1], the position of the token in each of S columns of B rows, and after them the root's.

        S is the number of columns of the row that has most; what follows the root in other rows is arbitrary.
        """
        count = max(map(self._count_columns, rows)) + 1
        column_positions = torch.arange(count).repeat(len(rows), 1)
        for row, positions in zip(rows, column_positions, strict=True):
            end = self.lengths[row]
            # the tokens in the ring: none as long as all are sinks
            latest = torch.arange(max(end - self.ring, min(self.sinks, end)), end)
            positions[self._columns(row, latest)] = latest
            positions[self._count_columns(row)] = end
        return column_positions


class SnapState(SparseState):
    """Sequences whose prompts are reduced once to the columns that their last tokens attend to.

    All tokens after the prompt stay.
    """

    def __init__(self, target_rows: TargetSequences, budget: int) -> None:
        super().__init__(target_rows, budget, sinks=0)
        # by row: how many tokens of a prompt are left out; each key head chooses others, but as many
        self.skipped: dict[int, int] = {}

    def release(self, row: int) -> None:
        """Release a row, whose prompt may have been reduced."""
        super().release(row)
        self.skipped.pop(row, None)

    def _copy_prompt(self, row: int, cache_row: int) -> None:
        """Copy `budget` columns of a longer prompt: its last ones, and for each head those with the highest scores.

        A shorter prompt is left to `_copy_committed`, which copies all of it.

        Args:
            row: The row, whose prompt the target has read.
            cache_row: Its index in this cache.
        """
        length = self.lengths[row]
        self.skipped[row] = max(length - self.budget, 0)
        if not self.skipped[row]:
            return
        latest = upload(torch.arange(length - OBSERVED, length), self.view.device)
        # the columns are written from the first one on
        self.cache.set_write_offset([cache_row], [0])

        def copy(layer: int, queries: Tensor, keys: Tensor, scale: float) -> None:
            """Copy a layer's selected columns, when the target's forward comes to its attention.

            Args:
                layer: The index of the layer.
                queries: [1, H, N, D], of the last N tokens, in H query heads of width D.
                keys: [1, X, T, D], of all T tokens, in X key heads.
                scale: The factor on their product.
            """
            # [X, budget - OBSERVED]; the last tokens stay, and of the others those that they attend to most
            selected = (
                score_columns(queries[0], keys[0], scale).topk(self.budget - OBSERVED).indices
            )
            last = latest.to(selected.device).expand(len(selected), -1)
            columns = torch.cat([selected, last], 1)[:, :, None]  # [X, budget, 1]
            stored = self.target_rows.keys_values(row, layer)
            layers: Any = self.cache.layers
            layers[layer].update(*(tensor.take_along_dim(columns, 1)[None] for tensor in stored))

        # reads the last tokens again, and calls `copy` in each layer
        self.target_rows.observe_attention(row, OBSERVED, copy)
        self.copied[row] = length

    def _count_columns(self, row: int) -> int:
        """Return the number of columns in use for a row: its tokens without those that were left out of the prompt."""
        return self.lengths[row] - self.skipped[row]

    def _uncopied_positions(self, row: int) -> Tensor:
        """Return the positions of all committed tokens that were not copied yet: none after the prompt is left out."""
        return torch.arange(self.copied[row], self.lengths[row])

    def _columns(self, row: int, positions: Tensor) -> Tensor:
        """Return the cache column of each position: that many columns earlier as the prompt has tokens left out."""
        return positions - self.skipped[row]


def score_columns(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return [X, T - N], how much the last N of T tokens attend to each token before them, in each of X key heads.

    Probs are summed over queries and the heads that share keys, then averaged over five neighbours, 0 beyond the ends
    (SnapKV).

    Args:
        queries: of the last N tokens, [H, N, D], in H query heads of width D.
        keys: of all tokens, [X, T, D].
        scale: the factor on their product.
    """
    heads = len(keys)  # X
    _, count, width = queries.shape  # H, N, D
    # A = softmax(scale Q K^T); the score of a key is the sum of its column
    scores = (queries.reshape(heads, -1, width) * scale) @ keys.transpose(1, 2)
    scores = scores.view(heads, -1, count, keys.shape[1])  # [X, H / X, N, T]
    # a query does not see the tokens after it
    is_later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., -count:].masked_fill_(is_later, -torch.inf)
    attended = scores.softmax(-1, dtype=torch.float32)[..., :-count].sum((1, 2))
    return F.avg_pool1d(attended, POOLED, stride=1, padding=POOLED // 2)
