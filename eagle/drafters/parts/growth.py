"""Growing trees level by level, in a fixed shape or along the drafter's likeliest paths."""

# B sequences, K nodes of one level, R of all levels, C candidates, N nodes of a tree, S columns of committed tokens
# V vocabulary, D draft vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Noise
from eagle.core.grown import LEFT_OUT, DeviceTrees, hand_over
from eagle.core.tree import DraftTree, Paths
from eagle.device import must_wait, pick_rows, upload
from eagle.drafters.parts.scoring import SHARPNESS, ChildScorer, DraftRequest

Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], their parents among the nodes of the level above [K], their ancestors [K, R] -> logits [K, D].

One row of logits stands for all nodes, where the children of all are guessed alike.
"""

RowsLevel = Callable[[int, list[int], Tensor, Tensor, Tensor], Tensor]
"""Depth, the rows that grow on, and what a `Level` gets for each of them [B, ..] -> logits [B, K, D] or [B, 1, D]."""

Confidence = Callable[[int, list[int]], Tensor]
"""Depth and these rows -> how likely a child of each node is kept whose logits were given last, [B, K] or [B, 1]."""

# the bits of a log-likelihood of minus infinity
NOTHING = int(torch.tensor(-math.inf).view(torch.int32))


class FollowsRows:
    """A `RowsLevel` that keeps tensors of the level above; rows leave them as their trees end."""

    rows: list[int]  # of the level above

    def keep_rows(self, rows: list[int], *parts: Tensor) -> list[Tensor]:
        """Return the rows that still grow of tensors [B, ..], whose rows are those of the level above."""
        indices = [self.rows.index(row) for row in rows]
        self.rows = rows
        return [pick_rows(part, indices) for part in parts]


# -- masks and fixed shapes -------------------------------------------------------------------------------------------


def level_mask(committed: Tensor, seen: Tensor, groups: int = 1) -> Tensor:
    """Return the additive mask [B, 1, groups * K, S + R] by which a level's nodes see their sequence and own path.

    Args:
        committed: [B or 1, S], 0 at columns that a row's sequence fills, the lowest number after them.
        seen: [B, K, R], the ancestors of each node, and the node.
        groups: How many query heads share a key, and become rows of one head.
    """
    rows, count, _ = seen.shape
    draft = torch.where(seen, *_mask_values(committed.dtype, committed.device))
    committed_mask = committed[:, None, None].expand(rows, groups, count, -1)
    draft_mask = draft[:, None].expand(-1, groups, -1, -1)
    return torch.cat([committed_mask, draft_mask], dim=-1).flatten(1, 2)[:, None]


@cache
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two values of an additive mask: of what is seen, and of what is hidden."""
    lowest = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), lowest, dtype=dtype, device=device
    )


@cache
def _identity(count: int, device: torch.device) -> Tensor:
    """Return [1, K, K]: of its own level, each node sees itself alone."""
    return torch.eye(count, dtype=torch.bool, device=device)[None]


def level_rows(budget: Budget) -> tuple[int, ...]:
    """Return how many rows `grow` asks for in each level of a tree after the first."""
    if budget.paths is None:
        width = min(budget.top_k, budget.nodes)
        return (width,) * (budget.depth - 1) if width else ()
    # nodes of a fixed shape that have children
    inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
    depths = [len(path) for path in inner]
    return tuple(depths.count(depth) for depth in range(1, max(depths, default=0) + 1))


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """One level of a fixed shape: its nodes, and those of them that are read because they have children."""

    width: int  # children of a row that are ranked
    rows: Tensor  # [nodes], each node's parent among the rows that were read of the level above
    children: Tensor  # [nodes], which each node is of all ranked children of these rows
    read: Tensor  # [K], the nodes that are read
    parents: Tensor  # [K], the rows that these follow
    tree_mask: Tensor  # [K, rows read so far]


@cache  # never dropped: captured drafts read these tensors
def plan_levels(paths: Paths, depth: int, device: torch.device) -> tuple[list[LevelPlan], Tensor]:
    """Return a fixed shape level by level down to `depth`, and the parents [N] of its nodes."""
    plans = []
    tree_mask = torch.zeros(1, 0, dtype=torch.bool)
    above: list[tuple[int, ...]] = [()]  # the paths that were read of the level above
    nodes = {path: 0 for path in above}  # of the whole tree, by path
    parents = [-1]
    for length in range(1, depth + 1):
        # the paths of this level, siblings in the order of their ranks
        level = sorted(path for path in set(paths) if len(path) == length)
        for path in level:
            parents.append(nodes[path[:-1]])
            nodes[path] = len(nodes)
        # only nodes with children are read
        followed = {path[:-1] for path in paths} if length < depth else set()
        inner = [path for path in level if path in followed]
        rows = torch.tensor([above.index(path[:-1]) for path in level])
        ranks = torch.tensor([path[-1] for path in level])
        read = torch.tensor([level.index(path) for path in inner], dtype=torch.long)
        width = 1 + max(path[-1] for path in level)
        # a node sees what its parent sees, and itself
        tree_mask = torch.cat(
            [tree_mask[rows[read]], torch.eye(len(inner), dtype=torch.bool)], dim=1
        )
        tensors = [rows, rows * width + ranks, read, rows[read], tree_mask]
        plans.append(LevelPlan(width, *(upload(tensor, device) for tensor in tensors)))
        if not inner:
            break
        above = inner
    return plans, torch.tensor(parents)


def plan_parents(budget: Budget, nodes: int, device: torch.device) -> Tensor | None:
    """Return the parents [1 + N] in a fixed shape of so many nodes; None where the budget fixes none."""
    if budget.paths is None:
        return None
    _, parents = plan_levels(budget.paths, budget.depth, device)
    return parents[: 1 + nodes]


# -- growing ----------------------------------------------------------------------------------------------------------


def grow(
    root: int,
    logits: Tensor,
    level: Level,
    budget: Budget,
    noise: Noise | None = None,
    place: int = 0,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> DraftTree:
    """Return the tree under one root.

    A budget with a fixed shape gets that shape. Any other gets EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858).

    Args:
        root: The root's token.
        logits: [D], those of the root's children.
        level: Gives the logits of the next level.
        budget: The size or the shape of the tree.
        noise: The target's sampling noise; None if it is greedy.
        place: The position of the root's children.
        drafts: [D], the draft vocabulary; None for all tokens.
        sharpness: What logits are multiplied by where the budget does not say.
    """

    def level_of_row(
        depth: int, rows: list[int], tokens: Tensor, parents: Tensor, tree_mask: Tensor
    ) -> Tensor:
        return level(depth, tokens[0], parents[0], tree_mask[0])[None]

    request = DraftRequest(root, place, budget, noise)
    return grow_rows([request], logits[None], level_of_row, drafts=drafts, sharpness=sharpness)[0]


def grow_rows(
    requests: Sequence[DraftRequest],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
    confidence: Confidence | None = None,
) -> list[DraftTree]:
    """Return the tree under each root, as `grow` describes; logits [B, D].

    Trees stay on a device that the host would have to wait for, until something on the host asks for one of them.
    Where a budget has a minimum confidence, nodes have no children that the drafter is less sure of.
    """
    grown = grow_columns(
        requests, logits, level, drafts=drafts, sharpness=sharpness, confidence=confidence
    )
    roots = [request.root for request in requests]
    return hand_over(grown, roots, at_once=not must_wait(logits.device))


def grow_columns(
    requests: Sequence[DraftRequest],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
    confidence: Confidence | None = None,
) -> list[DeviceTrees]:
    """Return the trees of `grow_rows` without their roots.

    Rows whose budgets differ in their depth alone grow together, and leave when they are deep enough.
    """
    # a group shares all that decides the operations of a level, so that one forward reads it for all
    groups: dict[object, list[int]] = {}
    for row, request in enumerate(requests):
        if not request.budget.is_empty:
            groups.setdefault(_kind(request), []).append(row)
    grown: list[DeviceTrees] = []
    for rows in groups.values():
        budget = requests[rows[0]].budget
        scorer = ChildScorer(
            budget.draw, drafts, sharpness if budget.sharpness is None else budget.sharpness
        )
        kind = _DynamicTrees if budget.paths is None else _FixedTrees
        trees = kind(
            requests=[requests[row] for row in rows],
            rows=rows,
            scorer=scorer,
            confidence=confidence,
            device=logits.device,
        )
        grown += _grow_group(trees, pick_rows(logits, rows)[:, None], level)
    return grown


def _kind(request: DraftRequest) -> object:
    """Return the properties shared by rows that grow together: all of the budget but its depth, and having noise."""
    budget = request.budget
    shape = (budget.nodes, budget.top_k, budget.paths)
    return *shape, budget.draw, budget.sharpness, budget.confidence, request.noise is None


def _grow_group(
    trees: _DynamicTrees | _FixedTrees, logits: Tensor, level: RowsLevel
) -> list[DeviceTrees]:
    """Return the trees of a group of rows, from the logits [B, 1, D] of their roots' children."""
    grown: list[DeviceTrees] = []
    for depth in range(1, trees.depth + 1):
        trees.add_level(depth - 1, logits)
        is_last = depth == trees.depth
        # by their indices in the group
        ended = [
            index
            for index, request in enumerate(trees.requests)
            if is_last or request.budget.depth <= depth
        ]
        if ended:
            grown.append(trees.finish(ended, depth))
            growing = [index for index in range(len(trees.rows)) if index not in ended]
            if not growing:
                break
            trees.keep(growing)
        tokens, parents, tree_mask = trees.read_next(depth)
        logits = level(depth, trees.rows, tokens, parents, tree_mask)
    return grown


class _Trees:
    """The trees of one group of rows that still grow; their budgets are alike but for the depth."""

    def __init__(
        self,
        requests: list[DraftRequest],
        rows: list[int],
        scorer: ChildScorer,
        confidence: Confidence | None,
        device: torch.device,
    ) -> None:
        self.requests = requests
        self.rows = rows
        self.scorer = scorer
        self.confidence = confidence
        self.device = device
        self.budget = requests[0].budget
        self.depth = max(request.budget.depth for request in requests)
        self.tokens: list[Tensor] = []  # of each level

    def is_sure(self, depth: int) -> Tensor | None:
        """Return [B, K] or [B, 1], which nodes may have children; None where all may."""
        if self.budget.confidence is None or self.confidence is None:
            return None
        return self.confidence(depth, self.rows) >= self.budget.confidence

    def keep(self, indices: list[int]) -> None:
        """Continue with these rows only."""
        self.rows = [self.rows[index] for index in indices]
        self.requests = [self.requests[index] for index in indices]
        self.tokens = _pick_levels(self.tokens, indices)


def _pick_levels(levels: list[Tensor], rows: list[int]) -> list[Tensor]:
    """Return these rows of each level's [B, ..]."""
    return [pick_rows(level, rows) for level in levels]


def _join_levels(levels: list[Tensor], rows: list[int]) -> Tensor:
    """Return these rows of all levels, one level after the other."""
    return torch.cat(_pick_levels(levels, rows), dim=1)


class _DynamicTrees(_Trees):
    """EAGLE-2's trees: read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all.

    A path's log-likelihood is the sum of its nodes' log-probs, in fp32. Of each level `tokens` are candidates [B, C].
    """

    def __init__(self, **group: Any) -> None:
        super().__init__(**group)
        self.width = min(self.budget.top_k, self.budget.nodes)
        self.parents: list[Tensor] = []  # of each level [B, K], of C / K candidates each
        self.likelihoods: list[Tensor] = []  # of each level [B, C], in logs
        self.count = 1  # candidates so far, and the root
        # of the nodes that were read last, at first the roots: their log-likelihoods, numbers and ancestors
        self.totals = torch.zeros(
            len(self.rows), 1, dtype=torch.float32, device=self.device
        )  # [B, K]
        # [B, K]
        self.frontier = torch.zeros(len(self.rows), 1, dtype=torch.long, device=self.device)
        # [B, K, R]
        self.tree_mask = torch.zeros(len(self.rows), 1, 0, dtype=torch.bool, device=self.device)

    def add_level(self, depth: int, logits: Tensor) -> None:
        """Make the best children of the nodes that were read last candidates."""
        scores, _ = self.scorer.score(self.requests, depth, logits)
        # log-probs are never above 0, so that no child beats its parent
        log_probs, tokens = self.scorer.best(scores.log_softmax(-1), self.width)
        is_sure = self.is_sure(depth)
        if is_sure is not None:
            log_probs = log_probs.masked_fill(~is_sure[..., None], -math.inf)
        # one row of logits may stand for all nodes
        tokens = tokens.expand(-1, self.totals.shape[1], -1)  # [B, K, children]
        likelihoods = self.totals[..., None] + log_probs
        self.tokens.append(tokens.flatten(1))
        self.parents.append(self.frontier)
        self.likelihoods.append(likelihoods.flatten(1))

    def finish(self, rows: list[int], levels: int) -> DeviceTrees:
        """Return the trees of rows that are deep enough."""
        columns = _keep_likeliest(
            _join_levels(self.tokens, rows),
            _join_levels(self.parents, rows),
            _join_levels(self.likelihoods, rows),
            nodes=self.budget.nodes,
        )
        leaves_out = self.budget.confidence is not None
        if leaves_out:
            columns[:, 0].masked_fill_(columns[:, 2] == NOTHING, LEFT_OUT)
        return DeviceTrees(
            [self.rows[row] for row in rows], columns, levels, leaves_nodes_out=leaves_out
        )

    def keep(self, indices: list[int]) -> None:
        """Continue with these rows only."""
        super().keep(indices)
        self.parents = _pick_levels(self.parents, indices)
        self.likelihoods = _pick_levels(self.likelihoods, indices)
        self.tree_mask = pick_rows(self.tree_mask, indices)

    def read_next(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, K], parents [B, K] and ancestors [B, K, R] of the nodes to read next."""
        likelihoods = self.likelihoods[-1]
        best = likelihoods.topk(min(self.width, likelihoods.shape[1]))
        # candidates stand parent after parent, each with as many children: [B, C] -> [B, K]
        parents = best.indices // (likelihoods.shape[1] // self.totals.shape[1])
        self.totals = best.values
        self.frontier = self.count + best.indices
        self.count += likelihoods.shape[1]
        # a node sees what its parent sees, and itself
        above = self.tree_mask.gather(1, parents[..., None].expand(-1, -1, self.tree_mask.shape[2]))
        itself = _identity(parents.shape[1], self.device).expand(len(parents), -1, -1)
        self.tree_mask = torch.cat([above, itself], dim=2)
        return self.tokens[-1].gather(1, best.indices), parents, self.tree_mask


def _keep_likeliest(tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> Tensor:
    """Return [B, 3, N]: tokens, parents and the bits of log-likelihoods of the best candidates.

    Args:
        tokens: [B, C], of all levels.
        parents: The number of each parent: 0 is the root, i + 1 is candidate i. Each has as many candidates, one after
            the other.
        likelihoods: [B, C], logs.
        nodes: The most candidates to keep.
    """
    parents = parents[..., None].expand(-1, -1, tokens.shape[1] // parents.shape[1]).flatten(1)
    # at a tie the candidate that comes first is better, so that no child loses its parent
    selected = likelihoods.sort(descending=True, stable=True).indices[:, :nodes].sort().values
    # from candidates to nodes of the tree; -2 is nobody's parent, which a tree refuses
    node_of = selected.new_full((len(tokens), tokens.shape[1] + 1), -2)
    node_of[:, 0] = 0
    nodes_selected = torch.arange(1, selected.shape[1] + 1, device=selected.device)
    node_of.scatter_(1, selected + 1, nodes_selected.expand(selected.shape))
    # one tensor of integers, so that all of a tree comes to the host in one transfer
    bits = likelihoods.gather(1, selected).view(torch.int32).long()
    tree_parents = node_of.gather(1, parents.gather(1, selected))
    return torch.stack([tokens.gather(1, selected), tree_parents, bits], dim=1)


class _FixedTrees(_Trees):
    """Trees of a fixed shape: of each level the nodes that have children are read."""

    def __init__(self, **group: Any) -> None:
        super().__init__(**group)
        assert self.budget.paths is not None
        self.plans, self.parents = plan_levels(self.budget.paths, self.depth, self.device)
        self.depth = len(self.plans)
        self.read_count = 1  # nodes that were read of the level above
        self.draft_probs: list[
            Tensor
        ] = []  # of each level [B, nodes, V], what its nodes were sampled from
        # [B, nodes], the last level's tokens, those that are left out included
        self.last = torch.empty(0)
        # [B, nodes], whether all nodes of the path so far had confidence; None where no budget asks
        self.is_unfinished: Tensor | None = None

    def add_level(self, depth: int, logits: Tensor) -> None:
        """Give the nodes of a level the children of the ranks that the shape names."""
        plan = self.plans[depth]
        scores, probs = self.scorer.score(self.requests, depth, logits)
        _, best = self.scorer.best(scores, plan.width)
        if best.shape[2] != plan.width:
            raise ValueError(
                f"the budget's fixed tree holds a child of rank {plan.width - 1}, and the drafter knows "
                f"{best.shape[2]} tokens: take ranks below that"
            )
        # one row of logits may stand for all nodes
        best = best.expand(-1, self.read_count, -1)
        self.last = best.flatten(1).index_select(1, plan.children)
        is_sure = self.is_sure(depth)
        if is_sure is not None:
            is_unfinished = (
                is_sure.expand(-1, self.read_count)
                if self.is_unfinished is None
                else is_sure & self.is_unfinished
            )
            self.is_unfinished = is_unfinished.index_select(1, plan.rows)
        self.tokens.append(
            self.last
            if self.is_unfinished is None
            else self.last.masked_fill(~self.is_unfinished, LEFT_OUT)
        )
        if probs is not None:
            probs = probs.expand(-1, self.read_count, -1)
            if not self.draft_probs:
                self.draft_probs.append(probs)  # a row for the root, which nothing reads
            self.draft_probs.append(probs.index_select(1, plan.rows))

    def finish(self, rows: list[int], levels: int) -> DeviceTrees:
        """Return the trees of rows that are deep enough."""
        tokens = _join_levels(self.tokens, rows)[:, None]
        probs = _join_levels(self.draft_probs, rows) if self.draft_probs else None
        parents = self.parents[: 1 + tokens.shape[2]]
        is_partial = self.is_unfinished is not None
        numbers = [self.rows[row] for row in rows]
        return DeviceTrees(
            numbers, tokens, levels, parents=parents, probs=probs, leaves_nodes_out=is_partial
        )

    def keep(self, indices: list[int]) -> None:
        """Continue with these rows only."""
        super().keep(indices)
        self.draft_probs = _pick_levels(self.draft_probs, indices)
        self.last = pick_rows(self.last, indices)
        if self.is_unfinished is not None:
            self.is_unfinished = pick_rows(self.is_unfinished, indices)

    def read_next(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, K], parents [B, K] and ancestors [B, K, R] of the nodes to read next."""
        plan = self.plans[depth - 1]
        count = len(self.rows)
        self.read_count = len(plan.read)
        if self.is_unfinished is not None:
            self.is_unfinished = self.is_unfinished.index_select(1, plan.read)
        parents = plan.parents.expand(count, -1)
        return self.last.index_select(1, plan.read), parents, plan.tree_mask.expand(count, -1, -1)
