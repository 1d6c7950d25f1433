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
"""The shape of a tree: for every node but the root, the ranks among siblings of the nodes on the path to it."""

# the fixed tree of EAGLE-1 (Li et al. 2024, arXiv 2401.15077): 25 draft nodes on 5 levels
LEVELS = (
    "0 1 2 3",
    "00 01 02 10 11 20 21 30",
    "000 001 002 010 011 020 021 100",
    "0000 0001 0002",
    "00000 00001",
)
PUBLISHED_TREE: Paths = tuple(tuple(map(int, path)) for path in " ".join(LEVELS).split())


def chain_paths(length: int) -> Paths:
    """Return the shape of a chain of `length` draft tokens, as paths of ranks: (0,), (0, 0), ...

    A path names a node by the ranks, among their siblings, of the nodes on the way to it; in a chain all ranks are 0.
    """
    return tuple((0,) * depth for depth in range(1, length + 1))


def best_tree(rates: Sequence[Sequence[float]], nodes: int, depth: int) -> Paths:
    """Return the tree shape with the greatest expected number of accepted tokens, as paths.

    A path holds the ranks, among their siblings, of the nodes on the way from the root to a node.

    A node adds the product of the rates on its path (Sequoia, Chen et al. 2024, arXiv 2402.12374), which is never more
    than its parent adds. So the best nodes form a tree, and greedily taking the best reachable node gives the optimum
    that Sequoia computes by dynamic programming.

    Args:
        rates: `rates[d][r]` is the probability that, after an accepted node of depth d, the target chooses its child
            of rank r; the last row holds for all deeper levels.
        nodes: The most nodes, the root not counted.
        depth: The most levels.
    """
    # the proof needs rates of at most 1: a node must not add more than its parent
    if not rates or not all(0 <= rate <= 1 for row in rates for rate in row):
        raise ValueError(
            f"rates are probabilities by depth and rank, expected rows of 0..1: got {rates}"
        )
    paths: list[
        tuple[int, ...]
    ] = []  # of the chosen nodes; the first is the root's, which is empty
    # a heap of (what a node adds, negated; its level; its path): ties go to the shallow node, then to the lower rank
    reachable: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while reachable and len(paths) <= nodes:
        weight, level, path = heappop(reachable)
        paths.append(path)
        if level >= depth:
            continue
        for rank, rate in enumerate(rates[min(level, len(rates) - 1)]):
            # a node that is never accepted adds nothing
            if rate > 0:
                heappush(reachable, (weight * rate, level + 1, (*path, rank)))
    return tuple(sorted(paths[1:], key=lambda path: (len(path), path)))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens, on the host. Node 0 is the last committed token (the root); parents precede children."""

    tokens: Tensor  # [N]
    parents: Tensor  # [N], parents[0] == -1
    # [N, V], the distribution that each node was sampled from, siblings without replacement; None unless sampled
    draft_probs: Tensor | None = None
    # [N], the drafter's log-probability of each node's path; 0 at the root
    likelihoods: Tensor | None = None
    # [N], the log-odds that each node is accepted after its parent, as a head with a confidence output predicts them;
    # None if it was not asked
    confidences: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse tensors that form no tree, because a drafter of a user may have made them."""
        _check_tensor("tokens", self.tokens, 1, "whole numbers")
        _check_tensor("parents", self.parents, 1, "whole numbers")
        if self.draft_probs is not None:
            _check_tensor("draft_probs", self.draft_probs, 2, "numbers")
        if self.likelihoods is not None:
            _check_tensor("likelihoods", self.likelihoods, 1, "numbers")

        tokens = self.tokens.tolist()
        parents = self.parents.tolist()
        count = len(tokens)
        if not tokens or count != len(parents):
            raise ValueError(
                f"a tree needs one parent per token and a root: got {count} and {len(parents)}"
            )
        if parents[0] != -1:
            raise ValueError(f"node 0 is the root, with parent -1: got parent {parents[0]}")
        # two siblings with one token would both match the target's choice, and the token would count twice
        edges = set()
        for node in range(1, count):
            edge = (parents[node], tokens[node])
            parent, token = edge
            if parent == -1:
                raise ValueError(
                    f"a tree has one root: node {node} has parent -1 too; give it a parent below {node}"
                )
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents precede children: node {node} has parent {parent}, expected 0..{node - 1}"
                )
            if edge in edges:
                raise ValueError(
                    f"siblings differ: token {token} stands twice under node {parent}; merge the nodes"
                )
            edges.add(edge)
        if self.draft_probs is not None and len(self.draft_probs) != count:
            raise ValueError(
                f"draft_probs hold one row per node: got {len(self.draft_probs)}, expected {count}"
            )
        if self.likelihoods is not None and len(self.likelihoods) != count:
            raise ValueError(
                f"likelihoods hold one per node: got {len(self.likelihoods)}, expected {count}"
            )

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], draft_probs: Tensor | None = None) -> DraftTree:
        """Return the tree in which every node but the last has one child.

        Args:
            tokens: Of the nodes, the root's first.
            draft_probs: [N, V], the distribution over V tokens that each of the N nodes was sampled from; None if they
                were not sampled.
        """
        return cls(torch.tensor(tokens), torch.arange(-1, len(tokens) - 1), draft_probs)

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Return the smallest tree that contains all of these draft sequences.

        Args:
            root: The root token.
            paths: Sequences of token ids that may follow the root.
        """
        tokens = [root]
        parents = [-1]
        children: dict[tuple[int, int], int] = {}  # parent and token -> node
        # paths share the nodes of the prefix that they have in common
        for path in paths:
            node = 0
            for token in path:
                edge = (node, token)
                if edge not in children:
                    children[edge] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[edge]
        return cls(torch.tensor(tokens), torch.tensor(parents))

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child, so that every node is the child of the node before it."""
        return self.parents.tolist() == list(range(-1, len(self) - 1))

    @property
    def levels(self) -> int:
        """The number of levels below the root: the length of the longest path."""
        return max(self.depths())

    @property
    def columns(self) -> int:
        """The number of nodes that the target reads, and so of the positions that the tree takes in its KV cache.

        A tree on a device may have more than `len` of them (`GrownTree`).
        """
        return len(self)

    def renumber(self, path: list[int]) -> list[int]:
        """Turn a path's node numbers in the target's forward into this tree's.

        They are equal here. They differ only in a tree on a device, which is padded to a fixed size (`GrownTree`).
        """
        return path

    def depths(self) -> list[int]:
        """Return each node's number of steps from the root."""
        depths = [0]
        for parent in self.parents.tolist()[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def ancestors(self) -> Tensor:
        """Return the tree's attention mask, [N, N] bool for N nodes: row i marks node i and its ancestors."""
        # one integer for each node, with bit j for node j, is five times faster than rows of a tensor
        count = len(self)
        words = [1]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            words.append(words[parent] | 1 << node)
        num_bytes = -(-count // 8)  # rounded up
        packed = np.frombuffer(
            b"".join(word.to_bytes(num_bytes, "little") for word in words), np.uint8
        )
        # [N, N] of 0 and 1
        bits = np.unpackbits(
            packed.reshape(count, num_bytes), axis=1, count=count, bitorder="little"
        )
        return torch.from_numpy(bits).bool()

    def path(self, node: int) -> list[int]:
        """Return the nodes on the path from the root to `node`, both included."""
        parents = self.parents.tolist()
        path = []
        while node != -1:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def children(self) -> list[list[int]]:
        """Return the children of each node, in the order in which they were proposed."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            children[parent].append(node)
        return children


def _check_tensor(name: str, value: object, dims: int, kind: str) -> None:
    """Refuse a field of `DraftTree` that is no tensor, has other dimensions, or holds another type of numbers.

    Args:
        name: The field.
        value: What it holds.
        dims: The expected number of dimensions.
        kind: The expected numbers, as the message names them: "whole numbers" or "numbers".
    """
    if not isinstance(value, Tensor):
        got = f"{value!r:.60}"
    else:
        # torch makes an empty tensor float
        is_wrong_type = (
            kind == "whole numbers" and value.is_floating_point() and value.shape != (0,)
        )
        if value.dim() == dims and not is_wrong_type:
            return
        got = f"a {value.dtype} tensor {list(value.shape)}"
    raise ValueError(
        f"DraftTree.{name} is {got}, expected a tensor of {kind} with {dims} dimensions"
    )


def check_draft(tree: object, root: int, levels: int, vocab_size: int) -> DraftTree:
    """Return a drafter's tree unchanged; ValueError if the target cannot verify it.

    Args:
        tree: What the drafter returned.
        root: The token that the tree must start at.
        levels: The most levels of the tree.
        vocab_size: V, the size of the target's vocabulary.
    """
    if not isinstance(tree, DraftTree):
        got = "no tree" if tree is None else f"a {type(tree).__name__}"
        raise ValueError(
            f"the drafter proposed {got}, expected a DraftTree: DraftTree.chain([update.root]) drafts nothing"
        )
    # a drafter may be a user's: each of these faults would give a wrong answer without an error, or stop a whole batch
    tokens = tree.tokens.tolist()
    if tokens[0] != root:
        raise ValueError(
            f"the draft's root is token {tokens[0]}, expected {root}, the last token of the sequence: begin the tree "
            "with update.root"
        )
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"the draft holds token ids {wrong[:5]}, expected 0..{vocab_size - 1}: leave others out"
        )
    # depths are counted only where the tree has enough nodes to be too deep
    depth = tree.levels if len(tree) > levels else 0
    if depth > levels:
        raise ValueError(
            f"the draft has {depth} levels, expected at most {levels}: draft within budget.depth"
        )
    if tree.draft_probs is not None and tree.draft_probs.shape != (len(tokens), vocab_size):
        raise ValueError(
            f"the draft's probs are {list(tree.draft_probs.shape)}, expected those of {vocab_size} tokens for each of "
            f"{len(tokens)} nodes"
        )
    return tree


def stack_trees(trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens and depths [B, N], and attention masks [B, N, N] (None for chains), for one forward over all trees.

    The B trees are padded to the N nodes of the largest. A depth is a node's number of steps from the root, and row i
    of a mask marks node i and its ancestors. A node of padding attends only to itself, no other node attends to it, and
    it has the root's depth.
    """
    # a single tree, the most frequent case, needs no padding
    if len(trees) == 1:
        tree = trees[0]
        mask = None if tree.is_chain else tree.ancestors()[None]
        return tree.tokens[None], torch.tensor([tree.depths()]), mask

    # [B, N], where N is the number of nodes of the largest tree
    size = (len(trees), max(map(len, trees)))
    tokens = torch.zeros(size, dtype=torch.long)
    depths = torch.zeros(size, dtype=torch.long)
    for row, tree in enumerate(trees):
        tokens[row, : len(tree)] = tree.tokens
        depths[row, : len(tree)] = torch.tensor(tree.depths())
    # a causal mask serves chains
    if all(tree.is_chain for tree in trees):
        return tokens, depths, None
    # a node of padding attends to itself, because the softmax over an empty row of a mask is nan
    masks = torch.eye(size[1], dtype=torch.bool).repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        masks[row, : len(tree), : len(tree)] = tree.ancestors()
    return tokens, depths, masks


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """A target's logits and tapped features at every node of a tree."""

    tree: DraftTree
    logits: Tensor  # [N, V]
    features: Tensor | None  # [N, L, D]
    start: int  # the root's position in the sequence
    # the list of the sequence's committed tokens, shared with the target's state: first those before the root, later
    # also those that were committed since
    sequence: list[int]

    @property
    def positions(self) -> list[int]:
        """For each node the position, in the sequence, of the token that the target chooses after it."""
        return [self.start + 1 + depth for depth in self.tree.depths()]

    def prefix(self, node: int) -> list[int]:
        """Return all tokens before the target's choice after `node`: the sequence, the root, and the path to the node.

        A repetition penalty is computed from them.
        """
        # `sequence` may have grown since: only the tokens before the root belong to the prefix
        tokens = self.tree.tokens.tolist()
        drafted = [tokens[step] for step in self.tree.path(node)]
        return self.sequence[: self.start] + drafted

    def likeliest(self, count: int) -> Tensor:
        """Return the target's likeliest tokens after each of the tree's N nodes, [N, count], likeliest first."""
        return self.logits.topk(min(count, self.logits.shape[-1])).indices

    def features_at(self, path: Sequence[int] | Tensor) -> Tensor | None:
        """Return the target's tapped hidden states at the nodes of a path, [len(path), L, D]; None without taps.

        There are L taps (layers whose inputs the drafter reads), and D is the target's width. They are what the drafter
        reads of the accepted tokens.

        Args:
            path: Nodes of the tree. A tensor is on the device, and may hold padding after the path.
        """
        if self.features is None:
            return None
        if isinstance(path, Tensor):
            # padding may exceed this tree's nodes: it reads any state, which is dropped later
            return self.features.index_select(0, path.clamp(max=len(self.features) - 1))
        return pick_rows(self.features, path)
