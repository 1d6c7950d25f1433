"""Losses that several methods share."""

# K steps, S supervised slots, D width, R rows of one chunk, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 96  # of a chunk at least: fewer make poor matrix products
LOGITS = {"cpu": 1 << 22}  # bytes of a chunk's at most, on a CPU such as stay in its cache
LOGITS_ELSEWHERE = 1 << 28
AT_ONCE = {"cpu": 1 << 17}  # of them in fp32 at a time, for all that is no product
AT_ONCE_ELSEWHERE = 1 << 25

EVEN = 16  # of which a chunk's rows are a multiple
TINY = 1e-20  # no logarithm is taken of less: an overlap, and what has no probability, have one

Kind = Literal["cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid"]
"""Of the teacher's probs p and the student's q, with a = sum min(p, q) what they have in common:

- cross_entropy: -sum p log q, which is KL(p, q) but for what no student changes
- reverse_kl: KL(q, p); jsd: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; tv: 1 - a, half the sum of |p - q|
- acceptance: -log a; hybrid: l KL(p, q) + (1 - l) (1 - a), where l = e^-3a is taken as given
"""


class LanguageHead(Protocol):
    """Hidden states to logits, and gradients back."""

    @property
    def weight(self) -> Tensor: ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...

    def slope(self, logits: Tensor) -> Tensor | None: ...

    def pull_back(self, gradient: Tensor) -> Tensor: ...

    def cast(self, dtype: torch.dtype) -> LanguageHead: ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head's own matrix [V, D], and a bias [V] where it has one."""

    weight: Tensor
    bias: Tensor | None = None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[.., V], written to `out` where that is given."""
        logits = torch.matmul(hidden.to(self.weight.dtype), self.weight.T, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def slope(self, logits: Tensor) -> None:
        """Nothing lies between the product and the logits."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """[.., D], the gradient at the hidden states from that at their products with the matrix."""
        return gradient.to(self.weight.dtype) @ self.weight

    def cast(self, dtype: torch.dtype) -> OwnHead:
        """This head in another precision, with gradients that reach its own."""
        return OwnHead(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True, slots=True)
class Objective:
    """What probs are compared by; `top` weighs the likeliest `top_k` tokens of the teacher once more."""

    kind: Kind = "cross_entropy"
    weight: float = 1.0
    top: float = 0.0
    top_k: int = 10


def feature_regression(predicted: Tensor, true: Tensor, weights: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) of [K, S, D] to [S, D], a mean over the width, and a sum over the rest by weights [K, S]."""
    losses = F.smooth_l1_loss(predicted.float(), true.float().expand_as(predicted), reduction="none")
    return (losses.mean(-1) * weights).sum()


def step_weights(places: Tensor, steps: int, in_draft_vocab: Tensor | None = None, decay: float = 1.0) -> Tensor:
    """[K, S], what row r of each step weighs: of all S slots its part, if a draft that began s slots before reaches it.

    It does if all slots between are supervised, and `in_draft_vocab` [S] marks them; `decay` is that of a step.
    """
    reached = [torch.ones_like(places, dtype=torch.bool) if in_draft_vocab is None else in_draft_vocab]
    for step in range(1, steps):
        moved = places.roll(step)
        reached.append(reached[-1].roll(1) & reached[0] & (places - moved == step))
    decays = decay ** torch.arange(steps, device=places.device)
    return torch.stack(reached) * (decays / max(len(places), 1))[:, None]


def align_steps(states: Iterable[Tensor]) -> Tensor:
    """[K, S, D]: in row r of step s the state of the draft that began s slots before, so that all share a teacher."""
    return torch.stack(
        [F.pad(state[: max(len(state) - s, 0)], (0, 0, min(s, len(state)), 0)) for s, state in enumerate(states)]
    )


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    heads: tuple[LanguageHead | Sequence[LanguageHead], LanguageHead | None],
    objective: Objective | None = None,
) -> tuple[Tensor, Tensor]:
    """Divergence of the student [K, S, D'] from the teacher [S, D] by weights [K, S], summed, and each step's part [K].

    The student has one head for all steps, or one for each. A teacher without a head names the tokens [S] that are
    right. Logits live for one chunk of rows, of which the teacher's serve all steps; gradients are found in the same
    pass, at the states and at the matrices and biases that are trained.
    """
    students, frozen = heads
    students = students if isinstance(students, Sequence) else [students]
    if len(students) not in (1, len(student)):
        raise ValueError(f"got {len(students)} heads for {len(student)} steps: expected one, or one for each step")
    matrices, biases = [head.weight for head in students], [_bias_of(head) for head in students]
    return _Distilled.apply(student, teacher, weights, students, frozen, objective or Objective(), *matrices, *biases)


def _bias_of(head: LanguageHead) -> Tensor | None:
    return head.bias if isinstance(head, OwnHead) else None


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weights: Tensor,
        students: Sequence[LanguageHead],
        frozen: LanguageHead | None,
        objective: Objective,
        *trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Chunk by chunk: both logits, their divergence, and its gradient pulled back."""
        steps, count, _ = student.shape
        wide = torch.promote_types(student.dtype, torch.float32)
        grad_student, sums = torch.empty_like(student), torch.zeros(steps, dtype=wide, device=student.device)
        grads = [
            torch.zeros_like(part, dtype=wide) if part is not None and needed else None
            for part, needed in zip(trained, ctx.needs_input_grad[6:], strict=True)
        ]
        by_head = list(zip(students, grads[: len(students)], grads[len(students) :], strict=True))
        device = "cpu" if student.is_meta else student.device.type  # meta tensors, of sizes alone, know no autocast
        with torch.autocast(device, enabled=False):
            chunks = _chunks(count, steps, students[0].weight)
            room = _room_for_logits(chunks, steps // len(students), students[0], frozen)
            for rows in chunks:
                taught = teacher[rows]
                if frozen is not None:
                    taught = frozen.logits(taught, out=room[1][: len(taught)])
                for number, (own, grad, grad_bias) in enumerate(by_head):
                    part = slice(number, number + 1) if len(students) > 1 else slice(None)
                    # flat, as products of three dimensions copy the matrix
                    hidden, weight = student[part, rows].flatten(0, 1).to(own.weight.dtype), weights[part, rows]
                    logits = own.logits(hidden, out=room[0][: len(hidden)])
                    slope = own.slope(logits)
                    losses = _loss_and_grad_(logits.unflatten(0, weight.shape), taught, wide, objective)
                    sums[part] += (losses * weight).sum(-1)
                    back, weight = logits if slope is None else logits.mul_(slope), weight.reshape(-1, 1)
                    at_states = grad_student[part, rows]
                    grad_student[part, rows] = (own.pull_back(back) * weight).to(at_states.dtype).view_as(at_states)
                    if grad is not None:
                        grad += back.T @ (hidden * weight).to(back.dtype)
                    if grad_bias is not None:
                        grad_bias += (back.T @ weight.to(back.dtype))[:, 0]
        ctx.trained = [grad is not None for grad in grads]
        ctx.save_for_backward(grad_student, *(grad for grad in grads if grad is not None))
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass found."""
        grad_student, *grads = ctx.saved_tensors
        by_part = [grads.pop(0) * upstream[0] if trained else None for trained in ctx.trained]
        return grad_student * upstream[0], None, None, None, None, None, *by_part


def _loss_and_grad_(logits: Tensor, taught: Tensor, wide: torch.dtype, objective: Objective) -> Tensor:
    """[K, R], how logits [K, R, V] diverge from the teacher's [R, V] or right tokens [R]; they become the gradient."""
    losses = torch.empty(logits.shape[:2], dtype=wide, device=logits.device)
    few = max(AT_ONCE.get(logits.device.type, AT_ONCE_ELSEWHERE) // logits.shape[2], 1)
    for first in range(0, len(taught), few):
        rows = slice(first, first + few)
        if taught.is_floating_point():
            target_probs = taught[rows].softmax(-1, dtype=wide)
            compare = COMPARE.get(objective.kind, _overlap)(target_probs, objective)
        else:
            compare = _likelihood(taught[rows, None], objective)
        for step in range(len(logits)):
            student = logits[step, rows].to(wide)
            losses[step, rows], grad = compare(student, student.softmax(-1))
            logits[step, rows] = grad
    return losses


def _likelihood(tokens: Tensor, objective: Objective) -> Any:
    """Cross-entropy from tokens [R, 1] that are right."""

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        norm = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        loss = (norm - logits.gather(-1, tokens))[..., 0]
        grad = probs.scatter_add_(-1, tokens, torch.full_like(norm, -1))
        weight = objective.weight
        return (loss, grad) if weight == 1 else (weight * loss, grad.mul_(weight))

    return compare


def _entropy(target_probs: Tensor, objective: Objective) -> Any:
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


def _overlap(target_probs: Tensor, objective: Objective) -> Any:
    """Losses of the overlap sum min(p, q), which is the chance that a token drawn from one is kept by the other."""

    def compare(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        below = (probs < target_probs).to(probs.dtype)
        overlap = torch.minimum(probs, target_probs).sum(-1, keepdim=True).clamp(min=TINY)
        # of the overlap, by the logits
        rise = probs * (below - (probs * below).sum(-1, keepdim=True))
        if objective.kind == "tv":
            return objective.weight * (1 - overlap[..., 0]), rise.mul_(-objective.weight)
        if objective.kind == "acceptance":
            return objective.weight * -overlap[..., 0].log(), rise.mul_(-objective.weight / overlap)
        blend = (-3 * overlap).exp()
        divergence = torch.xlogy(target_probs, target_probs).sum(-1) - (target_probs * logits.log_softmax(-1)).sum(-1)
        loss = blend[..., 0] * divergence + (1 - blend[..., 0]) * (1 - overlap[..., 0])
        return objective.weight * loss, (blend * (probs - target_probs) - (1 - blend) * rise).mul_(objective.weight)

    return compare


def _relative(target_probs: Tensor, objective: Objective) -> Any:
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


COMPARE = {"cross_entropy": _entropy, "reverse_kl": _relative, "jsd": _relative}  # others are functions of the overlap


def _room_for_logits(
    chunks: Sequence[slice], steps: int, own: LanguageHead, frozen: LanguageHead | None
) -> list[Tensor]:
    """Memory for the student's logits of a chunk and the teacher's: each new one would be laid beside the last."""
    rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    heads = [(own.weight, steps)] + ([] if frozen is None else [(frozen.weight, 1)])
    return [weight.new_empty(rows * count, len(weight)) for weight, count in heads]


def _chunks(count: int, steps: int, weight: Tensor) -> list[slice]:
    size = weight.element_size() * weight.shape[0] * steps  # bytes of a row's logits
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // size, -(-ROWS // steps))
    rows = max(rows // EVEN, 1) * EVEN
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
