"""A forward's draft trees as root-to-leaf paths, the rows over which a module that a mask cannot steer runs."""

# B texts, R nodes of each that are not committed, N of them new, P paths, D nodes of the longest path

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.device import upload

Path = tuple[int, list[int]]
"""A text and nodes of it, each the child of the one before."""


class Paths:
    """Paths of nodes as rows of one length, padded on the right with their last node."""

    def __init__(self, paths: Sequence[Path], shape: tuple[int, int]) -> None:
        self.paths, self.shape = list(paths), shape  # B, R
        self.longest = max(len(nodes) for _, nodes in paths)
        self.texts = [text for text, _ in paths]
        self.uploaded: dict[tuple[str, torch.device], Tensor] = {}

    @cached_property
    def is_whole(self) -> bool:
        """Whether row b is all nodes of text b in their order, so that nothing has to be gathered."""
        texts, width = self.shape
        return self.texts == list(range(texts)) and all(nodes == list(range(width)) for _, nodes in self.paths)

    def nodes(self, device: torch.device) -> Tensor:
        """[P * D], each place's node as a row of [B * R, ..]."""
        width = self.shape[1]
        rows = [(text, nodes + nodes[-1:] * (self.longest - len(nodes))) for text, nodes in self.paths]
        return self._upload("nodes", lambda: [text * width + node for text, nodes in rows for node in nodes], device)

    def places(self, device: torch.device) -> Tensor:
        """[B * R], one place [P * D] of each node; 0 for nodes that lie on none of these paths."""

        def find() -> list[int]:
            width, places = self.shape[1], [0] * (self.shape[0] * self.shape[1])
            for row, (text, nodes) in enumerate(self.paths):
                for step, node in enumerate(nodes):
                    places[text * width + node] = row * self.longest + step
            return places

        return self._upload("places", find, device)

    def _upload(self, name: str, make: Callable[[], list[int]], device: torch.device) -> Tensor:
        """An index on a device, computed and copied there once."""
        if (name, device) not in self.uploaded:
            self.uploaded[name, device] = upload(torch.tensor(make()), device)
        return self.uploaded[name, device]

    def gather(self, value: Any) -> Any:
        """A forward's argument for [B, R] nodes as that for these rows: tensors [B or 1, R, ..], also within others."""
        if self.is_whole:
            return value

        def pick(tensor: Tensor, batch: int) -> Tensor:
            tensor = tensor.movedim((batch, batch + 1), (0, 1)).expand(self.shape[0], *[-1] * (tensor.dim() - 1))
            picked = tensor.flatten(0, 1).index_select(0, self.nodes(tensor.device)).unflatten(0, (-1, self.longest))
            return picked.movedim((0, 1), (batch, batch + 1))

        return map_nodes(pick, value, self.shape)

    def scatter(self, rows: Tensor, new: int) -> Tensor:
        """[B, N, ..], rows [P, D, ..] put back to the last N nodes of each text."""
        if self.is_whole:
            return rows[:, -new:]
        nodes = rows.flatten(0, 1).index_select(0, self.places(rows.device))
        return nodes.unflatten(0, self.shape)[:, -new:]


def map_nodes(change: Callable[[Tensor, int], Tensor], value: Any, shape: tuple[int, int]) -> Any:
    """The value with `change(tensor, batch dimension)` of its tensors that have an entry for each of [B, R] nodes."""
    if isinstance(value, Tensor):
        batch = batch_dimension(value, shape)
        return value if batch is None else change(value, batch)
    if isinstance(value, (tuple, list)):
        return type(value)(map_nodes(change, item, shape) for item in value)
    if isinstance(value, dict):
        return {name: map_nodes(change, item, shape) for name, item in value.items()}
    return value


def batch_dimension(tensor: Tensor, shape: tuple[int, int]) -> int | None:
    """Where a tensor has [B or 1, R]: in front, or behind the axes of positions in several dimensions."""
    sizes, (texts, width) = tensor.shape, shape
    if len(sizes) >= 2 and sizes[1] == width and sizes[0] in (1, texts):
        return 0
    return 1 if len(sizes) == 3 and sizes[2] == width and sizes[1] in (1, texts) else None


class Plan:
    """The trees of one forward: each text's nodes by their parents, of which the last N are new."""

    def __init__(self, parents: list[list[int]], width: int, new: int) -> None:
        self.parents, self.new = parents, new  # parent -1: the committed text
        self.shape = len(parents), width

    def paths(self, paths: Sequence[Path]) -> Paths:
        """Some of its paths as rows."""
        return Paths(paths, self.shape)

    @property
    def first(self) -> int:
        """The number of nodes that were read before."""
        return self.shape[1] - self.new

    @cached_property
    def to_leaves(self) -> Paths:
        """The paths from the committed text to each leaf that is new."""
        rows = []
        for text, parents in enumerate(self.parents):
            inner = set(parents)
            rows += [(text, self.path(text, node)) for node in range(self.first, len(parents)) if node not in inner]
        return self.paths(rows)

    @cached_property
    def levels(self) -> list[list[tuple[int, int]]]:
        """The new nodes (text, node) by depth below the nodes that were read before."""
        levels: list[list[tuple[int, int]]] = []
        for text, parents in enumerate(self.parents):
            depths = [-1] * self.first
            for node in range(self.first, len(parents)):
                depths.append(0 if parents[node] == -1 else depths[parents[node]] + 1)
                levels += [[]] if depths[node] == len(levels) else []
                levels[depths[node]].append((text, node))
        return levels

    @cached_property
    def level_rows(self) -> tuple[list[Paths], Paths]:
        """The nodes of each level, and those of all, as rows of one; they are numbered among the new nodes."""
        levels = [[(text, [node - self.first]) for text, node in level] for level in self.levels]
        shape = self.shape[0], self.new
        return [Paths(level, shape) for level in levels], Paths([row for level in levels for row in level], shape)

    def path(self, text: int, node: int) -> list[int]:
        """The nodes from the committed text to this one."""
        path = []
        while node != -1:
            path.append(node)
            node = self.parents[text][node]
        return path[::-1]


def find_parents(seen: Tensor | None, sizes: Sequence[int], earlier: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each text's parents, from the nodes [B, N, R] that its new ones see (None: a chain) and earlier ones' parents.

    Raises ValueError where a node does not see just itself, its parent and all that its parent sees.
    """
    if seen is None:
        return [list(range(-1, size - 1)) for size in sizes]
    new, width = seen.shape[1:]
    itself = torch.eye(width, dtype=torch.bool)[width - new :]
    above = seen & ~itself
    last = (above * torch.arange(1, width + 1)).amax(-1) - 1
    parents = [
        [*old, *row[: size - len(old)]]
        for old, row, size in zip(earlier, last.expand(len(sizes), -1).tolist(), sizes, strict=True)
    ]
    for row, row_parents in zip(above.expand(len(sizes), -1, -1).tolist(), parents, strict=True):
        marks = [0] * len(row_parents)
        for node, parent in enumerate(row_parents):
            marks[node] = 1 << node | (marks[parent] if parent >= 0 else 0)
            if node >= width - new and marks[node] != 1 << node | sum(
                1 << i for i, is_seen in enumerate(row[node - width + new]) if is_seen
            ):
                raise ValueError(
                    "a target that keeps a state reads trees: a new token must see its parent and all that its parent "
                    "sees"
                )
    return parents
