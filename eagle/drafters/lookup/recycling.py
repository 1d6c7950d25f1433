"""Token recycling: draft what the target last found likely after each token, in whatever sequence that was.

Luo et al. 2024, arXiv 2408.08696.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import Lock

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Followers, Noise, Reads
from eagle.core.tree import DraftTree, best_tree
from eagle.device import to_host

WIDTH = 8  # tokens that are kept as likely after one token
UNKNOWN = -1  # in rows of tokens that the target has not read yet
# how often the target's choice is the kept token of each rank: a law near the 0.27, 0.10, 0.05, 0.03 of the first ranks
# in 40 answers of SmolLM2-135M-Instruct
RATES = tuple(0.27 / (rank + 1) ** 1.5 for rank in range(WIDTH))


class RecyclingDrafter(Drafter):
    """A table of each token's `WIDTH` likeliest next tokens, by the target's logits where it read the token last.

    Every token that the target reads writes its row: those of prompts, and all nodes of a draft tree, as rejected nodes
    bring logits too. The table belongs to the drafter, so that all sequences of a batch share it, and so do all later
    prompts.
    """

    reads = Reads(
        followers=WIDTH
    )  # it gets so many likely next tokens of every token that the target reads
    remembers = True  # the drafts of one sequence depend on those before and beside it

    def __init__(self) -> None:
        """Begin with an empty table."""
        # for a CPU: the paper's 80 nodes and 6 levels need a device on which tokens of a forward are cheap
        self.budget = Budget(nodes=8, depth=4, top_k=4)
        self.table = torch.empty(0, WIDTH, dtype=torch.long)  # [V, WIDTH], on the host
        # threads may decode with one drafter: none reads a row that another one is writing
        self.lock = Lock()

    def open(self) -> RecyclingState:
        """Return a state for several sequences, which draft from the same table."""
        return RecyclingState(self)

    @torch.inference_mode()
    def learn(self, batches: Iterable[Followers]) -> None:
        """Write the table's rows of tokens that the target has read; of one token the last occurrence is kept.

        Args:
            batches: Of each sequence, the tokens that the target has read and the likeliest next tokens after each.
        """
        followers = Followers.join(list(batches))
        if followers is None or not len(followers.tokens):
            return
        tokens = followers.tokens.tolist()
        # token -> the index of its last occurrence: an indexed write with an index twice has no fixed order
        latest = {token: index for index, token in enumerate(tokens)}
        (likeliest,) = to_host([followers.likeliest])
        # a row of the table has WIDTH entries, and a vocabulary may have fewer tokens
        width = likeliest.shape[1]
        with self.lock:
            self._reserve(max(latest) + 1)
            self.table[list(latest), :width] = likeliest[list(latest.values())]

    def likely_after(self, tokens: list[int]) -> list[list[int]]:
        """Return the table's row of each token: its likely next tokens, `UNKNOWN` where fewer or none are known."""
        with self.lock:
            # the table may be too short for tokens that were never read; default: for no tokens
            self._reserve(max(tokens, default=-1) + 1)
            return self.table[tokens].tolist()

    def _reserve(self, size: int) -> None:
        """Let the table have at least `size` rows; the size of the vocabulary is not known beforehand."""
        if size > len(self.table):
            # twice as many, so that the table is seldom copied
            table = torch.full((2 * size, WIDTH), UNKNOWN)
            table[: len(self.table)] = self.table
            self.table = table


class RecyclingState:
    """The sequences of a batch, of which nothing is kept but the drafter's table."""

    def __init__(self, drafter: RecyclingDrafter) -> None:
        self.drafter = drafter

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; the noise is unused, as rows of the table are ranked by logits alone."""

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Learn from all rows' updates, and return each row's tree of what is likely after its root.

        Rows are sequences of the decoding batch.

        Args:
            updates: By row, the new root, and what the target found likely after the tokens that it has read.
            budgets: By row, the limits on its tree.
        """
        batches = [update.followers for update in updates.values() if update.followers is not None]
        self.drafter.learn(batches)
        return {row: self._draft(update.root, budgets[row]) for row, update in updates.items()}

    def _draft(self, root: int, budget: Budget) -> DraftTree:
        """Return a tree, level by level; children that are not known are left out, with all below them."""
        tokens = [root]
        parents = [-1]
        nodes: dict[tuple[int, ...], int] = {(): 0}  # path of ranks -> node
        first = 0  # the first node of the level above
        # a level is a list of paths; the last rank of a path says which of its parent's likely tokens a node has
        for level in levels_of(budget):
            # the likely tokens after each node of the level above
            rows = self.drafter.likely_after(tokens[first:])
            next_first = len(tokens)
            for path in level:
                parent = nodes.get(path[:-1])
                # the parent was not known
                if parent is None:
                    continue
                token = rows[parent - first][path[-1]]
                if token != UNKNOWN:
                    nodes[path] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
            first = next_first
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    def fork(self, row: int, other: int) -> None:
        """Copy a row, of which there is nothing."""

    def release(self, row: int) -> None:
        """Release a row, of which there is nothing."""


@lru_cache(maxsize=256)
def levels_of(budget: Budget) -> list[list[tuple[int, ...]]]:
    """Return the paths of ranks to the nodes of a budget's tree, by level.

    Without paths of its own, a budget gets the nodes whose paths are the likeliest, by the product of `RATES`.
    """
    paths = budget.paths
    if paths is None:
        paths = best_tree([RATES[: budget.top_k]], budget.nodes, budget.depth)
    levels: list[list[tuple[int, ...]]] = [[] for _ in range(budget.depth)]
    # a fixed shape may be deeper than the budget, or ask for ranks that the table does not keep
    for path in sorted(set(paths)):
        if 0 < len(path) <= budget.depth and max(path) < WIDTH:
            levels[len(path) - 1].append(path)
    return levels
