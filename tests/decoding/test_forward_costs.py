"""The model of costs that policy, tuner and report share, against cycles of a world whose clock counts rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch import Tensor

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
from eval.costs import asked_budgets, model_seconds
from eval.result_files.write_results import cycle_of
from tests.batches import new_head
from tests.families import build, random_tokens

PROMPT_LENGTH = 40
# what costs are measured at
CONTEXTS = (40, 90)
BATCH_SIZES = (1, 4)
CHAIN = Budget.fixed(chain_paths(4))
TREE = Budget(8, 3, 3)
# seconds of verification for each row, and of growing a level
VERIFY = 0.3
GROW = 0.05


def read_seconds(count: int, tokens: int, context: int) -> float:
    """Return the seconds of a forward of the target."""
    return 1 + 0.1 * count * tokens + 0.02 * count * context


def draft_seconds(count: int, tokens: int) -> float:
    """Return the seconds of a forward of the head."""
    return 0.2 + 0.05 * count * tokens


class World:
    """A target and a head whose forwards advance a clock, and a loop that takes its time too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.target = Target(build("llama"))
        self.target.reader.check(rows=max(BATCH_SIZES))
        self.target.model.base_model.register_forward_hook(self.tick_target, with_kwargs=True)
        self.head = new_head("eagle1", self.target)
        self.head.fc.register_forward_hook(self.tick_head)
        open_state = self.head.open
        accept = loop.accept

        def accept_slowly(
            state: Any,
            rows: Sequence[Any],
            outputs: Any,
        ) -> Any:
            self.now += VERIFY * len(rows)
            return accept(state, rows, outputs)

        monkeypatch.setattr(loop, "accept", accept_slowly)
        monkeypatch.setattr(
            self.head,
            "open",
            lambda: SlowGrowth(self, open_state()),
        )

    def tick_target(
        self,
        module: Any,
        args: Any,
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Advance the clock by a forward of the target; its root comes after the longest sequence."""
        count, tokens = output.last_hidden_state.shape[:2]
        context = int(kwargs["position_ids"][:, 0].max())
        self.now += read_seconds(count, tokens, context)

    def tick_head(self, module: Any, args: Any, output: Tensor) -> None:
        """Advance the clock by a forward of the head; a prompt counts as one token, as no model charges it."""
        count, tokens = output.shape[:2]
        self.now += draft_seconds(count, tokens if tokens < PROMPT_LENGTH else 1)

    def measure(self, budget: Budget) -> Costs:
        """Measure all costs."""
        costs, *_ = measure_costs(
            self.target,
            self.head,
            [random_tokens(PROMPT_LENGTH, seed=7)],
            budget,
            {"max_new_tokens": 90},
            sizes=(1, 2, 30),
            batch_tokens=(1, 5),
            contexts=CONTEXTS,
            batch_sizes=BATCH_SIZES,
            clock=lambda: self.now,
            rounds=1,
        )
        return costs

    def decode(
        self,
        count: int,
        budget: Budget,
    ) -> tuple[list[dict[str, Any]], float]:
        """Return records of the first twelve cycles of a batch, and the seconds of all of them."""
        decoding = Decoding(
            self.target,
            self.head,
            budget=budget,
            batch_size=count,
            timing=lambda: self.now,
        )
        traces = [Trace([]) for _ in range(count)]
        for row, trace in enumerate(traces):
            prompt = random_tokens(PROMPT_LENGTH + row, seed=row)
            decoding.add(
                row,
                prompt,
                Sampling(request=row),
                90,
                trace,
                stop=[],
            )
        for _ in range(12):
            decoding.step()
        # before any answer ends, so that the batch stays as it is
        decoding.close()
        answers = []
        seconds: dict[int, float] = {}
        for trace in traces:
            answers.append({"session": "", "cycles": [record(cycle) for cycle in trace.cycles]})
            # a cycle of several rows is in the traces of all
            for cycle in trace.cycles:
                seconds[cycle.number] = sum((cycle.seconds or {}).values())
        return answers, sum(seconds.values())


def record(cycle: Cycle) -> dict[str, Any]:
    """Return a cycle as result files have it, without its seconds, which the model must not know."""
    return {
        **cycle_of(replace(cycle, seconds=None)),
        "number": cycle.number,
        "rows": cycle.rows,
    }


class SlowGrowth:
    """A head's state that takes its time for every level."""

    def __init__(self, world: World, state: DraftState) -> None:
        self.world = world
        self.state = state
        self.admit = state.admit
        self.fork = state.fork
        self.release = state.release

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return the same trees, later."""
        self.world.now += GROW * max(budget.depth for budget in budgets.values())
        return self.state.propose(updates, budgets)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world of its own for each test."""
    return World(monkeypatch)


def model_total(
    costs: Costs,
    answers: list[dict[str, Any]],
    budget: Budget,
) -> float:
    """Return the modelled seconds of all answers, from their records alone."""
    budgets = [asked_budgets(answer["cycles"], budget) for answer in answers]
    return sum(model_seconds(costs, answers, budgets))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "budget",
    [CHAIN, TREE],
    ids=["chain", "tree"],
)
def test_modelled_seconds_are_those_of_the_clock(world: World, budget: Budget, count: int) -> None:
    """Target, head, growth and verification, also at batch sizes and contexts between those that were measured."""
    # time outside of forwards is measured with one budget for all
    costs = world.measure(TREE)
    # the clock has seen every forward, the model only the records
    answers, seconds = world.decode(count, budget)
    assert model_total(costs, answers, budget) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.slow
def test_a_model_without_batch_sizes_is_seen(world: World) -> None:
    """A planted fault: costs of one sequence for all batches are off by more than 5%."""
    costs = replace(world.measure(TREE), batches=())
    answers, seconds = world.decode(4, TREE)
    assert abs(model_total(costs, answers, TREE) / seconds - 1) > 0.05


def test_tokens_that_a_drafter_has_not_read_have_a_price(world: World) -> None:
    """It is their share of a long forward, which takes a quarter of a second here; lookup reads nothing."""
    options: dict[str, Any] = {
        "contexts": (PROMPT_LENGTH,),
        "sizes": (1, 2),
        "rounds": 1,
        "clock": lambda: world.now,
    }
    costs = bare_costs(world.target, world.head, **options)
    assert costs.catch_up == pytest.approx(0.25 / UNREAD)
    table = CycleCosts.of_forwards(costs, world.head, CHAIN, {})
    assert table.catch_up == costs.catch_up
    assert bare_costs(world.target, NgramDrafter(), **options).catch_up == 0


def find_best_speed(forecasts: Sequence[Forecast], context: int) -> float:
    """Return the highest tokens per second by trying all depths of all rows, in the world's own seconds."""
    count = len(forecasts)
    speeds = []
    for depths in product(range(CHAIN.depth + 1), repeat=count):
        seconds = read_seconds(count, 1 + max(depths), context) + VERIFY * count
        for level in range(1, max(depths) + 1):
            drafting = sum(depth >= level for depth in depths)
            # the first forward reads what the last cycle committed
            seconds += GROW + draft_seconds(drafting, 2 if level == 1 else 1)
        tokens = float(count)
        for forecast, depth in zip(forecasts, depths, strict=True):
            tokens += sum(forecast.path_probs[:depth])
        speeds.append(tokens / seconds)
    return max(speeds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "context"),
    [
        ((0.9,), 40),
        ((0.3,), 90),
        ((0.8, 0.5), 65),
        ((0.95, 0.95, 0.2), 65),
    ],
)
def test_the_policys_depths_are_the_best_of_all(
    world: World, rates: tuple[float, ...], context: int
) -> None:
    """By the same costs as all else, also between the contexts that were measured."""
    table = CycleCosts.of_forwards(
        world.measure(CHAIN),
        world.head,
        CHAIN,
        {},
    )
    forecasts = []
    for rate in rates:
        accepted = [rate**level for level in range(1, CHAIN.depth + 1)]
        forecasts.append(Forecast(accepted, [1.0] * CHAIN.depth))
    # contexts within 64 tokens have the same costs: scaled by 64 they are told apart
    sharp = replace(
        table,
        contexts=tuple(64 * measured for measured in table.contexts),
    )
    batch = Batch(forecasts, sharp.at(len(rates), 64 * context))
    chosen = batch.best_levels(
        [CHAIN.depth] * len(rates),
        CHAIN.depth,
    )
    assert batch.speed(chosen) == pytest.approx(
        find_best_speed(forecasts, context),
        rel=1e-3,
    )
