"""Losses that several methods share."""

# K steps, S supervised slots, D width, R rows of one chunk, V vocabulary

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 96  # of a chunk at least: fewer make poor matrix products
LOGITS = {"cpu": 1 << 20}  # of a chunk at most, on a CPU such as stay in its cache
LOGITS_ELSEWHERE = 1 << 27
AT_ONCE = {"cpu": 1 << 18}  # of them in fp32 at a time, for all that is no product
AT_ONCE_ELSEWHERE = 1 << 25

EVEN = 16  # of which a chunk's rows are a multiple
TINY = 1e-20  # no logarithm is taken of less: an overlap, and what the teacher never says, have one

Kind = Literal["cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid"]
"""Of the teacher's law p and the student's q, with a = sum min(p, q) what they have in common:

- cross_entropy: -sum p log q, which is KL(p, q) but for what no student changes
- reverse_kl: KL(q, p); jsd: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; tv: 1 - a, half the sum of |p - q|
- acceptance: -log a; hybrid: l KL(p, q) + (1 - l) (1 - a), where l = e^-3a is taken as given
"""


class LanguageHead(Protocol):
    """Hidden states to logits, and gradients back."""

    @property
    def weight(self) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def slope(self, logits: Tensor) -> Tensor | None: ...

    def pull_back(self, gradient: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head's own matrix [V, D]."""

    weight: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V]."""
        return hidden @ self.weight.T

    def slope(self, logits: Tensor) -> None:
        """Nothing lies between the product and the logits."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """[.., D], the gradient at the hidden states from that at their products with the matrix."""
        return gradient.to(self.weight.dtype) @ self.weight


@dataclass(frozen=True, slots=True)
class Objective:
    """What two laws are compared by; `top` weighs the likeliest `top_k` tokens of the teacher once more."""

    kind: Kind = "cross_entropy"
    weight: float = 1.0
    top: float = 0.0
    top_k: int = 10


def feature_regression(predicted: Tensor, true: Tensor, weights: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) of [K, S, D] to [S, D], a mean over the width, and a sum over the rest by weights [K, S]."""
    found = F.smooth_l1_loss(predicted.float(), true.float().expand_as(predicted), reduction="none")
    return (found.mean(-1) * weights).sum()


def shares(places: Tensor, steps: int, said: Tensor | None = None, decay: float = 1.0) -> Tensor:
    """[K, S], what row r of each step weighs: of all S slots its part, if a draft that began s slots before reaches it.

    It does if all slots between are supervised, and what `said` [S] marks can be drafted; `decay` is that of a step.
    """
    reached = [torch.ones_like(places, dtype=torch.bool) if said is None else said]
    for step in range(1, steps):
        moved = places.roll(step)
        reached.append(reached[-1].roll(1) & reached[0] & (places - moved == step))
    decays = decay ** torch.arange(steps, device=places.device)
    return torch.stack(reached) * (decays / max(len(places), 1))[:, None]


def shifted(states: Iterable[Tensor]) -> Tensor:
    """[K, S, D]: in row r of step s the state of the draft that began s slots before, so that all share a teacher."""
    return torch.stack(
        [F.pad(state[: len(state) - s], (0, 0, min(s, len(state)), 0)) for s, state in enumerate(states)]
    )


def distilled(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    heads: tuple[LanguageHead, LanguageHead],
    objective: Objective | None = None,
) -> tuple[Tensor, Tensor]:
    """What the student's laws [K, S, D] lack of the teacher's [S, D], weighted by [K, S]; and each step's part [K].

    Logits live for one chunk of rows, of which the teacher's serve all steps; gradients are found in the same pass, at
    the states and at the matrix of the student's head, if that is trained.
    """
    own, frozen = heads
    return _Distilled.apply(student, own.weight, teacher, weights, own, frozen, objective or Objective())


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        matrix: Tensor,
        teacher: Tensor,
        weights: Tensor,
        own: LanguageHead,
        frozen: LanguageHead,
        objective: Objective,
    ) -> tuple[Tensor, Tensor]:
        """Chunk by chunk: both laws, what lies between them, and its gradient pulled back."""
        steps, count, _ = student.shape
        wide = torch.promote_types(student.dtype, torch.float32)
        gradient, sums = torch.empty_like(student), torch.zeros(steps, dtype=wide, device=student.device)
        by_matrix = torch.zeros_like(matrix, dtype=wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(student.device.type, enabled=False):
            for rows in _chunks(count, steps, matrix):
                # flat, as products of three dimensions copy the matrix
                hidden, share = student[:, rows].flatten(0, 1).to(matrix.dtype), weights[:, rows]
                logits = own.logits(hidden)
                slope = own.slope(logits)
                taught = frozen.logits(teacher[rows])
                found = _between(logits.unflatten(0, share.shape), taught, wide, objective)
                sums += (found * share).sum(-1)
                back, share = logits if slope is None else logits.mul_(slope), share.reshape(-1, 1)
                gradient[:, rows] = (own.pull_back(back) * share).to(gradient.dtype).view_as(gradient[:, rows])
                if by_matrix is not None:
                    by_matrix += back.T @ (hidden * share).to(back.dtype)
        ctx.save_for_backward(gradient, *([] if by_matrix is None else [by_matrix]))
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass found."""
        gradient, *by_matrix = ctx.saved_tensors
        return gradient * upstream[0], by_matrix[0] * upstream[0] if by_matrix else None, None, None, None, None, None


def _between(logits: Tensor, taught: Tensor, wide: torch.dtype, objective: Objective) -> Tensor:
    """[K, R], what the laws of logits [K, R, V] lack of those of `taught` [R, V]; the gradient takes their place."""
    losses = torch.empty(logits.shape[:2], dtype=wide, device=logits.device)
    few = max(AT_ONCE.get(logits.device.type, AT_ONCE_ELSEWHERE) // logits.shape[2], 1)
    for first in range(0, len(taught), few):
        rows = slice(first, first + few)
        law = taught[rows].softmax(-1, dtype=wide)
        compare = COMPARE.get(objective.kind, _overlap)(law, objective)
        for step in range(len(logits)):
            own = logits[step, rows].to(wide)
            losses[step, rows], found = compare(own, own.softmax(-1))
            logits[step, rows] = found
    return losses


def _entropy(law: Tensor, objective: Objective) -> Any:
    """Cross-entropy from a law, whose likeliest tokens may count more."""
    wanted = law if objective.weight == 1 else objective.weight * law
    mass: Any = objective.weight
    if objective.top:
        best = law.topk(objective.top_k)
        wanted = (wanted.clone() if wanted is law else wanted).scatter_add_(
            -1, best.indices, objective.top * best.values
        )
        mass = mass + objective.top * best.values.sum(-1)

    def compare(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        # the sum of exponentials, known from the likeliest token alone
        norm = logits.amax(-1) - own.amax(-1).log()
        loss = mass * norm - (wanted * logits).sum(-1)
        scaled = own.mul_(mass[..., None]) if isinstance(mass, Tensor) else own if mass == 1 else own.mul_(mass)
        return loss, scaled.sub_(wanted)

    return compare


def _overlap(law: Tensor, objective: Objective) -> Any:
    """Losses of the overlap, which is the chance that a token drawn by one law is kept by the other."""

    def compare(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        below = (own < law).to(own.dtype)
        overlap = torch.minimum(own, law).sum(-1, keepdim=True).clamp(min=TINY)
        # of the overlap, by the logits
        rise = own * (below - (own * below).sum(-1, keepdim=True))
        if objective.kind == "tv":
            return objective.weight * (1 - overlap[..., 0]), rise.mul_(-objective.weight)
        if objective.kind == "acceptance":
            return objective.weight * -overlap[..., 0].log(), rise.mul_(-objective.weight / overlap)
        blend = (-3 * overlap).exp()
        divergence = torch.xlogy(law, law).sum(-1) - (law * logits.log_softmax(-1)).sum(-1)
        loss = blend[..., 0] * divergence + (1 - blend[..., 0]) * (1 - overlap[..., 0])
        return objective.weight * loss, (blend * (own - law) - (1 - blend) * rise).mul_(objective.weight)

    return compare


def _relative(law: Tensor, objective: Objective) -> Any:
    """Losses of how the student's law lies to another: the teacher's own, or the middle between both."""
    middle = objective.kind == "jsd"
    weight = objective.weight / 2 if middle else objective.weight

    def compare(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        other = (own + law).div_(2) if middle else law.clamp(min=TINY)
        # each logarithm for itself: a ratio of two zeros has none
        apart = torch.xlogy(own, own) - torch.xlogy(own, other)
        divergence = apart.sum(-1, keepdim=True)
        loss = divergence[..., 0]
        if middle:
            loss = loss + (torch.xlogy(law, law) - torch.xlogy(law, other)).sum(-1)
        return weight * loss, apart.sub_(own * divergence).mul_(weight)

    return compare


COMPARE = {"cross_entropy": _entropy, "reverse_kl": _relative, "jsd": _relative}  # others are functions of the overlap


def _chunks(count: int, steps: int, weight: Tensor) -> list[slice]:
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // (weight.shape[0] * steps), -(-ROWS // steps))
    rows = max(rows - rows % EVEN, 1)
    return [slice(start, start + rows) for start in range(0, count, rows)]
