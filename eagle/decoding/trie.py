"""A trie of tokens, one node each: beam search keeps the beams in it, after the text that all beams share."""

# N new nodes, R nodes

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Trie:
    """Nodes in the order in which they were added, parents first; -1 is the parent of the first nodes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.children: dict[tuple[int, int], int] = {}  # parent and token -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """The parent's child with this token, added if it is missing."""
        if (parent, token) not in self.children:
            self.children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        return self.children[parent, token]

    def path(self, node: int) -> list[int]:
        """The nodes from the first to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def seen(self, first: int) -> Tensor:
        """[N, R] bool, each node's ancestors and itself, for the nodes from `first` on."""
        marks = [(node - first, above) for node in range(first, len(self)) for above in self.path(node)]
        seen = torch.zeros(len(self) - first, len(self), dtype=torch.bool)
        seen[tuple(torch.tensor(marks).T)] = True
        return seen

    def split(self, leaves: Iterable[int]) -> tuple[list[int], list[int]]:
        """The nodes on the paths to all of these leaves, and the nodes on the path to at least one."""
        paths = [set(self.path(leaf)) for leaf in set(leaves)]
        shared = set.intersection(*paths)
        return sorted(shared), sorted(set.union(*paths) - shared)

    def keep(self, nodes: list[int]) -> Trie:
        """Keep only these nodes and renumber them; those without a parent among them come first."""
        trie, numbers = Trie(), dict[int, int]()
        for node in nodes:
            numbers[node] = trie.add(numbers.get(self.parents[node], -1), self.tokens[node])
        return trie
