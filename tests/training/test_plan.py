"""The plan: every example once an epoch, whoever asks; learning rates as their formulas say."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from eagle.recipe import TrainSection
from eagle.training.plan import Plan

SLOTS = [random.Random(place).choice([0, 3, 17, 40, 200]) for place in range(103)]


def plan(**settings: Any) -> Plan:
    """A plan over 103 examples, some of which have nothing to learn from."""
    return Plan(SLOTS, TrainSection(out="nowhere", **settings))


@pytest.mark.parametrize("validation", [0.0, 0.05, 0.5])
def test_examples_are_split_once(validation: float) -> None:
    """Held-out, learned from and unusable ones are everything, and nothing is two of them."""
    made = plan(validation=validation)
    usable = [place for place, slots in enumerate(SLOTS) if slots]
    assert sorted(made.training + made.validation) == usable and not set(made.training) & set(
        made.validation
    )
    assert made.unusable == len(SLOTS) - len(usable) > 0
    assert len(made.validation) == math.ceil(validation * len(usable))


def test_an_epoch_reads_every_example_once_in_an_order_of_its_own() -> None:
    """Whoever asks, in whatever order; another epoch and another seed have another order."""
    made, again = plan(epochs=3), plan(epochs=3)
    assert len(made) == 3 * math.ceil(len(made.training) / 4)
    read = {number: again.step(number) for number in reversed(range(len(again)))}
    epochs = [[place for number in range(start, start + len(made) // 3) for place in made.step(number)]
              for start in range(0, len(made), len(made) // 3)]  # fmt: skip
    assert (
        all(sorted(epoch) == made.training for epoch in epochs)
        and epochs[0] != epochs[1] != epochs[2]
    )
    assert all(made.step(number) == read[number] for number in range(len(made)))
    orders = [
        plan(seed=seed, validation=0).epoch(number) for seed in range(4) for number in range(4)
    ]
    assert len({tuple(order) for order in orders}) == 16
    assert len(plan(epochs=3, max_steps=7)) == 7 and len(plan(max_steps=10**6)) == len(plan())


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_the_step_and_their_weights_one(count: int) -> None:
    """Every example weighs what its slots are of the step's, in exactly one part; no part is empty or much heavier."""
    made = plan(batch_size=5)
    for number in range(len(made)):
        parts, step = made.parts(number, count), made.step(number)
        shares = made.weights(number, parts)
        whole, fresh = sum(SLOTS[place] for place in step), set(step)
        assert len(parts) == count and all(parts) and math.isclose(sum(shares), 1.0)
        for part, share in zip(parts, shares, strict=True):
            own = [place for place in part if place in fresh]
            assert own in ([], part)
            assert math.isclose(share, sum(SLOTS[place] for place in own) / whole)
            fresh -= set(own)
        assert not fresh
        heaviest, longest = max(shares) * whole, max(SLOTS[place] for place in step)
        assert heaviest <= whole / count + longest


@pytest.mark.parametrize(("count", "batch_size"), [(64, 512), (64, 64), (128, 40)])
def test_parts_of_many_processes(count: int, batch_size: int) -> None:
    """As a search for the lightest part deals them: each example once, weights that sum to one, parts about equal."""
    drawn = random.Random(7)
    slots = [drawn.randrange(20, 2000) for _ in range(1100)]
    made = Plan(slots, TrainSection(out="nowhere", batch_size=batch_size, validation=0))
    for number in (0, 1):
        step, parts = made.step(number), made.parts(number, count)
        naive: list[list[int]] = [[] for _ in range(count)]
        for place in sorted(step, key=lambda place: -slots[place]):
            min(naive, key=lambda part: sum(slots[i] for i in part)).append(place)
        assert [part for part in naive if part] == parts[: min(len(step), count)]
        shares, whole = made.weights(number, parts), sum(slots[place] for place in step)
        owned = [
            place for part, share in zip(parts, shares, strict=True) if share for place in part
        ]
        assert sorted(owned) == sorted(step) and math.isclose(sum(shares), 1.0)
        assert max(shares) * whole <= whole / count + max(slots[place] for place in step)
        if batch_size == 512:  # eight conversations a process
            assert max(shares) / min(shares) < 1.2


def test_seeds_differ_by_example_epoch_and_run() -> None:
    """No two draws share one."""
    seeds = [
        seed
        for run in range(3)
        for made in [plan(seed=run, epochs=2, validation=0)]
        for number in range(len(made))
        for seed in made.seeds(number, made.step(number))
    ]
    assert len(seeds) == len(set(seeds)) == 6 * len(plan(validation=0).training)


SHAPES = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 0), (0.1, 10), (20, 20)])
def test_learning_rates(schedule: Any, warmup: float, steps: int, final: float) -> None:
    """A straight rise over the warm-up, then the formula over what is left, whose end the last step does not reach."""
    made = plan(schedule=schedule, warmup=warmup, lr=2.0, epochs=10, max_steps=100, final_lr=final)
    for number in range(100):
        rise = (number + 1) / steps if number < steps else 1.0
        fall = SHAPES[schedule](max(number - steps, 0) / (100 - steps))
        assert math.isclose(made.lr(number), 2 * min(rise, 1.0) * (final + (1 - final) * fall))
    assert made.lr(99) > 2 * final


def test_wsd_is_constant_and_falls_at_the_end() -> None:
    """Longer runs have the steps before the fall in common: a linear warm-up and one rate."""
    longer, shorter = (
        plan(epochs=50, max_steps=steps, schedule="wsd", warmup=4, lr=1.0) for steps in (40, 20)
    )
    assert (longer.stem_steps, shorter.stem_steps) == (32, 16)
    assert [shorter.lr(number) for number in range(16)] == [0.25, 0.5, 0.75, *[1.0] * 13]
    assert all(longer.lr(number) == shorter.lr(number) for number in range(17))
    assert all(longer.step(number) == shorter.step(number) for number in range(20))
    assert [shorter.lr(number) for number in range(16, 20)] == [1.0, 0.75, 0.5, 0.25]
    ended = plan(
        epochs=50, max_steps=20, schedule="wsd", warmup=0, lr=1.0, final_lr=0.5, decay_share=0.5
    )
    assert [ended.lr(number) for number in (0, 10, 15, 19)] == [1.0, 1.0, 0.75, 0.55]


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_learned_tokens_are_those_of_every_step_so_far(batch_size: int) -> None:
    """Within an epoch, at its end and behind it; the last step of an epoch may be short."""
    made = plan(epochs=3, batch_size=batch_size)
    for steps in range(len(made) + 1):
        assert made.learned(steps) == sum(
            SLOTS[place] for number in range(steps) for place in made.step(number)
        )
