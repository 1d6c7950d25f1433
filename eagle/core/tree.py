"""Draft trees, their shapes, and the target's output on them."""

# B trees, N nodes, V vocabulary, L taps, D target width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from eagle.device import pick_rows

Paths = tuple[tuple[int, ...], ...]
"""The shape of a tree: for every node but the root, the ranks of the children on the path to it."""

# the fixed tree of EAGLE-1 (Li et al. 2024, arXiv 2401.15077): 25 draft nodes on 5 levels
LEVELS = ("0 1 2 3", "00 01 02 10 11 20 21 30", "000 001 002 010 011 020 021 100", "0000 0001 0002", "00000 00001")
PUBLISHED_TREE: Paths = tuple(tuple(map(int, path)) for level in LEVELS for path in level.split())


def chain_paths(length: int) -> Paths:
    """The shape of a chain."""
    return tuple((0,) * depth for depth in range(1, length + 1))


def best_tree(rates: Sequence[Sequence[float]], nodes: int, depth: int) -> Paths:
    """The shape of at most `nodes` nodes on `depth` levels with the greatest expected number of accepted tokens.

    `rates[d][r]` is the probability that, after an accepted node of depth d, the target chooses its child of rank r;
    the last row holds for all deeper levels. A node adds the product of the rates on its path (Sequoia, Chen et al.
    2024, arXiv 2402.12374), which is never more than its parent adds. So the best nodes form a tree, and greedily
    taking the best reachable node gives the optimum that Sequoia computes by dynamic programming.
    """
    if not rates or not all(0 <= rate <= 1 for row in rates for rate in row):
        raise ValueError(f"rates are probabilities by depth and rank, expected rows of 0..1: got {rates}")
    paths: list[tuple[int, ...]] = []
    reachable: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # ties: the shallow node, the lower rank
    while reachable and len(paths) <= nodes:
        weight, level, path = heappop(reachable)
        paths.append(path)
        for rank, rate in enumerate(rates[min(level, len(rates) - 1)] if level < depth else ()):
            if rate > 0:
                heappush(reachable, (weight * rate, level + 1, (*path, rank)))
    return tuple(sorted(paths[1:], key=lambda path: (len(path), path)))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens, on the host. Node 0 is the last committed token (the root); parents precede children."""

    tokens: Tensor  # [N]
    parents: Tensor  # [N], parents[0] == -1
    draft_probs: Tensor | None = (
        None  # [N, V], probs each node was sampled from, siblings without replacement; row 0 unused
    )
    likelihoods: Tensor | None = None  # [N], the drafter's log-probability of each node's path; 0 at the root

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            if not (isinstance(values := getattr(self, name), Tensor) and values.shape == (0,)):  # torch makes it float
                _check_rows(name, values, 1, "whole numbers")
        for name, dims in (("draft_probs", 2), ("likelihoods", 1)):
            if getattr(self, name) is not None:
                _check_rows(name, getattr(self, name), dims, "numbers")
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        if not tokens or len(tokens) != len(parents):
            raise ValueError(f"a tree needs one parent per token and a root: got {len(tokens)} and {len(parents)}")
        if parents[0] != -1:
            raise ValueError(f"node 0 is the root, with parent -1: got parent {parents[0]}")
        seen = set()
        for node, (parent, token) in enumerate(zip(parents[1:], tokens[1:], strict=True), start=1):
            if parent == -1:
                raise ValueError(f"a tree has one root: node {node} has parent -1 too; give it a parent below {node}")
            if not 0 <= parent < node:
                raise ValueError(f"parents precede children: node {node} has parent {parent}, expected 0..{node - 1}")
            if (parent, token) in seen:
                raise ValueError(f"siblings differ: token {token} stands twice under node {parent}; merge the nodes")
            seen.add((parent, token))
        if self.draft_probs is not None and len(self.draft_probs) != len(tokens):
            raise ValueError(f"draft_probs hold one row per node: got {len(self.draft_probs)}, expected {len(tokens)}")
        if self.likelihoods is not None and len(self.likelihoods) != len(tokens):
            raise ValueError(f"likelihoods hold one per node: got {len(self.likelihoods)}, expected {len(tokens)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], draft_probs: Tensor | None = None) -> DraftTree:
        """The tree in which every node but the last has one child."""
        return cls(torch.tensor(tokens), torch.arange(-1, len(tokens) - 1), draft_probs)

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]]) -> DraftTree:
        """The smallest tree that contains every path of tokens after the root."""
        tokens, parents, index = [root], [-1], {}
        for path in paths:
            node = 0
            for token in path:
                if (node, token) not in index:
                    index[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = index[node, token]
        return cls(torch.tensor(tokens), torch.tensor(parents))

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before."""
        return self.parents.tolist() == list(range(-1, len(self) - 1))

    @property
    def levels(self) -> int:
        """How many levels it has at most."""
        return max(self.depths())

    @property
    def columns(self) -> int:
        """How many nodes a target reads."""
        return len(self)

    def renumber(self, path: list[int]) -> list[int]:
        """A path's nodes, counted without what was left out, where they are counted with it."""
        return path

    def depths(self) -> list[int]:
        """Each node's number of steps from the root."""
        depths = [0]
        for parent in self.parents.tolist()[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def ancestors(self) -> Tensor:
        """[N, N] bool, the attention mask: row i marks node i and its ancestors."""
        size, words = len(self), [1]  # one integer per node, bit j for node j: five times faster than tensor rows
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            words.append(words[parent] | 1 << node)
        width = -(-size // 8)
        packed = np.frombuffer(b"".join(word.to_bytes(width, "little") for word in words), np.uint8)
        marks = np.unpackbits(packed.reshape(size, width), axis=1, count=size, bitorder="little")
        return torch.from_numpy(marks).bool()

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        parents, path = self.parents.tolist(), []
        while node != -1:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def children(self) -> list[list[int]]:
        """Each node's children, in the order in which they were proposed."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            children[parent].append(node)
        return children


def _check_rows(name: str, value: object, dims: int, kind: str) -> None:
    """Refuse what is no tensor with so many dimensions, or holds other numbers."""
    if not isinstance(value, Tensor) or value.dim() != dims or (kind == "whole numbers" and value.is_floating_point()):
        got = f"a {value.dtype} tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
        raise ValueError(f"DraftTree.{name} is {got}, expected a tensor of {kind} with {dims} dimensions")


def check_draft(tree: object, root: int, levels: int, vocab_size: int) -> DraftTree:
    """The tree; ValueError for what is no draft after the token `root`, of at most `levels` levels."""
    if not isinstance(tree, DraftTree):
        got = "no tree" if tree is None else f"a {type(tree).__name__}"
        raise ValueError(
            f"the drafter proposed {got}, expected a DraftTree: DraftTree.chain([update.root]) drafts nothing"
        )
    tokens = tree.tokens.tolist()
    if tokens[0] != root:
        raise ValueError(
            f"the draft's root is token {tokens[0]}, expected {root}, the last token of the text: begin the tree with "
            "update.root"
        )
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"the draft holds token ids {wrong[:5]}, expected 0..{vocab_size - 1}: leave others out")
    if len(tree) > levels and (depth := tree.levels) > levels:
        raise ValueError(f"the draft has {depth} levels, expected at most {levels}: draft within budget.depth")
    if tree.draft_probs is not None and tree.draft_probs.shape != (len(tokens), vocab_size):
        raise ValueError(
            f"the draft's probs are {list(tree.draft_probs.shape)}, expected those of {vocab_size} tokens for each of "
            f"{len(tokens)} nodes"
        )
    return tree


def stack_trees(trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens and depths [B, N], and attention masks [B, N, N] (None for chains).

    Padding attends only to itself, is unseen and stands where the root does.
    """
    count, chains = max(map(len, trees)), all(tree.is_chain for tree in trees)
    depths = torch.tensor([tree.depths() + [0] * (count - len(tree)) for tree in trees])
    if len(trees) == 1:
        return trees[0].tokens[None], depths, None if chains else trees[0].ancestors()[None]
    tokens = torch.zeros(len(trees), count, dtype=torch.long)
    seen = torch.eye(count, dtype=torch.bool).repeat(len(trees), 1, 1)
    for number, tree in enumerate(trees):
        tokens[number, : len(tree)] = tree.tokens
        if not chains:
            seen[number, : len(tree), : len(tree)] = tree.ancestors()
    return tokens, depths, None if chains else seen


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """A target's logits and tapped features at every node of a tree."""

    tree: DraftTree
    logits: Tensor  # [N, V]
    features: Tensor | None  # [N, L, D]
    start: int  # the root's position
    text: list[int]  # all tokens committed before the root, and later those that have been since

    @property
    def positions(self) -> list[int]:
        """The position of the token chosen after each node."""
        return [self.start + 1 + depth for depth in self.tree.depths()]

    def prefix(self, node: int) -> list[int]:
        """The whole text up to and including `node`."""
        tokens = self.tree.tokens.tolist()
        return self.text[: self.start] + [tokens[step] for step in self.tree.path(node)]

    def likeliest(self, count: int) -> Tensor:
        """[N, count], the target's likeliest tokens after each node, likeliest first."""
        return self.logits.topk(min(count, self.logits.shape[-1])).indices

    def features_at(self, path: Sequence[int] | Tensor) -> Tensor | None:
        """[len(path), L, D], the tapped features at the nodes of a path; None without taps."""
        if self.features is None:
            return None
        if isinstance(path, Tensor):
            return self.features.index_select(0, path.clamp(max=len(self.features) - 1))
        return pick_rows(self.features, path)
