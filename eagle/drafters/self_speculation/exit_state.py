"""Drafting with a target's first layers, on the target's own keys and values of the sequences."""

# B sequences, K nodes of one level, R of all levels with the root, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Reads
from eagle.core.tree import DraftTree
from eagle.drafters.parts.growth import grow_rows, level_rows
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.sequence_state import SequenceLengths


def exit_layer(layers: int | None, max_layers: int) -> int:
    """Return how many of the target's first layers draft: `layers`, or by default a third of all `max_layers`."""
    exit_after = max(max_layers // 3, 1) if layers is None else layers
    if not 1 <= exit_after <= max_layers:
        raise ValueError(
            f"layers is {layers}, expected 1 to {max_layers}: so many of this target's layers can draft"
        )
    return exit_after


class ExitDrafter(Drafter):
    """Drafts with the target's first layers and a head on their output; it has no cache of its own.

    Every draft begins with a forward over the root; the target has read the accepted tokens.
    """

    reads = Reads(
        view=True, kv_cache=True
    )  # it gets the target's layers, and the rows of the target's KV cache
    layers: int | None = None  # how many of the target's first layers draft; None: a third of them
    view: Any = None  # the target's layers (`TargetView`), once it is bound

    def exit_logits(self, hidden: Tensor, view: Any) -> Tensor:
        """Return logits [.., V] of the last drafting layer's output [.., H], by the target's final norm and LM head."""
        logits: Tensor = view.logits(hidden)
        return logits

    def bind_target(self, view: Any) -> None:
        """Take the target's layers, for timing; a number of layers that it does not have is refused."""
        # called for its refusal
        exit_layer(self.layers, len(view))
        self.view = view

    def open_with(self, sequences: Any) -> ExitState:
        """Return the state for several sequences drafted in a batch, on the target's cache rows `sequences`."""
        view = sequences.view
        return ExitState(
            sequences,
            exit_layer(self.layers, len(view)),
            lambda hidden: self.exit_logits(hidden, view),
        )

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft after the first reads, level by level."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens a draft's first forward reads: 1, the root, as the target has read all before it."""
        return 1

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: the drafting layers on `rows` tokens after `context` cached ones.

        The last `scored` of them get logits.
        """
        view = self.view
        cache = view.new_cache()
        hidden = view.embed(torch.ones(1, context + rows, dtype=torch.long))
        positions = torch.arange(context + rows)[None]
        layers = exit_layer(self.layers, len(view))

        def read(rows: slice) -> Tensor:
            """Return the output [1, K, H] of layers 0 to `layers` - 1 at K tokens, which it adds to the cache."""
            # None: a causal mask
            states: Tensor = view.read(hidden[:, rows], positions[:, rows], None, cache, 0, layers)
            return states

        # the context is written once; every call reads its rows after it and overwrites those of the call before
        if context:
            cache.set_write_offset([0], commits=True)
            read(slice(0, context))
        cache.length = context

        @torch.inference_mode()
        def run() -> Tensor:
            cache.set_write_offset([0])
            states = read(slice(context, None))
            return self.exit_logits(states[0, -scored:], view)

        return run


class TargetRowsState(SequenceLengths):
    """The state of drafts over the target's own cache rows, which cannot be copied."""

    def fork(self, row: int, other: int) -> None:
        """Refuse: drafts read the target's own cache rows, which a drafter cannot copy."""
        raise ValueError(
            "drafts over the target's own rows cannot follow a sequence that goes on in two ways"
        )


class ExitState(TargetRowsState):
    """The noise and length of each sequence; everything else is in the target's state.

    Args:
        target_rows: The rows of the target's KV cache (`TargetSequences`).
        layers: How many of the target's first layers draft.
        logits: Returns the logits [.., V] of these layers' output [.., H].
    """

    def __init__(self, target_rows: Any, layers: int, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.target_rows = target_rows
        self.layers = layers
        self.logits = logits

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return trees grown by the target's first layers, which read each root and then level after level.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, and the new root.
            budgets: By row, the limits on its tree.
        """
        trees: dict[int, DraftTree] = {}
        # groups of rows that may share a forward
        for rows in self.target_rows.groups(list(updates)):
            requests = []
            for row in rows:
                self.lengths[row] += len(updates[row].tokens)
                # drafted nodes are written after the sequence in the target's own cache, which may be full
                budget = _fit_columns(budgets[row], self.target_rows.room(row))
                requests.append(self.request(row, updates[row].root, budget))
            trees |= dict(zip(rows, self._grow(rows, requests), strict=True))
        return trees

    def _grow(self, rows: list[int], requests: list[DraftRequest]) -> list[DraftTree]:
        """Return the trees of rows that may share a forward.

        Args:
            rows: The B rows.
            requests: The root, position, budget and noise of each row's tree.
        """
        # the depth of each node that is read, level after level; every draft reads the root first, which has depth 0
        depths = [0]

        def read(read_rows: list[int], tokens: Tensor, mask: Tensor | None) -> Tensor:
            """Return the logits [B, K, V] after the last K nodes [B, K] of B rows.

            `mask` [B, K, R] says which of the R nodes read so far, the root first, each of them sees. None: a root sees
            itself alone.
            """
            return self.logits(self.target_rows.ahead(read_rows, tokens, depths, mask, self.layers))

        def level(
            depth: int,
            row_indices: list[int],
            tokens: Tensor,
            parents: Tensor,
            tree_mask: Tensor,
        ) -> Tensor:
            """Return the logits [B, K, V] after the K nodes of one level of B rows' trees (a `RowsLevel`).

            `row_indices` are the rows whose trees still grow. The parents are not needed, as `tree_mask` [B, K, R - 1]
            marks each node's ancestors but the root.
            """
            if depth == 1:
                # trees of another budget grow after these, from the roots again: only the root's depth stays
                del depths[1:]
            depths.extend([depth] * tokens.shape[1])
            # every node sees the root
            with_root = F.pad(tree_mask, (1, 0), value=True)  # [B, K, R]
            return read([rows[i] for i in row_indices], tokens, with_root)

        roots = torch.tensor([[request.root] for request in requests])
        return grow_rows(requests, read(rows, roots, None)[:, 0], level)


def _fit_columns(budget: Budget, room: float) -> Budget:
    """Return the budget, less deep if the root and the nodes that are read would not fit in `room` cache columns.

    `room` is infinite if the cache may grow. The last level needs no column, as nothing reads it.
    """
    while not budget.is_empty and 1 + sum(level_rows(budget)) > room:
        budget = budget.within(budget.depth - 1)
    return budget
