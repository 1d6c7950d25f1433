"""Heads of several levels are priced by the forwards that they take, and their measured ranks give a tree."""

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
from eval.tune import Tuning, acceptance_by_rank, chain, fixed, search
from tests.eval.test_costs import COUNTING
from tests.families import build, random_tokens
from tests.registry import LEVEL_HEADS
from tests.trained import fixture_seed

LEVELS = 3
# chains shorter and longer than the head, a tree that grows and a fixed one
BUDGETS = [chain(2), chain(8), Budget(8, 4, 3), Budget.fixed(PUBLISHED_TREE)]


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, a few of whose tokens are guessed right."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    """Its answers to random prompts."""
    made = []
    for seed in range(10):
        prompt = random_tokens(12, seed)
        made.append(answer(target, (-1,), prompt, limit=24, sampling=Sampling()))
    return made


def new_head(name: str, target: Target) -> Any:
    """Return an untrained head, ready to draft."""
    torch.manual_seed(fixture_seed())
    section = settings_of({"kind": name, "levels": LEVELS}, "test")
    return DRAFTERS[name].for_target(section, target.config, target.head).eval().bind(target.head)


@pytest.mark.parametrize("budget", [*BUDGETS, Budget(0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_forwards_are_those_that_a_draft_takes(name: str, budget: Budget, target: Target) -> None:
    """Only levels that read the tokens of the level before take a forward after the first."""
    head = new_head(name, target)
    rows: list[int] = []
    read_token = head.read_token

    def record(level: int, state: Any, tokens: torch.Tensor, target_head: Any) -> Any:
        rows.append(tokens.shape[1])
        return read_token(level, state, tokens, target_head)

    # counts the forwards from outside of the head
    head.read_token = record
    hidden = torch.randn(1, 1, target.config.hidden_size)
    head.begin().propose(Committed(torch.tensor([3]), hidden, 5), budget)
    later = tuple(rows[1:])

    assert head.forwards(budget) == later
    assert len(rows) <= LEVELS
    assert bool(later) == (head.reads_tokens and budget.depth > 1)
    # the first forward reads the four tokens that were committed
    assert COUNTING.rows(head, budget, 4) == ((4, *later) if budget.nodes else ())


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_what_is_timed_is_what_a_draft_computes(name: str, target: Target) -> None:
    """The timed forward computes all levels where none reads another's tokens, else one level."""
    head = new_head(name, target)
    size = target.vocab_size
    first = [logits.shape for logits in head.probe(16, 8, 1)()]
    assert first == [(1, 1, size)] * (1 if head.reads_tokens else LEVELS)
    if head.reads_tokens:
        assert [logits.shape for logits in head.probe(16, 8, 8)()] == [(1, 8, size)]


@pytest.fixture(scope="module")
def tuning(target: Target, answers: list[Answer]) -> Tuning:
    """A head that has learned these answers, where reading costs nothing but nodes beyond a few."""
    # it learns the answers by heart, so that ranks matter
    head = new_head("medusa", target).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    batch = batch_of(answers)
    for _ in range(300):
        optimizer.zero_grad()
        head(batch, target.head)["total"].backward()
        optimizer.step()

    # a level as costly as nine forwards of the target
    costs = Costs(
        (0,),
        (1, 13, 61),
        ((1.0, 1.02, 2.0),),
        first=((0.01,) * 3,),
        level=((9.0,) * 3,),
    )
    return Tuning(target, head.eval(), answers, costs)


def batch_of(answers: list[Answer]) -> Batch:
    """Return the answers as examples to learn from."""
    examples = []
    for one in answers:
        mask = torch.arange(len(one.tokens)) >= one.prompt
        examples.append(Example(torch.tensor(one.tokens), mask, one.features))
    return collate(examples, (-1,))


def expected_tokens(rates: list[list[float]], paths: Paths) -> float:
    """Return how many tokens of a tree are expected to be accepted: a node needs all ranks on its path."""
    accepted = 0.0
    for path in paths:
        prob = 1.0
        for level, rank in enumerate(path):
            is_known = level < len(rates) and rank < len(rates[level])
            prob *= rates[level][rank] if is_known else 0.0

        accepted += prob

    return accepted


@pytest.mark.slow
def test_measured_ranks_of_each_level_give_the_tree(tuning: Tuning) -> None:
    """No other tree of twelve nodes is expected to keep more tokens, nor keeps many more."""
    rates = acceptance_by_rank(tuning)
    assert len(rates) == LEVELS
    assert rates[0][0] > 0.2

    best = best_tree(rates, 12, LEVELS)
    assert Budget.fixed(best) in fixed(rates)

    measured = tuning.trial(Budget.fixed(best)).acceptance_length
    others = [
        best_tree(tune.GUESS, 12, LEVELS),
        tuple((rank,) for rank in range(6)),
        PUBLISHED_TREE[:12],
    ]
    for other in others:
        assert expected_tokens(rates, best) >= expected_tokens(rates, other)
        assert measured >= tuning.trial(Budget.fixed(other)).acceptance_length - 0.05


def test_levels_that_do_not_depend_on_one_another_are_not_charged(tuning: Tuning) -> None:
    """A tree pays although a level costs nine forwards, since the head needs only its first forward."""
    at_depth = Budget(12, LEVELS, 4)
    deeper = Budget(12, 8, 4)
    found = search(tuning, [chain(1), chain(3), at_depth, deeper], note=lambda _: None)
    assert found.budget.depth > 1
    assert found.speed > 1.2
    assert tuning.trial(deeper) == replace(tuning.trial(at_depth), budget=deeper)


def test_a_policy_stays_within_what_the_head_drafts(tuning: Tuning) -> None:
    """Asked for eight levels of a head of three, it decodes the target's own tokens."""
    prompt = tuning.answers[0].tokens[: tuning.answers[0].prompt]
    # costs by which ever deeper drafts pay
    policy = Goodput([0.0, *[0.01] * 8], [1.0, *[1.02] * 8], chain(8))
    options: dict[str, Any] = {"max_new_tokens": 24, "stop": []}
    plain = generate(
        tuning.target,
        tuning.drafter,
        prompt,
        budget=Budget(0),
        **options,
    )
    trace = generate(
        tuning.target,
        tuning.drafter,
        prompt,
        budget=policy,
        **options,
    )

    assert trace.tokens == plain.tokens
    assert max(cycle.depth for cycle in trace.cycles) == LEVELS
