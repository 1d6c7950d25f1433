"""A forward's draft trees as root-to-leaf paths, which a module that a mask cannot steer reads as rows of a batch."""

# B sequences, R nodes of each that are not committed, N of them new, P paths, D nodes of the longest path

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.device import upload

Path = tuple[int, list[int]]
"""The index of a sequence, and nodes of its tree from an ancestor to a descendant, each a child of the node before."""


class Paths:
    """Paths of nodes as rows of a batch [P, D], padded on the right with their last node."""

    def __init__(self, paths: Sequence[Path], shape: tuple[int, int]) -> None:
        """Take P paths (sequence, nodes), and the shape [B, R] of the forward's nodes: R for each of B sequences."""
        self.paths = list(paths)
        self.shape = shape
        self.longest = max(len(nodes) for _, nodes in paths)
        self.seqs = [seq for seq, _ in paths]  # the sequence of each path
        # by the name of a kind of indices
        self.uploaded: dict[tuple[str, torch.device], Tensor] = {}

    @cached_property
    def is_whole(self) -> bool:
        """Whether row b holds all nodes of sequence b in their order, so that nothing has to be gathered.

        So it is where every tree is a chain of equal length.
        """
        seqs, width = self.shape
        whole = list(range(width))
        return self.seqs == list(range(seqs)) and all(nodes == whole for _, nodes in self.paths)

    def nodes(self, device: torch.device) -> Tensor:
        """Return [P * D], the node at each of D steps of P paths, as an index into the nodes [B, R, ..], flattened.

        B are sequences, and R the nodes of each.
        """

        def find() -> list[int]:
            """List the nodes of all paths by flat index, each path padded with its last node."""
            indices = []
            for seq, nodes in self.paths:
                padding = nodes[-1:] * (self.longest - len(nodes))
                indices += [seq * self.shape[1] + node for node in nodes + padding]
            return indices

        return self._upload("nodes", find, device)

    def steps(self, device: torch.device) -> Tensor:
        """Return [B * R], for each node where a path visits it, as an index into the steps [P, D, ..], flattened.

        There are R nodes of each of B sequences, and P paths of D steps. It is 0 for nodes on no path, whose entries
        are not used.
        """

        def find() -> list[int]:
            """List for each node the flat index of the last path and step that visits it."""
            seqs, width = self.shape
            indices = [0] * (seqs * width)
            for row, (seq, nodes) in enumerate(self.paths):
                for step, node in enumerate(nodes):
                    indices[seq * width + node] = row * self.longest + step
            return indices

        return self._upload("steps", find, device)

    def _upload(self, name: str, find: Callable[[], list[int]], device: torch.device) -> Tensor:
        """Return the indices that `find` computes, on a device; they are computed and copied there only once.

        `name` tells indices of different kinds apart.
        """
        if (name, device) not in self.uploaded:
            self.uploaded[name, device] = upload(torch.tensor(find()), device)
        return self.uploaded[name, device]

    def gather(self, value: Any) -> Any:
        """Turn a forward's argument by node into one by path: from tensors [B or 1, R, ..] to [P, D, ..].

        There are R nodes of each of B sequences, and P paths of D steps. Containers are searched for such tensors;
        values without nodes stay unchanged.
        """
        if self.is_whole:
            return value

        def pick(tensor: Tensor, batch: int) -> Tensor:
            """Gather the paths of a tensor whose axes `batch` and `batch` + 1 count sequences and nodes."""
            # the batch axis and the node axis after it are moved to the front, and back at the end
            nodes = tensor.movedim((batch, batch + 1), (0, 1))
            # a tensor may have one row that serves all sequences
            by_sequence = nodes.expand(self.shape[0], *nodes.shape[1:])
            rows = by_sequence.flatten(0, 1).index_select(0, self.nodes(tensor.device))
            return rows.unflatten(0, (-1, self.longest)).movedim((0, 1), (batch, batch + 1))

        return map_nodes(pick, value, self.shape)

    def scatter(self, rows: Tensor, new: int) -> Tensor:
        """Turn an output by path [P, D, ..] into one by node [B, N, ..], of the last N = `new` nodes of B trees.

        There are P paths of D steps. A node on several paths has the same output on each.
        """
        if self.is_whole:
            return rows[:, -new:]
        nodes = rows.flatten(0, 1).index_select(0, self.steps(rows.device))
        return nodes.unflatten(0, self.shape)[:, -new:]


def map_nodes(change: Callable[[Tensor, int], Tensor], value: Any, shape: tuple[int, int]) -> Any:
    """Apply `change(tensor, batch dimension)` to the tensors of a value that have an entry for each node.

    Arguments of a module's forward are turned from nodes to paths by this.

    Args:
        change: returns the tensor to put in the place of each.
        value: a tensor, or a container of values; everything else is returned unchanged.
        shape: [B, R], the numbers of sequences and of nodes of each.
    """
    if isinstance(value, Tensor):
        batch = batch_dimension(value, shape)
        return value if batch is None else change(value, batch)
    if isinstance(value, (tuple, list)):
        return type(value)(map_nodes(change, item, shape) for item in value)
    if isinstance(value, dict):
        return {name: map_nodes(change, item, shape) for name, item in value.items()}
    return value


def batch_dimension(tensor: Tensor, shape: tuple[int, int]) -> int | None:
    """Return the dimension of a tensor that counts sequences, followed by that of nodes; None if it has none.

    It is 0, or 1 for positions [3, B, R] that have several numbers for each token.

    Args:
        tensor: the tensor.
        shape: [B, R], the numbers of sequences and of nodes of each.
    """
    sizes = tensor.shape
    seqs, width = shape
    # a tensor may have one row that serves all sequences, as positions do
    if len(sizes) >= 2 and sizes[1] == width and sizes[0] in (1, seqs):
        return 0
    if len(sizes) == 3 and sizes[2] == width and sizes[1] in (1, seqs):
        return 1
    return None


class Plan:
    """The trees of one forward, given by the parent of each node; the last N nodes are new."""

    def __init__(self, parents: list[list[int]], width: int, new: int) -> None:
        """Take the trees of one forward, by the parent of each node.

        Args:
            parents: by sequence the parent of each uncommitted node, -1 where the committed sequence precedes it.
            width: R, the number of nodes of the largest tree.
            new: N, how many of them this forward reads; earlier forwards have read the others.
        """
        self.parents = parents
        self.new = new
        self.shape = (len(parents), width)

    def paths(self, paths: Sequence[Path]) -> Paths:
        """Return paths of these trees, pairs of a sequence's index and its nodes, as rows of a batch."""
        return Paths(paths, self.shape)

    @property
    def first_new(self) -> int:
        """The first node that this forward reads: the number of nodes that earlier forwards have read."""
        return self.shape[1] - self.new

    @cached_property
    def to_leaves(self) -> Paths:
        """The paths to each new leaf, each from its first uncommitted node on.

        A module that a mask cannot steer reads each path as a row of a batch.
        """
        rows = []
        for seq, parents in enumerate(self.parents):
            # a node that is a parent is no leaf
            inner = set(parents)
            leaves = [node for node in range(self.first_new, len(parents)) if node not in inner]
            rows += [(seq, self.path(seq, node)) for node in leaves]
        return self.paths(rows)

    @cached_property
    def levels(self) -> list[list[tuple[int, int]]]:
        """By depth the new nodes, as pairs (sequence, node), for modules that are called once for each depth.

        The first new node on each path has depth 0, whatever earlier forwards have read before it.
        """
        # parents come before their children, so that one pass finds all depths
        levels: list[list[tuple[int, int]]] = []
        for seq, parents in enumerate(self.parents):
            # of nodes read before, so that their children have depth 0
            depths = [-1] * self.first_new
            for node in range(self.first_new, len(parents)):
                parent = parents[node]
                depth = 0 if parent == -1 else depths[parent] + 1
                depths.append(depth)
                # the first node of this depth, in any sequence
                if depth == len(levels):
                    levels.append([])
                levels[depth].append((seq, node))
        return levels

    @cached_property
    def level_rows(self) -> tuple[list[Paths], Paths]:
        """The new nodes as rows of one node each: by level (depth), and all levels together in the order of the levels.

        Nodes are counted from the first new one, as a mixer that reads by levels gets inputs at the new nodes alone.
        """
        shape = (self.shape[0], self.new)
        levels = []
        rows: list[Path] = []
        for level in self.levels:
            paths = [(seq, [node - self.first_new]) for seq, node in level]
            levels.append(Paths(paths, shape))
            rows += paths
        return levels, Paths(rows, shape)

    def path(self, seq: int, node: int) -> list[int]:
        """Return the nodes on the path from the committed sequence `seq` to `node`, which comes last."""
        path = []
        while node != -1:
            path.append(node)
            node = self.parents[seq][node]
        return path[::-1]


def find_parents(
    tree_mask: Tensor | None,
    sizes: Sequence[int],
    earlier: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Return by sequence the parent of each uncommitted node, -1 for the committed sequence, from a tree mask.

    A model with recurrent states must know the parent from whose state a node goes on.

    Args:
        tree_mask: [1 or B, N, R], of R nodes those that each of N new ones attends to, itself included; None: each
            sequence is a chain of new nodes.
        sizes: the number of nodes of each of B sequences, without padding.
        earlier: by sequence the parents of the nodes that earlier forwards have read.

    Raises:
        ValueError: if a node does not see just itself, its parent and all that its parent sees.
    """
    if tree_mask is None:
        return [list(range(-1, size - 1)) for size in sizes]
    new, width = tree_mask.shape[1:]
    # [N, R], each new node in its own column
    itself = torch.eye(width, dtype=torch.bool)[width - new :]
    # [B, N, R], the ancestors of each new node
    above = (tree_mask & ~itself).expand(len(sizes), -1, -1)
    # the parent is the last ancestor, as nodes come after their parents; -1 for a node without ancestors
    last = (above * torch.arange(1, width + 1)).amax(-1) - 1
    parents = []
    for old, new_parents, size in zip(earlier, last.tolist(), sizes, strict=True):
        parents.append([*old, *new_parents[: size - len(old)]])
    for mask, seq_parents in zip(above.tolist(), parents, strict=True):
        _check_parents(mask, seq_parents, first=width - new)
    return parents


def _check_parents(above: list[list[bool]], parents: list[int], first: int) -> None:
    """Refuse a mask that is not that of a tree: a node must see exactly its parent and all that its parent sees.

    Args:
        above: [N][R], whether each of N new nodes attends to each of R nodes, itself left out.
        parents: the parent of each node of the sequence, without padding; -1 for the committed sequence.
        first: the first new node.
    """
    ancestors: list[set[int]] = [set() for _ in parents]  # of each node, itself included
    for node, parent in enumerate(parents):
        inherited = ancestors[parent] if parent >= 0 else set()
        ancestors[node] = inherited | {node}
        # earlier forwards have checked their nodes
        if node < first:
            continue
        visible = {column for column, is_visible in enumerate(above[node - first]) if is_visible}
        if visible != inherited:
            raise ValueError(
                "a target that keeps a state reads trees: a new token must see its parent and all that its parent sees"
            )
