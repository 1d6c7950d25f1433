"""How a student's probs diverge from a teacher's, and the gradient at the student's logits."""

# R rows of one chunk, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

TINY = 1e-20  # no logarithm is taken of less: an overlap, and what has no probability, have one

Kind = Literal["cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest"]
"""Of the teacher's probs p and the student's q, with a = sum min(p, q) what they have in common:

- cross_entropy: -sum p log q, which is KL(p, q) but for what no student changes
- reverse_kl: KL(q, p); jsd: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; tv: 1 - a, half the sum of |p - q|
- acceptance: -log a; hybrid: l KL(p, q) + (1 - l) (1 - a), where l = e^-3a is taken as given, unless `blend` is l
- likeliest: -log q of the token whose p is highest, which published trainers call "ce"
"""

Compare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The student's logits and probs [R, V], which it may overwrite, to losses [R] and gradients at the logits."""


@dataclass(frozen=True, slots=True)
class Objective:
    """How probs are compared; `top` is an additional weight of the teacher's likeliest `top_k` tokens."""

    kind: Kind = "cross_entropy"
    weight: float = 1.0
    top: float = 0.0
    top_k: int = 10
    blend: float | None = None  # of a hybrid
    tokens: float = 0.0  # what the likelihood of the texts' own tokens counts beside the teacher's probs


def compare_with(taught: Tensor, objective: Objective, named: Tensor | None = None) -> Compare:
    """The function that compares a student with a teacher's probs [R, V], or with right tokens [R].

    `named` tokens [R] beside the probs have the weight that the objective gives.
    """
    if not taught.is_floating_point():
        return _likelihood(taught[:, None], objective.weight)
    compare = COMPARE.get(objective.kind, _overlap)(taught, objective)
    return compare if named is None else _both(compare, _likelihood(named[:, None], objective.tokens))


def _both(first: Compare, second: Compare) -> Compare:
    """The sum of two, of which the second leaves the logits as they are."""

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        more, pull = second(logits, probs.clone())
        loss, grad = first(logits, probs)
        return loss + more, grad.add_(pull)

    return compare


def _likelihood(tokens: Tensor, weight: float) -> Compare:
    """Cross-entropy from tokens [R, 1] that are right."""

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        norm = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        loss = (norm - logits.gather(-1, tokens))[..., 0]
        grad = probs.scatter_add_(-1, tokens, torch.full_like(norm, -1))
        return (loss, grad) if weight == 1 else (weight * loss, grad.mul_(weight))

    return compare


def _entropy(target_probs: Tensor, objective: Objective) -> Compare:
    """Cross-entropy from the target's probs, whose likeliest tokens may count more."""
    wanted = target_probs if objective.weight == 1 else objective.weight * target_probs
    mass: Any = objective.weight
    if objective.top:
        best = target_probs.topk(objective.top_k)
        wanted = (wanted.clone() if wanted is target_probs else wanted).scatter_add_(
            -1, best.indices, objective.top * best.values
        )
        mass = mass + objective.top * best.values.sum(-1)

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        # the sum of exponentials, known from the likeliest token alone
        norm = logits.amax(-1) - probs.amax(-1).log()
        loss = mass * norm - logits.mul_(wanted).sum(-1)
        scaled = probs.mul_(mass[..., None]) if isinstance(mass, Tensor) else probs if mass == 1 else probs.mul_(mass)
        return loss, scaled.sub_(wanted)

    return compare


def _overlap(target_probs: Tensor, objective: Objective) -> Compare:
    """Losses of the overlap sum min(p, q), the probability that a drafted token is accepted."""

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        below = (probs < target_probs).to(probs.dtype)
        overlap = torch.minimum(probs, target_probs).sum(-1, keepdim=True).clamp(min=TINY)
        # of the overlap, by the logits
        rise = probs * (below - (probs * below).sum(-1, keepdim=True))
        if objective.kind == "tv":
            return objective.weight * (1 - overlap[..., 0]), rise.mul_(-objective.weight)
        if objective.kind == "acceptance":
            return objective.weight * -overlap[..., 0].log(), rise.mul_(-objective.weight / overlap)
        blend = (-3 * overlap).exp() if objective.blend is None else torch.full_like(overlap, objective.blend)
        divergence = torch.xlogy(target_probs, target_probs).sum(-1) - (target_probs * logits.log_softmax(-1)).sum(-1)
        loss = blend[..., 0] * divergence + (1 - blend[..., 0]) * (1 - overlap[..., 0])
        return objective.weight * loss, (blend * (probs - target_probs) - (1 - blend) * rise).mul_(objective.weight)

    return compare


def _relative(target_probs: Tensor, objective: Objective) -> Compare:
    """Losses of the student's probs relative to others: the teacher's, or the middle between both."""
    middle = objective.kind == "jsd"
    weight = objective.weight / 2 if middle else objective.weight

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        other = (probs + target_probs).div_(2) if middle else target_probs.clamp(min=TINY)
        # each logarithm for itself: a ratio of two zeros has none
        apart = torch.xlogy(probs, probs) - torch.xlogy(probs, other)
        divergence = apart.sum(-1, keepdim=True)
        loss = divergence[..., 0]
        if middle:
            loss = loss + (torch.xlogy(target_probs, target_probs) - torch.xlogy(target_probs, other)).sum(-1)
        return weight * loss, apart.sub_(probs * divergence).mul_(weight)

    return compare


def _likeliest(target_probs: Tensor, objective: Objective) -> Compare:
    """Cross-entropy from the teacher's likeliest token alone."""
    return _likelihood(target_probs.argmax(-1, keepdim=True), objective.weight)


# others are functions of the overlap
COMPARE = {"cross_entropy": _entropy, "reverse_kl": _relative, "jsd": _relative, "likeliest": _likeliest}
