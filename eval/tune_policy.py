"""Replay an adaptive policy along the answers that budgets are tuned on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.trace import Cycle
from eagle.decoding.forward_costs import Costs, CycleCosts
from eagle.decoding.goodput import Goodput
from eagle.target.target import Target
from eval.costs import model_seconds
from eval.replay import Answer, record_cycles, replay


class NotedPolicy:
    """A policy that records the budgets it chooses."""

    def __init__(self, policy: Goodput) -> None:
        self.policy = policy
        self.nodes = policy.nodes
        self.draw = policy.draw
        self.budgets: list[Budget] = []

    def within(self, levels: int) -> Budget:
        """Return and record the policy's budget."""
        self.budgets.append(self.policy.within(levels))
        return self.budgets[-1]

    def learn(self, cycle: Cycle) -> None:
        """Give the policy the outcome of a cycle."""
        self.policy.learn(cycle)


def replay_policy(
    target: Target,
    drafter: Drafter,
    answers: Sequence[Answer],
    costs: Costs,
    budget: Budget,
    draft_seconds: float,
) -> tuple[int, float]:
    """Return committed tokens and modelled seconds of a policy within a budget, which learns from answer to answer.

    Drafts without forwards take `draft_seconds` each.
    """
    drafts = {1: [0.0, *[draft_seconds] * budget.depth]}
    policy = Goodput.of_costs(CycleCosts.of_forwards(costs, drafter, budget, drafts), budget)
    records: list[dict[str, Any]] = []
    budgets: list[list[Budget]] = []
    tokens = 0
    # the policy is one: what it learns from an answer serves the next
    for target_answer in answers:
        noted = NotedPolicy(policy)
        seconds: list[float] = []
        cycles = record_cycles(
            target_answer, replay(target, drafter, target_answer, noted, seconds=seconds), seconds
        )
        tokens += sum(cycle["committed"] for cycle in cycles)
        records.append({"cycles": cycles})
        budgets.append(noted.budgets)
    return tokens, sum(model_seconds(costs, records, budgets, drafter))
