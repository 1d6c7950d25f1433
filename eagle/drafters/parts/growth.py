"""The growing of trees: level by level, of a fixed shape or where the drafter finds it likeliest."""

# K rows of one level, V vocabulary, D draft vocabulary

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Noise
from eagle.core.tree import DraftTree, Paths


def level_mask(cached: int, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, K, cached + rows so far]: a level's rows see the committed text and, of the draft, their own path."""
    mask = torch.zeros(len(seen), cached + seen.shape[1], dtype=dtype, device=seen.device)
    mask[:, cached:].masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def level_rows(budget: Budget) -> tuple[int, ...]:
    """How many rows `grow` asks for in each level of a tree after the first."""
    if budget.paths is not None:
        inner = {path[:-1] for path in budget.paths if 1 < len(path) <= budget.depth}
        depths = range(1, max(map(len, inner), default=0) + 1)
        return tuple(sum(len(path) == depth for path in inner) for depth in depths)
    width = min(budget.top_k, budget.nodes)
    return (width,) * (budget.depth - 1) if width else ()


Level = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Depth, tokens [K], rows of the level before that they follow [K], whom they see [K, rows] -> [K, D] logits."""


# What a head's logits are multiplied by before nodes are compared, where the budget does not say; 1 is EAGLE-2's rule.
# The target takes the likeliest token, at T > 0 once known noise is added, so that only the head's
# error in the logits, of about 1 / sharpness at any T, leaves a doubt. With 25 nodes on 6 levels 1 / 2 / 3 / 4 keep on
# the tiny target 2.93 / 3.32 / 3.32 / 3.30 tokens per step, with noise at T = 1 3.47 / 3.92 / 3.83 / 3.82 (40 prompts),
# and on a target of 25 M parameters 3.22 / 3.82 / 4.04 / 4.01 (20 prompts).
SHARPNESS = 3.0


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
    if budget.is_empty:
        return DraftTree.chain([root])
    sharpness = sharpness if budget.sharpness is None else budget.sharpness
    scorer = ChildScorer(budget.draw, noise, place, drafts, sharpness)
    if budget.paths is not None:
        return _fill_plan(root, logits[None], level, _plan(budget.paths, budget.depth, logits.device), scorer)
    return _likeliest(root, logits[None], level, budget, scorer)


@dataclass(frozen=True, slots=True)
class ChildScorer:
    """How the children of a level are ranked, and which tokens they are."""

    draw: Draw
    noise: Noise | None
    place: int
    drafts: Tensor | None  # [D], of the target's tokens; None for all
    sharpness: float

    def score(self, depth: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-odds [K, D] of being the target's choice, and the probs [K, V] that children are drawn from.

        The best k of log-probs plus Gumbel noise are k draws from these probs without replacement.
        """
        logits, noise = logits.float(), self.noise
        if noise is None:
            return self.sharpness * logits, None
        logits = noise.filter_logits(logits)
        if self.draw == "noise":
            return self.sharpness * (logits + self._in_draft_vocab(noise([self.place + depth]))), None
        if self.draw == "likeliest":  # unknown noise is one more error, beside the head's own
            return logits / math.hypot(noise.temperature, 1 / self.sharpness), None
        private = noise.own(len(logits))
        probs = (logits / noise.temperature).softmax(-1)
        whole = probs if self.drafts is None else torch.zeros_like(private).index_copy_(-1, self.drafts, probs)
        return logits + self._in_draft_vocab(private), whole

    def best(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[K, count] each, the best scores and their tokens, in the target's vocabulary."""
        values, indices = scores.topk(min(count, scores.shape[-1]))
        return values, indices if self.drafts is None else self.drafts[indices]

    def _in_draft_vocab(self, noise: Tensor) -> Tensor:
        return noise if self.drafts is None else noise[:, self.drafts]


def _likeliest(root: int, logits: Tensor, level: Level, budget: Budget, scorer: ChildScorer) -> DraftTree:
    """Read the `top_k` likeliest candidates of each level, keep the `nodes` likeliest of all; fp32 throughout."""
    width = min(budget.top_k, budget.nodes)
    totals = logits.new_zeros(1, dtype=torch.float32)
    frontier = torch.full((1,), -1, device=logits.device)  # candidates that the logits belong to; -1 is the root
    seen = torch.zeros(1, 0, dtype=torch.bool, device=logits.device)
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: tokens, parents, likelihoods
    count = 0
    for depth in range(budget.depth):
        scores, _ = scorer.score(depth, logits)
        values, best = scorer.best(scores.log_softmax(-1), width)  # never above 0: no child beats its parent
        likelihoods = (totals[:, None] + values).flatten()
        tokens, parents = best.flatten(), frontier.repeat_interleave(best.shape[1])
        candidates.append((tokens, parents, likelihoods))
        if depth + 1 == budget.depth:
            break
        chosen = likelihoods.topk(min(width, len(likelihoods)))
        before = chosen.indices // best.shape[1]
        totals, frontier = chosen.values, count + chosen.indices
        count += len(likelihoods)
        itself = torch.eye(len(before), dtype=torch.bool, device=seen.device)
        seen = torch.cat([seen[before], itself], dim=1)
        logits = level(depth + 1, tokens[chosen.indices], before, seen)
    return _keep_likeliest(root, *(torch.cat(column) for column in zip(*candidates, strict=True)), nodes=budget.nodes)


def _keep_likeliest(root: int, tokens: Tensor, parents: Tensor, likelihoods: Tensor, *, nodes: int) -> DraftTree:
    """The tree of the best candidates; a tie goes to the one found first, so that no child loses its parent."""
    kept = likelihoods.sort(descending=True, stable=True).indices[:nodes].sort().values
    place = torch.full((len(tokens) + 1,), -2, device=kept.device)  # -2 is nobody's parent: a tree would refuse it
    place[-1] = 0  # the root, which candidates call -1
    place[kept] = torch.arange(1, len(kept) + 1, device=kept.device)
    bits = likelihoods[kept].view(torch.int32).long()  # all in one transfer
    packed = torch.stack([tokens[kept], place[parents[kept]], bits]).cpu()
    tokens, parents, bits = torch.cat([torch.tensor([[root], [-1], [0]]), packed], dim=1)
    return DraftTree(tokens, parents, likelihoods=bits.int().view(torch.float32))


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of a fixed shape: its nodes, and those of them that are read because they have children."""

    best: int  # how many children of a row are ranked
    rows: Tensor  # [nodes], the row of the level before, of those read, that each node follows
    ranks: Tensor  # [nodes]
    read: Tensor  # [K]
    seen: Tensor  # [K, rows read so far]


@lru_cache(maxsize=32)  # as many as a shape has depths, for a few shapes
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
        rungs.append(Rung(int(ranks.max()) + 1, *(part.to(device) for part in (rows, ranks, chosen, seen))))
        parents += [place[path[:-1]] for path in nodes]
        place |= {path: len(place) + index for index, path in enumerate(nodes)}
        if not read:
            break
        above = read
    return rungs, torch.tensor(parents)


def _fill_plan(
    root: int, logits: Tensor, level: Level, plan: tuple[list[Rung], Tensor], scorer: ChildScorer
) -> DraftTree:
    """The tree of a fixed shape: one reading per level, of the nodes that have children."""
    rungs, parents = plan
    tokens = [torch.tensor([root], device=logits.device)]
    drawn_from: list[Tensor] = []
    for depth, rung in enumerate(rungs):
        scores, probs = scorer.score(depth, logits)
        tokens.append(scorer.best(scores, rung.best)[1][rung.rows, rung.ranks])
        if probs is not None:
            drawn_from += [probs[rung.rows]] if drawn_from else [probs, probs[rung.rows]]  # a row for the root, unused
        if depth + 1 < len(rungs):
            logits = level(depth + 1, tokens[-1][rung.read], rung.rows[rung.read], rung.seen)
    return DraftTree(torch.cat(tokens).cpu(), parents, torch.cat(drawn_from) if drawn_from else None)
