"""The plan: every example once an epoch, whoever asks; learning rates as their formulas say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from eagle.recipe import TrainSection
from eagle.training.plan import Plan

# supervised positions of each example; some have nothing to learn from
POSITIONS = [random.Random(index).choice([0, 3, 17, 40, 200]) for index in range(103)]


def make_plan(**settings: Any) -> Plan:
    """Return a plan over these examples."""
    return Plan(POSITIONS, TrainSection(out="nowhere", **settings))


@pytest.mark.parametrize("validation", [0.0, 0.05, 0.5])
def test_examples_are_split_once(validation: float) -> None:
    """Held-out, learned from and unusable ones are everything, and nothing is two of them."""
    plan = make_plan(validation=validation)
    usable = [index for index, count in enumerate(POSITIONS) if count]

    # equal lists of indices: none is in both
    assert sorted(plan.training + plan.validation) == usable
    assert plan.unusable == len(POSITIONS) - len(usable)
    assert len(plan.validation) == math.ceil(validation * len(usable))


def test_an_epoch_reads_every_example_once() -> None:
    """Whoever asks, in whatever order; another epoch and another seed have another order."""
    plan = make_plan(epochs=3)
    again = make_plan(epochs=3)
    steps_an_epoch = math.ceil(len(plan.training) / 4)

    assert len(plan) == 3 * steps_an_epoch

    # a process that goes on asks for a step without those before it
    backwards = [again.step(number) for number in reversed(range(len(again)))]
    steps = [plan.step(number) for number in range(len(plan))]

    assert steps == backwards[::-1]

    for start in range(0, len(plan), steps_an_epoch):
        epoch = sum(steps[start : start + steps_an_epoch], [])  # noqa: RUF017
        assert sorted(epoch) == plan.training

    orders = set()

    for seed in range(4):
        # four seeds with four epochs each
        other = make_plan(seed=seed, validation=0)
        orders |= {tuple(other.epoch(number)) for number in range(4)}

    assert len(orders) == 16
    assert len(make_plan(epochs=3, max_steps=7)) == 7
    assert len(make_plan(max_steps=10**6)) == len(make_plan())


@pytest.mark.parametrize("count", [1, 3, 8])
def test_parts_are_the_step_and_their_weights_one(count: int) -> None:
    """Every example weighs what its positions are of the step's, in exactly one part; no part is empty or heavy."""
    plan = make_plan(batch_size=5)

    for number in range(len(plan)):
        step = plan.step(number)
        parts = plan.parts(number, count)
        shares = plan.weights(number, parts)
        whole = sum(POSITIONS[index] for index in step)
        assert len(parts) == count
        assert all(parts)
        # what is read twice weighs nothing the second time
        fresh = {*step}
        for part, share in zip(parts, shares, strict=True):
            new = [index for index in part if index in fresh]
            assert new in ([], part)
            assert math.isclose(share, sum(POSITIONS[index] for index in new) / whole)
            fresh -= {*new}
        assert not fresh
        assert max(shares) * whole <= whole / count + max(POSITIONS[index] for index in step)


@pytest.mark.parametrize(("count", "batch_size"), [(64, 512), (128, 40)])
def test_parts_of_many_processes(count: int, batch_size: int) -> None:
    """A search for the lightest part deals them: the longest example first, each to whoever has least."""
    dice = random.Random(7)
    positions = [dice.randrange(20, 2000) for _ in range(1100)]
    plan = Plan(positions, TrainSection(out="nowhere", batch_size=batch_size, validation=0))
    step = plan.step(0)
    parts = plan.parts(0, count)
    # the oracle searches all parts for each example; the plan keeps them in a heap
    expected: list[list[int]] = [[] for _ in range(count)]

    for index in sorted(step, key=lambda index: -positions[index]):
        lightest = min(expected, key=lambda part: sum(positions[i] for i in part))
        lightest.append(index)

    assert [part for part in expected if part] == parts[: min(len(step), count)]

    shares = plan.weights(0, parts)
    assert math.isclose(sum(shares), 1.0)
    if batch_size == 512:  # eight conversations a process
        assert max(shares) / min(shares) < 1.2


def test_seeds_differ_by_example_epoch_and_run() -> None:
    """No two draws share one."""
    seeds = []

    # seeds of runs, epochs and examples in one list
    for run in range(3):
        plan = make_plan(seed=run, epochs=2, validation=0)
        for number in range(len(plan)):
            seeds += plan.seeds(number, plan.step(number))

    assert len(seeds) == len(set(seeds))
    assert len(seeds) == 6 * len(make_plan(validation=0).training)


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 0), (0.1, 10), (20, 20)])
def test_learning_rates(schedule: Any, warmup: float, steps: int, final: float) -> None:
    """A straight rise over the warm-up, then the formula over what is left, whose end the last step does not reach."""
    options = {"schedule": schedule, "warmup": warmup, "final_lr": final}
    plan = make_plan(lr=2.0, epochs=10, max_steps=100, **options)

    for number in range(100):
        # a share of the steps, or a number of them
        rise = (number + 1) / steps if number < steps else 1.0
        fall = SHAPES[schedule](max(number - steps, 0) / (100 - steps))
        expected = 2 * rise * (final + (1 - final) * fall)
        assert math.isclose(plan.lr(number), expected)

    assert plan.lr(99) > 2 * final


def test_wsd_is_constant_and_falls_at_the_end() -> None:
    """Longer runs have the steps before the fall in common: a linear warm-up and one rate."""
    options = {"epochs": 50, "schedule": "wsd", "lr": 1.0}
    longer = make_plan(max_steps=40, warmup=4, **options)
    shorter = make_plan(max_steps=20, warmup=4, **options)

    assert longer.stem_steps == 32
    assert shorter.stem_steps == 16

    rates = [shorter.lr(number) for number in range(20)]

    # four steps of warm-up, twelve at the full rate, and a fall over the last fifth
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 13, 1.0, 0.75, 0.5, 0.25]
    assert [longer.lr(number) for number in range(17)] == rates[:17]

    for number in range(20):
        assert longer.step(number) == shorter.step(number)

    # the fall takes half of the steps and ends at half of the rate
    ended = make_plan(
        max_steps=20,
        warmup=0,
        final_lr=0.5,
        decay_share=0.5,
        **options,
    )

    assert [ended.lr(number) for number in (0, 10, 15, 19)] == [1.0, 1.0, 0.75, 0.55]


@pytest.mark.parametrize("batch_size", [1, 7])
def test_learned_tokens_are_those_of_every_step_so_far(batch_size: int) -> None:
    """Within an epoch, at its end and after it; the last step of an epoch may be short."""
    plan = make_plan(epochs=3, batch_size=batch_size)
    expected = 0

    for number in range(len(plan)):
        assert plan.learned(number) == expected
        expected += sum(POSITIONS[index] for index in plan.step(number))

    assert plan.learned(len(plan)) == expected
