"""Lookahead decoding: the target generates n-grams beside the text, which are drafted where they fit."""

# C columns, N nodes

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

    Fu et al. 2024, arXiv 2402.02057. The window has `window` columns of `level` - 1 tokens. The first tokens of the
    columns are a chain behind the root, which stands in the first column; the others follow the token above them. So
    the window is a tree, read with the draft, and the target's choice below a column makes an n-gram of `level` tokens.
    Of each first token the pool keeps the `guesses` latest n-grams; those of the root are drafted. With `from_prompt`
    the pool holds the n-grams of the text too.
    """

    reads = Reads(choices=1)

    def __init__(self, window: int = 15, level: int = 5, guesses: int = 15, from_prompt: bool = True) -> None:
        if min(window, guesses) < 1 or level < 2:
            raise ValueError(
                f"window, level and guesses are {window}, {level} and {guesses}, expected 1, 2 and 1 or more: columns, "
                "tokens of an n-gram, and n-grams of a token that are drafted"
            )
        self.window, self.level, self.guesses, self.from_prompt = window, level, guesses, from_prompt
        nodes, depth = (level - 1) * (window + guesses) - 1, max(window + level - 3, level - 1)
        self.budget = Budget(nodes, depth, guesses + level)

    def open(self) -> LookaheadState:
        """Texts, each with a window and a pool of its own."""
        return LookaheadState(self)


class LookaheadState:
    """The texts by row."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.texts: dict[int, LookaheadText] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row with a window and a pool; the noise is unused, as it is in the target's choices already."""
        self.texts[row] = LookaheadText(self.drafter)

    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Each row's guesses and window; the target's choices in the last trees are copied from the device at once."""
        read = {row: update.choices for row, update in updates.items() if update.choices is not None}
        choices = {row: part[:, 0].tolist() for row, part in zip(read, to_host(list(read.values())), strict=True)}
        for row, update in updates.items():
            text = self.texts[row]
            if update.tree is not None and row in choices and text.columns:
                text.advance(update.tree, choices[row])
            text.read([*update.tokens.tolist(), update.root])
        return {row: self.texts[row].draft(budgets[row]) for row in updates}

    def fork(self, row: int, other: int) -> None:
        """Copy a row's text with its window and pool to a new row."""
        self.texts[other] = copy.deepcopy(self.texts[row], {id(self.drafter): self.drafter})

    def release(self, row: int) -> None:
        """Forget the row."""
        del self.texts[row]


class LookaheadText:
    """A text's last tokens, its window by columns, and its pool."""

    def __init__(self, drafter: LookaheadDrafter) -> None:
        self.drafter = drafter
        self.end: deque[int] = deque(maxlen=drafter.level)
        self.columns: deque[list[int]] = deque()
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> what followed it, latest last

    def advance(self, tree: DraftTree, choices: Sequence[int]) -> None:
        """Lengthen the columns that the target read by its choice [N] below each; full ones lose their first token."""
        tokens = tree.tokens.tolist()
        children = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tokens, strict=True))}
        top = children.get((-1, self.columns[0][0]))
        for number, column in enumerate(self.columns):
            if number:
                top = children.get((top, column[0]))
            node = top
            for token in column[1:]:
                node = children.get((node, token))
            if top is None or node is None:
                return  # the budget, or another drafter, left this column and those behind it out
            column.append(choices[node])
            if len(column) == self.drafter.level:
                self._keep(column)
                del column[0]
        if len(self.columns) > self.drafter.window:  # while the columns are not full yet
            del self.columns[0]

    def read(self, tokens: list[int]) -> None:
        """Append the tokens to the text, the last as the root; the first is the last root, except for a prompt."""
        drafter = self.drafter
        if not self.columns:
            count = drafter.window + drafter.level - 2
            self.columns.extend([token] for token in random.Random(0).choices(tokens, k=count))
        else:
            del tokens[0]
            self.columns.rotate(1 - len(tokens))  # each column stays where it was in the text; those passed come last
        for token in tokens:
            self.end.append(token)
            if drafter.from_prompt and len(self.end) == drafter.level:
                self._keep(self.end)
        self.columns[0][0] = tokens[-1]

    def draft(self, budget: Budget) -> DraftTree:
        """The guesses for the root, latest first, then as many columns of the window as there is room for."""
        root, *top = [column[0] for column in self.columns]
        size = min(self.drafter.level - 1, budget.depth)
        count = min(budget.top_k, budget.nodes // max(size, 1))
        grams = islice(reversed(self.pool.get(root, {})), count)
        paths = [list(gram[:size]) for gram in grams]
        left = budget.nodes - size * len(paths)
        has_room = len(paths) + 2 <= budget.top_k  # a token of the first row has two children, beside the guesses
        for number, column in enumerate(self.columns if has_room else []):
            left -= len(column) if number else len(column) - 1
            if left < 0 or number + len(column) - 1 > budget.depth:
                break
            paths.append(top[:number] + column[1:])
        tree = DraftTree.from_paths(root, paths)
        while max(map(len, tree.children())) > budget.top_k:  # columns that begin alike share nodes
            paths.pop()
            tree = DraftTree.from_paths(root, paths)
        return tree

    def _keep(self, gram: Sequence[int]) -> None:
        """Add an n-gram to those with its first token, and drop the oldest."""
        first, *rest = gram
        grams = self.pool.setdefault(first, {})
        grams.pop(tuple(rest), None)
        grams[tuple(rest)] = None
        if len(grams) > self.drafter.guesses:
            del grams[next(iter(grams))]
