"""Growing trees level by level, in a fixed shape or along the drafter's likeliest paths."""

# B rows of text, K nodes of one level, R of all levels, C candidates, V vocabulary, D draft vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Noise
from eagle.core.grown import LEFT_OUT, GrownTrees, hand_over
from eagle.core.tree import DraftTree
from eagle.device import must_wait, pick_rows
from eagle.drafters.parts.scoring import SHARPNESS, ChildScorer, Seed
from eagle.drafters.parts.shapes import level_rows as level_rows
from eagle.drafters.parts.shapes import plan_parents as plan_parents
from eagle.drafters.parts.shapes import plan_rungs


def level_mask(committed: Tensor, seen: Tensor, groups: int = 1) -> Tensor:
    """[B, 1, groups * K, S + R]: a level's nodes see the committed text and, of the draft [B, K, R], their own path.

    `committed` [B or 1, S] is 0 at columns that a row's text fills, the lowest number behind it.
    """
    rows, count, _ = seen.shape
    draft = torch.where(seen, *_seen_and_hidden(committed.dtype, committed.device))
    parts = committed[:, None, None].expand(rows, groups, count, -1), draft[:, None].expand(-1, groups, -1, -1)
    return torch.cat(parts, dim=-1).flatten(1, 2)[:, None]


NOTHING = int(torch.tensor(-math.inf).view(torch.int32))  # the bits of a likelihood of minus infinity


@cache
def _seen_and_hidden(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of an additive mask: seen and hidden."""
    lowest = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=device), torch.full((), lowest, dtype=dtype, device=device)


@cache
def _see_itself(count: int, device: torch.device) -> Tensor:
    """[1, K, K], each node of a level sees itself alone of its level."""
    return torch.eye(count, dtype=torch.bool, device=device)[None]


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], nodes of the level before that they follow [K], whom they see [K, R] -> logits [K, D].

One row of logits stands for all nodes, where the children of all are guessed alike.
"""

RowsLevel = Callable[[int, list[int], Tensor, Tensor, Tensor], Tensor]
"""Depth, the rows that grow on, and what a `Level` gets for each of them [B, ..] -> logits [B, K, D] or [B, 1, D]."""

Confidence = Callable[[int, list[int]], Tensor]
"""Depth and these rows -> how likely a child of each node is kept whose logits were given last, [B, K] or [B, 1]."""


class FollowsRows:
    """A `RowsLevel` that remembers the level before; rows leave it as their trees end."""

    rows: list[int]  # of the level before

    def keep_rows(self, rows: list[int], *parts: Tensor) -> list[Tensor]:
        """The rows of `parts` [B, ..] that grow on."""
        kept, self.rows = [self.rows.index(row) for row in rows], rows
        return [pick_rows(part, kept) for part in parts]


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
    confidence: Confidence | None = None,
) -> list[DraftTree]:
    """The tree under each root, as `grow` describes; logits [B, D].

    Trees stay on a device that the host would have to wait for, until something on the host asks for one of them.
    Where a budget has a least confidence, nodes have no children that the drafter is less sure of.
    """
    grown = grow_columns(seeds, logits, level, drafts, sharpness, confidence)
    return hand_over(grown, [seed.root for seed in seeds], at_once=not must_wait(logits.device))


def grow_columns(
    seeds: Sequence[Seed],
    logits: Tensor,
    level: RowsLevel,
    drafts: Tensor | None = None,
    sharpness: float = SHARPNESS,
    confidence: Confidence | None = None,
) -> list[GrownTrees]:
    """`grow_rows`, but the trees have no roots yet.

    Rows whose budgets differ in their depth alone grow together, and leave when they are deep enough.
    """
    groups: dict[object, list[int]] = {}
    for row, seed in enumerate(seeds):
        if not seed.budget.is_empty:
            groups.setdefault(_kind(seed), []).append(row)
    grown: list[GrownTrees] = []
    for rows in groups.values():
        budget = seeds[rows[0]].budget
        scorer = ChildScorer(budget.draw, drafts, sharpness if budget.sharpness is None else budget.sharpness)
        first = pick_rows(logits, rows)[:, None]
        grow_group = _likeliest if budget.paths is None else _fill_plan
        grown += grow_group(_Rows(seeds, rows, confidence), first, level, scorer)
    return grown


def _kind(seed: Seed) -> object:
    """The properties shared by rows that grow together: the budget except its depth, and whether noise is given."""
    budget = seed.budget
    shape = budget.nodes, budget.top_k, budget.paths
    return *shape, budget.draw, budget.sharpness, budget.confidence, seed.noise is None


class _Rows:
    """The rows of one group that still grow."""

    def __init__(self, seeds: Sequence[Seed], rows: list[int], confidence: Confidence | None) -> None:
        self.rows, self.seeds, self.confidence = rows, [seeds[row] for row in rows], confidence

    @property
    def depth(self) -> int:
        """How deep the deepest tree may be."""
        return max(seed.budget.depth for seed in self.seeds)

    def split(self, depth: int) -> tuple[list[int], list[int]]:
        """The rows whose trees end at this depth, and the rows that continue."""
        ended = [number for number, seed in enumerate(self.seeds) if seed.budget.depth <= depth]
        return ended, [number for number in range(len(self.rows)) if number not in ended] if ended else []

    def is_sure(self, depth: int) -> Tensor | None:
        """[B, K] or [B, 1], which nodes may have children; None where all may."""
        least = self.seeds[0].budget.confidence
        return None if least is None or self.confidence is None else self.confidence(depth, self.rows) >= least

    def keep(self, numbers: list[int]) -> None:
        """Continue with these rows only."""
        self.rows, self.seeds = [self.rows[n] for n in numbers], [self.seeds[n] for n in numbers]


def _likeliest(rows: _Rows, logits: Tensor, level: RowsLevel, scorer: ChildScorer) -> list[GrownTrees]:
    """Read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all; fp32 throughout."""
    budget, device = rows.seeds[0].budget, logits.device
    width = min(budget.top_k, budget.nodes)
    totals = logits.new_zeros(len(logits), 1, dtype=torch.float32)
    frontier = torch.zeros(len(logits), 1, dtype=torch.long, device=device)  # what the logits belong to; 0 is the root
    seen = torch.zeros(len(logits), 1, 0, dtype=torch.bool, device=device)
    # per level: tokens [B, C], the parents of C / K each [B, K], likelihoods [B, C]
    candidates: list[list[Tensor]] = []
    grown: list[GrownTrees] = []
    count = 1
    for depth in range(rows.depth):
        scores, _ = scorer.score(rows.seeds, depth, logits)
        values, best = scorer.best(scores.log_softmax(-1), width)  # never above 0: no child beats its parent
        if (sure := rows.is_sure(depth)) is not None:
            values = values.masked_fill(~sure[..., None], -math.inf)
        best = best.expand(-1, totals.shape[1], -1)
        likelihoods = (totals[..., None] + values).flatten(1)
        tokens = best.flatten(1)
        candidates.append([tokens, frontier, likelihoods])
        ended, growing = rows.split(depth + 1)
        if ended:
            whole = [torch.cat([pick_rows(part, ended) for part in kind], 1) for kind in zip(*candidates, strict=True)]
            columns = _keep_likeliest(*whole, nodes=budget.nodes)
            if budget.confidence is not None:
                columns[:, 0].masked_fill_(columns[:, 2] == NOTHING, LEFT_OUT)
            sheds = budget.confidence is not None
            grown.append(GrownTrees([rows.rows[number] for number in ended], columns, depth + 1, sheds=sheds))
            if not growing:
                break
            rows.keep(growing)
            candidates = [[pick_rows(part, growing) for part in level_parts] for level_parts in candidates]
            seen = pick_rows(seen, growing)
            tokens, _, likelihoods = candidates[-1]
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


def _fill_plan(rows: _Rows, logits: Tensor, level: RowsLevel, scorer: ChildScorer) -> list[GrownTrees]:
    """Trees of a fixed shape: one reading per level, of the nodes that have children."""
    paths = rows.seeds[0].budget.paths
    assert paths is not None
    rungs, parents = plan_rungs(paths, rows.depth, logits.device)
    tokens: list[Tensor] = []  # per level [B, nodes]
    drawn_from: list[Tensor] = []
    grown: list[GrownTrees] = []
    inner_nodes, goes_on = 1, None  # nodes of the level above that have children, and which of them may
    for depth, rung in enumerate(rungs):
        scores, probs = scorer.score(rows.seeds, depth, logits)
        best = scorer.best(scores, rung.best)[1].expand(-1, inner_nodes, -1)
        if best.shape[2] != rung.best:
            raise ValueError(
                f"the budget's fixed tree holds a child of rank {rung.best - 1}, and the drafter knows "
                f"{best.shape[2]} tokens: take ranks below that"
            )
        chosen = best.flatten(1).index_select(1, rung.children)
        if (sure := rows.is_sure(depth)) is not None:
            goes_on = (sure.expand(-1, inner_nodes) if goes_on is None else sure & goes_on).index_select(1, rung.rows)
        tokens.append(chosen if goes_on is None else chosen.masked_fill(~goes_on, LEFT_OUT))
        if probs is not None:
            probs = probs.expand(-1, inner_nodes, -1)
            drawn_from += [probs] * (not drawn_from) + [probs.index_select(1, rung.rows)]  # a row for the root, unused
        ended, growing = rows.split(depth + 1) if depth + 1 < len(rungs) else (list(range(len(rows.rows))), [])
        if ended:
            nodes = torch.cat([pick_rows(part, ended) for part in tokens], dim=1)[:, None]
            whole = torch.cat([pick_rows(part, ended) for part in drawn_from], dim=1) if drawn_from else None
            shape, sheds = parents[: 1 + nodes.shape[2]], goes_on is not None
            grown.append(GrownTrees([rows.rows[n] for n in ended], nodes, depth + 1, shape, whole, sheds=sheds))
            if not growing:
                break
            rows.keep(growing)
            tokens, drawn_from = ([pick_rows(part, growing) for part in parts] for parts in (tokens, drawn_from))
            chosen = pick_rows(chosen, growing)
            goes_on = None if goes_on is None else pick_rows(goes_on, growing)
        before, seen = rung.before.expand(len(rows.rows), -1), rung.seen.expand(len(rows.rows), -1, -1)
        logits = level(depth + 1, rows.rows, chosen.index_select(1, rung.read), before, seen)
        inner_nodes = len(rung.read)
        goes_on = None if goes_on is None else goes_on.index_select(1, rung.read)
    return grown
