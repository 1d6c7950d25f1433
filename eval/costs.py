"""Model the seconds of recorded cycles, of one request or of requests that share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.decoding.cycle_times import mean_of_most
from eagle.decoding.forward_costs import Costs
from eagle.drafters.parts.growth import level_rows

Answer = dict[str, Any]
Cycle = dict[str, Any]
Rows = tuple[int, ...] | None  # of a draft's forwards; None where they have no costs
Shape = tuple[int, int, int]  # of a cycle: requests, nodes and levels of the largest tree
Place = tuple[Any, int]  # session and number of a cycle, which requests may share
NOT_DRAFTING = Budget(0, 0, 0)


class _GrowsTrees(Drafter):
    """The drafter of stored rows, as far as modelled time needs it: a head that grows its trees."""

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return the rows of each level after the first."""
        return level_rows(budget)


GROWS_TREES = _GrowsTrees()


def model_seconds(
    costs: Costs,
    answers: Sequence[Answer],
    budgets: Sequence[Sequence[Budget]],
    drafter: Drafter = GROWS_TREES,
) -> list[float]:
    """Return the modelled seconds of each answer without prefill, by the budgets of its cycles.

    A cycle that requests share is split evenly among them. Its forwards read all requests' rows padded to the most,
    after contexts padded to the longest. Drafts whose forwards have no costs take the mean seconds of those recorded
    with as many requests, nodes and levels.

    Args:
        costs: Seconds of bare forwards on the machine that is modelled.
        answers: Rows with their "cycles", and a "session" where answers shared them.
        budgets: What each cycle of each answer asked for.
        drafter: Whose forwards drafts take.
    """
    shared: dict[Place, list[tuple[Cycle, Rows]]] = defaultdict(list)
    places: list[list[Place]] = []
    for i, (answer, asked) in enumerate(zip(answers, budgets, strict=True)):
        cycles = answer["cycles"]
        outcomes = [(cycle["accepted"], cycle["depth"]) for cycle in cycles]
        # an answer that was decoded alone shares its cycles with none
        session = answer.get("session", i)
        of_answer: list[Place] = []
        for cycle, rows in zip(cycles, costs.rows_along(drafter, asked, outcomes), strict=True):
            place = (session, cycle.get("number", len(of_answer)))
            of_answer.append(place)
            shared[place].append((cycle, rows))
        places.append(of_answer)

    recorded = []
    for requests in shared.values():
        recorded.append([cycle for cycle, _ in requests])
    drafts = draft_seconds(recorded)
    seconds = {place: _share_cycle(costs, requests, drafts) for place, requests in shared.items()}

    totals = []
    for of_answer in places:
        totals.append(sum(seconds[place] for place in of_answer))
    return totals


def asked_budgets(
    cycles: Sequence[Cycle], budget: Budget | None, limit: int | None = None
) -> list[Budget]:
    """Return what each cycle asked for.

    Args:
        cycles: Those of one answer, in order.
        budget: The drafter's; None where nothing was drafted.
        limit: The most tokens of the answer, whose end leaves room for fewer levels; None for no such end.
    """
    if budget is None:
        return [NOT_DRAFTING] * len(cycles)
    if limit is None:
        return [budget] * len(cycles)
    budgets = []
    # the prefill commits the first token
    done = 1
    for cycle in cycles:
        # the target's own token takes one position of what is left
        budgets.append(budget.within(limit - done - 1))
        done += cycle["committed"]
    return budgets


def draft_seconds(shared: Iterable[Sequence[Cycle]]) -> dict[Shape, float]:
    """Return the mean seconds of recorded drafts by their shape, from the records of each cycle's requests."""
    seconds_by_shape: dict[Shape, list[float]] = defaultdict(list)
    for cycles in shared:
        # each request's record holds the whole cycle's seconds
        seconds = cycles[0].get("seconds") or {}
        if "draft" in seconds:
            seconds_by_shape[shape_of(cycles)].append(seconds["draft"])
    return {shape: mean_of_most(seconds) for shape, seconds in seconds_by_shape.items()}


def shape_of(cycles: Sequence[Cycle]) -> Shape:
    """Return the shape of a cycle by the records of its requests."""
    nodes = max(cycle["nodes"] for cycle in cycles)
    depth = max(cycle["depth"] for cycle in cycles)
    return cycles[0].get("rows", 1), nodes, depth


def _share_cycle(
    costs: Costs, requests: Sequence[tuple[Cycle, Rows]], drafts: Mapping[Shape, float]
) -> float:
    """Return the seconds that a cycle takes of each of its requests."""
    cycles = [cycle for cycle, _ in requests]
    shape = shape_of(cycles)
    num_requests, nodes, _ = shape
    context = max(cycle["context"] for cycle in cycles)

    drafting = 0.0
    asked = [rows for _, rows in requests if rows]
    if asked:
        # a forward is as wide as its widest request, and there are as many as the deepest draft needs
        pending = max(rows[0] for rows in asked)
        levels = max(asked, key=len)[1:]
        drafting = costs.draft((pending, *levels), context, len(asked))
    elif any(rows is None for _, rows in requests):
        drafting = drafts.get(shape, 0.0)

    # the target reads the root too
    verification = costs.read(nodes + 1, context, num_requests)
    return (drafting + verification) / num_requests
