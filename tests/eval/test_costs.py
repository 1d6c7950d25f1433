"""Bare forwards are those of the model and the head; modelled time charges every row that a run has read."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from eval.result_files.write_results import cycle_of
from tests.families import build, random_tokens
from tests.modelled import seconds_of
from tests.unrolled_heads import causal_states

PROMPT = random_tokens(20, seed=3)
# chains and trees, grown and fixed; one is wider than its nodes, one is cut below its depth
BUDGETS = [
    Budget(6, 6, 1),
    Budget(3, 2, 10),
    Budget(25, 5, 4),
    Budget.fixed(chain_paths(3)),
    Budget.fixed(((0,), (1,))),
    Budget.fixed(PUBLISHED_TREE).within(2),
]

# a row of the target costs 1, one of the head's first forward 1e-3, of a level 1e-6: a sum shows how many of each
COUNTING = Costs(
    (0,),
    (1, 2),
    ((1.0, 2.0),),
    first=((1e-3, 2e-3),),
    level=((1e-6, 2e-6),),
)
TARGET_ALONE = replace(COUNTING, first=None, level=None)


def name_budget(budget: Budget) -> str:
    """Return the id of a case."""
    return f"{budget.nodes}-{budget.depth}-{budget.top_k}"


def through_json(costs: Costs) -> Costs:
    """Return costs as they come back from a results file."""
    return Costs.parse(json.loads(json.dumps(asdict(costs))))


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, a few of whose tokens are guessed right."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle1:
    """An untrained head."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)


class Rows:
    """The rows of each forward of a target and of a head."""

    def __init__(self) -> None:
        self.target: list[int] = []
        self.head: list[int] = []

    def add_target(self, module: Any, inputs: Any, output: Any) -> None:
        """Record a forward of the target, whose states are [B, T, H]."""
        self.target.append(output.last_hidden_state.shape[:2].numel())

    def add_head(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        """Record a forward of the head."""
        self.head.append(output.shape[1])


@pytest.fixture
def rows(target: Target, head: Eagle1) -> Iterator[Rows]:
    """The rows that pass through both while the test runs."""
    # reading trees is checked once, which is not charged
    target.reader.check()
    target.forget()
    counted = Rows()
    hooks = [
        target.model.base_model.register_forward_hook(counted.add_target),
        head.fc.register_forward_hook(counted.add_head),
    ]
    yield counted
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", BUDGETS, ids=name_budget)
def test_modelled_time_charges_what_was_read(
    target: Target,
    head: Eagle1,
    rows: Rows,
    budget: Budget,
    temperature: float,
) -> None:
    """The recorded cycles alone give the rows that were counted while decoding; prefill is not charged."""
    trace = generate(
        target,
        head,
        PROMPT,
        budget=budget,
        sampling=Sampling(temperature=temperature),
        max_new_tokens=30,
        stop=[],
    )
    assert sum(cycle.accepted for cycle in trace.cycles) > 0
    # in the first cycle the head reads the prompt
    assert rows.head[0] == len(PROMPT)

    # the head states the rows of each further forward
    levels = head.forwards(budget)
    assert tuple(rows.head[1 : 1 + len(levels)]) == levels

    # each later draft first reads what the cycle before accepted; with one token to go nothing is drafted
    committed = 1 + sum(cycle.committed for cycle in trace.cycles[:-1])
    followed_by_a_draft = trace.cycles[:-1] if committed < 29 else trace.cycles[:-2]
    told = sum(cycle.accepted + 1 for cycle in followed_by_a_draft)
    in_levels = sum(rows.head) - len(PROMPT) - told
    expected = sum(rows.target[1:]) + 1e-3 * (1 + told) + 1e-6 * in_levels
    cycles = list(map(cycle_of, trace.cycles))

    assert seconds_of(COUNTING, cycles, budget, limit=30) == pytest.approx(expected, abs=1e-9)


def test_plain_decoding_is_charged_single_reads(target: Target) -> None:
    """Neither a head that was not used nor one that is not there costs anything."""
    trace = generate(target, NoDrafter(), PROMPT, max_new_tokens=12, stop=[])
    cycles = list(map(cycle_of, trace.cycles))
    assert seconds_of(COUNTING, cycles) == 11
    assert seconds_of(TARGET_ALONE, cycles, Budget(4, 4, 1)) == 11


def test_recorded_seconds_are_charged_where_a_draft_was_asked_for() -> None:
    """At an answer's end, where no level has room, nothing is drafted or charged."""
    cycle = {
        "nodes": 0,
        "depth": 0,
        "accepted": 0,
        "committed": 1,
        "context": 5,
        "seconds": {"draft": 9.0},
    }
    for costs, limit, seconds in (
        # a draft without nodes took its nine seconds
        (TARGET_ALONE, 3, 1 + 9),
        (TARGET_ALONE, 2, 1),
        (COUNTING, 2, 1),
    ):
        assert seconds_of(costs, [cycle], Budget(4, 4, 1), limit=limit) == seconds


def test_a_results_file_tells_what_a_draft_left_unread() -> None:
    """A drafter that reads its root alone is charged for that, which only the file knows."""
    table = ((1.0, 4.0),)
    costs = Costs(
        (0,),
        (1, 4),
        table,
        first=table,
        level=table,
        forwards=((), (), (1,)),
    )
    told = replace(costs, unread=((1,), (1, 1), (1, 1, 1)))
    cycles = []
    for context in (9, 12, 15):
        shape = {"nodes": 2, "depth": 2, "accepted": 2, "committed": 3}
        cycles.append({**shape, "context": context})

    budget = Budget(2, 2, 1)

    # a cycle reads 3 rows of the target, and drafts with 1 + 1; unless told so, after the first with 3 + 1
    assert seconds_of(told, cycles, budget) == pytest.approx(3 * (3 + 2))
    assert seconds_of(costs, cycles, budget) == pytest.approx(3 * (3 + 2) + 2 * 2)
    assert through_json(told) == told


def test_costs_are_interpolated() -> None:
    """In both directions as numpy does it; the line also goes on beyond the last size and context."""
    table = ((1.0, 1.5, 4.0), (2.0, 2.5, 6.0))
    costs = Costs((100, 500), (1, 4, 16), table)
    for size in (1, 2, 3.5, 4, 10, 16):
        ends = [np.interp(size, (1, 4, 16), row) for row in table]
        for context in (100, 250, 500):
            assert costs.read(size, context) == pytest.approx(np.interp(context, (100, 500), ends))

    assert costs.read(28, 100) == pytest.approx(6.5)
    assert costs.read(1, 900) == pytest.approx(3)
    # before the first context its costs hold
    assert Costs((100, 200), (1,), ((1.0,), (2.0,))).read(1, 0) == 1


def test_costs_of_batches_lie_between_those_measured() -> None:
    """They are linear in the number of sequences; without batches all cost what one sequence does."""
    four = Costs((100,), (1, 3), ((2.0, 8.0),), batch_size=4)
    costs = Costs((100, 500), (1, 4), ((1.0, 4.0), (2.0, 5.0)), batches=(four,))
    for size, context, texts, seconds in (
        (1, 100, 1, 1),
        (1, 100, 2, 4 / 3),
        (1, 100, 4, 2),
        (2, 500, 1, 3),
        (2, 500, 2, 3 + 2 / 3),
        (2, 500, 4, 5),
        # on the same line beyond the last
        (1, 100, 7, 3),
    ):
        assert costs.read(size, context, texts) == pytest.approx(seconds)

    assert replace(costs, batches=()).read(1, 100, 16) == 1
    assert through_json(costs) == costs
    assert through_json(TARGET_ALONE) == TARGET_ALONE


@pytest.mark.parametrize(("size", "scored"), [(1, 1), (5, 1), (5, 5)])
def test_a_bare_draft_is_the_heads_forward(
    target: Target,
    head: Eagle1,
    size: int,
    scored: int,
) -> None:
    """The timed forward gives the logits of one causal pass over the whole sequence, however often it runs."""
    run = head.probe(11, size, scored)
    run()
    tokens = torch.ones(1, 11 + size, dtype=torch.long)
    features = torch.zeros(1, 11 + size, head.shape.hidden_size)
    states = causal_states(head, tokens, features, 0, target_head=target.head)[0]
    torch.testing.assert_close(run(), target.head.logits(states)[-scored:])


def test_what_is_measured_is_a_table_of_seconds(target: Target, head: Eagle1, rows: Rows) -> None:
    """Contexts beyond the model's positions are shortened; each size and batch size has its seconds."""

    # it ticks by 1 for each row of the target, and by 1,000 for each of the head
    def clock() -> float:
        return sum(rows.target) + 1000 * sum(rows.head)

    costs = bare_costs(target, head, (16, 10**6), (192, 1), rounds=3, clock=clock)

    assert costs.contexts == (16, target.max_positions - 192)
    assert costs.sizes == (1, 192)
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
    # of the contexts the first and the last
    expected = [
        Costs((16, 32), (1, 8), ((texts, 8 * texts),) * 2, batch_size=texts) for texts in (2, 16)
    ]
    assert list(batches) == expected
