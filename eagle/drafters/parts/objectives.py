"""Losses that several methods share."""

# K steps, S supervised slots, D width, R rows of one chunk, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import Batch
from eagle.drafters.parts.divergences import Kind as Kind
from eagle.drafters.parts.divergences import Objective as Objective
from eagle.drafters.parts.divergences import compare_with
from eagle.drafters.parts.language_heads import BiasedHead as BiasedHead
from eagle.drafters.parts.language_heads import LanguageHead as LanguageHead
from eagle.drafters.parts.language_heads import OwnHead as OwnHead

ROWS = 96  # of a chunk at least: fewer make poor matrix products
LEARNED = 4  # times as many where a matrix learns: every chunk is added to all of its gradient
LOGITS = {"cpu": 1 << 22}  # bytes of a chunk's at most, on a CPU such as stay in its cache
LOGITS_ELSEWHERE = 1 << 28
AT_ONCE = {"cpu": 1 << 17}  # of them in fp32 at a time, for all that is no product
AT_ONCE_ELSEWHERE = 1 << 25

EVEN = 16  # of which a chunk's rows are a multiple

Loss = Literal[Kind, "tokens"]
"""A divergence from the target's probs, or "tokens": cross-entropy of the text's next token."""


@dataclass(frozen=True, slots=True)
class Named:
    """The tokens [S] that stand in the texts, and room for what student and teacher have in common there [K, S]."""

    tokens: Tensor
    overlaps: Tensor


def choose_teacher(
    loss: Loss, batch: Batch, places: Tensor, frozen: LanguageHead
) -> tuple[Tensor, LanguageHead | None, Objective]:
    """The teacher for the token two places after each slot [S], and the divergence from it.

    The teacher is the token itself, or the target's state and LM head that predict it.
    """
    if loss == "tokens":
        return batch.tokens.index_select(0, places + 2), None, Objective()
    return batch.select_taps((-1,))[:, 0].index_select(0, places + 1), frozen, Objective(loss)


def feature_regression(predicted: Tensor, true: Tensor, weights: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) of [K, S, D] to [S, D], a mean over the width, and a sum over the rest by weights [K, S]."""
    wide = torch.promote_types(predicted.dtype, torch.float32)
    losses = F.smooth_l1_loss(predicted.to(wide), true.to(wide).expand_as(predicted), reduction="none")
    return (losses.mean(-1) * weights).sum()


def step_weights(places: Tensor, steps: int, in_draft_vocab: Tensor | None = None, decay: float = 1.0) -> Tensor:
    """[K, S], the weight of row r in step s: decay^s / S if a draft that began s slots earlier reaches it, else 0."""
    decays = decay ** torch.arange(steps, device=places.device)
    return reached_steps(places, steps, in_draft_vocab) * (decays / max(len(places), 1))[:, None]


def reached_steps(places: Tensor, steps: int, in_draft_vocab: Tensor | None = None) -> Tensor:
    """[K, S], whether a draft that began s slots before row r reaches it in step s.

    It does if all slots between are supervised and marked by `in_draft_vocab` [S].
    """
    reached = [torch.ones_like(places, dtype=torch.bool) if in_draft_vocab is None else in_draft_vocab]
    for step in range(1, steps):
        moved = places.roll(step)
        reached.append(reached[-1].roll(1) & reached[0] & (places - moved == step))
    return torch.stack(reached)


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
    dtype: torch.dtype | None = None,
    named: Named | None = None,
) -> tuple[Tensor, Tensor]:
    """Divergence of the student [K, S, D'] from the teacher [S, D] by weights [K, S], summed, and each step's part [K].

    The student has one head for all steps, or one for each. A teacher without a head names the tokens [S] that are
    right. Logits live for one chunk of rows, of which the teacher's serve all steps; gradients are found in the same
    pass, at the states and at the matrices and biases that are trained. `dtype` is that of the student's products.
    Where tokens are `named` beside the teacher, they count as the objective says, and all overlaps are written down.
    """
    students, frozen = heads
    students = students if isinstance(students, Sequence) else [students]
    if len(students) not in (1, len(student)):
        raise ValueError(f"got {len(students)} heads for {len(student)} steps: expected one, or one for each step")
    # heads that share no teacher's logits have nothing in common: those of one live at a time
    groups = [students] if frozen is not None else [[head] for head in students]
    losses = []
    for group, states, weight in zip(groups, student.chunk(len(groups)), weights.chunk(len(groups)), strict=True):
        trained = [head.weight for head in group] + [_bias_of(head) for head in group]
        cast = group if dtype is None else [head.cast(dtype) for head in group]
        learned = cast, frozen, objective or Objective(), named
        losses.append(_Distilled.apply(states, teacher, weight, *learned, *trained))
    totals, each = zip(*losses, strict=True)
    return torch.stack(totals).sum(), torch.cat(each)


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
        named: Named | None,
        *trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Chunk by chunk: both logits, their divergence, and its gradient pulled back."""
        steps, count, _ = student.shape
        wide = torch.promote_types(student.dtype, torch.float32)
        grad_student, sums = torch.empty_like(student), torch.zeros(steps, dtype=wide, device=student.device)
        grads = [
            torch.zeros_like(part, dtype=wide) if part is not None and needed else None
            for part, needed in zip(trained, ctx.needs_input_grad[7:], strict=True)
        ]
        learned = list(zip(students, grads[: len(students)], grads[len(students) :], strict=True))
        device = "cpu" if student.is_meta else student.device.type  # meta tensors, of sizes alone, know no autocast
        with torch.autocast(device, enabled=False):
            chunks = _chunks(count, steps, students[0].weight, len(students), grads[0] is not None)
            room = _room_for_logits(chunks, steps, students[0], frozen)
            product = _room_for_product(students[0], grads[0])
            for rows in chunks:
                taught = teacher[rows]
                if frozen is not None:
                    taught = frozen.logits(taught, out=room[1][: len(taught)])
                # flat, as products of three dimensions copy the matrix
                hidden, weight = student[:, rows].flatten(0, 1).to(students[0].weight.dtype), weights[:, rows]
                lent = room[0][: len(hidden)].chunk(len(students))
                parts = zip(students, hidden.chunk(len(students)), lent, strict=True)
                logits = [own.logits(states, out=out) for own, states, out in parts]
                read = hidden.chunk(len(students))
                slopes = [own.slope(*parts) for own, *parts in zip(students, logits, read, strict=True)]
                by_step = [one for part in logits for one in part.chunk(steps // len(students))]
                beside = None if named is None else Named(named.tokens[rows], named.overlaps[:, rows])
                losses = _loss_and_grad_(by_step, taught, wide, objective, beside)
                sums += (losses * weight).sum(-1)
                weight = weight.reshape(-1, 1)
                weighted = (hidden * weight).to(hidden.dtype).chunk(len(students))
                by_head = zip(learned, logits, slopes, weighted, weight.chunk(len(students)), strict=True)
                pulled = torch.cat([_pull_back_(*parts, product) for parts in by_head])
                grad_student[:, rows] = pulled.to(student.dtype).view(steps, len(taught), -1)
        ctx.trained = [grad is not None for grad in grads]
        ctx.save_for_backward(grad_student, *(grad for grad in grads if grad is not None))
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass found, scaled in place: those of matrices are large."""
        grad_student, *grads = ctx.saved_tensors
        by_part = [grads.pop(0).mul_(upstream[0]) if trained else None for trained in ctx.trained]
        others = [None] * 6  # of the arguments between states and matrices
        return grad_student * upstream[0], *others, *by_part


def _pull_back_(
    learned: tuple[LanguageHead, Tensor | None, Tensor | None],
    back: Tensor,
    slope: Tensor | None,
    weighted: Tensor,
    weight: Tensor,
    product: Tensor | None,
) -> Tensor:
    """[R, D], the gradient at states from that at their logits [R, V]; adds to those of the matrix and the bias."""
    own, grad, grad_bias = learned
    pulled = own.pull_back(back, slope) * weight
    if grad is not None:
        _add_product_(grad, back.T, weighted[:, -grad.shape[1] :], product)  # it reads what lies behind, if not all
    if grad_bias is not None:
        grad_bias += (back.T @ weight.to(back.dtype))[:, 0]
    return pulled


def _add_product_(total: Tensor, left: Tensor, right: Tensor, room: Tensor | None) -> None:
    """Add a product to a gradient, by way of some memory where it is of another precision."""
    if room is None:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out=room)


def _loss_and_grad_(
    logits: Sequence[Tensor], taught: Tensor, wide: torch.dtype, objective: Objective, named: Named | None
) -> Tensor:
    """[K, R], how each step's logits [R, V] diverge from what the teacher says; they become the gradient."""
    losses = torch.empty(len(logits), len(taught), dtype=wide, device=taught.device)
    few = max(AT_ONCE.get(taught.device.type, AT_ONCE_ELSEWHERE) // logits[0].shape[1], 1)
    for first in range(0, len(taught), few):
        rows = slice(first, first + few)
        right = taught[rows].softmax(-1, dtype=wide) if taught.is_floating_point() else taught[rows]
        compare = compare_with(right, objective, None if named is None else named.tokens[rows])
        for step, step_logits in enumerate(logits):
            student = step_logits[rows].to(wide)
            probs = student.softmax(-1)
            if named is not None:
                named.overlaps[step, rows] = torch.minimum(probs, right).sum(-1)
            losses[step, rows], step_logits[rows] = compare(student, probs)
            del probs  # before the next step's are made
    return losses


def _room_for_logits(
    chunks: Sequence[slice], steps: int, own: LanguageHead, frozen: LanguageHead | None
) -> list[Tensor]:
    """Memory for the student's logits of a chunk and the teacher's: each new one would be laid beside the last."""
    rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    heads = [(own.weight, steps)] + ([] if frozen is None else [(frozen.weight, 1)])
    return [weight.new_empty(rows * count, len(weight)) for weight, count in heads]


def _room_for_product(own: LanguageHead, grad: Tensor | None) -> Tensor | None:
    """Memory for what a chunk adds to a matrix's gradient, where the products are of another precision."""
    return None if grad is None or grad.dtype == own.weight.dtype else torch.empty_like(own.weight)


def _chunks(count: int, steps: int, weight: Tensor, heads: int = 1, learned: bool = False) -> list[slice]:
    """Rows of which the logits of all steps live at once."""
    size = weight.element_size() * weight.shape[0] * steps  # bytes of a row's logits
    least = -(-(LEARNED if learned else 1) * ROWS * heads // steps)
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // size, least)
    rows = max(rows // EVEN, 1) * EVEN
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
