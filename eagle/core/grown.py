"""Draft trees that were grown on a device and stay there until something on the host needs them.

If nothing does, the target reads and verifies them on the device, and the host waits once a cycle: growth,
verification and the moves in the KV cache have fixed shapes, and one transfer brings trees and outcomes together.
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

# the token of nodes that belong to the fixed shape and not to the tree; the host's copy of the tree lacks them
LEFT_OUT = -1


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Parents, ancestors and depths of the N nodes of each of B trees, as tensors on a device."""

    parents: Tensor  # [B, N]; the root is its own parent
    tree_mask: Tensor  # [B, N, N] bool, row i marks node i and its ancestors
    depths: Tensor  # [B, N], steps from the root

    def map(self, function: Callable[[Tensor], Tensor]) -> NodeShape:
        """Return the shape with `function` applied to its three tensors, such as one that selects trees."""
        return NodeShape(function(self.parents), function(self.tree_mask), function(self.depths))


def find_shape(parents: Tensor, levels: int) -> NodeShape:
    """Return the ancestors and depths of all nodes of several trees, on the device of `parents`.

    It has no loop over nodes, so that a GPU runs few kernels and the host need not wait for it.

    Args:
        parents: [B, N], the parent of each of the N nodes of B trees; of node 0, the root, it is 0 or -1.
        levels: The most levels of a tree below its root.
    """
    # the clamp only keeps indices valid: a check would need the host, which refuses faulty trees when it reads them
    parents = parents.clamp(0, parents.shape[1] - 1)
    # [B, N, N], reach[i, j]: node j is node i, or at most one step above it
    reach = torch.zeros(*parents.shape, parents.shape[1], device=parents.device)
    reach.scatter_(2, parents[..., None], 1)
    reach.diagonal(dim1=1, dim2=2).fill_(1)
    # each product doubles the steps, so log2(levels) products find all ancestors
    for _ in range((levels - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    tree_mask = reach > 0
    # a node of depth d has d ancestors, and is marked itself
    return NodeShape(parents, tree_mask, tree_mask.sum(-1) - 1)


@lru_cache(256)
def fixed_shape(parents: tuple[int, ...], device: torch.device) -> NodeShape:
    """Return the shape of one tree, with a batch dimension of 1; cached, so that a fixed tree is uploaded once.

    Args:
        parents: The parent of each node; of node 0, the root, it is 0 or -1.
        device: The device of the result's tensors.
    """
    # a tree of N nodes has fewer than N levels
    shape = find_shape(torch.tensor(parents)[None], len(parents))
    return shape.map(lambda tensor: upload(tensor, device))


class DeviceTrees:
    """Trees of equal size on a device, which were grown together."""

    def __init__(
        self,
        rows: Sequence[int],
        fields: Tensor,
        levels: int,
        parents: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        leaves_nodes_out: bool = False,
    ) -> None:
        """Hold draft trees that were grown on a device, until the host reads them.

        Args:
            rows: The batch row of each tree.
            fields: [B, 1, 2 or 3, N - 1], of B trees of N nodes, without the roots: the nodes' tokens, and if
                `parents` is None also their parents and the bits of their fp32 likelihoods. Otherwise the bits of fp32
                log-odds of acceptance may follow. All are integers in one tensor, so that one transfer reads them.
            levels: The most levels of a tree below its root.
            parents: [N], on the host, if all trees have one fixed shape.
            probs: [B, N, V], the drafter's probabilities of V tokens that each node was sampled from; None for trees
                that were not sampled.
            leaves_nodes_out: Whether some nodes may have the token `LEFT_OUT`: they only fill the fixed number of
                nodes, and do not belong to their tree.
        """
        self.rows = list(rows)
        self.fields = fields
        self.levels = levels
        self.parents = parents
        self.probs = probs
        self.leaves_nodes_out = leaves_nodes_out
        self.roots: list[int] = []  # the root token of each tree, once `hand_over` has set them
        # all groups of trees of one proposal, which are read in one transfer; `hand_over` sets them
        self.read_together: Sequence[DeviceTrees] = [self]
        self.host_fields: Tensor | None = None  # `fields` on the host, once they are read

    @property
    def size(self) -> int:
        """The number of nodes of each tree, with the root and the `LEFT_OUT` nodes that fill the fixed size."""
        return self.fields.shape[2] + 1

    @cached_property
    def tokens(self) -> Tensor:
        """The tokens of B trees of N nodes, [B, N], on the device, the roots first.

        `LEFT_OUT` stands for nodes that only fill the fixed size and belong to no tree.
        """
        # the roots are known on the host alone
        roots = upload(torch.tensor(self.roots)[:, None], self.fields.device)
        return torch.cat([roots, self.fields[:, 0]], dim=1)

    @cached_property
    def shape(self) -> NodeShape:
        """Parents, ancestors and depths of all trees' nodes, on the device.

        Nodes that only fill the fixed size (`LEFT_OUT`) are among them.
        """
        if self.parents is None:
            # tokens, parents and likelihoods, in this order; a parent of 0 is added for the root
            return find_shape(F.pad(self.fields[:, 1], (1, 0)), self.levels)
        # all trees share one shape, which is expanded to the batch without a copy
        count = len(self.fields)
        shared = fixed_shape(tuple(self.parents.tolist()), self.fields.device)
        return shared.map(lambda tensor: tensor.expand(count, *tensor.shape[1:]))

    def pick(self, indices: Sequence[int]) -> tuple[Tensor, NodeShape]:
        """Return the tokens and the shape of some of the trees, on the device.

        They are read by the target in one forward.

        Args:
            indices: Of B trees, in the order of the result, whose tokens are [B, N] with N nodes each.
        """
        return pick_rows(self.tokens, indices), self.shape.map(
            lambda tensor: pick_rows(tensor, indices)
        )

    def tree(self, index: int) -> DraftTree:
        """Return one of the trees as a `DraftTree` on the host, read from the device if it was not yet.

        One transfer reads all groups of trees that the drafter proposed together.

        Args:
            index: Of the tree among these trees.
        """
        # one transfer reads all groups of the proposal and sets their `host_fields`
        if self.host_fields is None:
            read_trees(self.read_together)
        assert self.host_fields is not None
        fields = self.host_fields[index]  # [1, 2 or 3, N - 1]
        root = self.roots[index]
        if self.parents is not None:
            # a fixed shape: only the tokens differ between trees
            tokens = torch.cat([torch.tensor([root]), fields[0]])
            probs = None if self.probs is None else self.probs[index]
            confidences = None
            if len(fields) > 1:
                confidences = torch.cat([torch.zeros(1), fields[1].int().view(torch.float32)])
            return _leave_out(tokens, self.parents, draft_probs=probs, confidences=confidences)
        # the root's token and parent, and a likelihood of 0
        root_fields = torch.tensor([[root], [-1], [0]])
        # the likelihoods travel in the tensor of integers, as the bits of their fp32 values
        tokens, parents, bits = torch.cat([root_fields, fields], dim=1)
        return _leave_out(tokens, parents, likelihoods=bits.int().view(torch.float32))

    def renumber(self, index: int, path: list[int]) -> list[int]:
        """Turn a path's node numbers on the device into those of the same tree on the host.

        On the device all trees have equally many nodes. Those with the token `LEFT_OUT` only fill that number, and the
        host's tree lacks them.

        Args:
            index: Of the tree in this group.
            path: Nodes of this tree that belong to it, the root first.
        """
        if not self.leaves_nodes_out:
            return path
        # a node's new number is the count of kept nodes before it; the root is always kept, and has no column
        assert self.host_fields is not None
        is_kept = F.pad(self.host_fields[index, 0] != LEFT_OUT, (1, 0), value=True)
        return (is_kept.cumsum(0) - 1)[torch.tensor(path)].tolist()


class GrownTree(DraftTree):
    """One of several `DeviceTrees`. Its `DraftTree` fields are read from the device when one is first asked for."""

    __slots__ = ("device_trees", "index")
    device_trees: DeviceTrees | None  # None for a copy, which has all fields on the host
    index: int  # of this tree in `device_trees`

    @classmethod
    def of(cls, device_trees: DeviceTrees, index: int) -> GrownTree:
        """Return the tree of this index in a group of trees on a device, without a transfer to the host.

        Its fields are read only when they are asked for.
        """
        # DraftTree's own __init__ would check the fields, which are not on the host yet
        tree = object.__new__(cls)
        object.__setattr__(tree, "device_trees", device_trees)
        object.__setattr__(tree, "index", index)
        return tree

    def __getattr__(self, name: str) -> Any:
        """Return a field of a tree on a device; the first one that is asked for brings all fields to the host."""
        # Python calls this only for slots that were not set; copies, as by dataclasses.replace, set no `device_trees`
        if name == "device_trees":
            return None
        if name not in DraftTree.__slots__ or self.device_trees is None:
            raise AttributeError(name)
        # one transfer brings all fields
        tree = self.device_trees.tree(self.index)
        for field in DraftTree.__slots__:
            object.__setattr__(self, field, getattr(tree, field))
        return getattr(self, name)

    @property
    def levels(self) -> int:
        """The most levels that the tree may have below its root, known without waiting for the device."""
        return max(self.depths()) if self.device_trees is None else self.device_trees.levels

    @property
    def columns(self) -> int:
        """The number of nodes that the target reads: the root, the tree's nodes, and those that fill the fixed size."""
        return len(self) if self.device_trees is None else self.device_trees.size

    def renumber(self, path: list[int]) -> list[int]:
        """Turn a path's node numbers on the device into this tree's, which lacks the nodes that fill the fixed size."""
        return path if self.device_trees is None else self.device_trees.renumber(self.index, path)

    def __len__(self) -> int:
        """Return the number of nodes, the root included.

        Some nodes on the device may only fill the fixed size (token `LEFT_OUT`). They do not count, and then the host
        must read the tree first.
        """
        # nodes that were left out can only be counted once the host has the tokens
        if self.device_trees is None or self.device_trees.leaves_nodes_out:
            return len(self.tokens)
        return self.device_trees.size


def lies_on_device(tree: object) -> TypeGuard[GrownTree]:
    """Return whether a tree is on a device and the host has not read it yet.

    Such a tree is verified on the device, without waiting for it.
    """
    if not isinstance(tree, GrownTree) or tree.device_trees is None:
        return False
    return tree.device_trees.host_fields is None


def hand_over(
    groups: Sequence[DeviceTrees], roots: Sequence[int], *, at_once: bool
) -> list[DraftTree]:
    """Turn the trees of one proposal into a list of `DraftTree`, one for each row.

    They are read from the device now (`at_once`), or when one of their fields is first asked for.

    Args:
        groups: The trees of some rows (sequences of the batch); the other rows get a tree with the root alone. They are
            told their root tokens and each other, so that one transfer reads all.
        roots: The root token of every row.
        at_once: Whether to read all trees now. Sampled trees are read in any case, as the host verifies them.
    """
    trees = [DraftTree.chain([root]) for root in roots]
    for group in groups:
        group.roots = [roots[row] for row in group.rows]
        group.read_together = groups
    # a second loop, because the first tree that is read takes all groups along in its transfer
    for group in groups:
        is_read = at_once or group.probs is not None
        for index, row in enumerate(group.rows):
            trees[row] = group.tree(index) if is_read else GrownTree.of(group, index)
    return trees


def read_trees(groups: Sequence[DeviceTrees]) -> None:
    """Copy the nodes of groups of trees to the host in one transfer, for which it waits; each group keeps its own."""
    _store_fields(groups, to_host([group.fields for group in groups]))


def _store_fields(groups: Sequence[DeviceTrees], fields: Sequence[Tensor]) -> None:
    """Set each group's `host_fields`, the tokens (and parents) of its trees' nodes, to what was copied to the host."""
    for group, host_fields in zip(groups, fields, strict=True):
        group.host_fields = host_fields


def lay_out(
    trees: Sequence[DraftTree], device: torch.device, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens and depths [B, N] and attention masks [B, N, N], for one forward of the target over all trees.

    There are B trees, padded to the N nodes of the largest. A depth is a node's number of steps from the root, and row
    i of a mask marks the nodes that node i attends to. All are on the host if all trees are, where masks are None for
    chains; else on the device.

    Args:
        trees: Of each row of the batch.
        device: The target's.
        vocab_size: The size of the target's vocabulary.
    """
    if not any(map(lies_on_device, trees)):
        return stack_trees(trees)
    # LEFT_OUT marks nodes that only fill the fixed size of trees on a device. It is no index of the embedding, so these
    # nodes are read as another token; they are never accepted.
    tokens, shape = place_trees(trees, device)
    return tokens.clamp(0, vocab_size - 1), shape.depths, shape.tree_mask


def place_trees(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """Return the trees' tokens and shape as tensors on a device; trees on the host are uploaded.

    Tokens are [B, N], of B trees padded to the N nodes of the largest. A node of padding, which only fills the size,
    has the token `LEFT_OUT`, attends only to itself, and has the root's depth. The target reads them and `walk_trees`
    verifies them there.
    """
    # trees of one `DeviceTrees` share its tensors, and are picked from them together; a host tree is its own group
    groups = {id(tree.device_trees) if lies_on_device(tree) else id(tree) for tree in trees}
    if len(groups) == 1:
        return _place_group(trees, device)
    # trees of different groups, or on the host: placed one by one, and padded to the largest
    placed = [_place_group([tree], device) for tree in trees]
    count = max(tokens.shape[1] for tokens, _ in placed)

    def stack(tensors: Sequence[Tensor], padding: int) -> Tensor:
        """Return tensors [1, nodes of a tree] as one [B, N], padded with a value."""
        padded = [F.pad(tensor, (0, count - tensor.shape[1]), value=padding) for tensor in tensors]
        return torch.cat(padded)

    # [B, N, N], row i marks what node i attends to; padding attends to itself, as a softmax over nothing is nan
    tree_masks = torch.eye(count, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
    for tree_mask, (_, shape) in zip(tree_masks, placed, strict=True):
        size = shape.tree_mask.shape[1]
        tree_mask[:size, :size] = shape.tree_mask[0]
    tokens = stack([tokens for tokens, _ in placed], LEFT_OUT)
    parents = stack([shape.parents for _, shape in placed], 0)
    depths = stack([shape.depths for _, shape in placed], 0)
    return tokens, NodeShape(parents, tree_masks, depths)


def _place_group(trees: Sequence[DraftTree], device: torch.device) -> tuple[Tensor, NodeShape]:
    """Return the tokens [B, N] and the shape of B trees of N nodes that were grown together, or of one host tree."""
    first = trees[0]
    # trees on the host come one by one
    if not lies_on_device(first):
        return upload(first.tokens[None], device), fixed_shape(
            tuple(first.parents.tolist()), device
        )
    assert first.device_trees is not None
    return first.device_trees.pick([tree.index for tree in trees if isinstance(tree, GrownTree)])


def _leave_out(
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None = None,
    likelihoods: Tensor | None = None,
    confidences: Tensor | None = None,
) -> DraftTree:
    """Return a tree on the host without the nodes that only filled the fixed size of trees on the device.

    Their token is `LEFT_OUT`. All descendants of such a node are of this kind, too.

    Args:
        tokens: [N], of all nodes, the root first; `LEFT_OUT` for nodes that do not belong to the tree.
        parents: [N], -1 for the root.
        draft_probs: [N, V], what each node was sampled from; None for trees that were not sampled.
        likelihoods: [N], the drafter's log-probability of each node's path; None if they are not known.
        confidences: [N], the log-odds that each node is accepted after its parent; None if they are not known.
    """
    is_kept = tokens != LEFT_OUT
    if is_kept.all():
        return DraftTree(tokens, parents, draft_probs, likelihoods, confidences)
    nodes = is_kept.nonzero()[:, 0]
    # [N + 1], old number -> new number; index -1 reads the last entry, so that the root's parent -1 stays -1
    numbers = torch.cat([is_kept.cumsum(0) - 1, torch.tensor([-1])])
    if draft_probs is not None:
        draft_probs = pick_rows(draft_probs, nodes.tolist())
    if likelihoods is not None:
        likelihoods = pick_rows(likelihoods, nodes.tolist())
    if confidences is not None:
        confidences = pick_rows(confidences, nodes.tolist())
    return DraftTree(tokens[nodes], numbers[parents[nodes]], draft_probs, likelihoods, confidences)


@dataclass(frozen=True, slots=True)
class Walks:
    """The accepted paths of several trees, on a device."""

    # [B, W], of B trees, with W nodes at most: the accepted nodes, the root first; each entry after the last of them is
    # padding, and holds its own index
    paths: Tensor
    counts: Tensor  # [B], the number of accepted nodes, the root included
    following: Tensor  # [B], the token that the target chose after the last accepted node


def walk_trees(tokens: Tensor, shape: NodeShape, choices: Tensor, width: int) -> Walks:
    """Verify trees on their device: return the accepted paths, without a loop over nodes or a transfer to the host.

    A node is accepted if its token, and that of each of its ancestors, is the target's choice after the parent.

    Args:
        tokens: [B, N], the token of each of N nodes of B trees; nodes that only fill the fixed size have `LEFT_OUT`,
            which no choice equals.
        shape: Parents and ancestors of the nodes.
        choices: [B, N], the token that the target chose after each node.
        width: The most nodes of a path, the root included: the number of columns of the result's paths.
    """
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    # [B, N]: the root, and nodes whose token the target chose after their parent
    is_chosen = (tokens == choices.gather(1, shape.parents)) | (nodes == 0)
    # [B, N]: nodes that are chosen with all of their ancestors
    is_accepted = (is_chosen[:, None] | ~shape.tree_mask).all(-1)
    # Siblings differ, so at most one child of a node is accepted. Parents precede children, so the accepted nodes in
    # ascending order are the path, and a node's rank among them is its index in the path.
    ranks = is_accepted.cumsum(1) - 1
    # nodes that are not accepted are written to a further entry, which is cut off
    positions = torch.where(is_accepted, ranks, width).clamp_(max=width)
    paths = torch.arange(width + 1, device=tokens.device).repeat(len(tokens), 1)
    paths = paths.scatter_(1, positions, nodes.expand_as(positions))[:, :width]
    counts = is_accepted.sum(1).clamp_(max=width)
    last_nodes = paths.gather(1, counts[:, None] - 1)
    return Walks(paths, counts, choices.gather(1, last_nodes)[:, 0])


def walk_outputs(rows: Sequence[tuple[TargetOutput, Choose]]) -> Walks:
    """Choose the target's token after each node, and return the accepted paths; at least one tree is on the device.

    All rows of a batch are verified together, and nothing is copied to the host yet: `read_walks` does that.

    Args:
        rows: For each row of the batch the target's output on its tree, and how the target chooses. Noise that is
            cached for positions of committed tokens is dropped.
    """
    device = rows[0][0].logits.device
    trees = [output.tree for output, _ in rows]
    tokens, shape = place_trees(trees, device)
    # [B, N], the token that the target chooses after each node; 0 after padding, which is never accepted
    choices = torch.zeros_like(tokens)
    for row, (output, choose) in enumerate(rows):
        # positions up to the root are committed: no token is chosen there again
        if choose.noise is not None:
            choose.noise.forget(output.start + 1)
        # a row has logits for its own nodes, not for padding
        count = len(output.logits)
        tree_mask = shape.tree_mask[row, :count, :count]
        depths = shape.depths[row, :count]
        choices[row, :count] = choose.pick_on_device(output, tokens[row, :count], tree_mask, depths)
    # the root is a node of the path, too
    longest = max(tree.levels for tree in trees) + 1
    return walk_trees(tokens, shape, choices, min(longest, tokens.shape[1]))


def read_walks(
    rows: Sequence[tuple[TargetOutput, Choose]], walks: Walks
) -> list[tuple[list[int], int]]:
    """Copy the accepted paths and the trees of several rows (sequences) to the host, in one transfer.

    Args:
        rows: For each row of the batch the target's output on its tree, and how the target chooses.
        walks: The accepted paths, on the device.

    Returns:
        Of each row the accepted path, the root first, in the node numbers of its tree on the host, and the target's
        token after it.
    """
    # The trees of one proposal lie in several groups, one for each kind of budget. All of its groups are read, also
    # those of rows that are not verified now, so that a row that is read later needs no transfer.
    trees = [output.tree for output, _ in rows]
    groups_by_id: dict[int, DeviceTrees] = {}
    for tree in trees:
        if lies_on_device(tree) and tree.device_trees is not None:
            for group in tree.device_trees.read_together:
                groups_by_id[id(group)] = group
    groups = list(groups_by_id.values())
    fields = [group.fields for group in groups]
    *host_fields, paths, counts, following = to_host(
        [*fields, walks.paths, walks.counts, walks.following]
    )
    _store_fields(groups, host_fields)

    results = []
    for tree, path, count, token in zip(
        trees, paths.tolist(), counts.tolist(), following.tolist(), strict=True
    ):
        # what follows the first `count` nodes is padding; the host's tree lacks the device's `LEFT_OUT` nodes
        results.append((tree.renumber(path[:count]), token))
    return results
