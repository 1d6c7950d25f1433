"""Sums of losses divided as `drafter.divisor` says, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Term = tuple[int, int, Any, Tensor]  # of which text, on which level, its weight and its loss


def divide_terms(divisor: str, terms: Sequence[Term], begins: Sequence[int]) -> Tensor:
    """The weighted sum; each text has so many slots or anchors from which drafts begin."""
    levels, texts = ([term[place] for term in terms] for place in (1, 0))
    weights = sum(float(weight) for _, _, weight, _ in terms)
    total = torch.zeros((), dtype=torch.float64)
    for text, level, weight, loss in terms:
        if divisor == "texts":
            number = texts.count(text) * sum(begins) / begins[text]
        else:
            numbers = {
                "slots": sum(begins),
                "reached": len(terms),
                "weights": weights,
                "levels": levels.count(level),
            }
            number = numbers[divisor]
        total = total + weight * loss / number
    return total
