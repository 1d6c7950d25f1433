"""The policy on its first answers, of which it knows nothing: never far below plain decoding, whatever the drafter."""

from __future__ import annotations

import random
from functools import lru_cache, partial
from itertools import product
from statistics import mean
from typing import NamedTuple

import pytest

from eagle import Budget
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding import draft_depths
from eagle.decoding.forward_costs import CycleCosts
from eagle.decoding.goodput import Goodput

LEVELS, PROMPT, TEXTS = 6, 80, (1, 4, 16)
CHAIN = Budget.fixed(chain_paths(LEVELS))
RATES = (0.0, 0.2, 0.4, 0.7, 0.9)


class World(NamedTuple):
    """Seconds over those of a forward of the target that reads nothing."""

    row: float  # of the target's forward, for each token that it reads
    level: float  # to draft a level
    text: float  # and for each text that drafts it
    token: float  # of a draft, for each token that it has to read first

    def cycle(self, levels: dict[int, int], unread: dict[int, int]) -> float:
        """A cycle of these texts, by the levels that each drafts and the tokens that its drafter has not read."""
        seconds = 1 + self.row * len(levels) * (1 + max(levels.values()))
        for row, depth in levels.items():
            seconds += depth * self.text + (self.token * max(unread[row] - 2, 0) if depth else 0.0)
        return seconds + self.level * max(levels.values())

    @property
    def costs(self) -> CycleCosts:
        """What the policy is told."""
        draft = [
            [level * (self.level + self.text * texts) for level in range(LEVELS + 1)]
            for texts in TEXTS
        ]
        read = [
            [1 + self.row * texts * (1 + level) for level in range(LEVELS + 1)] for texts in TEXTS
        ]
        draft_grid, read_grid = (
            tuple((tuple(levels),) for levels in grid) for grid in (draft, read)
        )
        return CycleCosts(TEXTS, (0,), draft_grid, read_grid, self.token)


WORLDS = {
    "further rows are free": World(0.002, 0.04, 0.0002, 0.0001),
    "drafts pay, less in a batch": World(0.02, 0.05, 0.002, 0.0006),
    "drafts barely pay in a batch": World(0.08, 0.055, 0.006, 0.0025),
    "drafts barely pay at all": World(0.5, 0.1, 0.03, 0.015),
}


@lru_cache
def chain(depth: int) -> DraftTree:
    """A tree of one node a level."""
    return DraftTree.chain(range(depth + 1))


def write_answers(
    plan: Goodput | int, world: World, rate: float, texts: int, tokens: int, seed: int
) -> float:
    """Seconds of answers side by side after their first token, under a policy or with so many levels in each cycle."""
    dice, seconds = random.Random(seed), 0.0
    left, contexts = dict.fromkeys(range(texts), tokens - 1), dict.fromkeys(range(texts), PROMPT)
    read = dict.fromkeys(range(texts), 0)
    while left:
        if isinstance(plan, Goodput):
            budgets = plan.share(left, {row: contexts[row] for row in left})
            levels = {row: budget.depth for row, budget in budgets.items()}
        else:
            levels = {row: min(plan, tokens) for row, tokens in left.items()}
        seconds += world.cycle(levels, {row: contexts[row] - read[row] for row in left})
        read |= {row: contexts[row] for row, depth in levels.items() if depth}
        cycles = {}
        for row, depth in levels.items():
            accepted = next((level for level in range(depth) if dice.random() >= rate), depth)
            kept = tuple(range(1, accepted + 1))
            cycles[row] = Cycle(
                chain(depth), kept, min(accepted + 1, left[row]), contexts[row], rows=len(left)
            )
            contexts[row] += accepted + 1
        if isinstance(plan, Goodput):
            plan.learn_rows(cycles)
        left = {
            row: rest for row, cycle in cycles.items() if (rest := left[row] - cycle.committed) > 0
        }
    return seconds


def speeds(
    world: World, rate: float, texts: int, tokens: int, costs: CycleCosts | None = None
) -> tuple[float, float]:
    """Speed of a new policy over plain decoding's, and over that of the best fixed length."""
    answers = range(max(4, 24 // texts))
    seconds = partial(write_answers, world=world, rate=rate, texts=texts, tokens=tokens)
    policy = mean(
        seconds(Goodput.of_costs(costs or world.costs, CHAIN), seed=seed) for seed in answers
    )
    fixed = [mean(seconds(levels, seed=seed) for seed in answers) for levels in range(LEVELS + 1)]
    return fixed[0] / policy, min(fixed) / policy


@pytest.mark.quick("4-drafts pay, less in a batch")
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("texts", TEXTS)
def test_first_answers_are_no_slower_than_plain_decoding(name: str, texts: int) -> None:
    """4% below it at worst, whatever the drafter; and near the best fixed length, which knows all from the start."""
    ratios = [speeds(WORLDS[name], rate, texts, 48) for rate in RATES]
    over_plain, over_best = zip(*ratios, strict=True)
    assert min(over_plain) > 0.96
    assert min(over_best) > 0.88 and mean(over_best) > 0.94


@pytest.mark.quick("16-0.965")
@pytest.mark.parametrize(("tokens", "least"), [(16, 0.965), (200, 0.99)])
def test_a_bad_drafter_loses_no_more_than_its_trials(tokens: int, least: float) -> None:
    """Half a percent of the time; of an answer of 50 tokens or fewer, up to five times as much."""
    ratios = [
        speeds(world, 0.0, texts, tokens)[0] for world, texts in product(WORLDS.values(), (1, 4))
    ]
    assert min(ratios) > least


@pytest.mark.slow
def test_an_unknown_drafter_that_is_believed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a policy that takes a new drafter for a good one loses far more."""
    monkeypatch.setattr(draft_depths, "GUESS", 1.0)
    ratios = [speeds(world, 0.0, 1, 48)[0] for world in WORLDS.values()]
    assert max(ratios) < 0.96 and min(ratios) < 0.9


@pytest.mark.slow
def test_reading_a_prompt_is_priced() -> None:
    """A planted fault: a policy that is not told what a drafter's first forward costs drafts too eagerly."""
    world = WORLDS["drafts barely pay in a batch"]._replace(token=0.02)
    told, untold = (
        speeds(world, 0.5, 16, 48, costs)[0]
        for costs in (world.costs, world._replace(token=0.0).costs)
    )
    assert told > 0.97 and untold < 0.9
