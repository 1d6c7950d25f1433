"""Fixed shapes of trees, level by level."""

# K nodes of one level that have children, N nodes

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.tree import Paths
from eagle.device import upload


def level_rows(budget: Budget) -> tuple[int, ...]:
    """How many rows `grow` asks for in each level of a tree after the first."""
    if budget.paths is not None:
        inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
        depths = range(1, max(map(len, inner), default=0) + 1)
        return tuple(sum(len(path) == depth for path in inner) for depth in depths)
    width = min(budget.top_k, budget.nodes)
    return (width,) * (budget.depth - 1) if width else ()


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of a fixed shape: its nodes, and those of them that are read because they have children."""

    best: int  # how many children of a row are ranked
    rows: Tensor  # [nodes], the row of the level before, of those read, that each node follows
    children: Tensor  # [nodes], which each node is of all ranked children of these rows
    read: Tensor  # [K]
    before: Tensor  # [K], the rows that those follow
    seen: Tensor  # [K, rows read so far]


@cache  # never dropped: captured drafts read these tensors
def plan_rungs(paths: Paths, depth: int, device: torch.device) -> tuple[list[Rung], Tensor]:
    """A fixed shape level by level down to `depth`, and the parents [N] of its nodes."""
    rungs, parents, seen = [], [-1], torch.zeros(1, 0, dtype=torch.bool)
    above: list[tuple[int, ...]] = [()]
    place = {path: 0 for path in above}
    for length in range(1, depth + 1):
        nodes = sorted(path for path in set(paths) if len(path) == length)  # siblings in the order of their ranks
        followed = {path[:-1] for path in paths} if length < depth else set()
        read = [path for path in nodes if path in followed]
        rows = torch.tensor([above.index(path[:-1]) for path in nodes])
        ranks = torch.tensor([path[-1] for path in nodes])
        chosen = torch.tensor([nodes.index(path) for path in read], dtype=torch.long)
        seen = torch.cat([seen[rows[chosen]], torch.eye(len(read), dtype=torch.bool)], dim=1)
        best = 1 + max(path[-1] for path in nodes)
        parts = rows, rows * best + ranks, chosen, rows[chosen], seen
        rungs.append(Rung(best, *(upload(part, device) for part in parts)))
        parents += [place[path[:-1]] for path in nodes]
        place |= {path: len(place) + index for index, path in enumerate(nodes)}
        if not read:
            break
        above = read
    return rungs, torch.tensor(parents)


def plan_parents(budget: Budget, nodes: int, device: torch.device) -> Tensor | None:
    """[1 + N], the parents in a fixed shape of so many nodes; None where the budget fixes none."""
    return None if budget.paths is None else plan_rungs(budget.paths, budget.depth, device)[1][: 1 + nodes]
