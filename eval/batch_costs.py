"""Modelled seconds of recorded batch cycles, from the costs of bare forwards over as many texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from eval.costs import Costs, mean_of_most

Cycle = dict[str, Any]
Place = tuple[str, int]  # session and number of a cycle that texts shared


def share_batches(costs: Costs, answers: Sequence[dict[str, Any]], drafts_cost: bool) -> list[float]:
    """Modelled seconds of each answer, prefill excluded: the cost of a cycle is split evenly among its texts.

    A forward reads all texts' trees padded to the largest, behind contexts padded to the longest. Drafts cost the mean
    seconds of those recorded with as many texts and levels.
    """
    shared: dict[Place, list[Cycle]] = defaultdict(list)
    for answer in answers:
        for cycle in answer["cycles"]:
            shared[answer["session"], cycle["number"]].append(cycle)
    drafts = draft_seconds_by_texts(shared.values()) if drafts_cost else {}
    seconds = {place: _cycle_seconds(costs, cycles, drafts) for place, cycles in shared.items()}
    return [
        sum(seconds[answer["session"], cycle["number"]] / cycle["rows"] for cycle in answer["cycles"])
        for answer in answers
    ]


def draft_seconds_by_texts(shared: Iterable[list[Cycle]]) -> dict[tuple[int, int], float]:
    """Mean seconds of recorded drafts by number of texts and levels; cycles without a draft are left out."""
    seconds_by_shape: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cycles in shared:
        seconds = cycles[0].get("seconds") or {}
        if "draft" in seconds:
            seconds_by_shape[_shape(cycles)].append(seconds["draft"])
    return {shape: mean_of_most(seconds) for shape, seconds in seconds_by_shape.items()}


def _cycle_seconds(costs: Costs, cycles: list[Cycle], drafts: dict[tuple[int, int], float]) -> float:
    nodes, context = (max(cycle[name] for cycle in cycles) for name in ("nodes", "context"))
    texts = cycles[0]["rows"]
    return costs.read(nodes + 1, context, texts) + drafts.get(_shape(cycles), 0.0)


def _shape(cycles: list[Cycle]) -> tuple[int, int]:
    """The number of texts and of draft levels of a batch cycle."""
    return cycles[0]["rows"], max(cycle["depth"] for cycle in cycles)
