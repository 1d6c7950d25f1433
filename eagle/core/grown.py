"""Draft trees that have grown on a device: the host reads them when something there asks for them.

Where nothing does, a target reads and verifies them where they are, and the host waits once a cycle: growth,
verification and what moves in the cache have fixed shapes, and one transfer brings trees and outcomes together.
"""

# B trees, N nodes, W nodes of the longest path, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.tree import DraftTree, TargetOutput, stack_trees
from eagle.core.verify import Choose
from eagle.device import pick_rows, to_host, upload

LEFT_OUT = -1  # the token of nodes that a tree does not get


@dataclass(frozen=True, slots=True)
class NodeShape:
    """How the nodes of several trees follow one another, on a device."""

    parents: Tensor  # [B, N], the root's its own
    seen: Tensor  # [B, N, N] bool, each node's ancestors and itself
    depths: Tensor  # [B, N]

    def map(self, function: Callable[[Tensor], Tensor]) -> NodeShape:
        """Return the shape with a function of each of its tensors."""
        return NodeShape(function(self.parents), function(self.seen), function(self.depths))


def find_shape(parents: Tensor, levels: int) -> NodeShape:
    """Return the shape of trees of at most so many levels, from parents [B, N]; the root's do not matter."""
    # what is wrong is refused once the host has it
    parents = parents.clamp(0, parents.shape[1] - 1)
    # reach[i, j]: node j is at most one step above node i
    reach = torch.zeros(*parents.shape, parents.shape[1], device=parents.device)
    reach.scatter_(2, parents[..., None], 1)
    reach.diagonal(dim1=1, dim2=2).fill_(1)
    # each product doubles the steps, so log2(levels) products find all ancestors
    for _ in range((levels - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    ancestors = reach > 0
    return NodeShape(parents, ancestors, ancestors.sum(-1) - 1)


@lru_cache(256)
def fixed_shape(parents: tuple[int, ...], device: torch.device) -> NodeShape:
    """Return the shape of one tree with these parents, uploaded once."""
    shape = find_shape(torch.tensor(parents)[None], len(parents))
    return shape.map(lambda tensor: upload(tensor, device))


class DeviceTrees:
    """Trees of equal size on a device.

    Args:
        rows: The batch row of each tree.
        columns: [B, 1 or 3, N - 1], without the roots: tokens, and where `parents` do not fix one shape also parents
            and the bits of fp32 likelihoods. One tensor of integers, so that one transfer brings all.
        levels: Of each tree at most.
        parents: [N], on the host, if all trees have one shape.
        probs: [B, N, V], what the nodes were sampled from.
        leaves_nodes_out: Whether some nodes may be `LEFT_OUT`.
    """

    def __init__(
        self,
        rows: Sequence[int],
        columns: Tensor,
        levels: int,
        parents: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        leaves_nodes_out: bool = False,
    ) -> None:
        self.rows = list(rows)
        self.columns = columns
        self.levels = levels
        self.parents = parents
        self.probs = probs
        self.leaves_nodes_out = leaves_nodes_out
        self.roots: list[int] = []
        self.together: Sequence[DeviceTrees] = [self]  # what is read with these
        self.host_columns: Tensor | None = None  # once they are read

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
        if self.parents is None:
            return find_shape(F.pad(self.columns[:, 1], (1, 0)), self.levels)
        count = len(self.columns)
        shared = fixed_shape(tuple(self.parents.tolist()), self.columns.device)
        return shared.map(lambda tensor: tensor.expand(count, *tensor.shape[1:]))

    def pick(self, indices: Sequence[int]) -> tuple[Tensor, NodeShape]:
        """Return the tokens [B, N] and the shape of some of the trees."""
        return pick_rows(self.tokens, indices), self.shape.map(
            lambda tensor: pick_rows(tensor, indices)
        )

    def tree(self, index: int) -> DraftTree:
        """Return one of the trees on the host."""
        if self.host_columns is None:
            read_trees(self.together)
        assert self.host_columns is not None
        columns = self.host_columns[index]
        root = self.roots[index]
        if self.parents is not None:
            tokens = torch.cat([torch.tensor([root]), columns[0]])
            probs = None if self.probs is None else self.probs[index]
            return _leave_out(tokens, self.parents, draft_probs=probs)
        # the root's token and parent, and a likelihood of 0
        root_column = torch.tensor([[root], [-1], [0]])
        tokens, parents, bits = torch.cat([root_column, columns], dim=1)
        return _leave_out(tokens, parents, likelihoods=bits.int().view(torch.float32))

    def renumber(self, index: int, path: list[int]) -> list[int]:
        """Turn a path's node numbers on the device into those of the host's tree, which lacks the `LEFT_OUT` nodes."""
        if not self.leaves_nodes_out:
            return path
        # a node's new number is the count of kept nodes before it; the root, which is always kept, has no column
        assert self.host_columns is not None
        is_kept = F.pad(self.host_columns[index, 0] != LEFT_OUT, (1, 0), value=True)
        return (is_kept.cumsum(0) - 1)[torch.tensor(path)].tolist()


class GrownTree(DraftTree):
    """A tree on a device. Its fields are those of `DraftTree`, read from there when one of them is first asked for."""

    __slots__ = ("grown", "number")
    grown: DeviceTrees | None  # None for a copy
    number: int

    @classmethod
    def of(cls, grown: DeviceTrees, number: int) -> GrownTree:
        """Return the tree of this number."""
        tree = object.__new__(cls)
        object.__setattr__(tree, "grown", grown)
        object.__setattr__(tree, "number", number)
        return tree

    def __getattr__(self, name: str) -> Any:
        # called only for slots that hold nothing yet
        if name == "grown":
            return None
        if name not in DraftTree.__slots__ or self.grown is None:
            raise AttributeError(name)
        # one transfer brings all fields
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
        """Return a path's nodes, counted without what was left out, where they are counted with it."""
        return path if self.grown is None else self.grown.renumber(self.number, path)

    def __len__(self) -> int:
        if self.grown is None or self.grown.leaves_nodes_out:
            return len(self.tokens)
        return self.grown.size


def lies_on_device(tree: object) -> TypeGuard[GrownTree]:
    """Return whether the host has not read a tree yet."""
    return (
        isinstance(tree, GrownTree) and tree.grown is not None and tree.grown.host_columns is None
    )


def hand_over(
    grown: Sequence[DeviceTrees], roots: Sequence[int], *, at_once: bool
) -> list[DraftTree]:
    """Return the tree under each root, read from the device now (`at_once`) or when it is asked for.

    Args:
        grown: Trees for some of the rows; the others get their root alone.
        roots: The root token of every row.
        at_once: Whether to read all trees now. Those that were sampled are read in any case.
    """
    trees = [DraftTree.chain([root]) for root in roots]
    for group in grown:
        group.roots = [roots[row] for row in group.rows]
        group.together = grown
    # all groups must know one another before the first is read
    for group in grown:
        is_read = at_once or group.probs is not None
        for index, row in enumerate(group.rows):
            trees[row] = group.tree(index) if is_read else GrownTree.of(group, index)
    return trees


def read_trees(grown: Sequence[DeviceTrees]) -> None:
    """Read trees from their device in one transfer, for which the host waits."""
    _store_columns(grown, to_host([group.columns for group in grown]))


def _store_columns(grown: Sequence[DeviceTrees], columns: Sequence[Tensor]) -> None:
    """Store what was read of trees."""
    for group, host_columns in zip(grown, columns, strict=True):
        group.host_columns = host_columns


def lay_out(
    trees: Sequence[DraftTree], device: torch.device, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens and depths [B, N] and attention masks [B, N, N], on the host if all trees lie there.

    Masks are None for chains.
    """
    if not any(map(lies_on_device, trees)):
        return stack_trees(trees)
    # a token that is left out is read as some other one, and never accepted
    tokens, shape = place_trees(trees, device)
    return tokens.clamp(0, vocab_size - 1), shape.depths, shape.seen


def place_trees(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """Return the trees' tokens [B, N] and shape as tensors on a device; trees that lie on the host are uploaded.

    A node of padding has the token `LEFT_OUT`, sees only itself, and has the root's depth.
    """
    # trees that grew in one batch share its tensors, and are placed together
    groups = {id(tree.grown) if lies_on_device(tree) else id(tree) for tree in trees}
    if len(groups) == 1:
        return _place_group(trees, device)
    # trees of different batches, or on the host: placed one by one, and padded to the largest
    placed = [_place_group([tree], device) for tree in trees]
    count = max(tokens.shape[1] for tokens, _ in placed)

    def stack(tensors: Sequence[Tensor], padding: int) -> Tensor:
        padded = [F.pad(tensor, (0, count - tensor.shape[1]), value=padding) for tensor in tensors]
        return torch.cat(padded)

    # seen[b, i, j]: node i sees node j
    seen = torch.eye(count, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
    for row, (_, shape) in zip(seen, placed, strict=True):
        size = shape.seen.shape[1]
        row[:size, :size] = shape.seen[0]
    tokens = stack([tokens for tokens, _ in placed], LEFT_OUT)
    parents = stack([shape.parents for _, shape in placed], 0)
    depths = stack([shape.depths for _, shape in placed], 0)
    return tokens, NodeShape(parents, seen, depths)


def _place_group(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """Place trees that grew together, or one tree."""
    first = trees[0]
    if not lies_on_device(first):
        return upload(first.tokens[None], device), fixed_shape(
            tuple(first.parents.tolist()), device
        )
    assert first.grown is not None
    return first.grown.pick([tree.number for tree in trees if isinstance(tree, GrownTree)])


def _leave_out(
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None = None,
    likelihoods: Tensor | None = None,
) -> DraftTree:
    """Return the tree without the removed nodes, whose descendants are removed too."""
    is_kept = tokens != LEFT_OUT
    if is_kept.all():
        return DraftTree(tokens, parents, draft_probs, likelihoods)
    nodes = is_kept.nonzero()[:, 0]
    # old number -> new number; the last entry is that of parent -1, so that the root's parent stays -1
    numbers = torch.cat([is_kept.cumsum(0) - 1, torch.tensor([-1])])
    if draft_probs is not None:
        draft_probs = pick_rows(draft_probs, nodes.tolist())
    if likelihoods is not None:
        likelihoods = pick_rows(likelihoods, nodes.tolist())
    return DraftTree(tokens[nodes], numbers[parents[nodes]], draft_probs, likelihoods)


@dataclass(frozen=True, slots=True)
class Walks:
    """The accepted paths of several trees, on a device."""

    paths: Tensor  # [B, W], accepted nodes, the root first; after the last of them each entry is its own index
    counts: Tensor  # [B], accepted nodes, the root included
    following: Tensor  # [B], what the target chose after the last of them


def walk_trees(tokens: Tensor, shape: NodeShape, choices: Tensor, width: int) -> Walks:
    """Return the accepted paths of at most `width` nodes, without a loop over nodes or a value on the host.

    A node is accepted if it and all its ancestors are what the target chose after their parents.

    Args:
        tokens: [B, N], of the nodes.
        shape: Of the trees.
        choices: [B, N], what the target chose after each node.
        width: W, the nodes of the longest path.
    """
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    # [B, N]: the root, and nodes whose token the target chose after their parent
    is_chosen = (tokens == choices.gather(1, shape.parents)) | (nodes == 0)
    # [B, N]: nodes that are chosen with all of their ancestors
    is_accepted = (is_chosen[:, None] | ~shape.seen).all(-1)
    # parents precede children, and siblings differ: the accepted nodes are the path in its order
    ranks = is_accepted.cumsum(1) - 1
    # all that is not accepted goes to one more entry, which is cut off
    positions = torch.where(is_accepted, ranks, width).clamp_(max=width)
    paths = torch.arange(width + 1, device=tokens.device).repeat(len(tokens), 1)
    paths = paths.scatter_(1, positions, nodes.expand_as(positions))[:, :width]
    counts = is_accepted.sum(1).clamp_(max=width)
    last_nodes = paths.gather(1, counts[:, None] - 1)
    return Walks(paths, counts, choices.gather(1, last_nodes)[:, 0])


def walk_outputs(rows: Sequence[tuple[TargetOutput, Choose]]) -> Walks:
    """Return the accepted paths of several rows' trees; at least one tree lies on the device."""
    device = rows[0][0].logits.device
    trees = [output.tree for output, _ in rows]
    tokens, shape = place_trees(trees, device)
    choices = torch.zeros_like(tokens)  # [B, N]
    for row, (output, choose) in enumerate(rows):
        # the noise of committed positions is not needed again
        if choose.noise is not None:
            choose.noise.forget(output.start + 1)
        # a row has logits for its own nodes, not for padding
        count = len(output.logits)
        seen = shape.seen[row, :count, :count]
        depths = shape.depths[row, :count]
        choices[row, :count] = choose.pick_where_it_lies(output, tokens[row, :count], seen, depths)
    longest = max(tree.levels for tree in trees) + 1
    return walk_trees(tokens, shape, choices, min(longest, tokens.shape[1]))


def read_walks(
    rows: Sequence[tuple[TargetOutput, Choose]], walks: Walks
) -> list[tuple[list[int], int]]:
    """Return the accepted path of each row, in the numbers of its tree on the host, and the token after it.

    One transfer brings them, together with all trees that lie on the device.
    """
    # batches that grew in one proposal are read in one transfer, those of rows that are not verified now too
    trees = [output.tree for output, _ in rows]
    grown: dict[int, DeviceTrees] = {}
    for tree in trees:
        if lies_on_device(tree) and tree.grown is not None:
            for group in tree.grown.together:
                grown[id(group)] = group
    groups = list(grown.values())
    columns = [group.columns for group in groups]
    *columns, paths, counts, following = to_host(
        [*columns, walks.paths, walks.counts, walks.following]
    )
    _store_columns(groups, columns)

    results = []
    for tree, path, count, token in zip(
        trees, paths.tolist(), counts.tolist(), following.tolist(), strict=True
    ):
        results.append((tree.renumber(path[:count]), token))
    return results
