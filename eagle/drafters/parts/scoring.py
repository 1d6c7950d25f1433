"""Rank the children of a level by the drafter's logits and the target's noise."""

# B sequences, K nodes of one level, V vocabulary, D draft vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.budget import Budget, Draw
from eagle.core.drafter import Noise

# What a head's logits are multiplied by before nodes are compared, where the budget does not say; 1 is EAGLE-2's rule.
# The target takes the likeliest token, at T > 0 once known noise is added, so that only the head's
# error in the logits, of about 1 / sharpness at any T, leaves a doubt. With 25 nodes on 6 levels 1 / 2 / 3 / 4 keep on
# the tiny target 2.93 / 3.32 / 3.32 / 3.30 tokens per step, with noise at T = 1 3.47 / 3.92 / 3.83 / 3.82 (40 prompts),
# and on a target of 25 M parameters 3.22 / 3.82 / 4.04 / 4.01 (20 prompts).
SHARPNESS = 3.0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a row asks its drafter for: a tree from this root, within this budget, ranked with this noise."""

    root: int
    position: int  # of the root's children
    budget: Budget
    noise: Noise | None = None


@dataclass(frozen=True, slots=True)
class ChildScorer:
    """Scores the children of a level and selects their tokens, by the drafter's logits and the target's noise."""

    draw: Draw  # how children are chosen where the target samples
    # [D], the draft vocabulary as target tokens; None if the draft has all tokens
    drafts: Tensor | None
    sharpness: float  # the factor on the logits

    def score(
        self, requests: Sequence[DraftRequest], depth: int, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Score every token as a child of each node of one level of the draft trees.

        Args:
            requests: Those of the B rows (sequences): either all have noise (their targets sample) or none has.
            depth: Of the nodes; the root has depth 0.
            logits: [B, K, D], the drafter's after each of the level's K nodes, over the D tokens of the draft
                vocabulary.

        Returns:
            The scores [B, K, D], unnormalised log-probs of being the token that the target chooses, and the probs
            [B, K, V] over the target's V tokens that children are sampled from, None if they are not sampled.
        """
        logits = logits.float()
        if requests[0].noise is None:
            return self.sharpness * logits, None
        rows = zip(requests, logits, strict=True)
        if self.draw != "sampled":
            return _stack(
                [self._score_row(request, depth, row_logits) for request, row_logits in rows]
            ), None
        sampled = [self._sample_row(request, row_logits) for request, row_logits in rows]
        return _stack([scores for scores, _ in sampled]), _stack([probs for _, probs in sampled])

    def _score_row(self, request: DraftRequest, depth: int, logits: Tensor) -> Tensor:
        """Return the scores [K, D] of one row (sequence) whose target samples, if its children are not sampled.

        The target adds noise to its logits that is fixed by the position, so the drafter may know it: with `draw`
        "noise" that at the children's position is added; with "likeliest" it is treated as unknown.

        Args:
            request: That of the row.
            depth: Of the nodes; the root has depth 0.
            logits: [K, D], the drafter's after each of the K nodes, over the D tokens of the draft vocabulary.
        """
        noise = request.noise
        assert noise is not None
        logits = noise.filter_logits(logits)
        if self.draw == "noise":
            return self.sharpness * (
                logits + self._in_draft_vocab(noise([request.position + depth]))
            )
        # the target's noise has the scale T, and the head's error in the logits has the scale 1 / sharpness; both are
        # unknown here, so the squares of their scales add up
        return logits / math.hypot(noise.temperature, 1 / self.sharpness)

    def _sample_row(self, request: DraftRequest, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [K, D] of one row (sequence) whose children are sampled, and the probs [K, V] used.

        The noise is the drafter's, not the target's. The best k of logits plus Gumbel noise are k samples from the
        softmax without replacement.

        Args:
            request: That of the row.
            logits: [K, D], the drafter's after each of the level's K nodes, over the D tokens of the draft vocabulary.

        Returns:
            The scores, and the probs over all V tokens of the target, 0 at those outside of the draft vocabulary.
        """
        noise = request.noise
        assert noise is not None
        logits = noise.filter_logits(logits)
        # [K, V], Gumbel noise times the temperature, so it is added to plain logits
        drafter_noise = noise.draft_noise(len(logits))
        probs = (logits / noise.temperature).softmax(-1)
        # verification compares these with the target's probs, so they get the target's vocabulary
        if self.drafts is not None:
            probs = torch.zeros_like(drafter_noise).index_copy_(-1, self.drafts, probs)
        return logits + self._in_draft_vocab(drafter_noise), probs

    def best(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the highest `count` scores of each node's children, and their tokens in the target's vocabulary.

        `scores` are [B, K, D], of B rows, K nodes and D draft tokens; both results are [B, K, count], or [B, K, D] if
        there are fewer draft tokens.
        """
        values, indices = scores.topk(min(count, scores.shape[-1]))
        return values, indices if self.drafts is None else self.drafts[indices]

    def _in_draft_vocab(self, noise: Tensor) -> Tensor:
        """Return noise [nodes, V] over the target's V tokens at those alone that the head can draft, [nodes, D]."""
        return noise if self.drafts is None else noise[:, self.drafts]


def _stack(rows: list[Tensor]) -> Tensor:
    """Return the tensors of B rows (sequences) stacked to [B, ..]; a single one is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)
