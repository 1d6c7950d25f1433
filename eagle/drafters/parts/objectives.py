"""Losses that several methods share, and the LM heads that they read."""

# K steps, S supervised slots, D width, R rows of one chunk, V vocabulary, r rank of a biased head's codes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.divergences import Kind as Kind
from eagle.drafters.parts.divergences import Objective as Objective
from eagle.drafters.parts.divergences import compare_with

# A chunk has at least this many rows, as fewer make poor matrix products; times LEARNED where a matrix is trained,
# because every chunk is added to all of its gradient.
ROWS = 96
LEARNED = 4
EVEN = 16  # a chunk's rows are a multiple of this

# Bytes of a chunk's logits at most, so that on a CPU they stay in its cache.
LOGITS = {"cpu": 1 << 22}
LOGITS_ELSEWHERE = 1 << 28
# Logits that are in fp32 at a time, for everything that is no matrix product.
AT_ONCE = {"cpu": 1 << 17}
AT_ONCE_ELSEWHERE = 1 << 25

Loss = Literal[Kind, "tokens"]
"""A divergence from the target's probs, or "tokens": cross-entropy of the sequence's next token."""


# -- LM heads ---------------------------------------------------------------------------------------------------------


class LanguageHead(Protocol):
    """An LM head during training: hidden states to logits, and gradients back."""

    @property
    def weight(self) -> Tensor: ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None: ...

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor: ...

    def cast(self, dtype: torch.dtype) -> LanguageHead: ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head's own matrix [V, D], and a bias [V] where it has one."""

    weight: Tensor
    bias: Tensor | None = None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [.., V], written to `out` where a buffer is passed."""
        logits = torch.matmul(hidden.to(self.weight.dtype), self.weight.T, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def slope(self, logits: Tensor, hidden: Tensor) -> None:
        """Return None, as there is no softcap."""

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at hidden states [.., D] from the gradient at their logits."""
        return gradient.to(self.weight.dtype) @ self.weight

    def cast(self, dtype: torch.dtype) -> OwnHead:
        """Return this head in another precision, with gradients that reach its own tensors."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return OwnHead(self.weight.to(dtype), bias)


@dataclass(frozen=True, slots=True)
class BiasedHead:
    """The target's LM head plus a bias of the logits, made of codes [.., r] that follow the states [.., D] in a row."""

    frozen: TargetHead
    weight: Tensor  # [V, r], which makes biases of codes, and learns

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [.., V] of states and codes [.., D + r], written to `out` where a buffer is passed."""
        state, code = self._split(hidden.to(self.weight.dtype))
        logits = self.frozen.logits(state, out=out)
        if out is None:
            return logits.add_(code @ self.weight.T)
        return torch.addmm(logits, code, self.weight.T, out=out)

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return how far the target's logits [.., V] move with what lies below their softcap; None without one.

        For a target that transforms states it is these states [.., D].
        """
        if self.frozen.is_linear:
            return None
        state, code = self._split(hidden)
        return self.frozen.slope(logits - code @ self.weight.T, state)

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at states and codes [.., D + r] from the gradient at the logits."""
        # the target's head changes its gradient in place where it has a softcap, and the codes need it unchanged
        target_gradient = gradient if slope is None else gradient.clone()
        return torch.cat(
            [self.frozen.pull_back(target_gradient, slope), gradient @ self.weight], dim=-1
        )

    def cast(self, dtype: torch.dtype) -> BiasedHead:
        """Return this head in another precision, with gradients that reach its own matrix."""
        return BiasedHead(self.frozen.cast(dtype), self.weight.to(dtype))

    def _split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        width = hidden.shape[-1] - self.weight.shape[1]
        return hidden.tensor_split([width], dim=-1)


# -- teachers, weights and aligned steps ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Named:
    """The tokens [S] of the sequences themselves, and a buffer [K, S] for the overlap of student and teacher there."""

    tokens: Tensor
    overlaps: Tensor


def choose_teacher(
    loss: Loss, batch: Batch, places: Tensor, frozen: LanguageHead
) -> tuple[Tensor, LanguageHead | None, Objective]:
    """Return the teacher of the token two positions after each slot [S], its head, and the divergence from it.

    The teacher is the token itself, or the target's state and LM head that predict it.
    """
    if loss == "tokens":
        return batch.tokens.index_select(0, places + 2), None, Objective()
    target_hidden = batch.select_taps((-1,))[:, 0]
    return target_hidden.index_select(0, places + 1), frozen, Objective(loss)


def feature_regression(predicted: Tensor, true: Tensor, weights: Tensor) -> Tensor:
    """Return the smooth-L1 loss (beta 1) of [K, S, D] to [S, D]: a mean over the width, a sum over weights [K, S]."""
    wide = torch.promote_types(predicted.dtype, torch.float32)
    expected = true.to(wide).expand_as(predicted)
    losses = F.smooth_l1_loss(predicted.to(wide), expected, reduction="none")
    return (losses.mean(-1) * weights).sum()


def step_weights(
    places: Tensor, steps: int, in_draft_vocab: Tensor | None = None, decay: float = 1.0
) -> Tensor:
    """Return weights [K, S]: decay^s / S in step s where a draft that began s slots earlier gets there, else 0."""
    decays = decay ** torch.arange(steps, device=places.device)
    reached = reached_steps(places, steps, in_draft_vocab)
    return reached * (decays / max(len(places), 1))[:, None]


def reached_steps(places: Tensor, steps: int, in_draft_vocab: Tensor | None = None) -> Tensor:
    """Return [K, S], whether a draft that began s slots before a row gets to it in step s.

    It does if all slots between are supervised and marked by `in_draft_vocab` [S].
    """
    if in_draft_vocab is None:
        in_draft_vocab = torch.ones_like(places, dtype=torch.bool)
    reached = [in_draft_vocab]
    for step in range(1, steps):
        is_adjacent = places - places.roll(step) == step
        reached.append(reached[-1].roll(1) & in_draft_vocab & is_adjacent)
    return torch.stack(reached)


def align_steps(states: Iterable[Tensor]) -> Tensor:
    """Return [K, S, D]: row r of step s is from the draft that began s slots earlier, so that all share a teacher."""
    aligned = []
    for step, state in enumerate(states):
        shift = min(step, len(state))
        aligned.append(F.pad(state[: len(state) - shift], (0, 0, shift, 0)))
    return torch.stack(aligned)


# -- distillation -----------------------------------------------------------------------------------------------------


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    heads: tuple[LanguageHead | Sequence[LanguageHead], LanguageHead | None],
    objective: Objective | None = None,
    dtype: torch.dtype | None = None,
    named: Named | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted divergence of the student from the teacher, summed, and each step's share of it [K].

    Logits live for one chunk of rows, of which the teacher's serve all steps; gradients are found in the same pass,
    at the states and at the matrices and biases that are trained.

    Args:
        student: States [K, S, D'].
        teacher: States [S, D], or the tokens [S] that are right where the teacher has no head.
        weights: What each row counts [K, S].
        heads: The student's, one for all steps or one for each, and the teacher's.
        objective: The divergence.
        dtype: The precision of the student's products.
        named: The sequences' own tokens: they count as the objective says, and all overlaps are written down.
    """
    students, frozen = heads
    students = students if isinstance(students, Sequence) else [students]
    if len(students) not in (1, len(student)):
        raise ValueError(
            f"got {len(students)} heads for {len(student)} steps: expected one, or one for each step"
        )
    # heads that share no teacher's logits have nothing in common: those of one live at a time
    groups = [students] if frozen is not None else [[head] for head in students]
    totals = []
    step_losses = []
    by_group = zip(groups, student.chunk(len(groups)), weights.chunk(len(groups)), strict=True)
    for group, states, weight in by_group:
        trained = [head.weight for head in group] + [_bias_of(head) for head in group]
        cast = group if dtype is None else [head.cast(dtype) for head in group]
        settings = _Settings(cast, frozen, objective or Objective(), named)
        total, losses = _Distilled.apply(states, teacher, weight, settings, *trained)
        totals.append(total)
        step_losses.append(losses)
    return torch.stack(totals).sum(), torch.cat(step_losses)


def _bias_of(head: LanguageHead) -> Tensor | None:
    return head.bias if isinstance(head, OwnHead) else None


@dataclass(frozen=True, slots=True)
class _Settings:
    """What `_Distilled` needs besides tensors that have gradients."""

    students: Sequence[LanguageHead]
    frozen: LanguageHead | None
    objective: Objective
    named: Named | None


class _Distilled(torch.autograd.Function):
    """The divergence of one group of heads; autograd would keep the logits of all rows for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weights: Tensor,
        settings: _Settings,
        *trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Find losses and gradients chunk by chunk."""
        steps, count, _ = student.shape
        wide = torch.promote_types(student.dtype, torch.float32)
        # gradients of matrices are summed over chunks, in fp32 or better
        grads: list[Tensor | None] = []
        for tensor, needs_grad in zip(trained, ctx.needs_input_grad[4:], strict=True):
            if tensor is None or not needs_grad:
                grads.append(None)
            else:
                grads.append(torch.zeros_like(tensor, dtype=wide))
        grad_student = torch.empty_like(student)
        sums = torch.zeros(steps, dtype=wide, device=student.device)
        # meta tensors, of sizes alone, know no autocast
        device = "cpu" if student.is_meta else student.device.type
        with torch.autocast(device, enabled=False):
            students = settings.students
            chunks = _chunks(
                count, steps, students[0].weight, heads=len(students), learned=grads[0] is not None
            )
            distill_chunk = _ChunkDistiller(settings, grads, steps, chunks)
            for rows in chunks:
                losses, grad = distill_chunk(
                    rows, student[:, rows], teacher[rows], weights[:, rows]
                )
                sums += losses
                grad_student[:, rows] = grad
        ctx.has_grad = [grad is not None for grad in grads]
        ctx.save_for_backward(grad_student, *(grad for grad in grads if grad is not None))
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass found, those of matrices in place because they are large."""
        grad_student, *grads = ctx.saved_tensors
        grad_trained = [
            grads.pop(0).mul_(upstream[0]) if has_grad else None for has_grad in ctx.has_grad
        ]
        # teacher, weights and settings have none
        return grad_student * upstream[0], None, None, None, *grad_trained


class _ChunkDistiller:
    """Losses and gradients of a chunk of rows at a time, with memory that all chunks use in turn."""

    def __init__(
        self,
        settings: _Settings,
        grads: Sequence[Tensor | None],
        steps: int,
        chunks: Sequence[slice],
    ) -> None:
        """Allocate what all chunks use in turn.

        Args:
            settings: The student heads, and the teacher's head where the teacher is a state.
            grads: Buffers for the gradients of the students' weights, then of their biases; None where none is wanted.
            steps: The draft steps: each has logits of its own for every row of a chunk, and the teacher's serve all.
            chunks: The rows that are worked on at a time.
        """
        self.settings = settings
        self.grad_weights = grads[: len(settings.students)]
        self.grad_biases = grads[len(settings.students) :]
        # allocated once, for the largest chunk: fresh tensors would leave the logits of two chunks in memory at a time
        rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        weight = settings.students[0].weight  # [V, D]; the others have its size and precision
        self.logits = weight.new_empty(rows * steps, len(weight))
        self.target_logits: Tensor | None = None
        if settings.frozen is not None:
            target_weight = settings.frozen.weight
            self.target_logits = target_weight.new_empty(rows, len(target_weight))
        # gradients are summed in fp32 or better, and addmm adds only a product of the same precision: one of weights in
        # half precision goes here first
        self.grad_product: Tensor | None = None
        grad_weight = grads[0]
        if grad_weight is not None and grad_weight.dtype != weight.dtype:
            self.grad_product = torch.empty_like(weight)

    def __call__(
        self, rows: slice, student: Tensor, teacher: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted losses [K] of a chunk, and the gradient at its states [K, R, D]."""
        heads = self.settings.students
        steps, count, _ = student.shape
        if self.settings.frozen is not None and self.target_logits is not None:
            teacher = self.settings.frozen.logits(teacher, out=self.target_logits[:count])
        # [K * R, D], as products of three dimensions copy the matrix
        hidden = student.flatten(0, 1).to(heads[0].weight.dtype)
        hidden_by_head = hidden.chunk(len(heads))
        buffers = self.logits[: len(hidden)].chunk(len(heads))
        logits = []
        slopes = []
        for head, states, buffer in zip(heads, hidden_by_head, buffers, strict=True):
            logits.append(head.logits(states, out=buffer))
            slopes.append(head.slope(logits[-1], states))
        # heads may be one for all steps: K tensors [R, V]
        logits_by_step: list[Tensor] = []
        for head_logits in logits:
            logits_by_step += head_logits.chunk(steps // len(heads))
        named = self.settings.named
        if named is not None:
            named = Named(named.tokens[rows], named.overlaps[:, rows])
        wide = torch.promote_types(student.dtype, torch.float32)
        losses = _loss_and_grad_(logits_by_step, teacher, wide, self.settings.objective, named)
        # from here on `logits` hold the gradients at the logits
        grad = self._pull_back(hidden, weights.reshape(-1, 1), logits, slopes)
        return (losses * weights).sum(-1), grad.to(student.dtype).view(steps, count, -1)

    def _pull_back(
        self,
        hidden: Tensor,
        weights: Tensor,
        grad_logits: Sequence[Tensor],
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """Return the gradient at states [K * R, D]; add to those of matrices and biases what the chunk gives."""
        heads = self.settings.students
        weighted = (hidden * weights).to(hidden.dtype).chunk(len(heads))
        weights_by_head = weights.chunk(len(heads))
        grads = []
        for index, head in enumerate(heads):
            grad = grad_logits[index]
            grads.append(head.pull_back(grad, slopes[index]) * weights_by_head[index])
            grad_weight = self.grad_weights[index]
            if grad_weight is not None:
                # a biased head's matrix reads the codes alone
                inputs = weighted[index][:, -grad_weight.shape[1] :]
                _add_product_(grad_weight, grad.T, inputs, self.grad_product)
            grad_bias = self.grad_biases[index]
            if grad_bias is not None:
                grad_bias += (grad.T @ weights_by_head[index].to(grad.dtype))[:, 0]
        return torch.cat(grads)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, buffer: Tensor | None) -> None:
    """Add a product to a gradient, by way of a buffer where it is of another precision."""
    if buffer is None:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out=buffer)


def _loss_and_grad_(
    logits: Sequence[Tensor],
    teacher: Tensor,
    wide: torch.dtype,
    objective: Objective,
    named: Named | None,
) -> Tensor:
    """Return how each step's logits [R, V] diverge from the teacher's [K, R]; they become the gradient in place."""
    losses = torch.empty(len(logits), len(teacher), dtype=wide, device=teacher.device)
    # probs in fp32 are several times larger than the logits, so only a few rows have them at a time
    limit = AT_ONCE.get(teacher.device.type, AT_ONCE_ELSEWHERE)
    size = max(limit // logits[0].shape[1], 1)
    for first in range(0, len(teacher), size):
        rows = slice(first, first + size)
        target = teacher[rows]
        if teacher.is_floating_point():
            target = target.softmax(-1, dtype=wide)
        compare = compare_with(target, objective, None if named is None else named.tokens[rows])
        for step, step_logits in enumerate(logits):
            student = step_logits[rows].to(wide)
            probs = student.softmax(-1)
            if named is not None:
                named.overlaps[step, rows] = torch.minimum(probs, target).sum(-1)
            losses[step, rows], step_logits[rows] = compare(student, probs)
            del probs  # before the next step's are made
    return losses


def _chunks(
    count: int, steps: int, weight: Tensor, heads: int = 1, learned: bool = False
) -> list[slice]:
    """Return slices of rows of which the logits of all steps are in memory at a time.

    Args:
        count: All rows.
        steps: The draft steps.
        weight: [V, D], of a student's head.
        heads: The student's heads.
        learned: Whether their matrices are trained.
    """
    row_bytes = weight.element_size() * weight.shape[0] * steps
    wanted = (LEARNED if learned else 1) * ROWS * heads
    min_rows = -(-wanted // steps)
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // row_bytes, min_rows)
    rows = max(rows // EVEN, 1) * EVEN
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
