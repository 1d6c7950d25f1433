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

# A chunk has logits of at least this many rows in all steps, as matrix products of fewer rows are inefficient. Where an
# LM head is trained it has LEARNED times as many, because every chunk adds to the gradient of the whole matrix.
ROWS = 96
LEARNED = 4
ADDED = 512  # rows of a gradient that are added to the sum at a time
EVEN = 16  # the number of a chunk's rows is a multiple of this

# The most bytes of a chunk's logits, by device type: on a CPU they should stay in its cache.
LOGITS = {"cpu": 1 << 22}
LOGITS_ELSEWHERE = 1 << 28
# The most logits that are converted to fp32 at a time, by device type. Softmax and losses are computed in fp32.
AT_ONCE = {"cpu": 1 << 17}
AT_ONCE_ELSEWHERE = 1 << 25

Loss = Literal[Kind, "tokens"]
"""A divergence from the target's probs, or "tokens": cross-entropy of the sequence's next token."""


# -- LM heads ---------------------------------------------------------------------------------------------------------


class LanguageHead(Protocol):
    """An LM head during training: it maps hidden states to logits, and the gradient at logits to that at states.

    The target's is `eagle.core.drafter.TargetHead`. The loss computes its gradients by hand, without autograd.
    """

    @property
    def weight(self) -> Tensor:
        """The matrix [V, width]: a row for each of V tokens, for states of this width."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [.., V] of hidden states [.., D], written to `out` where a buffer is passed."""

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return what `pull_back` needs besides the gradient; None for a linear head.

        It is the derivative [.., V] of the logits by the values before a softcap, or the states [.., D] if they are
        transformed before the matrix.
        """

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient [.., D] at the hidden states from the gradient [.., V] at the logits.

        `slope` is what the method `slope` returned for them.
        """

    def cast(self, dtype: torch.dtype) -> LanguageHead:
        """Return this head in another precision."""


@dataclass(frozen=True, slots=True)
class OwnHead:
    """An LM head with a matrix [V, D] and a bias [V] or None, which belongs to the draft head and not to the target."""

    weight: Tensor
    bias: Tensor | None = None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [.., V] = states [.., width] @ weight.T + bias, written to `out` where a buffer is passed."""
        logits = torch.matmul(hidden.to(self.weight.dtype), self.weight.T, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def slope(self, logits: Tensor, hidden: Tensor) -> None:
        """Return None: the head is linear (without a softcap), so `pull_back` needs nothing but the gradient."""

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at states [.., width] from the gradient [.., V] at their logits, by the chain rule.

        `slope` is None, because the head is linear.
        """
        return gradient.to(self.weight.dtype) @ self.weight

    def cast(self, dtype: torch.dtype) -> OwnHead:
        """Return this head in another precision, as tensors from which autograd reaches this head's own.

        The loss computes its products in that precision.
        """
        bias = None if self.bias is None else self.bias.to(dtype)
        return OwnHead(self.weight.to(dtype), bias)


@dataclass(frozen=True, slots=True)
class BiasedHead:
    """The target's LM head plus a trained low-rank bias: logits = target head(state) + weight @ code.

    Its input is a state [.., D] and a code [.., r], concatenated to [.., D + r].
    """

    target_head: TargetHead
    weight: Tensor  # [V, r], trained

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [.., V] of states and codes, concatenated to [.., width + r] (r: the rank of the bias).

        They are written to `out` where a buffer [.., V] is passed.
        """
        state, code = self._split(hidden.to(self.weight.dtype))
        logits = self.target_head.logits(state, out=out)
        if out is None:
            return logits.add_(code @ self.weight.T)
        return torch.addmm(logits, code, self.weight.T, out=out)

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return what `pull_back` needs of the target's head to carry a gradient at its logits back to its states.

        Args:
            logits: [.., V], with the bias.
            hidden: [.., width + rank], the states and codes that the logits were made of.

        Returns:
            None if that head is linear; the states [.., width] if it transforms them before its matrix; else the
            derivative [.., V] of the target's logits by the values before their softcap.
        """
        if self.target_head.is_linear:
            return None
        state, code = self._split(hidden)
        # the softcap is the target's alone, so its slope follows from the logits without the bias
        return self.target_head.slope(logits - code @ self.weight.T, state)

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at states and codes [.., width + rank] from the gradient [.., V] at the logits.

        `slope` is what the method of that name returned.
        """
        # with a softcap the target's head overwrites the gradient that it gets, and the codes need it unchanged
        target_gradient = gradient if slope is None else gradient.clone()
        return torch.cat(
            [self.target_head.pull_back(target_gradient, slope), gradient @ self.weight], dim=-1
        )

    def cast(self, dtype: torch.dtype) -> BiasedHead:
        """Return this head in another precision, as tensors from which autograd reaches this head's own matrix.

        The loss computes its products in that precision.
        """
        return BiasedHead(self.target_head.cast(dtype), self.weight.to(dtype))

    def _split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Split `hidden` into states [.., width], which the target's head reads, and codes [.., rank] of the bias."""
        width = hidden.shape[-1] - self.weight.shape[1]
        return hidden.tensor_split([width], dim=-1)


# -- teachers, weights and aligned steps ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """The tokens that follow in the sequences, for a loss that also learns them, and a buffer for overlaps."""

    tokens: Tensor  # [S], the sequence's token at each row
    # [K, S], written by the loss: the overlap sum min(p, q) of student and teacher
    overlaps: Tensor
    known: Tensor | None = None  # [S] bool, whether the loss learns the token; None for all


def choose_teacher(
    loss: Loss, batch: Batch, slot_indices: Tensor, target_head: LanguageHead
) -> tuple[Tensor, LanguageHead | None, Objective]:
    """Return what a head learns to predict two tokens after each slot, as arguments of `distillation_loss`.

    A slot i has the target's state of token i and token i + 1; the head predicts token i + 2 there. S slots, those
    whose token i + 2 is supervised, are taught.

    Args:
        loss: With "tokens" the teacher is the sequence's own token, otherwise the target's probs.
        batch: The sequences, with the target's states.
        slot_indices: [S], the index of each slot among all tokens of the batch.
        target_head: The target's LM head.

    Returns:
        The teacher, tokens [S] or the target's states [S, width]; the LM head that maps the states to logits, None for
        tokens; and the divergence from the teacher.
    """
    # the default divergence is the cross-entropy, the only one from tokens
    if loss == "tokens":
        return batch.tokens.index_select(0, slot_indices + 2), None, Objective()
    # the target predicts token i + 2 from its state at token i + 1
    # tap -1 is the input of the target's LM head: [all tokens, width]
    target_hidden = batch.select_taps((-1,))[:, 0]
    return target_hidden.index_select(0, slot_indices + 1), target_head, Objective(loss)


def feature_regression(predicted: Tensor, target_hidden: Tensor, weights: Tensor) -> Tensor:
    """Return the smooth-L1 loss (beta 1) between a head's states and the target's.

    It is a mean over the width and a weighted sum over draft steps and slots: EAGLE-1's regression loss. A slot is a
    token at which a draft begins.

    Args:
        predicted: The head's states [K, S, width] of K draft steps at S slots.
        target_hidden: The target's states [S, width] that they should equal, the same for all steps.
        weights: The weight of each slot in each step [K, S].
    """
    # half precision is too coarse for the loss
    wide = torch.promote_types(predicted.dtype, torch.float32)
    expected = target_hidden.to(wide).expand_as(predicted)
    losses = F.smooth_l1_loss(predicted.to(wide), expected, reduction="none")
    return (losses.mean(-1) * weights).sum()


def step_weights(
    places: Tensor, steps: int, in_draft_vocab: Tensor | None = None, decay: float = 1.0
) -> Tensor:
    """Return the loss weight [K, S] of each of S supervised slots in each of K draft steps.

    A slot is a token at which a draft begins. The weight is decay^s / S in step s if a draft that began s slots earlier
    reaches the slot, else 0. It is for states that `align_steps` has shifted, so that all steps of a slot predict the
    same token.

    Args:
        places: [S], the index of each supervised slot among all tokens, in ascending order.
        steps: K.
        in_draft_vocab: [S] bool, whether the head can draft the token that a slot predicts; None: it can draft all.
        decay: The weight of a step relative to the step before.
    """
    decays = decay ** torch.arange(steps, device=places.device)
    reached = reached_steps(places, steps, in_draft_vocab)
    # a batch may have no supervised slot
    return reached * (decays / max(len(places), 1))[:, None]


def reached_steps(places: Tensor, steps: int, in_draft_vocab: Tensor | None = None) -> Tensor:
    """Return a bool [K, S]: in step s of K, whether a draft that began s slots earlier reaches each of S slots.

    It does if all slots from the draft's beginning up to this one are supervised, and their tokens are in the draft
    vocabulary. A slot is a token at which a draft begins.

    Args:
        places: [S], the index of each supervised slot among all tokens, in ascending order.
        steps: K.
        in_draft_vocab: [S] bool, whether the head can draft the token that a slot predicts; None: it can draft all.
    """
    if in_draft_vocab is None:
        in_draft_vocab = torch.ones_like(places, dtype=torch.bool)
    reached = [in_draft_vocab]
    for step in range(1, steps):
        # the supervised slot `step` rows earlier is also `step` tokens earlier, so all slots between are supervised;
        # `roll` compares the first rows with the last ones, whose difference is never positive
        is_adjacent = places - places.roll(step) == step
        # a draft reaches a slot in this step if it reached the slot before in the step before
        reached.append(reached[-1].roll(1) & in_draft_vocab & is_adjacent)
    return torch.stack(reached)


def align_steps(states: Iterable[Tensor]) -> Tensor:
    """Return the states of K draft steps [K, S, width], shifted so that a row of all steps predicts the same token.

    In step s a draft predicts s tokens further, so row r of step s gets the state of the draft that began s slots
    earlier. All steps then share the teacher's logits. Rows without such a draft are zeros; the weights of
    `reached_steps` are 0 there.

    Args:
        states: The states [S, width] of each step, a row for each of the S supervised slots, at which a draft begins.
    """
    aligned = []
    for step, state in enumerate(states):
        # there may be fewer slots than steps
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
    sequence_tokens: SequenceTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted divergence of the student's probs from the teacher's, over K draft steps and S slots (rows).

    Logits are made for one chunk of rows at a time, because those of all rows may not fit in memory. The teacher's
    logits serve all steps. The same pass computes the gradients at the states and at the trained matrices and biases.

    Args:
        student: The inputs of the student's LM heads [K, S, width], as `align_steps` shifts them: row s of all steps
            predicts the same token.
        teacher: The inputs of the teacher's LM head [S, width], or the tokens [S] to predict if it has no head.
        weights: The weight of each row in each step [K, S].
        heads: The student's LM heads, one for all steps or one for each; and the teacher's, None for tokens.
        objective: The divergence; None for the cross-entropy.
        dtype: The precision of the student's matrix products; None for that of its heads.
        sequence_tokens: The sequences' tokens, which get the weight `objective.tokens`. The overlaps of student and
            teacher are written to it. None for neither.

    Returns:
        The loss, and each step's part of it [K], for logs: only the loss has a gradient.
    """
    students, teacher_head = heads
    students = students if isinstance(students, Sequence) else [students]
    if len(students) not in (1, len(student)):
        raise ValueError(
            f"got {len(students)} heads for {len(student)} steps: expected one, or one for each step"
        )
    # the heads of a group are read together because they share the teacher's logits; without a teacher's head there are
    # none to share, so each head is a group, and the logits of only one are in memory
    groups = [students] if teacher_head is not None else [[head] for head in students]
    # a single group has all steps; several groups have one step and its head each
    totals = []
    step_losses = []
    by_group = zip(groups, student.chunk(len(groups)), weights.chunk(len(groups)), strict=True)
    for group, states, weight in by_group:
        # arguments of their own, as autograd finds no tensors inside of `_Settings`
        trained = [head.weight for head in group] + [_bias_of(head) for head in group]
        cast = group if dtype is None else [head.cast(dtype) for head in group]
        settings = _Settings(cast, teacher_head, objective or Objective(), sequence_tokens)
        total, losses = _Distilled.apply(states, teacher, weight, settings, *trained)
        totals.append(total)
        step_losses.append(losses)
    return torch.stack(totals).sum(), torch.cat(step_losses)


def _bias_of(head: LanguageHead) -> Tensor | None:
    """Return a head's trained bias [V]; None if it has none, as any head but an `OwnHead`.

    The loss computes its gradient by hand.
    """
    return head.bias if isinstance(head, OwnHead) else None


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of `_Distilled` that are not tensors with gradients."""

    students: Sequence[LanguageHead]
    teacher_head: LanguageHead | None
    objective: Objective
    sequence_tokens: SequenceTokens | None


class _Distilled(torch.autograd.Function):
    """The divergence of one group of heads, with its gradients computed in the forward pass.

    Autograd would keep the logits of all rows for the backward pass, which may not fit in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weights: Tensor,
        settings: _Settings,
        *trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and gradients chunk by chunk; return the loss and each step's part of it [K].

        Args:
            ctx: Gets the gradients, for `backward`.
            student: The inputs of the student's LM heads [K, S, width], at S slots in each of K draft steps.
            teacher: The inputs of the teacher's LM head [S, width], or tokens [S].
            weights: The weight of each slot in each step [K, S].
            settings: The heads, the objective and the sequences' tokens.
            trained: The matrices of the student's heads, then their biases (None for a head without one).
        """
        steps, count, _ = student.shape
        wide = torch.promote_types(student.dtype, torch.float32)
        # the gradients of matrices are summed over chunks, in fp32 or better so that small terms are not lost
        grads: list[Tensor | None] = []
        # the four arguments before `trained` are skipped
        for tensor, needs_grad in zip(trained, ctx.needs_input_grad[4:], strict=True):
            if tensor is None or not needs_grad:
                grads.append(None)
            else:
                grads.append(torch.zeros_like(tensor, dtype=wide))
        grad_student = torch.empty_like(student)
        sums = torch.zeros(steps, dtype=wide, device=student.device)
        # explicit casts decide the precision of products, so autocast is off; it does not support the device of meta
        # tensors, for which the CPU is named
        device = "cpu" if student.is_meta else student.device.type
        with torch.autocast(device, enabled=False):
            students = settings.students
            # all students' heads are trained or none is
            chunks = _chunks(
                count, steps, students[0].weight, heads=len(students), learned=grads[0] is not None
            )
            buffers = _ChunkBuffers(settings, grads, steps, chunks)
            for rows in chunks:
                losses, grad_student[:, rows] = buffers.distill(
                    rows, student[:, rows], teacher[rows], weights[:, rows]
                )
                sums += losses
        ctx.has_grad = [grad is not None for grad in grads]
        ctx.save_for_backward(grad_student, *(grad for grad in grads if grad is not None))
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward pass computed, scaled by that at the loss, the first of `upstream`.

        Those of matrices are scaled in place because they are large. The second output, the losses by step, has no
        gradient. The forward pass computed them, as it had the logits in memory.
        """
        grad_student, *grads = ctx.saved_tensors
        grad_trained = [
            grads.pop(0).mul_(upstream[0]) if has_grad else None for has_grad in ctx.has_grad
        ]
        # teacher, weights and settings have no gradients
        return grad_student * upstream[0], None, None, None, *grad_trained


class _ChunkBuffers:
    """The buffers in which the losses and gradients of chunks of rows are computed, one chunk after the other."""

    def __init__(
        self,
        settings: _Settings,
        grads: Sequence[Tensor | None],
        steps: int,
        chunks: Sequence[slice],
    ) -> None:
        """Allocate the buffers for the logits and gradients of one chunk of rows (tokens).

        Args:
            settings: The student's heads, the teacher's head and the objective.
            grads: Sums for the gradients of the students' matrices, then of their biases; None for those not trained.
            steps: The number of draft steps: in a chunk the student has one row of logits per row and step, the teacher
                one per row, used for all steps.
            chunks: The chunks of rows; the largest decides the size of the buffers.
        """
        self.settings = settings
        # the sums for matrices come first, one for each head, then those for biases
        self.grad_weights = grads[: len(settings.students)]
        self.grad_biases = grads[len(settings.students) :]
        # allocated once, for the largest chunk: fresh tensors would leave the logits of two chunks in memory at a time
        rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        # [V, width]; the other students' have the same size and precision
        weight = settings.students[0].weight
        self.logits = weight.new_empty(rows * steps, len(weight))
        self.target_logits: Tensor | None = None
        if settings.teacher_head is not None:
            target_weight = settings.teacher_head.weight
            self.target_logits = target_weight.new_empty(rows, len(target_weight))
        # the gradients of matrices are summed in fp32 or better, but addmm cannot add a half-precision product to them:
        # with half-precision matrices the product is written here first, then added
        self.grad_product: Tensor | None = None
        grad_weight = grads[0]  # those of all students have the same precision
        if grad_weight is not None and grad_weight.dtype != weight.dtype:
            self.grad_product = torch.empty_like(weight)

    def distill(
        self, rows: slice, student: Tensor, teacher: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted losses [K] of a chunk of R rows in K draft steps, and the gradient at its states.

        The gradients of matrices and biases are added to the sums in place, and overlaps are written to the sequences'
        tokens in the settings.

        Args:
            rows: The chunk's rows among all rows, the supervised slots.
            student: The inputs of the student's LM heads at these rows [K, R, width].
            teacher: The inputs of the teacher's LM head [R, width], or the tokens [R] if the teacher has no head.
            weights: The weight of each row in each step [K, R].

        Returns:
            The losses [K], and the gradient at `student` [K, R, width].
        """
        heads = self.settings.students
        steps, count, _ = student.shape
        if self.settings.teacher_head is not None and self.target_logits is not None:
            teacher = self.settings.teacher_head.logits(teacher, out=self.target_logits[:count])
        # [K * R, width], as a product of a three-dimensional tensor would copy the matrix
        hidden = student.flatten(0, 1).to(heads[0].weight.dtype)
        logits, slopes = self._compute_logits(hidden)
        # one head for all steps has all K steps' logits in one tensor: split them into K tensors [R, V]
        logits_by_step: list[Tensor] = []
        for head_logits in logits:
            logits_by_step += head_logits.chunk(steps // len(heads))
        chunk_tokens = None
        if self.settings.sequence_tokens is not None:
            tokens = self.settings.sequence_tokens
            known = None if tokens.known is None else tokens.known[rows]
            chunk_tokens = SequenceTokens(tokens.tokens[rows], tokens.overlaps[:, rows], known)
        wide = torch.promote_types(student.dtype, torch.float32)
        losses = _loss_and_grad_(
            logits_by_step, teacher, wide, self.settings.objective, chunk_tokens
        )
        # `logits` now hold the gradients at the logits, without the rows' weights: they were overwritten to save memory
        grad = self._pull_back(hidden, weights.reshape(-1, 1), logits, slopes)
        return (losses * weights).sum(-1), grad.to(student.dtype).view(steps, count, -1)

    def _compute_logits(self, hidden: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return each head's logits [rows of its steps, V], in the buffer, and what its `slope` needs to keep of them.

        `hidden` are the inputs of the LM heads [K * R, width], one step after the other.
        """
        heads = self.settings.students
        buffers = self.logits[: len(hidden)].chunk(len(heads))
        logits = []
        slopes = []
        for head, states, buffer in zip(heads, hidden.chunk(len(heads)), buffers, strict=True):
            logits.append(head.logits(states, out=buffer))
            # asked for now, as the loss overwrites the logits
            slopes.append(head.slope(logits[-1], states))
        return logits, slopes

    def _pull_back(
        self,
        hidden: Tensor,
        weights: Tensor,
        grad_logits: Sequence[Tensor],
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """Return the gradient at states [K * R, width], and add those of matrices and biases to the sums, in place.

        The first dimension has the chunk's R rows of each of K draft steps, one step after the other.

        Args:
            hidden: The inputs of the LM heads [K * R, width].
            weights: The loss weight of each row [K * R, 1], which `grad_logits` do not have yet.
            grad_logits: The gradient at the logits of each head, [rows of the head's steps, V].
            slopes: What each head's `slope` returned: what it needs besides the gradient, None for a linear head.
        """
        heads = self.settings.students
        weighted = (hidden * weights).to(hidden.dtype).chunk(len(heads))
        weights_by_head = weights.chunk(len(heads))
        grads = []
        for index, head in enumerate(heads):
            grad = grad_logits[index]
            grads.append(head.pull_back(grad, slopes[index]) * weights_by_head[index])
            grad_weight = self.grad_weights[index]
            if grad_weight is not None:
                # the trained matrix of a `BiasedHead` multiplies only the code, which comes last in its input
                inputs = weighted[index][:, -grad_weight.shape[1] :]
                _add_product_(grad_weight, grad.T, inputs, self.grad_product)
            grad_bias = self.grad_biases[index]
            if grad_bias is not None:
                grad_bias += (grad.T @ weights_by_head[index].to(grad.dtype))[:, 0]
        return torch.cat(grads)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, buffer: Tensor | None) -> None:
    """Add left @ right to a sum of gradients in place; `buffer` gets the product first if `total` is more precise.

    `buffer` is None if the factors and the sum have one precision. Such a product is one chunk's part of the gradient
    of a weight matrix.
    """
    if buffer is None:
        total.addmm_(left, right)
        return
    torch.mm(left, right, out=buffer)
    # torch converts the whole buffer into a fresh tensor before it adds; a few rows at a time stay in the cache
    for total_rows, product_rows in zip(total.split(ADDED), buffer.split(ADDED), strict=True):
        total_rows += product_rows


def _loss_and_grad_(
    logits: Sequence[Tensor],
    teacher: Tensor,
    wide: torch.dtype,
    objective: Objective,
    sequence_tokens: SequenceTokens | None,
) -> Tensor:
    """Return the loss [K, R] of R rows (tokens) in K draft steps, and overwrite the logits with the gradient at them.

    Neither has the rows' loss weights yet.

    Args:
        logits: The student's of each step [R, V], overwritten.
        teacher: The teacher's logits [R, V], or the tokens [R] to predict.
        wide: The precision of the losses and of softmax.
        objective: The divergence.
        sequence_tokens: The sequences' tokens at these rows, if the loss also learns them; overlaps are written to it.
    """
    losses = torch.empty(len(logits), len(teacher), dtype=wide, device=teacher.device)
    # the probs in fp32 and temporary tensors of their size are several times larger than the logits, so they are made
    # for a few rows at a time
    limit = AT_ONCE.get(teacher.device.type, AT_ONCE_ELSEWHERE)
    size = max(limit // logits[0].shape[1], 1)
    for first in range(0, len(teacher), size):
        rows = slice(first, first + size)
        # probs or tokens
        target = teacher[rows]
        if teacher.is_floating_point():
            target = target.softmax(-1, dtype=wide)
        tokens = known = None
        if sequence_tokens is not None:
            tokens = sequence_tokens.tokens[rows]
            known = None if sequence_tokens.known is None else sequence_tokens.known[rows]
        compare = compare_with(target, objective, tokens, known)
        for step, step_logits in enumerate(logits):
            student = step_logits[rows].to(wide)
            probs = student.softmax(-1)
            if sequence_tokens is not None:
                sequence_tokens.overlaps[step, rows] = torch.minimum(probs, target).sum(-1)
            losses[step, rows], step_logits[rows] = compare(student, probs)
            del probs  # frees the memory before the next step's are made
    return losses


def _chunks(
    count: int, steps: int, weight: Tensor, heads: int = 1, learned: bool = False
) -> list[slice]:
    """Split the rows, the supervised slots (tokens), into chunks whose logits in all draft steps fit in memory.

    All chunks but the last have enough rows for efficient matrix products, even if their logits take more memory.

    Args:
        count: The number of all rows.
        steps: The number of draft steps.
        weight: [V, width], of a student's head.
        heads: The number of the student's heads.
        learned: Whether the heads' matrices are trained.
    """
    # of a row's logits in all steps
    row_bytes = weight.element_size() * weight.shape[0] * steps
    min_product_rows = (LEARNED if learned else 1) * ROWS * heads
    # a row of the chunk is a row of the product in each step; rounded up
    min_rows = -(-min_product_rows // steps)
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // row_bytes, min_rows)
    rows = max(rows // EVEN, 1) * EVEN
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
