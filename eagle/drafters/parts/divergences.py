"""How a student's probs diverge from a teacher's, and the gradient at the student's logits."""

# R rows of one chunk, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# overlaps and probabilities are clamped to at least this before their logarithm is taken
TINY = 1e-20

Kind = Literal["cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest"]
"""Of the teacher's probs p and the student's q, with a = sum min(p, q) what they have in common:

- cross_entropy: -sum p log q, which is KL(p, q) but for what no student changes
- reverse_kl: KL(q, p); jsd: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; tv: 1 - a, half the sum of |p - q|
- acceptance: -log a; hybrid: l KL(p, q) + (1 - l) (1 - a), where l = e^-3a is taken as given, unless `blend` is l
- likeliest: -log q of the token whose p is highest, which published trainers call "ce"
"""

Compare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gets the student's logits and probs [R, V], which it may overwrite; returns losses [R] and gradients at the logits
[R, V]. The teacher's probs and the objective are fixed when it is made."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The divergence of a student from its teacher, and its weights."""

    kind: Kind = "cross_entropy"
    weight: float = 1.0  # of the divergence
    top: float = 0.0  # with cross_entropy, additional weight of the teacher's likeliest `top_k` tokens (HASS)
    top_k: int = 10
    blend: float | None = None  # with hybrid, the fixed weight l of KL; None for l = e^-3a
    tokens: float = 0.0  # weight of the cross-entropy with the sequences' tokens, which is added to the divergence


def compare_with(
    teacher: Tensor,
    objective: Objective,
    tokens: Tensor | None = None,
    known: Tensor | None = None,
) -> Compare:
    """Return the function that compares a student (the draft head) with a teacher at R positions, over V tokens.

    Args:
        teacher: The teacher's probs [R, V], or the tokens [R] to predict, with which only cross-entropy is possible.
        objective: The divergence and its weights.
        tokens: The sequences' own tokens [R]. The cross-entropy with them is added with the weight `objective.tokens`;
            None to leave them out.
        known: [R] bool, whether that cross-entropy counts at a position; None for all positions.

    Returns:
        A function of the student's logits and probs [R, V], both of which it may overwrite. It returns the losses [R]
        and their gradients at the logits [R, V].
    """
    # token ids are integers, probs are not
    if not teacher.is_floating_point():
        return _likelihood(teacher[:, None], objective.weight)
    compare = COMPARE[objective.kind](teacher, objective)
    if tokens is None:
        return compare
    likelihood = _likelihood(tokens[:, None], objective.tokens)
    if known is not None:
        likelihood = _mask_rows(likelihood, known)
    return _add_likelihood(compare, likelihood)


def _mask_rows(compare: Compare, known: Tensor) -> Compare:
    """Return a comparison that is `compare`, but with a loss and a gradient of 0 where `known` [R] is false.

    A comparison is a function of the student's logits and probs [R, V] at R positions; it returns losses and gradients.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses [R] and the gradients at the logits [R, V], 0 where nothing is known."""
        loss, grad = compare(logits, probs)
        return loss * known, grad * known[:, None]

    return loss_and_grad


def _add_likelihood(divergence: Compare, likelihood: Compare) -> Compare:
    """Return the comparison whose loss is the sum of a divergence and a cross-entropy with tokens.

    Both are functions of the student's logits and probs [R, V], which return losses and gradients.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed losses [R] and their gradients at the logits [R, V]; both arguments may be overwritten."""
        # first and on a copy of the probs: a likelihood overwrites probs alone, a divergence the logits too
        token_loss, token_grad = likelihood(logits, probs.clone())
        loss, grad = divergence(logits, probs)
        return loss + token_loss, grad.add_(token_grad)

    return loss_and_grad


def _likelihood(tokens: Tensor, weight: float) -> Compare:
    """Return the comparison by cross-entropy with tokens: -log q(token), times a weight.

    Args:
        tokens: [R, 1], the token to predict in each of the R rows.
        weight: The factor on loss and gradient.

    Returns:
        A function of the student's logits and probs q [R, V], which it overwrites.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return -log q of the tokens [R] and its gradient at the logits [R, V], written over the student's probs q."""
        # With logits z and the student's probs q, log q = z - log sum e^z. The sum follows from the likeliest token,
        # whose z and q are both known: log sum e^z = max z - log max q.
        log_normalizer = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        loss = (log_normalizer - logits.gather(-1, tokens))[..., 0]
        # the gradient is q - e, with e the unit vector of the token
        grad = probs.scatter_add_(-1, tokens, torch.full_like(log_normalizer, -1))
        if weight == 1:
            return loss, grad
        return weight * loss, grad.mul_(weight)

    return loss_and_grad


def _cross_entropy(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by cross-entropy with the target's probs [R, V], whose likeliest tokens may weigh more.

    With `objective.top` the loss has, in addition, the cross-entropy terms of the `top_k` likeliest tokens (HASS).
    """
    # With target probs p, student logits z and probs q, and w the weight of each token:
    # loss = sum(w p) logsumexp(z) - sum(w p z), gradient = sum(w p) q - w p.
    weight = objective.weight
    weighted = target_probs if weight == 1 else weight * target_probs
    mass: Any = weight  # sum(w p), a number if all tokens weigh the same, else [rows]
    if objective.top:
        best = target_probs.topk(min(objective.top_k, target_probs.shape[-1]))
        extra = objective.top * best.values
        # the target's probs are not ours to overwrite
        if weighted is target_probs:
            weighted = weighted.clone()
        weighted.scatter_add_(-1, best.indices, extra)
        mass = mass + extra.sum(-1)

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [R] and its gradient at the student's logits [R, V]; both arguments are overwritten."""
        # logsumexp(z) from the likeliest token, as log max q = max z - logsumexp(z)
        log_normalizer = logits.amax(-1) - probs.amax(-1).log()
        loss = mass * log_normalizer - logits.mul_(weighted).sum(-1)
        if isinstance(mass, Tensor):
            probs.mul_(mass[..., None])
        elif mass != 1:
            probs.mul_(mass)
        return loss, probs.sub_(weighted)

    return loss_and_grad


def _overlap(probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the overlap a = sum min(p, q) [R, 1], and its gradient at the student's logits [R, V], a new tensor.

    The overlap is the probability that a sampled draft token is accepted. `probs` are the student's q [R, V],
    `target_probs` the target's p [R, V].
    """
    overlap = torch.minimum(probs, target_probs).sum(-1, keepdim=True).clamp(min=TINY)
    # da/dz = q (b - sum q b), where b is 1 for tokens with q < p, as min(p, q) depends on q only there
    is_below = (probs < target_probs).to(probs.dtype)
    share = (probs * is_below).sum(-1, keepdim=True)
    return overlap, probs * (is_below - share)


def _total_variation(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by total variation: 1 - a, where a = sum min(p, q) is the chance of acceptance.

    It is a function of the student's logits and probs q; `target_probs` are the teacher's p [R, V] at R positions.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss 1 - a [R] and its gradient at the logits [R, V], from the student's probs q [R, V]."""
        overlap, overlap_grad = _overlap(probs, target_probs)
        return objective.weight * (1 - overlap[..., 0]), overlap_grad.mul_(-objective.weight)

    return loss_and_grad


def _acceptance(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by -log a, where the overlap a = sum min(p, q) is the chance of acceptance.

    It is a function of the student's logits and probs q; `target_probs` are the teacher's p [R, V] at R positions.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss -log a [R] and its gradient at the logits [R, V], from the student's probs q [R, V]."""
        overlap, overlap_grad = _overlap(probs, target_probs)
        # d(-log a) = -da / a
        grad = overlap_grad.mul_(-objective.weight / overlap)
        return objective.weight * -overlap[..., 0].log(), grad

    return loss_and_grad


def _hybrid(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by l KL(p, q) + (1 - l) (1 - a), of the target's probs p and the student's q.

    The overlap a = sum min(p, q) is the chance of acceptance. The blend l is `objective.blend`, or e^-3a if that is
    None: the better the student, the more its acceptance counts.
    """

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [R] and its gradient at the logits [R, V], from the student's logits and probs q."""
        overlap, overlap_grad = _overlap(probs, target_probs)
        blend = (
            (-3 * overlap).exp()
            if objective.blend is None
            else torch.full_like(overlap, objective.blend)
        )
        negative_entropy = torch.xlogy(target_probs, target_probs).sum(-1)
        divergence = negative_entropy - (target_probs * logits.log_softmax(-1)).sum(-1)
        loss = blend[..., 0] * divergence + (1 - blend[..., 0]) * (1 - overlap[..., 0])
        # l is taken as a constant, so it has no gradient; the gradient of KL(p, q) at the logits is q - p
        grad = blend * (probs - target_probs) - (1 - blend) * overlap_grad
        return objective.weight * loss, grad.mul_(objective.weight)

    return loss_and_grad


def _reverse_kl(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by KL(q, p), or for "jsd" by (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2.

    p are the target's probs and q the student's, [rows, V] each.
    """
    is_jsd = objective.kind == "jsd"
    weight = objective.weight / 2 if is_jsd else objective.weight

    def loss_and_grad(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [R] and its gradient at the logits [R, V], from the student's probs q [R, V]."""
        # what q is compared with: the mixture m = (p + q) / 2 for jsd, else the target's p
        reference = (probs + target_probs).div_(2) if is_jsd else target_probs.clamp(min=TINY)
        # q log q - q log m, each by xlogy, which is 0 for q = 0, where log(q / m) may be undefined
        terms = torch.xlogy(probs, probs) - torch.xlogy(probs, reference)
        divergence = terms.sum(-1, keepdim=True)
        loss = divergence[..., 0]
        if is_jsd:
            target_terms = torch.xlogy(target_probs, target_probs) - torch.xlogy(
                target_probs, reference
            )
            loss = loss + target_terms.sum(-1)
        # both kinds have the gradient q (log(q / m) - KL(q, m)): reverse_kl has m = p, and for jsd the derivatives by m
        # cancel out
        return weight * loss, terms.sub_(probs * divergence).mul_(weight)

    return loss_and_grad


def _likeliest(target_probs: Tensor, objective: Objective) -> Compare:
    """Return the comparison by cross-entropy with the teacher's likeliest token, from its probs [R, V].

    A comparison is a function of the student's logits and probs that returns losses and gradients.
    """
    return _likelihood(target_probs.argmax(-1, keepdim=True), objective.weight)


COMPARE: dict[Kind, Callable[[Tensor, Objective], Compare]] = {
    "cross_entropy": _cross_entropy,
    "reverse_kl": _reverse_kl,
    "jsd": _reverse_kl,
    "tv": _total_variation,
    "acceptance": _acceptance,
    "hybrid": _hybrid,
    "likeliest": _likeliest,
}
