"""Calibrate a head's confidence: a temperature for each level of a chain, in the file that SGLang reads."""

# n drafts, K levels

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.tree import chain_paths
from eagle.target.target import Target
from eval.replay import Answer, replay

BINS = 15
TEMPERATURES = torch.logspace(-1, 1, 41, dtype=torch.float64)  # among them 1


def collect_confidences(
    target: Target, drafter: Any, answers: Iterable[Answer]
) -> tuple[Tensor, Tensor]:
    """Replay full chains along answers, and return how sure the head was and how much was accepted.

    The head's present temperatures are dropped, as the log-odds are returned without them.

    Args:
        target: The model that has answered.
        drafter: A head with a confidence output.
        answers: The target's answers.

    Returns:
        The log-odds [n, K] of each of n drafts of K levels, and the number of accepted tokens [n].
    """
    drafter.confidence_temperatures = None
    levels = drafter.levels
    # no confidence is below 0, so that no draft ends early
    budget = Budget.fixed(chain_paths(levels), confidence=0.0)
    logits = []
    accepted = []
    for target_answer in answers:
        position = target_answer.prompt
        for tree, path in replay(target, drafter, target_answer, budget):
            # after the answer's end nothing is known of a draft
            is_inside = position + levels < len(target_answer.tokens)
            confidences = tree.confidences
            if is_inside and len(tree) == levels + 1 and confidences is not None:
                logits.append(confidences[1:])
                accepted.append(len(path) - 1)
            position += len(path)
    if not logits:
        return torch.empty(0, levels), torch.empty(0)
    return torch.stack(logits), torch.tensor(accepted)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> dict[str, Any]:
    """Fit the temperature of each level, the first level first, by the least calibration error of the survival.

    The survival is the product of sigmoid(logit / T) over a level and those above it: the probability that a draft is
    accepted down to the level.

    Args:
        logits: [n, K], the log-odds of each level of n drafts.
        accepted: [n], how many tokens of each draft were accepted.

    Returns:
        "temperatures" of the K levels, "num_samples", and the mean error of all levels, "ece_before" and "ece_after".
    """
    logits = logits.double()
    levels = logits.shape[1]
    survival = torch.ones(len(logits), dtype=torch.float64)
    temperatures: list[float] = []
    for level in range(levels):
        # [41, n], under each temperature of this level and the chosen ones of the levels above
        candidates = survival * (logits[:, level] / TEMPERATURES[:, None]).sigmoid()
        level_errors = [calibration_error(probs, accepted > level) for probs in candidates]
        best = min(range(len(level_errors)), key=level_errors.__getitem__)
        survival = candidates[best]
        temperatures.append(float(TEMPERATURES[best]))
    return {
        "temperatures": temperatures,
        "num_samples": len(logits),
        "ece_before": survival_error(logits, accepted, [1.0] * levels),
        "ece_after": survival_error(logits, accepted, temperatures),
    }


def survival_error(logits: Tensor, accepted: Tensor, temperatures: list[float]) -> float:
    """Return the mean calibration error of the survival of all levels, with a temperature for each.

    `logits` [n, K] and `accepted` [n] are as in `fit_temperatures`.
    """
    rates = (logits.double() / torch.tensor(temperatures, dtype=torch.float64)).sigmoid()
    errors = [
        calibration_error(probs, accepted > level)
        for level, probs in enumerate(rates.cumprod(1).unbind(1))
    ]
    return sum(errors) / len(errors)


def calibration_error(probs: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error in 15 equal bins: the mean of |mean probability - share of true labels|.

    Args:
        probs: [n], predicted probabilities.
        labels: [n], whether it happened.
    """
    bins = (probs * BINS).long().clamp(max=BINS - 1)
    # the sum in a bin, over n, is the bin's share times its mean
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, probs - labels.double())
    return float(gaps.abs().sum()) / len(probs)
