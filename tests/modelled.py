"""Modelled seconds of one answer, in one call."""

from __future__ import annotations

from typing import Any

from eagle import Budget
from eagle.core.drafter import Drafter
from eagle.decoding.forward_costs import Costs
from eval.costs import GROWS_TREES, asked_budgets, model_seconds


def seconds_of(
    costs: Costs,
    cycles: list[dict[str, Any]],
    budget: Budget | None = None,
    limit: int | None = None,
    drafter: Drafter = GROWS_TREES,
) -> float:
    """Of these recorded cycles."""
    # one answer, with what was asked for in each of its cycles
    return model_seconds(
        costs, [{"cycles": cycles}], [asked_budgets(cycles, budget, limit)], drafter
    )[0]
