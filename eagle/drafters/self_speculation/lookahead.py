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
    which is that of the first column; the others follow the token above them. So the window is a tree, read with the
    draft, and the target's choice below a column makes an n-gram of `level` tokens. Of each first token the pool keeps
    the `guesses` latest n-grams; those of the root are drafted. With `from_prompt` the pool has the n-grams of the
    sequence too.
    """

    reads = Reads(choices=1)  # it gets the token that the target chooses after each node of a tree

    def __init__(
        self,
        window: int = 15,
        level: int = 5,
        guesses: int = 15,
        from_prompt: bool = True,
    ) -> None:
        """Set the sizes of the window and the pool.

        Args:
            window: Columns of the window.
            level: Tokens of an n-gram.
            guesses: The most n-grams that are kept for a first token, and drafted for a root.
            from_prompt: Whether the n-grams of the sequence itself are collected, too.
        """
        if min(window, guesses) < 1 or level < 2:
            raise ValueError(
                f"window, level and guesses are {window}, {level} and {guesses}, expected 1, 2 and 1 or more: columns, "
                "tokens of an n-gram, and n-grams of a token that are drafted"
            )
        self.window = window
        self.level = level
        self.guesses = guesses
        self.from_prompt = from_prompt
        # level - 1 tokens of each column and each guess; the root, in the first column, is no draft token
        nodes = (level - 1) * (window + guesses) - 1
        # the last column begins window - 1 after the root and has level - 2 further tokens; a guess has level - 1
        depth = max(window + level - 3, level - 1)
        self.budget = Budget(nodes=nodes, depth=depth, top_k=guesses + level)

    def open(self) -> LookaheadState:
        """Return the state of several sequences, each with its own window and pool."""
        return LookaheadState(self)


class LookaheadState:
    """The sequences of a batch, each with its window of guesses and its pool of n-grams."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.sequences: dict[int, LookaheadSequence] = {}  # by row

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row with a window and a pool; the noise is unused, as it is in the target's choices already."""
        self.sequences[row] = LookaheadSequence(self.drafter)

    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Improve each row's window by the target's choices, and return its guesses and its window as a tree.

        Args:
            updates: By row, the tokens that the target has committed since the last draft, the new root, and the
                target's choice after each node of the last tree.
            budgets: By row, the limits on its tree.
        """
        # by row, [N, 1]: the target's best token after each of N nodes
        on_device = {
            row: update.choices for row, update in updates.items() if update.choices is not None
        }
        # one copy from the device for all rows
        on_host = to_host(list(on_device.values()))
        choices = {
            row: tensor[:, 0].tolist() for row, tensor in zip(on_device, on_host, strict=True)
        }
        for row, update in updates.items():
            seq = self.sequences[row]
            # the first update has no tree, and so no choices after the window's nodes
            if update.tree is not None and row in choices and seq.columns:
                seq.advance(update.tree, choices[row])
            seq.read([*update.tokens.tolist(), update.root])
        return {row: self.sequences[row].draft(budgets[row]) for row in updates}

    def fork(self, row: int, other: int) -> None:
        """Copy a row's sequence with its window and pool to a new row."""
        # the second argument makes the copies share the drafter
        self.sequences[other] = copy.deepcopy(self.sequences[row], {id(self.drafter): self.drafter})

    def release(self, row: int) -> None:
        """Forget the row."""
        del self.sequences[row]


class LookaheadSequence:
    """A sequence's last tokens, its window of guesses by columns, and its pool of n-grams."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.end: deque[int] = deque(
            maxlen=drafter.level
        )  # the last `level` tokens, as many as an n-gram has
        # the tokens of each column, in the order of the columns' positions in the sequence; the first begins with the
        # root
        self.columns: deque[list[int]] = deque()
        # first token -> the other tokens of its n-grams, latest last
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}

    def advance(self, tree: DraftTree, choices: Sequence[int]) -> None:
        """Append the target's choice below each column that it read; each full column becomes an n-gram of the pool.

        Args:
            tree: The tree of N nodes that the target has read.
            choices: The target's token after each of its N nodes.
        """
        tokens = tree.tokens.tolist()
        # (parent, token) -> node; the root's parent is -1
        children = {
            edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tokens, strict=True))
        }
        # the first tokens of the columns are a chain after the root: `top` is the node of a column's first token, and
        # `node` ends at that of its last token
        top: int | None = -1
        for column in self.columns:
            top = children.get((top, column[0]))
            node = top
            for token in column[1:]:
                node = children.get((node, token))
            if top is None or node is None:
                # the tree was another drafter's, or the budget left out this column and those after it
                return
            column.append(choices[node])
            if len(column) == self.drafter.level:
                self._add_gram(column)
                # its other tokens are the next guess at this position
                del column[0]
        # the window starts with more columns, and loses one in each cycle until they are full
        if len(self.columns) > self.drafter.window:
            del self.columns[0]

    def read(self, tokens: list[int]) -> None:
        """Append the tokens to the sequence, the last as the root; the first is the last root, except for a prompt."""
        drafter = self.drafter
        if not self.columns:
            # each column starts as a random token of the prompt; there are more columns until they are full
            # a column starts with one token and is full at `level` - 1; each of the `level` - 2 cycles until then drops
            # one column
            count = drafter.window + drafter.level - 2
            self.columns.extend([token] for token in random.Random(0).choices(tokens, k=count))
        else:
            # the sequence has the last root already; this changes the caller's list
            del tokens[0]
            # each column stays at its position in the sequence; those that the sequence has passed come last
            self.columns.rotate(1 - len(tokens))
        for token in tokens:
            self.end.append(token)
            if drafter.from_prompt and len(self.end) == drafter.level:
                self._add_gram(self.end)
        # the first column begins with the root
        self.columns[0][0] = tokens[-1]

    def draft(self, budget: Budget) -> DraftTree:
        """Return a tree of the root's guesses, latest first, and of the window's columns, as far as the budget goes.

        Guesses are the n-grams of the pool that begin with the root. The columns are not likely to be accepted: the
        target reads them to improve them.
        """
        # the first tokens of the columns are a chain after the root
        root, *top = [column[0] for column in self.columns]
        # the tokens of a guess after the root, and how many guesses there is room for
        size = min(self.drafter.level - 1, budget.depth)
        count = min(budget.top_k, budget.nodes // max(size, 1))
        grams = islice(reversed(self.pool.get(root, {})), count)
        paths = [list(gram[:size]) for gram in grams]
        # a first token has two children, the token below and the next column's, beside the root's guesses
        if len(paths) + 2 <= budget.top_k:
            # the first column holds the root, which does not count as a node of the budget
            left = 1 + budget.nodes - size * len(paths)
            for i, column in enumerate(self.columns):
                left -= len(column)
                if left < 0 or i + len(column) - 1 > budget.depth:
                    break
                # the other tokens of a column follow the chain up to its first token
                paths.append(top[:i] + column[1:])
        tree = DraftTree.from_paths(root, paths)
        # columns that begin alike share nodes, which may then have too many children
        while max(map(len, tree.children())) > budget.top_k:
            # the last columns are left out
            paths.pop()
            tree = DraftTree.from_paths(root, paths)
        return tree

    def _add_gram(self, gram: Sequence[int]) -> None:
        """Add an n-gram to the pool; beyond `guesses` of its first token the oldest is dropped."""
        first, *rest = gram
        grams = self.pool.setdefault(first, {})
        # a dictionary keeps the order of insertion: an n-gram that occurs again becomes the latest
        grams.pop(tuple(rest), None)
        grams[tuple(rest)] = None
        if len(grams) > self.drafter.guesses:
            del grams[next(iter(grams))]
