"""Candidates of the slots of a block: a slot's best tokens, among which a path is chosen slot by slot.

A slot's candidates are the k tokens of its highest logits. Scores that depend on the path decide among them.
"""

# A anchors, K levels, k candidates, R nodes of one level, B sequences, N rows, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.device import pick_rows, upload
from eagle.drafters.parts.objectives import ROWS
from eagle.drafters.parts.scoring import DraftRequest

Candidates = tuple[Tensor, Tensor]
"""The highest logits [.., k] of some slots, and the tokens [.., k] that have them, as rows of the LM head."""


def pick_candidates(logits: Tensor, count: int) -> Candidates:
    """Return the candidates of slots with these logits [.., V], `count` of each or all V."""
    best = logits.topk(min(count, logits.shape[-1]))
    return best.values, best.indices


def candidate_log_probs(logits: Tensor, best: Tensor) -> Tensor:
    """Return the log-probs [.., k], in fp32 or better, of candidates with logits `best` among all logits [.., V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return best.to(wide) - logits.to(wide).logsumexp(-1, keepdim=True)


def insert_scores(logits: Tensor, candidates: Candidates, scores: Tensor) -> Tensor:
    """Return the logits [.., V] of a level: the scores divide the candidates' part of the slot's own probs among them.

    All other tokens keep their probs. As published, they have none, which matters where drafts are ranked with the
    target's noise: it may choose any token. The best candidate is the likeliest token in either way.

    Args:
        logits: [.., V], the slot's own, of a shape that expands to that of the result.
        candidates: The logits [.., k] and the tokens [.., k] of the candidates, which expand to the shape of `scores`.
        scores: [.., k], of the candidates.
    """
    best, tokens = candidates
    # log q(c) = log of the sum of the candidates' probs + log softmax of their scores, but for a constant
    shares = best.logsumexp(-1, keepdim=True) + scores.log_softmax(-1)
    logits = logits.expand(*scores.shape[:-1], -1).to(shares.dtype)
    return logits.scatter(-1, tokens.expand_as(shares), shares)


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankingHead:
    """The target's LM head, which keeps the candidates of all rows whose logits it makes.

    A loss makes the logits of all rows in order, chunk by chunk, and overwrites them. With this head no second product
    is needed to find the candidates.
    """

    head: TargetHead
    count: int  # k
    normalised: bool  # whether it keeps log-probs of candidates in place of their logits
    chunks: list[Candidates]  # of the rows so far

    @classmethod
    def of(cls, head: TargetHead, count: int, normalised: bool = False) -> RankingHead:
        """Return a head that has made no logits yet; `count` is the number of candidates of a row."""
        ranking = cls(head, count, normalised, [])
        # begins with an empty chunk, as there may be no rows to concatenate
        ranking.logits(head.weight.new_empty(0, head.weight.shape[1]))
        return ranking

    @property
    def weight(self) -> Tensor:
        """The matrix [V, H] of the LM head."""
        return self.head.weight

    @property
    def candidates(self) -> Candidates:
        """The candidates of all N rows so far [N, k], with their log-probs in place of logits if `normalised`."""
        logits, tokens = zip(*self.chunks, strict=True)
        return torch.cat(logits), torch.cat(tokens)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [N, V] of states [N, H], and keep the candidates of these rows."""
        logits = self.head.logits(hidden, out=out)
        best, tokens = pick_candidates(logits, self.count)
        if self.normalised:
            best = candidate_log_probs(logits, best)
        self.chunks.append((best, tokens))
        return logits

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return what `pull_back` needs besides the gradient, as the target's head has it."""
        return self.head.slope(logits, hidden)

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at states [N, H] from the gradient [N, V] at their logits."""
        return self.head.pull_back(gradient, slope)

    def cast(self, dtype: torch.dtype) -> RankingHead:
        """Return this head in another precision; both keep candidates in the same list."""
        return replace(self, head=self.head.cast(dtype))


class CandidateLogits(torch.autograd.Function):
    """The logits of candidates as a function of the states, where the values of the logits are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        logits: Tensor,
        tokens: Tensor,
        head: TargetHead,
        normalised: bool = False,
    ) -> Tensor:
        """Return the logits [N, k] of the candidates, or their log-probs.

        Args:
            ctx: Keeps what `backward` needs.
            states: [N, H], the inputs of the LM head.
            logits: [N, k], those of the candidates.
            tokens: [N, k], the candidates.
            head: The target's LM head.
            normalised: Whether `logits` are log-probs, which depend on the logits of all tokens.
        """
        ctx.head = head
        ctx.normalised = normalised
        ctx.save_for_backward(states, tokens)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at the states from the one at the logits [N, k], the only one of `upstream`."""
        states, tokens = ctx.saved_tensors
        head = ctx.head
        chunks = [torch.empty_like(states[:0])]
        # some rows at a time, as gradients at the logits of all tokens may not fit in memory
        for hidden, candidates, gradient in zip(
            states.split(ROWS), tokens.split(ROWS), upstream[0].split(ROWS), strict=True
        ):
            full = head.weight.new_zeros(len(hidden), len(head.weight))
            full.scatter_(1, candidates, gradient.to(full.dtype))
            # [n, V]; not read where the gradient does not depend on them
            logits: Any = head.logits(hidden) if ctx.normalised or not head.is_linear else None
            if ctx.normalised:
                # d log p(c) / d z(v) = 1 if v is c, else 0, - p(v)
                probs = logits.softmax(-1, dtype=gradient.dtype)
                full -= (probs * gradient.sum(-1, keepdim=True)).to(full.dtype)
            slope = None if head.is_linear else head.slope(logits, hidden)
            chunks.append(head.pull_back(full, slope).to(states.dtype))
        return torch.cat(chunks), None, None, None, None


# -- drafting ---------------------------------------------------------------------------------------------------------


class CandidateLevels:
    """The logits of all levels of all trees: scores of the level's candidates that depend on each node's token.

    It is a `RowsLevel`, the function that tree growth calls for the logits of each level. One forward over a block has
    made the states of all levels before. A chain is the walk from candidate to candidate.
    """

    def __init__(self, head: Any, requests: Sequence[DraftRequest], states: Tensor) -> None:
        """Find the candidates of B sequences, and compute the logits after the roots.

        Args:
            head: The draft head, bound to a target's head. Its `score_candidates` scores candidates after tokens, and
                its `candidate_count` is k.
            requests: Those of the B sequences, of which the roots are read.
            states: [B, K, H], the states that predict each level.
        """
        self.head = head
        self.states = states
        self.logits: Tensor = head.logits(states, head.target_head)  # [B, K, V]
        # [B, K, k], of the candidates
        self.best, self.tokens = pick_candidates(self.logits, head.candidate_count)
        roots = upload(torch.tensor([[request.root] for request in requests]), states.device)
        # [B, V], after the roots
        self.first = self._read_tokens(0, list(range(len(states))), roots)[:, 0]

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits [B, R, V] after the R nodes of one level of each row's tree.

        Args:
            depth: The depth of the nodes, 1 for the root's children.
            rows: The B rows whose trees still grow.
            tokens: [B, R], the tokens of the nodes.
            parents: Unused, like `tree_mask`: scores depend on a node's own token alone.
            tree_mask: Unused.
        """
        return self._read_tokens(depth, rows, tokens)

    def _read_tokens(self, depth: int, rows: list[int], tokens: Tensor) -> Tensor:
        """Return the logits [B, R, V] after tokens [B, R], those of nodes of this depth; roots have depth 0."""
        # what follows nodes of depth d are the candidates of level d, which all nodes of a tree share
        level = slice(depth, depth + 1)
        candidates = (
            pick_rows(self.best[:, level], rows),  # [B, 1, k]
            pick_rows(self.tokens[:, level], rows),
        )
        scores = self.score(depth, rows, tokens, candidates)
        return insert_scores(pick_rows(self.logits[:, level], rows), candidates, scores)

    def score(self, depth: int, rows: list[int], tokens: Tensor, candidates: Candidates) -> Tensor:
        """Return the scores [B, R, k] of a level's candidates after tokens [B, R], those of nodes of this depth.

        The arguments are those of `__call__`, and the logits and tokens [B, 1, k] of the candidates.
        """
        state = pick_rows(self.states[:, depth : depth + 1], rows)
        scores: Tensor = self.head.score_candidates(state, tokens, candidates)
        return scores
