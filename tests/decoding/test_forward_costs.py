"""One model of costs for policy, tuner and report, against the cycles of a world whose clock counts rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed, DraftState
from eagle.core.trace import Cycle, Trace
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding import loop
from eagle.decoding.cycle_times import UNREAD, bare_costs, measure_costs
from eagle.decoding.draft_depths import Batch, Forecast
from eagle.decoding.forward_costs import Costs, CycleCosts
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eval.costs import asked_budgets, model_seconds
from eval.result_files.answer_rows import cycle_of
from tests.families import build, random_tokens

PROMPT, CONTEXTS, TEXTS = 40, (40, 90), (1, 4)
CHAIN, TREE = Budget.fixed(chain_paths(4)), Budget(8, 3, 3)
LOOP, GROWING = 0.3, 0.05  # seconds of verification for each text, and of growing a level


def read_seconds(texts: int, tokens: int, context: int) -> float:
    """A forward of the target."""
    return 1 + 0.1 * texts * tokens + 0.02 * texts * context


def draft_seconds(texts: int, rows: Sequence[int]) -> float:
    """A draft whose forwards read so many rows of each text."""
    return sum(0.2 + GROWING + 0.05 * texts * count for count in rows)


class World:
    """A target and a head whose forwards advance a clock, and a loop that takes its time too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.target = Target(build("llama"))
        self.target.reader.check(rows=max(TEXTS))
        torch.manual_seed(0)
        self.head = Eagle1.for_target(Eagle1.Settings(), self.target.config).bind(self.target.head)
        self.target.model.base_model.register_forward_hook(self.read, with_kwargs=True)
        self.head.fc.register_forward_hook(self.draft)
        accept, opened = loop.accept, self.head.open

        def accept_slowly(state: Any, rows: Sequence[Any], outputs: Any) -> Any:
            self.now += LOOP * len(rows)
            return accept(state, rows, outputs)

        monkeypatch.setattr(loop, "accept", accept_slowly)
        monkeypatch.setattr(self.head, "open", lambda: Growing(self, opened()))

    def read(self, _: Any, __: Any, given: dict[str, Any], output: Any) -> None:
        """A forward of the target; its root stands right behind the longest text."""
        texts, tokens = output.last_hidden_state.shape[:2]
        self.now += read_seconds(texts, tokens, int(given["position_ids"][:, 0].max()))

    def draft(self, _: Any, __: Any, output: torch.Tensor) -> None:
        """A forward of the head; a prompt counts as one row, as no model charges it."""
        texts, rows = output.shape[:2]
        self.now += 0.2 + 0.05 * texts * (rows if rows < PROMPT else 1)

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def costs(self, budget: Budget) -> Costs:
        """All costs, as they are measured."""
        prompts, tables = (
            [random_tokens(PROMPT, seed=7)],
            {"sizes": (1, 2, 30), "batch_tokens": (1, 5)},
        )
        tables |= {"contexts": CONTEXTS, "batch_sizes": TEXTS, "clock": self.clock, "rounds": 1}
        return measure_costs(
            self.target, self.head, prompts, budget, {"max_new_tokens": 90}, **tables
        )[0]

    def decode(
        self, texts: int, budget: Budget, temperature: float
    ) -> tuple[list[dict[str, Any]], float]:
        """Recorded answers of so many texts, before any ends, and the seconds of all their cycles."""
        decoding = Decoding(
            self.target, self.head, budget=budget, batch_size=texts, timing=self.clock
        )
        traces = [Trace([]) for _ in range(texts)]
        for number, trace in enumerate(traces):
            sampling = Sampling(temperature, request=number)
            decoding.add(
                number, random_tokens(PROMPT + number, seed=number), sampling, 90, trace, stop=[]
            )
        for _ in range(12):
            decoding.step()
        decoding.close()
        cycles = {cycle.number: cycle for trace in traces for cycle in trace.cycles}
        seconds = sum(sum((cycle.seconds or {}).values()) for cycle in cycles.values())
        return [
            {"session": "", "cycles": [record(cycle) for cycle in trace.cycles]} for trace in traces
        ], seconds


def record(cycle: Cycle) -> dict[str, Any]:
    """A cycle as results hold it, without its seconds, which the forecast must not know."""
    return {**cycle_of(replace(cycle, seconds=None)), "number": cycle.number, "rows": cycle.rows}


class Growing:
    """A head's state that takes its time for every level."""

    def __init__(self, world: World, state: DraftState) -> None:
        self.world, self.state = world, state
        self.admit, self.fork, self.release = state.admit, state.fork, state.release

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """The same trees, later."""
        self.world.now += GROWING * max(budget.depth for budget in budgets.values())
        return self.state.propose(updates, budgets)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """One of its own for each test."""
    return World(monkeypatch)


def modelled(costs: Costs, answers: list[dict[str, Any]], budget: Budget) -> float:
    """Seconds of all answers, from their records alone."""
    return sum(
        model_seconds(
            costs, answers, [asked_budgets(answer["cycles"], budget) for answer in answers]
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("texts", [1, 3, 4])
@pytest.mark.parametrize("budget", [CHAIN, TREE], ids=["chain", "tree"])
def test_modelled_seconds_are_those_of_the_cycles(
    world: World, budget: Budget, texts: int, temperature: float
) -> None:
    """Target, head, growing and verifying, at numbers of texts and contexts between those measured, of both budgets."""
    costs = world.costs(TREE)  # what is spent beside forwards is measured with one budget for all
    answers, seconds = world.decode(texts, budget, temperature)
    assert modelled(costs, answers, budget) == pytest.approx(seconds, rel=1e-6)
    accepted = sum(cycle["accepted"] for answer in answers for cycle in answer["cycles"])
    assert accepted > 0 or budget is CHAIN or texts == 1


def test_tokens_that_a_drafter_has_not_read_have_a_price(world: World) -> None:
    """The share of each in a long forward, which takes a quarter of a second in this world; lookup reads nothing."""
    tables: dict[str, Any] = {
        "contexts": (PROMPT,),
        "sizes": (1, 2),
        "rounds": 1,
        "clock": world.clock,
    }
    costs = bare_costs(world.target, world.head, **tables)
    assert costs.catch_up == pytest.approx(0.25 / UNREAD)
    assert CycleCosts.of_forwards(costs, world.head, CHAIN, {}).catch_up == costs.catch_up
    assert bare_costs(world.target, NgramDrafter(), **tables).catch_up == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no head", "one text", "one context", "nothing beside forwards"])
def test_a_fault_of_the_model_is_seen(world: World, fault: str) -> None:
    """Each is off by 5% or more: the test above can fail."""
    costs, (answers, seconds) = world.costs(TREE), world.decode(4, TREE, 0.0)
    if fault == "no head":
        costs = replace(costs, first=None, level=None)
    elif fault == "one text":
        costs = replace(costs, batches=())
    elif fault == "one context":
        costs = at_first_context(costs)
    else:
        batches = tuple(replace(batch, outside=(0.0, 0.0)) for batch in costs.batches)
        costs = replace(costs, outside=(0.0, 0.0), batches=batches)
    assert abs(modelled(costs, answers, TREE) / seconds - 1) > 0.05


def at_first_context(costs: Costs) -> Costs:
    """Costs that forget how long a text is."""
    contexts, tables = (
        costs.contexts[:1],
        {name: getattr(costs, name) for name in ("target", "first", "level")},
    )
    cut = {name: table and table[:1] for name, table in tables.items()}
    return replace(
        costs, contexts=contexts, batches=tuple(map(at_first_context, costs.batches)), **cut
    )


def best_depths(forecasts: Sequence[Forecast], context: int) -> tuple[tuple[int, ...], float]:
    """The best depths of a chain for each text by trying all, in the world's own seconds."""
    texts, results = len(forecasts), {}
    for depths in product(range(CHAIN.depth + 1), repeat=texts):
        seconds = read_seconds(texts, 1 + max(depths), context) + LOOP * texts
        for level in range(1, max(depths) + 1):
            drafting = sum(depth >= level for depth in depths)
            seconds += draft_seconds(drafting, (2 if level == 1 else 1,))
        tokens = texts + sum(
            sum(text.reached[:depth]) for text, depth in zip(forecasts, depths, strict=True)
        )
        results[depths] = tokens / seconds
    best = max(results, key=lambda depths: results[depths])
    return best, results[best]


@pytest.mark.slow
@pytest.mark.parametrize("context", [40, 65, 90])
@pytest.mark.parametrize("rates", [(0.9,), (0.3,), (0.8, 0.5), (0.95, 0.95, 0.2), (0.6, 0.6, 0.6)])
def test_the_policys_depths_are_the_best_of_all(
    world: World, rates: tuple[float, ...], context: int
) -> None:
    """From the same costs as all else, by enumeration of every text's depth."""
    costs = world.costs(CHAIN)
    table = CycleCosts.of_forwards(costs, world.head, CHAIN, {})
    reached = [[rate ** (level + 1) for level in range(CHAIN.depth)] for rate in rates]
    forecasts = [Forecast(chances, [1.0] * CHAIN.depth) for chances in reached]
    # costs are not told apart within 64 tokens: at the context itself they are
    sharp = replace(table, contexts=tuple(64 * place for place in table.contexts))
    batch = Batch(forecasts, sharp.at(len(rates), 64 * context))
    chosen = batch.best_levels([CHAIN.depth] * len(rates), CHAIN.depth)
    best, speed = best_depths(forecasts, context)
    assert batch.speed(best) == pytest.approx(speed)
    assert batch.speed(chosen) >= 0.999 * speed
