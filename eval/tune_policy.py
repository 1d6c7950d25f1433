"""Acceptance and modelled speed of an adaptive policy along the answers that budgets are tuned on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.trace import Cycle
from eagle.decoding.cycle_costs import CycleCosts
from eagle.decoding.goodput import Goodput
from eagle.target.target import Target
from eval.costs import Costs
from eval.replay import Answer, record_cycles, replay

PENDING = 2  # tokens that a draft's first forward reads, where little is accepted


class NotedPolicy:
    """A policy that records the budgets it chooses."""

    def __init__(self, policy: Goodput) -> None:
        self.policy, self.nodes, self.draw = policy, policy.nodes, policy.draw
        self.budgets: list[Budget] = []

    def within(self, levels: int) -> Budget:
        """The policy's budget, which is recorded."""
        self.budgets.append(self.policy.within(levels))
        return self.budgets[-1]

    def learn(self, cycle: Cycle) -> None:
        """Give the policy the outcome of a cycle."""
        self.policy.learn(cycle)


def policy_of_costs(costs: Costs, drafter: Drafter, budget: Budget, context: int, draft_seconds: float) -> Goodput:
    """A policy for one text by bare forwards; drafts without forwards take so many seconds each."""
    draft, read = [0.0], [costs.read(1, context)]
    for levels in range(1, budget.depth + 1):
        level_budget = budget.within(levels)
        rows = costs.rows(drafter, level_budget, PENDING)
        draft.append(draft_seconds if rows is None else costs.draft(rows, context))
        read.append(costs.read(1 + _most_nodes(level_budget), context))
    return Goodput.of_costs(CycleCosts.of_one(draft, read), budget)


def replay_policy(
    target: Target, drafter: Drafter, answers: Sequence[Answer], costs: Costs, budget: Budget, draft_seconds: float
) -> tuple[int, float]:
    """Committed tokens and modelled seconds of a policy within a budget, which learns from answer to answer."""
    context = int(fmean(target_answer.prompt + target_answer.length // 2 for target_answer in answers))
    policy = policy_of_costs(costs, drafter, budget, context, draft_seconds)
    tokens, total = 0, 0.0
    for target_answer in answers:
        noted, seconds = NotedPolicy(policy), list[float]()
        cycles = record_cycles(target_answer, replay(target, drafter, target_answer, noted, seconds), seconds)
        tokens += sum(cycle["committed"] for cycle in cycles)
        total += _model_seconds(cycles, noted.budgets, costs, drafter)
    return tokens, total


def _model_seconds(cycles: list[dict[str, Any]], budgets: list[Budget], costs: Costs, drafter: Drafter) -> float:
    """Seconds of one answer's cycles, each with a budget of its own, at the prices of bare forwards."""
    total, pending = 0.0, 1
    for cycle, budget in zip(cycles, budgets, strict=True):
        rows = () if budget.is_empty else costs.rows(drafter, budget, pending)
        total += costs.cycle(cycle["nodes"], rows or (), cycle["context"])
        total += cycle["seconds"]["draft"] if rows is None else 0.0
        pending = pending + 1 if budget.is_empty else drafter.unread(cycle["accepted"], cycle["depth"])
    return total


def _most_nodes(budget: Budget) -> int:
    """The nodes of a full tree of this budget."""
    if budget.paths is not None:
        return sum(len(path) <= budget.depth for path in budget.paths)
    return min(budget.nodes, sum(budget.top_k**level for level in range(1, budget.depth + 1)))
