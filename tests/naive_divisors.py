"""A loss divided as `drafter.divisor` says, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Term = tuple[int, int, Any, Tensor]
"""Index of the text, level, weight and loss of one guessed token."""


def divide_terms(divisor: str, terms: Sequence[Term], begins: Sequence[int]) -> Tensor:
    """Return the weighted sum of the terms; `begins` counts the positions of each text at which drafts begin."""
    texts = [term[0] for term in terms]
    levels = [term[1] for term in terms]
    weights = sum(float(term[2]) for term in terms)
    total = torch.zeros((), dtype=torch.float64)
    for text, level, weight, loss in terms:
        counts = {
            "slots": sum(begins),
            "reached": len(terms),
            "weights": weights,
            "levels": levels.count(level),
            # texts count by their positions, however many levels these reach
            "texts": texts.count(text) * sum(begins) / max(begins[text], 1),
        }
        total = total + weight * loss / counts[divisor]
    return total
