"""Lookahead decoding: the target generates n-grams beside the sequence, which are drafted where they fit.

Fu et al. 2024, arXiv 2402.02057.
"""

# N nodes of the last tree

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise, Reads
from eagle.core.tree import DraftTree
from eagle.device import to_host


class LookaheadDrafter(Drafter):
    """A window of guesses that the target improves in every cycle, and a pool of the resulting n-grams.

    The window has `window` columns of `level` - 1 tokens. The first tokens of the columns are a chain after the root,
    which stands in the first column; the others follow the token above them. So the window is a tree, read with the
    draft, and the target's choice below a column makes an n-gram of `level` tokens. Of each first token the pool keeps
    the `guesses` latest n-grams; those of the root are drafted. With `from_prompt` the pool has the n-grams of the
    sequence too.
    """

    reads = Reads(choices=1)

    def __init__(
        self,
        window: int = 15,
        level: int = 5,
        guesses: int = 15,
        from_prompt: bool = True,
    ) -> None:
        if min(window, guesses) < 1 or level < 2:
            raise ValueError(
                f"window, level and guesses are {window}, {level} and {guesses}, expected 1, 2 and 1 or more: columns, "
                "tokens of an n-gram, and n-grams of a token that are drafted"
            )
        self.window = window
        self.level = level
        self.guesses = guesses
        self.from_prompt = from_prompt
        nodes = (level - 1) * (window + guesses) - 1
        depth = max(window + level - 3, level - 1)
        self.budget = Budget(nodes, depth, guesses + level)

    def open(self) -> LookaheadState:
        """Return the state of several sequences, each with its own window and pool."""
        return LookaheadState(self)


class LookaheadState:
    """The sequences by row."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.texts: dict[int, LookaheadText] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row with a window and a pool; the noise is unused, as it is in the target's choices already."""
        self.texts[row] = LookaheadText(self.drafter)

    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return each row's guesses and window."""
        on_device = {
            row: update.choices for row, update in updates.items() if update.choices is not None
        }
        # one copy from the device for all rows
        on_host = to_host(list(on_device.values()))
        choices = {
            row: tensor[:, 0].tolist() for row, tensor in zip(on_device, on_host, strict=True)
        }
        for row, update in updates.items():
            text = self.texts[row]
            # only a tree that held the window improves it
            if update.tree is not None and row in choices and text.columns:
                text.advance(update.tree, choices[row])
            text.read([*update.tokens.tolist(), update.root])
        return {row: self.texts[row].draft(budgets[row]) for row in updates}

    def fork(self, row: int, other: int) -> None:
        """Copy a row's sequence with its window and pool to a new row."""
        self.texts[other] = copy.deepcopy(self.texts[row], {id(self.drafter): self.drafter})

    def release(self, row: int) -> None:
        """Forget the row."""
        del self.texts[row]


class LookaheadText:
    """A sequence's last tokens, its window by columns, and its pool."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.end: deque[int] = deque(maxlen=drafter.level)
        self.columns: deque[list[int]] = deque()
        self.pool: dict[
            int, dict[tuple[int, ...], None]
        ] = {}  # first token -> what followed it, latest last

    def advance(self, tree: DraftTree, choices: Sequence[int]) -> None:
        """Lengthen the columns that the target read by its choice [N] below each; full ones lose their first token."""
        tokens = tree.tokens.tolist()
        # (parent, token) -> node; the root's parent is -1
        children = {
            edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tokens, strict=True))
        }
        top: int | None = -1
        for column in self.columns:
            top = children.get((top, column[0]))
            node = top
            for token in column[1:]:
                node = children.get((node, token))
            if top is None or node is None:
                return  # the budget, or another drafter, left this column and those after it out
            column.append(choices[node])
            if len(column) == self.drafter.level:
                self._keep(column)
                del column[0]
        if len(self.columns) > self.drafter.window:  # while the columns are not full yet
            del self.columns[0]

    def read(self, tokens: list[int]) -> None:
        """Append the tokens to the sequence, the last as the root; the first is the last root, except for a prompt."""
        drafter = self.drafter
        if not self.columns:
            # columns of one random token of the prompt each, more than the window has until they are full
            count = drafter.window + drafter.level - 2
            self.columns.extend([token] for token in random.Random(0).choices(tokens, k=count))
        else:
            del tokens[0]
            # each column keeps its position; those passed come last
            self.columns.rotate(1 - len(tokens))
        for token in tokens:
            self.end.append(token)
            if drafter.from_prompt and len(self.end) == drafter.level:
                self._keep(self.end)
        self.columns[0][0] = tokens[-1]

    def draft(self, budget: Budget) -> DraftTree:
        """Return the guesses for the root, latest first, then as many columns of the window as there is room for."""
        root, *top = [column[0] for column in self.columns]
        size = min(self.drafter.level - 1, budget.depth)
        count = min(budget.top_k, budget.nodes // max(size, 1))
        grams = islice(reversed(self.pool.get(root, {})), count)
        paths = [list(gram[:size]) for gram in grams]
        # a token of the first row has two children, beside the guesses
        if len(paths) + 2 <= budget.top_k:
            left = 1 + budget.nodes - size * len(paths)  # the root is no node of the budget
            for i, column in enumerate(self.columns):
                left -= len(column)
                if left < 0 or i + len(column) - 1 > budget.depth:
                    break
                paths.append(top[:i] + column[1:])
        tree = DraftTree.from_paths(root, paths)
        # columns that begin alike share nodes, which may then have too many children
        while max(map(len, tree.children())) > budget.top_k:
            paths.pop()
            tree = DraftTree.from_paths(root, paths)
        return tree

    def _keep(self, gram: Sequence[int]) -> None:
        """Add an n-gram to those with its first token, and drop the oldest."""
        first, *rest = gram
        grams = self.pool.setdefault(first, {})
        # a dictionary keeps its order: what is seen again counts as the latest
        grams.pop(tuple(rest), None)
        grams[tuple(rest)] = None
        if len(grams) > self.drafter.guesses:
            del grams[next(iter(grams))]
