"""The policy on its first answers, of which it knows nothing: never far below plain decoding, whatever the drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import mean
from typing import NamedTuple

import pytest

from eagle import Budget
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding import draft_depths
from eagle.decoding.forward_costs import CycleCosts
from eagle.decoding.goodput import Goodput

LEVELS = 6
PROMPT = 80
BATCH_SIZES = (1, 4, 16)
CHAIN = Budget.fixed(chain_paths(LEVELS))
# how often a drafter is right, at every level
RATES = (0.0, 0.2, 0.4, 0.7, 0.9)


class World(NamedTuple):
    """What a cycle costs, as a multiple of a forward of the target that reads nothing."""

    read: float  # for each token that the target reads
    level: float  # to draft a level
    draft: float  # for each sequence that drafts it
    catch_up: float  # for each token that a drafter has to read first

    def cycle_seconds(
        self,
        levels: dict[int, int],
        unread: dict[int, int],
    ) -> float:
        """Return the seconds of a cycle, by the levels of each row and the tokens that its drafter has not read."""
        deepest = max(levels.values())
        seconds = 1 + self.read * len(levels) * (1 + deepest) + self.level * deepest
        for row, depth in levels.items():
            seconds += depth * self.draft
            # a drafter reads two tokens in any case
            if depth:
                seconds += self.catch_up * max(unread[row] - 2, 0)
        return seconds

    def tabulate(self) -> CycleCosts:
        """Return the costs as the policy is told them."""
        depths = range(LEVELS + 1)
        draft = []
        read = []
        for count in BATCH_SIZES:
            # a grid by batch size, context and depth, with one context
            draft.append((tuple(depth * (self.level + self.draft * count) for depth in depths),))
            read.append((tuple(1 + self.read * count * (1 + depth) for depth in depths),))
        return CycleCosts(
            BATCH_SIZES,
            (0,),
            tuple(draft),
            tuple(read),
            self.catch_up,
        )


WORLDS = {
    "more rows are free": World(0.002, 0.04, 0.0002, 0.0001),
    "drafts pay, less in a batch": World(0.02, 0.05, 0.002, 0.0006),
    "drafts barely pay in a batch": World(0.08, 0.055, 0.006, 0.0025),
    "drafts barely pay at all": World(0.5, 0.1, 0.03, 0.015),
}


@lru_cache
def make_chain(depth: int) -> DraftTree:
    """Return a tree of one node a level."""
    return DraftTree.chain(range(depth + 1))


def write_answers(
    plan: Goodput | int, world: World, rate: float, count: int, tokens: int, seed: int
) -> float:
    """Return the seconds of a batch of answers, under a policy or with a fixed number of levels."""
    dice = random.Random(seed)
    seconds = 0.0
    # the first token comes with the prompt
    left = dict.fromkeys(range(count), tokens - 1)
    contexts = dict.fromkeys(left, PROMPT)
    read = dict.fromkeys(left, 0)
    while left:
        if isinstance(plan, Goodput):
            budgets = plan.share(
                left,
                {row: contexts[row] for row in left},
            )
            levels = {row: budget.depth for row, budget in budgets.items()}
        else:
            levels = {row: min(plan, rest) for row, rest in left.items()}
        unread = {row: contexts[row] - read[row] for row in left}
        seconds += world.cycle_seconds(levels, unread)
        cycles = {}
        for row, depth in levels.items():
            if depth:
                read[row] = contexts[row]
            accepted = 0
            while accepted < depth and dice.random() < rate:
                accepted += 1
            committed = min(accepted + 1, left[row])
            path = tuple(range(1, accepted + 1))
            cycles[row] = Cycle(
                make_chain(depth),
                path,
                committed,
                contexts[row],
                rows=len(levels),
            )
            contexts[row] += accepted + 1
            left[row] -= committed
            if not left[row]:
                del left[row]
        if isinstance(plan, Goodput):
            plan.learn_rows(cycles)
    return seconds


def compare_speeds(
    world: World, rate: float, count: int, tokens: int, costs: CycleCosts | None = None
) -> tuple[float, float]:
    """Return the speed of a new policy over plain decoding's, and over that of the best fixed length."""
    seeds = range(max(4, 24 // count))
    # each answer begins with a policy that knows nothing
    table = costs or world.tabulate()

    def measure(make_plan: Callable[[], Goodput | int]) -> float:
        return mean(write_answers(make_plan(), world, rate, count, tokens, seed) for seed in seeds)

    policy = measure(lambda: Goodput.of_costs(table, CHAIN))
    fixed = [measure(partial(int, levels)) for levels in range(LEVELS + 1)]
    return fixed[0] / policy, min(fixed) / policy


@pytest.mark.quick("4-drafts pay, less in a batch")
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("count", BATCH_SIZES)
def test_first_answers_are_no_slower_than_plain_decoding(name: str, count: int) -> None:
    """At worst 4%, whatever the drafter; and near the best fixed length, which knows all from the start."""
    # from useless drafters to very good ones
    ratios = [compare_speeds(WORLDS[name], rate, count, 48) for rate in RATES]
    over_plain, over_best = zip(*ratios, strict=True)
    assert min(over_plain) > 0.96
    assert min(over_best) > 0.88
    assert mean(over_best) > 0.94


@pytest.mark.quick("16-0.965")
@pytest.mark.parametrize(
    ("tokens", "least"),
    [(16, 0.965), (200, 0.99)],
)
def test_a_bad_drafter_costs_no_more_than_its_trials(tokens: int, least: float) -> None:
    """Half a percent of the time; of an answer of 50 tokens or fewer, up to five times as much."""
    for world in WORLDS.values():
        over_plain, _ = compare_speeds(world, 0.0, 1, tokens)
        assert over_plain > least


@pytest.mark.slow
def test_trust_in_an_unknown_drafter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a policy that takes a new drafter for a good one is much slower with a bad one."""
    monkeypatch.setattr(draft_depths, "GUESS", 1.0)
    ratios = [compare_speeds(world, 0.0, 1, 48)[0] for world in WORLDS.values()]
    assert max(ratios) < 0.96
    assert min(ratios) < 0.9


@pytest.mark.slow
def test_reading_a_prompt_is_priced() -> None:
    """A policy that does not know what a drafter's first forward costs drafts too eagerly."""
    world = WORLDS["drafts barely pay in a batch"]._replace(catch_up=0.02)
    blind = world._replace(catch_up=0.0).tabulate()
    assert compare_speeds(world, 0.5, 16, 48)[0] > 0.97
    assert compare_speeds(world, 0.5, 16, 48, blind)[0] < 0.9
