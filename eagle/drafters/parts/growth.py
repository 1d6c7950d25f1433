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
"""Reads the nodes of one level and returns the logits of their children.

It gets the depth, the nodes' tokens [K], their parents' indices in the level above [K] and a mask of their ancestors
[K, R]. It returns logits [K, D], or [1, D] where the children of all nodes have the same logits.
"""

RowsLevel = Callable[[int, list[int], Tensor, Tensor, Tensor], Tensor]
"""A `Level` for several rows: gets the depth, the rows whose trees still grow, and the arguments of a `Level` with a
batch dimension [B, ..]; returns logits [B, K, D] or [B, 1, D]."""

Confidence = Callable[[int, list[int]], Tensor]
"""Gets the depth and the rows whose trees still grow; returns the log-odds that a child is accepted, for each node
whose logits were returned last: [B, K], or [B, 1] if they are the same for all nodes."""

# a log-likelihood of minus infinity in fp32, its bits read as an integer
MINUS_INFINITY_BITS = int(torch.tensor(-math.inf).view(torch.int32))


class FollowsRows:
    """A `RowsLevel` that stores tensors of the level above, and drops the rows whose trees have ended from them."""

    rows: list[int]  # the rows that the level above had

    def keep_rows(self, rows: list[int], *tensors: Tensor) -> list[Tensor]:
        """Return tensors of the level above with only these rows (sequences), whose trees still grow.

        The rows are remembered for the next level.

        Args:
            rows: A subset of `self.rows`, the batch rows that the level above had. They replace `self.rows`.
            tensors: [B, ..] each, with an entry for each of the B rows of the level above.
        """
        indices = [self.rows.index(row) for row in rows]
        self.rows = rows
        return [pick_rows(tensor, indices) for tensor in tensors]


# -- masks and fixed shapes -------------------------------------------------------------------------------------------


def level_mask(committed: Tensor, tree_mask: Tensor, groups: int = 1) -> Tensor:
    """Return the additive attention mask [B, 1, groups * K, S + R] of one level of the draft trees of B sequences.

    The level has K nodes in each tree. A node sees the S cache columns of its sequence's committed tokens, and of the R
    draft nodes read so far (those of this level come last) its ancestors and itself.

    Args:
        committed: [B or 1, S], the additive mask of committed tokens: 0 where a sequence has a token, the lowest number
            of the dtype after its end; [B or 1, K, S] if nodes see different columns.
        tree_mask: [B, K, R] bool, true at the ancestors of each node and at the node.
        groups: How many query heads share a key head. Their queries are stacked as rows of one head, so the mask of a
            node is repeated for each of them.
    """
    rows, count, _ = tree_mask.shape
    # the two values are 0 and the dtype's lowest number
    draft = torch.where(tree_mask, *_mask_values(committed.dtype, committed.device))
    # [B or 1, K or 1, S]
    by_node = committed if committed.dim() == 3 else committed[:, None]
    committed_mask = by_node[:, None].expand(rows, groups, count, -1)
    draft_mask = draft[:, None].expand(-1, groups, -1, -1)
    return torch.cat([committed_mask, draft_mask], dim=-1).flatten(1, 2)[:, None]


@cache  # made once per dtype and device: a new tensor in every level would cost a launch
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two values of an additive attention mask as scalars: 0 for visible keys, the lowest for others."""
    lowest = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), lowest, dtype=dtype, device=device
    )


@cache
def _identity(count: int, device: torch.device) -> Tensor:
    """Return the mask [1, count, count] of the nodes of one depth of a tree among themselves: each sees itself."""
    return torch.eye(count, dtype=torch.bool, device=device)[None]


def level_rows(budget: Budget) -> tuple[int, ...]:
    """Return how many nodes of each level of a tree a drafter reads to get the next level's logits.

    The cost of a draft is forecast from these numbers. They begin with the nodes of the first level, the root's
    children, and leave out the root, whose logits come from the forward over the committed tokens. The deepest level
    needs no forward, as its nodes have no children.
    """
    if budget.paths is None:
        # a dynamic tree reads so many likeliest nodes of every level
        width = min(budget.top_k, budget.nodes)
        return (width,) * (budget.depth - 1) if width else ()
    # in a fixed shape only nodes with children are read
    # the root, which is the parent of paths of length 1, is not among them
    inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
    depths = [len(path) for path in inner]
    return tuple(depths.count(depth) for depth in range(1, max(depths, default=0) + 1))


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """One level of a fixed shape, as index tensors.

    The head reads only the nodes that have children. So a parent is an index among the nodes that were read of the
    level above.
    """

    width: int  # how many of the likeliest children of each parent are ranked
    # [nodes], the parent of each node, among the nodes read of the level above
    node_parents: Tensor
    child_indices: Tensor  # [nodes], the index of each node among the parents' ranked children [parents * width]
    read_nodes: Tensor  # [K], the nodes of this level that are read
    read_parents: Tensor  # [K], the parents of these
    # [K, R], the ancestors of these among the R nodes read so far, and themselves
    tree_mask: Tensor


@cache  # never dropped: captured drafts read these tensors
def plan_levels(paths: Paths, depth: int, device: torch.device) -> tuple[list[LevelPlan], Tensor]:
    """Return the plan of each level of a tree of fixed shape, and the parent of each of its nodes.

    Args:
        paths: The nodes of the shape; a path has the rank of the child to take at each level, from the root's child on.
        depth: The deepest level to plan; the root's children are level 1.
        device: Where the plans' tensors are used.

    Returns:
        The plans of levels 1, 2, ... down to `depth` or the shape's last level; and the parents [1 + N] of the root
        (-1) and its N nodes, on the host: 0 is the root, i the i-th node, counted level by level.
    """
    plans = []
    # the ancestors of the nodes read of the level above, at first of the root: nothing of the draft is read before it
    tree_mask = torch.zeros(1, 0, dtype=torch.bool)
    above: list[tuple[int, ...]] = [()]  # the paths of the nodes that were read of the level above
    node_of_path = {path: 0 for path in above}  # the number of each node
    parents = [-1]
    for length in range(1, depth + 1):
        # the paths of this level, siblings in the order of their ranks
        level = sorted(path for path in set(paths) if len(path) == length)
        for path in level:
            parents.append(node_of_path[path[:-1]])
            node_of_path[path] = len(node_of_path)
        # only nodes with children are read, and the deepest level that is planned gets none
        parent_paths = {path[:-1] for path in paths} if length < depth else set()
        inner = [path for path in level if path in parent_paths]
        node_parents = torch.tensor([above.index(path[:-1]) for path in level])
        ranks = torch.tensor([path[-1] for path in level])
        read = torch.tensor([level.index(path) for path in inner], dtype=torch.long)
        width = 1 + max(path[-1] for path in level)
        # a node sees what its parent sees, and itself
        tree_mask = torch.cat(
            [tree_mask[node_parents[read]], torch.eye(len(inner), dtype=torch.bool)], dim=1
        )
        # in the order of the fields of LevelPlan; each parent has `width` ranked children
        tensors = [
            node_parents,
            node_parents * width + ranks,
            read,
            node_parents[read],
            tree_mask,
        ]
        plans.append(LevelPlan(width, *(upload(tensor, device) for tensor in tensors)))
        if not inner:
            break
        above = inner
    return plans, torch.tensor(parents)


def plan_parents(budget: Budget, nodes: int, device: torch.device) -> Tensor | None:
    """Return the parents [1 + nodes] of the root and the first nodes of a budget's fixed tree shape, on the host.

    None if the budget has no fixed shape: then a dynamic tree's parents are known only once it has grown.

    Args:
        budget: The budget of a tree.
        nodes: How many nodes to return the parents of, without the root.
        device: That of the draft, with which the plan of the shape is cached.
    """
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
    """Grow the draft tree of one sequence and return it.

    With `paths` in the budget the tree has that fixed shape. Otherwise it is EAGLE-2's dynamic tree (Li et al. 2024,
    arXiv 2406.16858).

    Args:
        root: The root's token.
        logits: [D], those of the root's children.
        level: Depth, the nodes' tokens [K], their parents' indices in the level above [K] and a mask of their ancestors
            [K, R] -> the logits of their children [K, D].
        budget: The size or the shape of the tree.
        noise: The target's sampling noise, fixed by position, with which children are ranked; None if it is greedy.
        place: The position of the root's children in the sequence.
        drafts: [D], the draft vocabulary: the target's token of each logit; None if the drafter has all tokens.
        sharpness: The factor on the logits before children are ranked, unless the budget has a factor.
    """

    def level_of_row(
        depth: int, rows: list[int], tokens: Tensor, parents: Tensor, tree_mask: Tensor
    ) -> Tensor:
        """Call `level` without the batch dimension, as a `RowsLevel` of a batch of one sequence.

        `level` reads the nodes of one level, and returns the logits of their children.
        """
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
    """Grow the draft trees of a batch, one for each request, with one forward per level for all rows.

    Rows whose budgets differ in more than the depth grow one group after the other. On a device that the host would
    have to wait for, trees stay on the device until the host asks for one of them.

    Args:
        requests: The root, position, budget and noise of each of the B rows, the sequences of the batch.
        logits: [B, D], those of the roots' children, over the D tokens of the draft vocabulary.
        level: Reads the nodes of one level, given depth, the rows that still grow, and tokens, parents and ancestors of
            the nodes; returns the logits of their children (`RowsLevel`).
        drafts: [D], the target's token of each logit; None if the draft vocabulary is the target's.
        sharpness: The factor on the logits before children are ranked, unless the budget has a factor.
        confidence: Returns the log-odds that the children of each node are accepted. A node gets no children if their
            probability is below the budget's minimum confidence. None if the drafter does not estimate it.
    """
    grown = grow_without_roots(
        requests, logits, level, drafts=drafts, sharpness=sharpness, confidence=confidence
    )
    roots = [request.root for request in requests]
    return hand_over(grown, roots, at_once=not must_wait(logits.device))


def grow_without_roots(
    requests: Sequence[DraftRequest],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
    confidence: Confidence | None = None,
) -> list[DeviceTrees]:
    """Grow the draft trees of a batch level by level, and return them on the device without their roots.

    `requests` are the root, position, budget and noise of each row, and `logits` [B, D] those of the children of the B
    roots. `level` reads the nodes of a level and returns their children's logits; the rest is as in `grow_rows`. Each
    result has the trees of one group of rows that ended at the same depth, so results are not in the order of
    `requests`. A row with an empty budget, which allows no draft, is in none of them.
    """
    # a group shares everything that decides the operations of a level, so that one forward reads the level for all of
    # its rows; their depths may differ, as a row leaves the group when its tree is deep enough
    groups: dict[object, list[int]] = {}
    for row, request in enumerate(requests):
        if not request.budget.is_empty:
            groups.setdefault(_group_key(request), []).append(row)
    grown: list[DeviceTrees] = []
    for rows in groups.values():
        budget = requests[rows[0]].budget
        scorer = ChildScorer(
            budget.draw, drafts, sharpness if budget.sharpness is None else budget.sharpness
        )
        trees_class = _DynamicTrees if budget.paths is None else _FixedTrees
        trees = trees_class(
            requests=[requests[row] for row in rows],
            rows=rows,
            scorer=scorer,
            confidence=confidence,
            device=logits.device,
        )
        # [B, 1, D]: the root is the only node of its level
        grown += _grow_group(trees, pick_rows(logits, rows)[:, None], level)
    return grown


def _group_key(request: DraftRequest) -> object:
    """Return a key that is equal for rows (sequences) whose trees can grow together.

    It has everything in the budget but the depth, and whether the row samples with noise.
    """
    budget = request.budget
    shape = (budget.nodes, budget.top_k, budget.paths)
    return *shape, budget.draw, budget.sharpness, budget.confidence, request.noise is None


def _grow_group(
    trees: _DynamicTrees | _FixedTrees, logits: Tensor, level: RowsLevel
) -> list[DeviceTrees]:
    """Grow the trees of a group of rows (sequences) to their end; each result has the trees that ended at one depth.

    Args:
        trees: The trees of the group, at first only roots; changed in place.
        logits: [B, 1, D], of the children of the B roots, over the D tokens of the draft vocabulary.
        level: Reads the nodes of one level and returns the logits of their children, see `RowsLevel`.
    """
    grown: list[DeviceTrees] = []
    for depth in range(1, trees.depth + 1):
        # the nodes that the logits come after are a level above those that are added
        trees.add_level(depth - 1, logits)
        is_last = depth == trees.depth
        # the rows whose trees are deep enough, as indices in the group
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
            trees.keep_rows(growing)
        tokens, parents, tree_mask = trees.read_next(depth)
        logits = level(depth, trees.rows, tokens, parents, tree_mask)
    return grown


class _GrowingTrees:
    """The trees of one group of rows while they grow; the budgets of the rows differ only in their depth."""

    def __init__(
        self,
        requests: list[DraftRequest],
        rows: list[int],
        scorer: ChildScorer,
        confidence: Confidence | None,
        device: torch.device,
    ) -> None:
        """Begin the trees of a group of rows.

        Args:
            requests: Those of the group's rows.
            rows: The group's rows, as indices in the batch.
            scorer: Scores and selects children.
            confidence: Returns how likely the children of each node are accepted; None if the drafter does not estimate
                it.
            device: Where the logits are.
        """
        self.requests = requests
        self.rows = rows
        self.scorer = scorer
        self.confidence = confidence
        self.device = device
        self.budget = requests[0].budget
        self.depth = max(request.budget.depth for request in requests)
        self.tokens: list[Tensor] = []  # of each level, [rows, candidates or nodes]
        # [B, K] or [B, 1], the log-odds that a child is accepted, after the nodes that were read last; None: not rated
        self.odds: Tensor | None = None

    def may_have_children(self, depth: int) -> Tensor | None:
        """Return which nodes may have children: those where the drafter's confidence reaches the budget's threshold.

        The confidence is the drafter's estimate of how likely a child is accepted.

        Args:
            depth: Of the nodes, those that were read last; the root has depth 0.

        Returns:
            A bool [B, K] for the K nodes of each of the B trees, or [B, 1] for all nodes of a tree's level. None if no
            minimum is set or the drafter does not estimate its confidence: then all nodes may.
        """
        if self.budget.confidence is None or self.confidence is None:
            return None
        self.odds = self.confidence(depth, self.rows)
        return self.odds.sigmoid() >= self.budget.confidence

    def keep_rows(self, indices: list[int]) -> None:
        """Keep only these rows (indices of sequences in the group), as the trees of the others have ended."""
        self.rows = [self.rows[index] for index in indices]
        self.requests = [self.requests[index] for index in indices]
        self.tokens = _pick_levels(self.tokens, indices)


def _pick_levels(levels: list[Tensor], rows: list[int]) -> list[Tensor]:
    """Return the tensors of all levels of several trees, [trees, ..] each, with only the trees of these indices."""
    return [pick_rows(level, rows) for level in levels]


def _join_levels(levels: list[Tensor], rows: list[int]) -> Tensor:
    """Return one tensor [len(rows), nodes of all levels, ..] from one of each level of the trees [trees, nodes, ..].

    `rows` are the indices of the trees to take.
    """
    return torch.cat(_pick_levels(levels, rows), dim=1)


class _DynamicTrees(_GrowingTrees):
    """EAGLE-2's trees: read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all levels.

    The candidates [B, C] of a level are the `top_k` best children of each node that was read of the level above. The
    log-likelihood of a path is the sum of its nodes' log-probs, in fp32.
    """

    def __init__(self, **group: Any) -> None:
        """Begin at the roots of B trees that grow together; `group` are the arguments of `_GrowingTrees`.

        In the shapes below a level has C candidates, of which K nodes are read, R in all levels so far.
        """
        super().__init__(**group)
        self.width = min(self.budget.top_k, self.budget.nodes)
        self.parents: list[Tensor] = []  # of each level [B, K], of C / K candidates each
        self.likelihoods: list[Tensor] = []  # of each level [B, C], in logs
        self.count = 1  # candidates so far, and the root
        # The next three are of the nodes that were read last, at first the roots.
        # [B, K], their log-likelihoods
        self.read_likelihoods = torch.zeros(
            len(self.rows), 1, dtype=torch.float32, device=self.device
        )
        # [B, K], their numbers: 0 is the root, i + 1 is candidate i of all levels
        self.read_numbers = torch.zeros(len(self.rows), 1, dtype=torch.long, device=self.device)
        # [B, K, R], their ancestors among all nodes that were read, and themselves
        self.tree_mask = torch.zeros(len(self.rows), 1, 0, dtype=torch.bool, device=self.device)

    def add_level(self, depth: int, logits: Tensor) -> None:
        """Add the best `top_k` children of each node of the level that was read last to the candidates of the tree.

        Args:
            depth: Of those nodes; the root has depth 0.
            logits: [B, K, D] over the D tokens that the head can draft, after the K nodes of each of the B trees; [B,
                1, D] if they are the same after all of a tree's nodes.
        """
        # the second result would be the probs of sampled children, which only fixed shapes have
        scores, _ = self.scorer.score(self.requests, depth, logits)
        # log-probs are never above 0, so that no child beats its parent
        log_probs, tokens = self.scorer.best(scores.log_softmax(-1), self.width)
        may_continue = self.may_have_children(depth)
        if may_continue is not None:
            # children of a node that may have none stay candidates of likelihood 0, so that shapes are fixed
            log_probs = log_probs.masked_fill(~may_continue[..., None], -math.inf)
        # with [B, 1, D] logits all nodes get the same children
        tokens = tokens.expand(-1, self.read_likelihoods.shape[1], -1)  # [B, K, children]
        likelihoods = self.read_likelihoods[..., None] + log_probs
        self.tokens.append(tokens.flatten(1))
        self.parents.append(self.read_numbers)
        self.likelihoods.append(likelihoods.flatten(1))

    def finish(self, rows: list[int], levels: int) -> DeviceTrees:
        """Return the trees of some rows (sequences), without their roots: the likeliest candidates of all levels.

        There are `budget.nodes` of them.

        Args:
            rows: The rows whose trees have ended, as indices in the group.
            levels: The number of levels that these trees have.
        """
        # [rows, 3, nodes]: token, parent's number and likelihood of each node
        fields = _keep_likeliest(
            _join_levels(self.tokens, rows),
            _join_levels(self.parents, rows),
            _join_levels(self.likelihoods, rows),
            nodes=self.budget.nodes,
        )
        # children below the minimum confidence have a log-likelihood of minus infinity; the tensor keeps its size, as
        # counting the others would make the host wait, so their tokens are marked instead
        leaves_out = self.budget.confidence is not None
        if leaves_out:
            fields[:, 0].masked_fill_(fields[:, 2] == MINUS_INFINITY_BITS, LEFT_OUT)
        return DeviceTrees(
            [self.rows[row] for row in rows], fields, levels, leaves_nodes_out=leaves_out
        )

    def keep_rows(self, indices: list[int]) -> None:
        """Keep only these rows (indices of sequences in the group), as the trees of the others have ended."""
        super().keep_rows(indices)
        self.parents = _pick_levels(self.parents, indices)
        self.likelihoods = _pick_levels(self.likelihoods, indices)
        # `read_likelihoods` and `read_numbers` keep all rows: `read_next` replaces them before their rows are used
        self.tree_mask = pick_rows(self.tree_mask, indices)

    def read_next(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Select the likeliest candidates of the last level as the nodes that the head reads next.

        Args:
            depth: Not used; fixed shapes need it.

        Returns:
            For each of B trees the K nodes' tokens [B, K], their parents [B, K] as indices among the nodes that were
            read of the level above, and their tree mask [B, K, R], true at each node's ancestors and itself among all R
            nodes read so far.
        """
        likelihoods = self.likelihoods[-1]
        best = likelihoods.topk(min(self.width, likelihoods.shape[1]))
        # the C candidates are grouped by parent, and every parent has equally many: [B, C] -> [B, K]
        children_per_parent = likelihoods.shape[1] // self.read_likelihoods.shape[1]
        parents = best.indices // children_per_parent
        self.read_likelihoods = best.values
        # candidates are numbered over all levels, after the root, which is 0
        self.read_numbers = self.count + best.indices
        self.count += likelihoods.shape[1]
        # a node sees what its parent sees, and itself
        above = self.tree_mask.gather(1, parents[..., None].expand(-1, -1, self.tree_mask.shape[2]))
        itself = _identity(parents.shape[1], self.device).expand(len(parents), -1, -1)
        self.tree_mask = torch.cat([above, itself], dim=2)
        return self.tokens[-1].gather(1, best.indices), parents, self.tree_mask


def _keep_likeliest(tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> Tensor:
    """Select the likeliest candidates of each of B trees as the nodes of the tree: the re-ranking of EAGLE-2.

    Args:
        tokens: [B, C], of the C candidates of all levels.
        parents: [B, P], the number of each node that has candidates: 0 is the root, i + 1 is candidate i. Each has
            C / P candidates, grouped by parent.
        likelihoods: [B, C], log-likelihoods of the candidates' paths.
        nodes: The largest number N of candidates to select, without the root.

    Returns:
        [B, 3, N], for each node its token, its parent's number in the tree (0 is the root, i the i-th node) and the
        bits of its fp32 log-likelihood. Nodes are in the order of the candidates, parents before children.
    """
    # [B, C], the parent of each candidate
    parents = parents[..., None].expand(-1, -1, tokens.shape[1] // parents.shape[1]).flatten(1)
    # the sort is stable, so that a parent, which comes first, precedes a child with the same likelihood: no node is
    # selected without its parent; the second sort restores the order of candidates
    selected = likelihoods.sort(descending=True, stable=True).indices[:, :nodes].sort().values
    # from a candidate's number to that of its node; -2 marks candidates that are not selected, and a tree refuses it
    # as a parent
    node_of = selected.new_full((len(tokens), tokens.shape[1] + 1), -2)
    node_of[:, 0] = 0
    nodes_selected = torch.arange(1, selected.shape[1] + 1, device=selected.device)
    node_of.scatter_(1, selected + 1, nodes_selected.expand(selected.shape))
    # one tensor of integers, so that all of a tree comes to the host in one transfer
    bits = likelihoods.gather(1, selected).view(torch.int32).long()
    tree_parents = node_of.gather(1, parents.gather(1, selected))
    return torch.stack([tokens.gather(1, selected), tree_parents, bits], dim=1)


class _FixedTrees(_GrowingTrees):
    """Trees of a fixed shape; only nodes that have children are read."""

    def __init__(self, **group: Any) -> None:
        """Begin at the roots of B trees of one fixed shape; `group` are the arguments of `_GrowingTrees`."""
        super().__init__(**group)
        assert self.budget.paths is not None
        self.plans, self.parents = plan_levels(self.budget.paths, self.depth, self.device)
        # the budget's depth may exceed that of the shape
        self.depth = len(self.plans)
        self.read_count = 1  # nodes that were read of the level above
        # of each level [B, nodes, V], the probs that its nodes were sampled from
        self.draft_probs: list[Tensor] = []
        # [B, nodes], whether all ancestors of a node had enough confidence to have children; None if the budget sets no
        # minimum
        self.is_unfinished: Tensor | None = None
        self.confidences: list[Tensor] = []  # of each level [B, nodes], the log-odds of its nodes
        # [B, nodes], the tokens of the last level, also of nodes that are left out of the tree
        self.last_tokens = torch.empty(0)

    def add_level(self, depth: int, logits: Tensor) -> None:
        """Add the next level: each node that was read last gets the children whose ranks are in the tree's fixed shape.

        Args:
            depth: Of the nodes that were read last; the root has depth 0.
            logits: [B, K, D] over the D tokens that the head can draft, after the K nodes of each of the B trees; [B,
                1, D] if they are the same after all of a tree's nodes.
        """
        # plans begin with that of level 1, whose parents have depth 0
        plan = self.plans[depth]
        scores, probs = self.scorer.score(self.requests, depth, logits)
        _, best = self.scorer.best(scores, plan.width)
        if best.shape[2] != plan.width:
            raise ValueError(
                f"the budget's fixed tree holds a child of rank {plan.width - 1}, and the drafter knows "
                f"{best.shape[2]} tokens: take ranks below that"
            )
        # with [B, 1, D] logits all nodes have the same children
        best = best.expand(-1, self.read_count, -1)
        self.last_tokens = best.flatten(1).index_select(1, plan.child_indices)
        # once a node has too little confidence, none of its descendants belongs to the tree
        may_continue = self.may_have_children(depth)
        if may_continue is not None:
            is_unfinished = (
                may_continue.expand(-1, self.read_count)
                if self.is_unfinished is None
                else may_continue & self.is_unfinished
            )
            self.is_unfinished = is_unfinished.index_select(1, plan.node_parents)
        if self.odds is not None:
            odds = self.odds.float().expand(-1, self.read_count)
            self.confidences.append(odds.index_select(1, plan.node_parents))
        self.tokens.append(
            self.last_tokens
            if self.is_unfinished is None
            else self.last_tokens.masked_fill(~self.is_unfinished, LEFT_OUT)
        )
        # probs [B, K, V] come with sampled children, and verification needs those of each node
        if probs is not None:
            probs = probs.expand(-1, self.read_count, -1)
            if not self.draft_probs:
                self.draft_probs.append(probs)  # a row for the root, which nothing reads
            self.draft_probs.append(probs.index_select(1, plan.node_parents))

    def finish(self, rows: list[int], levels: int) -> DeviceTrees:
        """Return the trees of some rows (sequences), without their roots.

        Args:
            rows: The rows whose trees have ended, as indices in the group.
            levels: The number of levels that these trees have.
        """
        columns = _join_levels(self.tokens, rows)[:, None]
        # [rows, 1 or 2, nodes], so that one transfer brings the log-odds too
        if self.confidences:
            bits = _join_levels(self.confidences, rows).view(torch.int32).long()
            columns = torch.cat([columns, bits[:, None]], dim=1)
        probs = _join_levels(self.draft_probs, rows) if self.draft_probs else None
        # trees that end above the deepest level have the first nodes of the shape
        parents = self.parents[: 1 + columns.shape[2]]
        is_partial = self.is_unfinished is not None
        batch_rows = [self.rows[row] for row in rows]
        return DeviceTrees(
            batch_rows, columns, levels, parents=parents, probs=probs, leaves_nodes_out=is_partial
        )

    def keep_rows(self, indices: list[int]) -> None:
        """Keep only these rows (indices of sequences in the group), as the trees of the others have ended."""
        super().keep_rows(indices)
        self.draft_probs = _pick_levels(self.draft_probs, indices)
        self.confidences = _pick_levels(self.confidences, indices)
        self.last_tokens = pick_rows(self.last_tokens, indices)
        if self.is_unfinished is not None:
            self.is_unfinished = pick_rows(self.is_unfinished, indices)

    def read_next(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Select the nodes of level `depth` that have children as the K nodes that the head reads next.

        Returns:
            For each of B trees the K nodes' tokens [B, K], their parents [B, K] as indices among the nodes that were
            read of the level above, and their tree mask [B, K, R], true at each node's ancestors and itself among all R
            nodes read so far.
        """
        plan = self.plans[depth - 1]
        count = len(self.rows)
        self.read_count = len(plan.read_nodes)
        # from here on `is_unfinished` is of the nodes that are read, the parents of the next level
        if self.is_unfinished is not None:
            self.is_unfinished = self.is_unfinished.index_select(1, plan.read_nodes)
        tokens = self.last_tokens.index_select(1, plan.read_nodes)
        parents = plan.read_parents.expand(count, -1)
        return tokens, parents, plan.tree_mask.expand(count, -1, -1)
