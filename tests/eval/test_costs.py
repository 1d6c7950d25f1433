"""Bare forwards are those of the model and the head; modelled time charges every row that a run has really read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.forward_costs import Costs
from eagle.drafters.none import NoDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eval.result_files.answer_rows import cycle_of
from tests.families import build, random_tokens
from tests.modelled import seconds_of
from tests.unrolled_heads import causal_states

PROMPT = random_tokens(20, seed=3)
BUDGETS = [
    Budget(6, 6, 1),
    Budget(8, 4, 3),
    Budget(3, 2, 10),
    Budget(25, 5, 4),
    Budget.fixed(PUBLISHED_TREE),
]
BUDGETS += [
    Budget.fixed(chain_paths(3)),
    Budget.fixed(((0,), (1,))),
    Budget.fixed(PUBLISHED_TREE).within(2),
]
# a row of the target costs 1, one of the head's first forward 1e-3, of a level 1e-6: a sum shows how many of each
COUNTING = Costs((0,), (1, 2), ((1.0, 2.0),), ((1e-3, 2e-3),), ((1e-6, 2e-6),))


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, whose few tokens are guessed now and then."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle1:
    """An untrained head."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)


class Rows:
    """Counts the rows that pass through the target, and those of each forward of the head."""

    def __init__(self, target: Target, head: Eagle1) -> None:
        self.target, self.head = [], []
        self.hooks = [
            target.model.base_model.register_forward_hook(
                lambda *seen: self.target.append(seen[2].last_hidden_state.shape[:2].numel())
            ),
            head.fc.register_forward_hook(lambda *seen: self.head.append(seen[2].shape[1])),
        ]

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "budget", BUDGETS, ids=lambda budget: f"{budget.nodes}-{budget.depth}-{budget.top_k}"
)
def test_modelled_time_charges_what_was_read(
    target: Target, head: Eagle1, budget: Budget, temperature: float
) -> None:
    """Rows of target and head, counted while decoding, from the recorded cycles alone: prefill is not charged."""
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=temperature),
        "max_new_tokens": 30,
        "stop": [],
    }
    target.reader.check()  # once, and not charged
    target.forget()
    with Rows(target, head) as rows:
        trace = generate(target, head, PROMPT, budget=budget, **options)
    assert rows.head[0] == len(PROMPT)  # in the first cycle the head reads the prompt
    fed, said = (
        [cycle.accepted + 1 for cycle in trace.cycles],
        1 + sum(cycle.committed for cycle in trace.cycles[:-1]),
    )
    told = (
        sum(fed[:-1]) if said < 29 else sum(fed[:-2])
    )  # with one token to go nothing is drafted, and nothing told
    first = 1 + told
    levels = sum(rows.head) - len(PROMPT) - told
    expected = sum(rows.target[1:]) + 1e-3 * first + 1e-6 * levels
    cycles = list(map(cycle_of, trace.cycles))
    assert seconds_of(COUNTING, cycles, budget, limit=30) == pytest.approx(expected, abs=1e-9)
    assert sum(cycle.accepted for cycle in trace.cycles) > 0


def test_plain_decoding_is_charged_single_reads(target: Target, head: Eagle1) -> None:
    """Neither a head that was not used nor one that is not there costs anything."""
    trace = generate(target, NoDrafter(), PROMPT, max_new_tokens=12, stop=[])
    cycles = list(map(cycle_of, trace.cycles))
    assert seconds_of(COUNTING, cycles) == 11
    alone = replace(COUNTING, first=None, level=None)
    assert seconds_of(alone, cycles, Budget(4, 4, 1)) == 11


def test_recorded_seconds_are_charged_where_a_draft_was_asked_for() -> None:
    """Not at an answer's end, where no level has room, though drafts of no nodes took their time elsewhere."""
    cycle = {
        "nodes": 0,
        "depth": 0,
        "accepted": 0,
        "committed": 1,
        "context": 5,
        "seconds": {"draft": 9.0},
    }
    alone = replace(COUNTING, first=None, level=None)
    assert seconds_of(alone, [cycle], Budget(4, 4, 1), limit=3) == 1 + 9
    assert seconds_of(alone, [cycle], Budget(4, 4, 1), limit=2) == 1
    assert seconds_of(COUNTING, [cycle], Budget(4, 4, 1), limit=2) == 1


@pytest.mark.quick("3-3-1", "2-1-2", "25-2-4")
@pytest.mark.parametrize(
    "budget", BUDGETS, ids=lambda budget: f"{budget.nodes}-{budget.depth}-{budget.top_k}"
)
def test_the_rows_of_each_level_are_those_that_the_head_reads(
    target: Target, head: Eagle1, budget: Budget
) -> None:
    """Forward by forward."""
    with Rows(target, head) as rows:
        generate(target, head, PROMPT, budget=budget, max_new_tokens=40, stop=[])
    levels = head.forwards(budget)
    assert (
        tuple(rows.head[1 : 1 + len(levels)]) == levels
        and rows.head[1 + len(levels)] <= budget.depth + 1
    )


def test_a_results_file_tells_what_a_draft_left_unread() -> None:
    """A drafter that reads its root alone is charged for that, where nobody knows it but by the file."""
    table = ((1.0, 4.0),)
    costs = Costs((0,), (1, 4), table, table, table, forwards=((), (), (1,)))
    told = replace(costs, unread=((1,), (1, 1), (1, 1, 1)))
    cycles = [
        {"nodes": 2, "depth": 2, "accepted": 2, "committed": 3, "context": place}
        for place in (9, 12, 15)
    ]
    budget = Budget(2, 2, 1)
    # a cycle reads 3 rows of the target, and drafts by 1 + 1; without what is told by 3 + 1 behind the first
    assert seconds_of(told, cycles, budget) == pytest.approx(3 * (3 + 2))
    assert seconds_of(costs, cycles, budget) == pytest.approx(3 * (3 + 2) + 2 * 2)
    assert Costs.parse(json.loads(json.dumps(asdict(told)))) == told


def test_costs_lie_on_straight_lines_between_what_was_measured() -> None:
    """In both directions as numpy has it, also before the first; beyond the last the line goes on."""
    table = ((1.0, 1.5, 4.0), (2.0, 2.5, 6.0))
    costs = Costs((100, 500), (1, 4, 16), table)
    for size in (1, 2, 3.5, 4, 10, 16):
        ends = [np.interp(size, (1, 4, 16), row) for row in table]
        for context in (100, 250, 500):
            assert costs.read(size, context) == pytest.approx(np.interp(context, (100, 500), ends))
    assert costs.read(28, 100) == pytest.approx(6.5) and costs.read(1, 900) == pytest.approx(3)
    assert Costs((100, 200), (1,), ((1.0,), (2.0,))).read(1, 0) == 1


def test_costs_of_batches_lie_between_those_measured() -> None:
    """Linear in the number of texts, each table with sizes of its own; without batches all cost what one text does."""
    four = Costs((100,), (1, 3), ((2.0, 8.0),), texts=4)
    costs = Costs((100, 500), (1, 4), ((1.0, 4.0), (2.0, 5.0)), batches=(four,))
    assert [costs.read(1, 100, texts) for texts in (1, 2, 4)] == pytest.approx([1, 4 / 3, 2])
    assert (
        costs.read(2, 500, 4) == 5
        and costs.read(2, 500) == 3
        and costs.read(2, 500, 2) == pytest.approx(3 + 2 / 3)
    )
    assert costs.read(1, 100, 7) == pytest.approx(3)  # on the same line beyond
    assert Costs.parse(json.loads(json.dumps(asdict(costs)))) == costs
    assert replace(costs, batches=()).read(1, 100, 16) == 1


def test_costs_survive_json() -> None:
    """As they stand in a results file."""
    assert Costs.parse(json.loads(json.dumps(asdict(COUNTING)))) == COUNTING
    alone = replace(COUNTING, first=None, level=None)
    assert Costs.parse(json.loads(json.dumps(asdict(alone)))) == alone


@pytest.mark.parametrize(("size", "scored"), [(1, 1), (5, 1), (5, 5)])
def test_a_bare_draft_is_the_heads_forward(
    target: Target, head: Eagle1, size: int, scored: int
) -> None:
    """The same logits as one causal pass over all of the text, however often it is run."""
    run = head.probe(11, size, scored)
    run()
    tokens, features = (
        torch.ones(1, 11 + size, dtype=torch.long),
        torch.zeros(1, 11 + size, head.shape.hidden_size),
    )
    states = causal_states(head, tokens, features, 0, target.head)[0]
    torch.testing.assert_close(run(), target.head.logits(states)[-scored:])


def test_what_is_measured_is_a_table_of_seconds(target: Target, head: Eagle1) -> None:
    """Contexts that the model has no positions for are shortened; by a clock that ticks with every row read."""
    longest = target.max_positions
    with Rows(target, head) as rows:
        clock: Any = lambda: sum(rows.target) + 1000 * sum(rows.head)  # noqa: E731
        costs = bare_costs(target, head, (16, 10**6), (192, 1), rounds=3, clock=clock)
        assert costs.contexts == (16, longest - 192) and costs.sizes == (1, 192)
        assert costs.target == ((1, 192),) * 2
        assert costs.first == costs.level == ((1000, 192_000),) * 2
        assert bare_costs(target, NoDrafter(), (16,), (1,), rounds=1).level is None
        batches = bare_costs(
            target,
            head,
            (16, 24, 32),
            (1,),
            rounds=3,
            batch_sizes=(16, 1, 2),
            batch_tokens=(1, 8),
            clock=clock,
        ).batches
    found = [
        (batch.texts, batch.contexts, batch.sizes, batch.target, batch.level) for batch in batches
    ]
    assert found == [(n, (16, 32), (1, 8), ((n, 8 * n),) * 2, None) for n in (2, 16)]
