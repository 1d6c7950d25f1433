"""Losses that several methods share."""

# S supervised slots, D width, V vocabulary

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def feature_regression(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth-L1 (beta 1), mean over all entries of [S, D]."""
    return F.smooth_l1_loss(predicted.float(), true.float())


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over [S, V] logits of the cross-entropy from the teacher's law to the student's."""
    law = teacher.float().softmax(-1)
    return -(law * student.float().log_softmax(-1)).sum(-1).mean()
