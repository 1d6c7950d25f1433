"""Heads of several levels are priced by the forwards that they take, and their measured ranks give them a shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import PUBLISHED_TREE, Paths, best_tree
from eagle.decoding.forward_costs import Costs
from eagle.decoding.goodput import Goodput
from eagle.drafters import DRAFTERS, settings_of
from eval import tune
from eval.replay import Answer, answer
from eval.result_files.answer_rows import cycle_of
from eval.tune import Tuning, acceptance_by_rank, chain, fixed, search
from tests.families import build, random_tokens
from tests.modelled import seconds_of
from tests.registry import LEVEL_HEADS
from tests.trained import fixture_seed

LEVELS = 3
BUDGETS = [chain(2), chain(8), Budget(8, 4, 3), Budget.fixed(PUBLISHED_TREE), Budget(0, 0, 0)]
# a row of the target costs 1, one of the head's first forward 1e-3, of a level 1e-6: a sum shows how many of each
COUNTING = Costs((0,), (1, 2), ((1.0, 2.0),), ((1e-3, 2e-3),), ((1e-6, 2e-6),))


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, whose few tokens are guessed now and then."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    """Its answers to random prompts."""
    return [
        answer(target, (-1,), random_tokens(12, seed), limit=24, sampling=Sampling())
        for seed in range(10)
    ]


def new_head(name: str, target: Target, **settings: Any) -> Any:
    """An untrained head, ready to draft."""
    torch.manual_seed(fixture_seed())
    section = settings_of({"kind": name, "levels": LEVELS, **settings}, "test")
    return DRAFTERS[name].for_target(section, target.config, target.head).eval().bind(target.head)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_forwards_are_those_that_a_draft_takes(name: str, budget: Budget, target: Target) -> None:
    """None behind the first where no level reads what another drafted, however large the tree; else one a level."""
    head, read = new_head(name, target), list[int]()
    honest = head.read_token
    head.read_token = lambda level, state, tokens, frozen: (
        read.append(tokens.shape[1]) or honest(level, state, tokens, frozen)
    )
    update = Committed(torch.tensor([3]), torch.randn(1, 1, target.config.hidden_size), 5)
    head.begin().propose(update, budget)
    assert head.forwards(budget) == tuple(read[1:]) and len(read) <= LEVELS
    assert COUNTING.rows(head, budget, 4) == ((4, *read[1:]) if budget.nodes else ())
    assert bool(read[1:]) == (head.reads_tokens and budget.depth > 1)


@pytest.mark.parametrize("budget", BUDGETS[:4], ids=str)
@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_recorded_cycles_cost_the_drafters_own_forwards(
    name: str, budget: Budget, target: Target
) -> None:
    """From a results file, which holds no drafter, as from the drafter itself; without them levels would be charged."""
    head = new_head(name, target)
    trace = generate(target, head, random_tokens(20, 3), budget=budget, max_new_tokens=20, stop=[])
    cycles = list(map(cycle_of, trace.cycles))
    forwards = tuple(head.forwards(budget.within(levels)) for levels in range(budget.depth + 1))
    stored = replace(COUNTING, forwards=forwards)
    expected = seconds_of(COUNTING, cycles, budget, 20, head)
    assert seconds_of(stored, cycles, budget, 20) == expected
    if not head.reads_tokens or budget.depth > LEVELS:
        assert seconds_of(COUNTING, cycles, budget, 20) > expected


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_what_is_timed_is_what_a_draft_computes(name: str, target: Target) -> None:
    """All levels of one state where they do not depend on one another, however much was committed; else one level."""
    head, size = new_head(name, target), target.vocab_size
    first, level = (head.probe(16, 8, scored)() for scored in (1, 8))
    assert [logits.shape for logits in first] == [(1, 1, size)] * (
        1 if head.reads_tokens else LEVELS
    )
    assert not head.reads_tokens or [logits.shape for logits in level] == [(1, 8, size)]


@pytest.fixture(scope="module")
def tuning(target: Target, answers: list[Answer]) -> Tuning:
    """A head that has learned these answers, where reading costs nothing but nodes beyond a few."""
    head = new_head("medusa", target).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    batch = batch_of(answers)
    for _ in range(300):
        optimizer.zero_grad()
        head(batch, target.head)["total"].backward()
        optimizer.step()
    read = Costs((0,), (1, 13, 61), ((1.0, 1.02, 2.0),), ((0.01, 0.01, 0.01),), ((9.0, 9.0, 9.0),))
    return Tuning(target, head.eval(), answers, read)


def batch_of(answers: list[Answer]) -> Batch:
    """The answers to learn from."""
    masks = [torch.arange(len(one.tokens)) >= one.prompt for one in answers]
    texts = [
        Example(torch.tensor(one.tokens), mask, one.features)
        for one, mask in zip(answers, masks, strict=True)
    ]
    return collate(texts, (-1,))


def expected_tokens(rates: list[list[float]], paths: Paths) -> float:
    """How many tokens a shape is expected to keep of a draft."""
    kept = 0.0
    for path in paths:
        share = 1.0
        for level, rank in enumerate(path):
            share *= rates[level][rank] if level < len(rates) and rank < len(rates[level]) else 0.0
        kept += share
    return kept


@pytest.mark.slow
def test_measured_ranks_of_each_level_give_the_shape(tuning: Tuning) -> None:
    """As many rows as the head has levels; of all shapes of twelve nodes none is expected to keep more."""
    rates = acceptance_by_rank(tuning)
    assert len(rates) == LEVELS and rates[0][0] > 0.2
    best = best_tree(rates, 12, LEVELS)
    others = [
        best_tree(tune.GUESS, 12, LEVELS),
        tuple((rank,) for rank in range(6)),
        PUBLISHED_TREE[:12],
    ]
    assert all(expected_tokens(rates, best) >= expected_tokens(rates, other) for other in others)
    measured = tuning.trial(Budget.fixed(best)).acceptance_length
    assert (
        measured
        >= max(tuning.trial(Budget.fixed(other)).acceptance_length for other in others) - 0.05
    )
    assert Budget.fixed(best) in fixed(rates)


def test_levels_that_do_not_depend_on_one_another_are_not_charged(tuning: Tuning) -> None:
    """With levels as dear as nine forwards of the target a tree still pays, and the search finds one."""
    trial = search(
        tuning, [chain(1), chain(3), Budget(12, 3, 4), Budget(12, 8, 4)], note=lambda _: None
    )
    assert trial.budget.depth > 1 and trial.speed > 1.2
    assert tuning.trial(Budget(12, 8, 4)) == replace(
        tuning.trial(Budget(12, 3, 4)), budget=Budget(12, 8, 4)
    )


def test_a_policy_stays_within_what_the_head_drafts(tuning: Tuning) -> None:
    """Asked for eight levels of three; the tokens are the target's own."""
    prompt = tuning.answers[0].tokens[: tuning.answers[0].prompt]
    policy = Goodput([0.0, *[0.01] * 8], [1.0, *[1.02] * 8], chain(8))
    options: dict[str, Any] = {"max_new_tokens": 24, "stop": []}
    trace = generate(tuning.target, tuning.drafter, prompt, budget=policy, **options)
    assert (
        trace.tokens
        == generate(tuning.target, tuning.drafter, prompt, budget=Budget(0), **options).tokens
    )
    assert max(cycle.depth for cycle in trace.cycles) == LEVELS
