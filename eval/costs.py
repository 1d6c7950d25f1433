"""Modelled seconds of recorded cycles, of one text or of texts that share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.decoding.cycle_times import mean_of_most
from eagle.decoding.forward_costs import Costs
from eagle.drafters.parts.shapes import level_rows

Answer = dict[str, Any]
Cycle = dict[str, Any]
Rows = tuple[int, ...] | None  # of a draft's forwards; None where they have no costs
Shape = tuple[int, int, int]  # of a cycle: texts, nodes and levels of the largest tree
Place = tuple[Any, int]  # session and number of a cycle, which texts may share
NOT_DRAFTING = Budget(0, 0, 0)


class _GrowsTrees(Drafter):
    """The drafter of stored rows, as far as modelled time needs it: a head that grows its trees."""

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level after the first."""
        return level_rows(budget)


GROWS_TREES = _GrowsTrees()


def model_seconds(
    costs: Costs, answers: Sequence[Answer], budgets: Sequence[Sequence[Budget]], drafter: Drafter = GROWS_TREES
) -> list[float]:
    """Modelled seconds of each answer, by the budgets of its cycles; prefill is excluded.

    A cycle that texts share is split evenly among them. Its forwards read all texts' rows padded to the most, behind
    contexts padded to the longest. Drafts whose forwards have no costs take the mean seconds of those recorded with as
    many texts, nodes and levels.
    """
    shared: dict[Place, list[tuple[Cycle, Rows]]] = defaultdict(list)
    places: list[list[Place]] = []
    for number, (answer, asked) in enumerate(zip(answers, budgets, strict=True)):
        cycles = answer["cycles"]
        rows = costs.rows_along(drafter, asked, [(cycle["accepted"], cycle["depth"]) for cycle in cycles])
        session = answer.get("session", number)
        places.append([(session, cycle.get("number", place)) for place, cycle in enumerate(cycles)])
        for place, cycle, forwards in zip(places[-1], cycles, rows, strict=True):
            shared[place].append((cycle, forwards))
    drafts = draft_seconds([cycle for cycle, _ in texts] for texts in shared.values())
    seconds = {place: _share_cycle(costs, texts, drafts) for place, texts in shared.items()}
    return [sum(seconds[place] for place in of_answer) for of_answer in places]


def asked_budgets(cycles: Sequence[Cycle], budget: Budget | None, limit: int | None = None) -> list[Budget]:
    """What each cycle asked for: with the answer's limit of tokens, no levels that its end had no room for."""
    budgets, done = [], 1
    for cycle in cycles:
        left = budget if budget is None or limit is None else budget.within(limit - done - 1)
        budgets.append(left or NOT_DRAFTING)
        done += cycle["committed"]
    return budgets


def draft_seconds(shared: Iterable[Sequence[Cycle]]) -> dict[Shape, float]:
    """Mean seconds of recorded drafts by their shape, from the records of each cycle's texts."""
    seconds_by_shape: dict[Shape, list[float]] = defaultdict(list)
    for cycles in shared:
        if "draft" in (seconds := cycles[0].get("seconds") or {}):
            seconds_by_shape[shape_of(cycles)].append(seconds["draft"])
    return {shape: mean_of_most(seconds) for shape, seconds in seconds_by_shape.items()}


def shape_of(cycles: Sequence[Cycle]) -> Shape:
    """The shape of a cycle by the records of its texts."""
    nodes, depth = (max(cycle[name] for cycle in cycles) for name in ("nodes", "depth"))
    return cycles[0].get("rows", 1), nodes, depth


def _share_cycle(costs: Costs, texts: Sequence[tuple[Cycle, Rows]], drafts: Mapping[Shape, float]) -> float:
    """Seconds that a cycle takes of each of its texts."""
    shape, context = shape_of([cycle for cycle, _ in texts]), max(cycle["context"] for cycle, _ in texts)
    count, nodes, _ = shape
    asked = [rows for _, rows in texts if rows]
    drafting = drafts.get(shape, 0.0) if any(rows is None for _, rows in texts) else 0.0
    if asked:
        pending, levels = max(rows[0] for rows in asked), max(asked, key=len)[1:]
        drafting = costs.draft((pending, *levels), context, len(asked))
    return (drafting + costs.read(nodes + 1, context, count)) / count
