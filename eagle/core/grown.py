"""Draft trees that have grown on a device: the host reads them when something there asks for them.

Where nothing does, a target reads and verifies them where they are, and the host waits once a cycle; see
`eagle.core.walks`.
"""

# B trees, N nodes, R rows of text

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.tree import DraftTree, stack_trees
from eagle.device import pick_rows, to_host, upload

LEFT_OUT = -1  # a token in the place of nodes that no tree gets


@dataclass(frozen=True, slots=True)
class NodeShape:
    """How the nodes of several trees follow one another, on a device."""

    parents: Tensor  # [B, N], the root's its own
    seen: Tensor  # [B, N, N] bool, each node's ancestors and itself
    depths: Tensor  # [B, N]

    def change(self, function: Callable[[Tensor], Tensor]) -> NodeShape:
        """The shape with a function of each of its tensors."""
        return NodeShape(function(self.parents), function(self.seen), function(self.depths))


def find_shape(parents: Tensor, levels: int) -> NodeShape:
    """The shape of trees of at most so many levels, from parents [B, N]; what the root's are does not matter."""
    parents = parents.clamp(0, parents.shape[1] - 1)  # what is wrong is refused once the host has it
    reach = torch.zeros(*parents.shape, parents.shape[1], device=parents.device).scatter_(2, parents[..., None], 1)
    reach.diagonal(dim1=1, dim2=2).fill_(1)  # each product doubles the steps towards the root
    for _ in range((levels - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    seen = reach > 0
    return NodeShape(parents, seen, seen.sum(-1) - 1)


@lru_cache(256)
def fixed_shape(parents: tuple[int, ...], device: torch.device) -> NodeShape:
    """The shape of one tree with these parents, uploaded once."""
    return find_shape(torch.tensor(parents)[None], len(parents)).change(lambda part: upload(part, device))


class GrownTrees:
    """Trees of equal size on a device; `columns` [B, 1 or 3, N - 1] are without their roots.

    Columns are tokens, and where `parents` [N] do not fix one shape also parents and the bits of likelihoods.
    """

    def __init__(
        self,
        rows: Sequence[int],
        columns: Tensor,
        levels: int,
        parents: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        sheds: bool = False,
    ) -> None:
        self.rows, self.columns, self.levels = list(rows), columns, levels
        self.parents, self.probs, self.sheds = parents, probs, sheds  # probs [B, N, V], what the nodes were drawn from
        self.roots: list[int] = []
        self.together: Sequence[GrownTrees] = [self]  # what is read with these
        self.held: Tensor | None = None  # the columns on the host

    @property
    def size(self) -> int:
        """Nodes of each tree, roots and nodes that will be left out included."""
        return self.columns.shape[2] + 1

    @cached_property
    def tokens(self) -> Tensor:
        """[B, N], on the device; `LEFT_OUT` for nodes that a tree does not get."""
        roots = upload(torch.tensor(self.roots)[:, None], self.columns.device)
        return torch.cat([roots, self.columns[:, 0]], dim=1)

    @cached_property
    def shape(self) -> NodeShape:
        """The shape of all trees, with the nodes that are left out."""
        if self.parents is not None:
            shared = fixed_shape(tuple(self.parents.tolist()), self.columns.device)
            return shared.change(lambda part: part.expand(len(self.columns), *part.shape[1:]))
        return find_shape(F.pad(self.columns[:, 1], (1, 0)), self.levels)

    def pick(self, numbers: Sequence[int]) -> tuple[Tensor, NodeShape]:
        """The tokens [B, N] and the shape of some of the trees."""
        return pick_rows(self.tokens, numbers), self.shape.change(lambda part: pick_rows(part, numbers))

    def tree(self, number: int) -> DraftTree:
        """The tree of this number on the host."""
        if self.held is None:
            read_trees(self.together)
        assert self.held is not None
        columns, root = self.held[number], self.roots[number]
        if self.parents is not None:
            tokens, probs = torch.cat([torch.tensor([root]), columns[0]]), self.probs
            return _leave_out(tokens, self.parents, draft_probs=None if probs is None else probs[number])
        tokens, parents, bits = torch.cat([torch.tensor([[root], [-1], [0]]), columns], dim=1)
        return _leave_out(tokens, parents, likelihoods=bits.int().view(torch.float32))

    def renumber(self, number: int, path: list[int]) -> list[int]:
        """A path's nodes by their numbers in the tree on the host, which lacks what was left out."""
        if not self.sheds:
            return path
        assert self.held is not None
        kept = F.pad(self.held[number, 0] != LEFT_OUT, (1, 0), value=True)
        return (kept.cumsum(0) - 1)[torch.tensor(path)].tolist()


class GrownTree(DraftTree):
    """A tree on a device. Its fields are those of `DraftTree`, read from there when one of them is first asked for."""

    __slots__ = ("grown", "number")
    grown: GrownTrees | None  # None for a copy
    number: int

    @classmethod
    def of(cls, grown: GrownTrees, number: int) -> GrownTree:
        """The tree of this number."""
        tree = object.__new__(cls)
        object.__setattr__(tree, "grown", grown)
        object.__setattr__(tree, "number", number)
        return tree

    def __getattr__(self, name: str) -> Any:
        if name == "grown":
            return None
        if name not in DraftTree.__slots__ or self.grown is None:
            raise AttributeError(name)
        tree = self.grown.tree(self.number)
        for field in DraftTree.__slots__:
            object.__setattr__(self, field, getattr(tree, field))
        return getattr(self, name)

    @property
    def levels(self) -> int:
        """How many levels it has at most."""
        return max(self.depths()) if self.grown is None else self.grown.levels

    @property
    def columns(self) -> int:
        """How many nodes a target reads, those included that will be left out."""
        return len(self) if self.grown is None else self.grown.size

    def renumber(self, path: list[int]) -> list[int]:
        """A path's nodes, counted without what was left out, where they are counted with it."""
        return path if self.grown is None else self.grown.renumber(self.number, path)

    def __len__(self) -> int:
        return len(self.tokens) if self.grown is None or self.grown.sheds else self.grown.size


def lies_on_device(tree: object) -> TypeGuard[GrownTree]:
    """Whether the host has not read a tree yet."""
    return isinstance(tree, GrownTree) and tree.grown is not None and tree.grown.held is None


def hand_over(grown: Sequence[GrownTrees], roots: Sequence[int], *, at_once: bool) -> list[DraftTree]:
    """The tree under each root, the root alone where nothing has grown; read from the device now, or when asked."""
    trees = [DraftTree.chain([root]) for root in roots]
    for part in grown:
        part.roots, part.together = [roots[row] for row in part.rows], grown
    for part in grown:
        for number, row in enumerate(part.rows):
            trees[row] = part.tree(number) if at_once or part.probs is not None else GrownTree.of(part, number)
    return trees


def read_trees(grown: Sequence[GrownTrees]) -> None:
    """Read trees from their device in one transfer, for which the host waits."""
    keep_columns(grown, to_host([part.columns for part in grown]))


def keep_columns(grown: Sequence[GrownTrees], columns: Sequence[Tensor]) -> None:
    """Note what was read of trees."""
    for part, held in zip(grown, columns, strict=True):
        part.held = held


def lay_out(trees: Sequence[DraftTree], device: torch.device, vocab_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens and depths [B, N], and attention masks [B, N, N] (None for chains), on the host if all trees lie there."""
    if not any(map(lies_on_device, trees)):
        return stack_trees(trees)
    tokens, shape = place_trees(trees, device)
    return tokens.clamp(0, vocab_size - 1), shape.depths, shape.seen


def place_trees(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """Tokens [B, N] and the shape of trees on a device, where those of the host are uploaded.

    Padding is `LEFT_OUT`, sees itself and stands where the root does.
    """
    if len({id(tree.grown) if lies_on_device(tree) else id(tree) for tree in trees}) == 1:
        return _place(trees, device)
    placed = [_place([tree], device) for tree in trees]
    count = max(tokens.shape[1] for tokens, _ in placed)

    def stack(parts: Sequence[Tensor], padding: int) -> Tensor:
        return torch.cat([F.pad(part, (0, count - part.shape[1]), value=padding) for part in parts])

    seen = torch.eye(count, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
    for row, (_, shape) in zip(seen, placed, strict=True):
        size = shape.seen.shape[1]
        row[:size, :size] = shape.seen[0]
    parents, depths = [shape.parents for _, shape in placed], [shape.depths for _, shape in placed]
    tokens = stack([tokens for tokens, _ in placed], LEFT_OUT)
    return tokens, NodeShape(stack(parents, 0), seen, stack(depths, 0))


def _place(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """`place_trees` of trees that grew together, or of one."""
    first = trees[0]
    if not lies_on_device(first):
        return upload(first.tokens[None], device), fixed_shape(tuple(first.parents.tolist()), device)
    assert first.grown is not None
    return first.grown.pick([tree.number for tree in trees if isinstance(tree, GrownTree)])


def _leave_out(tokens: Tensor, parents: Tensor, **rest: Tensor | None) -> DraftTree:
    """The tree without the removed nodes, whose descendants are removed too."""
    kept = tokens != LEFT_OUT
    if not kept.all():
        nodes, numbers = kept.nonzero()[:, 0], torch.cat([kept.cumsum(0) - 1, torch.tensor([-1])])
        tokens, parents = tokens[nodes], numbers[parents[nodes]]  # the root's parent stays -1
        rest = {name: None if part is None else pick_rows(part, nodes.tolist()) for name, part in rest.items()}
    return DraftTree(tokens, parents, **rest)
