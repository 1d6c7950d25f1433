"""Losses that several methods share."""

# S supervised slots, D width, R rows of one chunk, V vocabulary

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 96  # of a chunk at least: fewer make poor matrix products
LOGITS = {"cpu": 1 << 20}  # of a chunk at most, on a CPU such as stay in its cache
LOGITS_ELSEWHERE = 1 << 27
AT_ONCE = {"cpu": 1 << 18}  # of them in fp32 at a time, for all that is no product


class LanguageHead(Protocol):
    """Hidden states to logits, and gradients back."""

    @property
    def weight(self) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def pull_back(self, gradient: Tensor, logits: Tensor) -> Tensor: ...


def feature_regression(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth-L1 (beta 1), mean over all entries of [S, D]."""
    return F.smooth_l1_loss(predicted.float(), true.float())


def soft_cross_entropy(student: Tensor, teacher: Tensor, head: LanguageHead) -> Tensor:
    """The mean over [S, D] hidden states of the cross-entropy from the teacher's law to the student's.

    Logits live for one chunk of rows; the gradient through the frozen head is found in the same pass.
    """
    return _SoftCrossEntropy.apply(student, teacher, head)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: LanguageHead) -> Tensor:
        """Chunk by chunk: both laws, their cross-entropy, and softmax(student) - softmax(teacher) pulled back."""
        gradient = torch.empty_like(student)
        total = torch.zeros((), dtype=torch.promote_types(student.dtype, torch.float32), device=student.device)
        wide = total.dtype
        with torch.autocast(student.device.type, enabled=False):
            for rows in _chunks(len(student), head.weight):
                wanted = head.logits(teacher[rows].to(head.weight.dtype))
                logits = head.logits(student[rows].to(head.weight.dtype))
                few = max(AT_ONCE.get(student.device.type, LOGITS_ELSEWHERE) // logits.shape[1], 1)
                for teacher_logits, student_logits in zip(wanted.split(few), logits.split(few), strict=True):
                    law, own_logits = teacher_logits.softmax(-1, dtype=wide), student_logits.to(wide)
                    own = own_logits.softmax(-1)
                    # the sum of exponentials, known from the likeliest token alone
                    norm = own_logits.amax(-1) - own.amax(-1).log()
                    total += norm.sum() - torch.dot(law.flatten(), own_logits.flatten())
                    teacher_logits.copy_(own.sub_(law))  # its place serves the gradient
                gradient[rows] = head.pull_back(wanted, logits)
        ctx.save_for_backward(gradient)
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient that the forward pass found."""
        (gradient,) = ctx.saved_tensors
        return gradient * (upstream[0] / len(gradient)), None, None


def _chunks(count: int, weight: Tensor) -> list[slice]:
    rows = max(LOGITS.get(weight.device.type, LOGITS_ELSEWHERE) // weight.shape[0], ROWS)
    return [slice(start, start + rows) for start in range(0, count, rows)]
