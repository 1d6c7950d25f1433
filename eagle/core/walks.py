"""Verification of trees that lie on a device: the host learns trees and outcomes together, and waits for them once.

A node is accepted if it and all its ancestors are what the target chose after their parents, which takes no loop and
no value of the host: growth, verification and what moves in the cache have fixed shapes.
"""

# B texts, N nodes, W nodes of the longest path

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.grown import GrownTrees, NodeShape, keep_columns, lies_on_device, place_trees
from eagle.core.tree import TargetOutput
from eagle.core.verify import Choose
from eagle.device import to_host


@dataclass(frozen=True, slots=True)
class Walks:
    """The accepted paths of several trees, on a device."""

    paths: Tensor  # [B, W], accepted nodes, the root first; behind the last of them each place holds itself
    counts: Tensor  # [B], accepted nodes, the root included
    following: Tensor  # [B], what the target chose after the last of them


def walk_trees(tokens: Tensor, shape: NodeShape, choices: Tensor, width: int) -> Walks:
    """The accepted paths of at most `width` nodes, from the nodes' tokens [B, N] and the target's choices [B, N]."""
    numbers = torch.arange(tokens.shape[1], device=tokens.device)
    is_chosen = (tokens == choices.gather(1, shape.parents)) | (numbers == 0)
    accepted = (is_chosen[:, None] | ~shape.seen).all(-1)
    # parents precede children, and siblings differ: the accepted nodes are the path in its order
    places = torch.where(accepted, accepted.cumsum(1) - 1, width).clamp_(max=width)
    paths = torch.arange(width + 1, device=tokens.device).repeat(len(tokens), 1)
    paths = paths.scatter_(1, places, numbers.expand_as(places))[:, :width]
    counts = accepted.sum(1).clamp_(max=width)
    return Walks(paths, counts, choices.gather(1, paths.gather(1, counts[:, None] - 1))[:, 0])


def walk_outputs(rows: Sequence[tuple[TargetOutput, Choose]]) -> Walks:
    """The accepted paths of several texts' trees; at least one tree lies on the device."""
    device = rows[0][0].logits.device
    trees = [output.tree for output, _ in rows]
    tokens, shape = place_trees(trees, device)
    choices = torch.zeros_like(tokens)
    for number, (output, choose) in enumerate(rows):
        if choose.noise is not None:
            choose.noise.forget(output.start + 1)
        count = len(output.logits)
        seen, depths = shape.seen[number, :count, :count], shape.depths[number, :count]
        choices[number, :count] = choose.pick_where_it_lies(output, tokens[number, :count], seen, depths)
    return walk_trees(tokens, shape, choices, min(max(tree.levels for tree in trees) + 1, tokens.shape[1]))


def read_walks(rows: Sequence[tuple[TargetOutput, Choose]], walks: Walks) -> list[tuple[list[int], int]]:
    """The accepted path of each text, in the numbers of its tree on the host, and the token after it.

    One transfer brings them, together with all trees that lie on the device.
    """
    trees = [output.tree for output, _ in rows]
    grown: dict[int, GrownTrees] = {}
    for tree in trees:
        if lies_on_device(tree) and tree.grown is not None:
            grown |= {id(part): part for part in tree.grown.together}
    columns = [part.columns for part in grown.values()]
    *columns, paths, counts, following = to_host([*columns, walks.paths, walks.counts, walks.following])
    keep_columns([*grown.values()], columns)
    accepted = [path[:count] for path, count in zip(paths.tolist(), counts.tolist(), strict=True)]
    return [(tree.renumber(path), root) for tree, path, root in zip(trees, accepted, following.tolist(), strict=True)]
