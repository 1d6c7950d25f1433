"""The growing of trees: level by level, of a fixed shape or where the drafter finds it likeliest."""

# B rows of text, K nodes of one level, R of all levels, C candidates, V vocabulary, D draft vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Noise
from eagle.core.tree import DraftTree, Paths
from eagle.device import pick_rows, to_host, upload
from eagle.drafters.parts.scoring import SHARPNESS, ChildScorer, Seed


def level_mask(committed: Tensor, seen: Tensor, groups: int = 1) -> Tensor:
    """[B, 1, groups * K, S + R]: a level's nodes see the committed text and, of the draft [B, K, R], their own path.

    `committed` [B or 1, S] is 0 at columns that a row's text fills, the lowest number behind it.
    """
    rows, count, _ = seen.shape
    draft = torch.where(seen, *_seen_and_hidden(committed.dtype, committed.device))
    parts = committed[:, None, None].expand(rows, groups, count, -1), draft[:, None].expand(-1, groups, -1, -1)
    return torch.cat(parts, dim=-1).flatten(1, 2)[:, None]


@cache
def _seen_and_hidden(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a mask adds where a column is seen, and where it is not."""
    lowest = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=device), torch.full((), lowest, dtype=dtype, device=device)


@cache
def _see_itself(count: int, device: torch.device) -> Tensor:
    """[1, K, K], each node of a level sees itself alone of its level."""
    return torch.eye(count, dtype=torch.bool, device=device)[None]


def level_rows(budget: Budget) -> tuple[int, ...]:
    """How many rows `grow` asks for in each level of a tree after the first."""
    if budget.paths is not None:
        inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
        depths = range(1, max(map(len, inner), default=0) + 1)
        return tuple(sum(len(path) == depth for path in inner) for depth in depths)
    width = min(budget.top_k, budget.nodes)
    return (width,) * (budget.depth - 1) if width else ()


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], nodes of the level before that they follow [K], whom they see [K, R] -> logits [K, D].

One row of logits stands for all nodes, where the children of all are guessed alike.
"""

RowsLevel = Callable[[int, list[int], Tensor, Tensor, Tensor], Tensor]
"""Depth, the rows that grow on, and what a `Level` gets for each of them [B, ..] -> logits [B, K, D] or [B, 1, D]."""


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
    """The tree under `root`, whose children the head gives these logits [D]; they will stand at position `place`.

    A budget with a fixed shape gets that shape. Any other gets EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858).
    `drafts` [D] is the draft vocabulary, if not all; `sharpness` holds where the budget names none.
    """

    def level_of_row(depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        return level(depth, tokens[0], before[0], seen[0])[None]

    return grow_rows([Seed(root, place, budget, noise)], logits[None], level_of_row, drafts, sharpness)[0]


def grow_rows(
    seeds: Sequence[Seed],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> list[DraftTree]:
    """The tree under each root, as `grow` describes; logits [B, D], and one transfer from the device for all trees."""
    return read_trees(seeds, grow_columns(seeds, logits, level, drafts, sharpness))


def grow_columns(
    seeds: Sequence[Seed],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> list[Grown]:
    """What `grow_rows` grows, on the device; nothing is read from there.

    Rows whose budgets differ in their depth alone grow together, and leave when they are deep enough.
    """
    groups: dict[object, list[int]] = {}
    for row, seed in enumerate(seeds):
        if not seed.budget.is_empty:
            groups.setdefault(_kind(seed), []).append(row)
    grown: list[Grown] = []
    for rows in groups.values():
        budget = seeds[rows[0]].budget
        scorer = ChildScorer(budget.draw, drafts, sharpness if budget.sharpness is None else budget.sharpness)
        first = pick_rows(logits, rows)[:, None]
        grow_group = _likeliest if budget.paths is None else _fill_plan
        grown += grow_group(_Rows(seeds, rows), first, level, scorer)
    return grown


def read_trees(seeds: Sequence[Seed], grown: Sequence[Grown]) -> list[DraftTree]:
    """The tree under each root, its root alone where nothing has grown; in one transfer from the device."""
    trees = [DraftTree.chain([seed.root]) if seed.budget.is_empty else None for seed in seeds]
    for part, columns in zip(grown, to_host([part.columns for part in grown]), strict=True):
        for number, row in enumerate(part.rows):
            trees[row] = part.tree(seeds[row].root, number, columns[number])
    return [tree for tree in trees if tree is not None]


def _kind(seed: Seed) -> object:
    """What rows that grow together have in common: all of a budget but its depth, and whether noise is known."""
    budget = seed.budget
    return budget.nodes, budget.top_k, budget.paths, budget.draw, budget.sharpness, seed.noise is None


class _Rows:
    """The rows of one group that still grow."""

    def __init__(self, seeds: Sequence[Seed], rows: list[int]) -> None:
        self.rows, self.seeds = rows, [seeds[row] for row in rows]

    @property
    def depth(self) -> int:
        """How deep the deepest tree may be."""
        return max(seed.budget.depth for seed in self.seeds)

    def split(self, depth: int) -> tuple[list[int], list[int]]:
        """The numbers of those whose trees end at this depth, and of those that grow on."""
        ended = [number for number, seed in enumerate(self.seeds) if seed.budget.depth <= depth]
        return ended, [number for number in range(len(self.rows)) if number not in ended] if ended else []

    def keep(self, numbers: list[int]) -> None:
        """Go on with these alone."""
        self.rows, self.seeds = [self.rows[n] for n in numbers], [self.seeds[n] for n in numbers]


@dataclass(frozen=True, slots=True)
class Grown:
    """Trees that ended at the same level, on the device, without their roots."""

    rows: list[int]
    columns: Tensor  # [B, 1 or 3, N]: tokens, and where no shape is fixed parents and the bits of likelihoods
    parents: Tensor | None = None  # [1 + N], of a fixed shape
    probs: Tensor | None = None  # [B, 1 + N, V], what the nodes were drawn from

    def tree(self, root: int, number: int, columns: Tensor) -> DraftTree:
        """The tree of the row with this number, from its columns on the host."""
        if self.parents is not None:
            tokens = torch.cat([torch.tensor([root]), columns[0]])
            return DraftTree(tokens, self.parents, None if self.probs is None else self.probs[number])
        tokens, parents, bits = torch.cat([torch.tensor([[root], [-1], [0]]), columns], dim=1)
        return DraftTree(tokens, parents, likelihoods=bits.int().view(torch.float32))


def _likeliest(rows: _Rows, logits: Tensor, level: RowsLevel, scorer: ChildScorer) -> list[Grown]:
    """Read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all; fp32 throughout."""
    budget, device = rows.seeds[0].budget, logits.device
    width = min(budget.top_k, budget.nodes)
    totals = logits.new_zeros(len(logits), 1, dtype=torch.float32)
    frontier = torch.zeros(len(logits), 1, dtype=torch.long, device=device)  # what the logits belong to; 0 is the root
    seen = torch.zeros(len(logits), 1, 0, dtype=torch.bool, device=device)
    found: list[list[Tensor]] = []  # per level: tokens [B, C], the parents of C / K each [B, K], likelihoods [B, C]
    grown: list[Grown] = []
    count = 1
    for depth in range(rows.depth):
        scores, _ = scorer.score(rows.seeds, depth, logits)
        values, best = scorer.best(scores.log_softmax(-1), width)  # never above 0: no child beats its parent
        best = best.expand(-1, totals.shape[1], -1)
        likelihoods = (totals[..., None] + values).flatten(1)
        tokens = best.flatten(1)
        found.append([tokens, frontier, likelihoods])
        ended, growing = rows.split(depth + 1)
        if ended:
            whole = [torch.cat([pick_rows(part, ended) for part in parts], 1) for parts in zip(*found, strict=True)]
            columns = _keep_likeliest(*whole, nodes=budget.nodes)
            grown.append(Grown([rows.rows[number] for number in ended], columns))
            if not growing:
                break
            rows.keep(growing)
            found = [[pick_rows(part, growing) for part in level_parts] for level_parts in found]
            seen = pick_rows(seen, growing)
            tokens, _, likelihoods = found[-1]
        chosen = likelihoods.topk(min(width, likelihoods.shape[1]))
        before = chosen.indices // best.shape[2]
        totals, frontier = chosen.values, count + chosen.indices
        count += likelihoods.shape[1]
        itself = _see_itself(before.shape[1], device).expand(len(before), -1, -1)
        seen = torch.cat([seen.gather(1, before[..., None].expand(-1, -1, seen.shape[2])), itself], dim=2)
        logits = level(depth + 1, rows.rows, tokens.gather(1, chosen.indices), before, seen)
    return grown


def _keep_likeliest(tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> Tensor:
    """[B, 3, N], tokens, parents and bits of the best candidates [B, C]; candidate i is the parent i + 1, the root 0.

    Each of the `parents` has as many candidates, one after the other.

    A tie goes to the one found first, so that no child loses its parent.
    """
    parents = parents[..., None].expand(-1, -1, tokens.shape[1] // parents.shape[1]).flatten(1)
    kept = likelihoods.sort(descending=True, stable=True).indices[:, :nodes].sort().values
    numbers = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    place = kept.new_full((len(tokens), tokens.shape[1] + 1), -2)  # -2 is nobody's parent: a tree would refuse it
    place[:, 0] = 0
    place.scatter_(1, kept + 1, numbers.expand(kept.shape))
    bits = likelihoods.gather(1, kept).view(torch.int32).long()
    return torch.stack([tokens.gather(1, kept), place.gather(1, parents.gather(1, kept)), bits], dim=1)


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
def _plan(paths: Paths, depth: int, device: torch.device) -> tuple[list[Rung], Tensor]:
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
        best = int(ranks.max()) + 1
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
    return None if budget.paths is None else _plan(budget.paths, budget.depth, device)[1][: 1 + nodes]


def _fill_plan(rows: _Rows, logits: Tensor, level: RowsLevel, scorer: ChildScorer) -> list[Grown]:
    """Trees of a fixed shape: one reading per level, of the nodes that have children."""
    paths = rows.seeds[0].budget.paths
    assert paths is not None
    rungs, parents = _plan(paths, rows.depth, logits.device)
    tokens: list[Tensor] = []  # per level [B, nodes]
    drawn_from: list[Tensor] = []
    grown: list[Grown] = []
    asked = 1  # nodes of the level above that have children
    for depth, rung in enumerate(rungs):
        scores, probs = scorer.score(rows.seeds, depth, logits)
        best = scorer.best(scores, rung.best)[1].expand(-1, asked, -1)
        assert best.shape[2] == rung.best, f"{best.shape[2]} tokens cannot fill a shape of rank {rung.best - 1}"
        tokens.append(best.flatten(1).index_select(1, rung.children))
        if probs is not None:
            probs = probs.expand(-1, asked, -1)
            drawn_from += [probs] * (not drawn_from) + [probs.index_select(1, rung.rows)]  # a row for the root, unused
        ended, growing = rows.split(depth + 1) if depth + 1 < len(rungs) else (list(range(len(rows.rows))), [])
        if ended:
            nodes = torch.cat([pick_rows(part, ended) for part in tokens], dim=1)[:, None]
            whole = torch.cat([pick_rows(part, ended) for part in drawn_from], dim=1) if drawn_from else None
            grown.append(Grown([rows.rows[n] for n in ended], nodes, parents[: 1 + nodes.shape[2]], whole))
            if not growing:
                break
            rows.keep(growing)
            tokens, drawn_from = ([pick_rows(part, growing) for part in parts] for parts in (tokens, drawn_from))
        before, seen = rung.before.expand(len(rows.rows), -1), rung.seen.expand(len(rows.rows), -1, -1)
        logits, asked = level(depth + 1, rows.rows, tokens[-1].index_select(1, rung.read), before, seen), len(rung.read)
    return grown
