"""Intervals against closed forms, a naive loop, and data whose true figure is known."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from math import inf, sqrt
from statistics import NormalDist, mean, quantiles, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from eval.result_files.statistics import Row, _tail, estimate, estimate_difference, interval, ratio

Conversations = Mapping[Hashable, list[Row]]
Answers = dict[tuple[int, int], Row]  # by conversation and turn


def draw_conversations(count: int, turns: int, spread: float, seed: int) -> dict[int, list[Row]]:
    """Return tokens and cycles of made-up answers: 2 tokens a cycle, with this spread between conversations."""
    generator = random.Random(seed)
    rows: dict[int, list[Row]] = {}
    for conversation in range(count):
        rate = 2 + generator.gauss(0, spread)
        rows[conversation] = [(rate * 20 + generator.gauss(0, 2), 20) for _ in range(turns)]
    return rows


def split(rows: Mapping[int, list[Row]]) -> dict[int, list[Row]]:
    """Return the same rows, each as a conversation of its own."""
    apart = []
    for turns in rows.values():
        apart += [[row] for row in turns]
    return dict(enumerate(apart))


def compare(first: Answers, second: Answers) -> Any:
    """Compare two drafters by conversation."""
    return estimate_difference(first, second, lambda prompt: prompt[0])


def exact_tail(count: int) -> float:
    """Return the tail of the bootstrap that gives Student's 95% interval (Hesterberg 2015)."""
    quantile = float(student.ppf(0.975, count - 1))
    return NormalDist().cdf(-quantile * sqrt(count / (count - 1)))


@pytest.mark.parametrize("count", [6, 8, 20, 80])
def test_the_tail_is_that_of_students_distribution(count: int) -> None:
    """The expansion of Student's quantile is close; with few conversations less of the tails is cut."""
    assert _tail(count) == pytest.approx(exact_tail(count), rel=0.1)
    assert _tail(count) < 0.025


def test_a_mean_has_students_interval() -> None:
    """The interval of a plain mean is known in closed form."""
    # independent values: each is a conversation of its own
    generator = random.Random(1)
    values = [generator.gauss(5, 1) for _ in range(60)]
    rows: dict[int, list[Row]] = {i: [(value, 1)] for i, value in enumerate(values)}
    half = float(student.ppf(0.975, 59)) * stdev(values) / sqrt(60)
    expected = (mean(values) - half, mean(values) + half)
    assert interval(rows, draws=20000) == pytest.approx(expected, abs=0.06 * half)


def test_an_interval_is_that_of_a_naive_loop() -> None:
    """Whole conversations are drawn with replacement, and their rows pooled before the ratio is taken."""
    rows = draw_conversations(15, 3, 0.5, 3)
    # conversations differ in length, so that pooling is not the mean of ratios
    rows[0] *= 4
    generator = random.Random(0)
    ratios = []
    for _ in range(6000):
        tokens = 0.0
        cycles = 0.0
        for name in generator.choices(list(rows), k=len(rows)):
            tokens += sum(row[0] for row in rows[name])
            cycles += sum(row[1] for row in rows[name])

        ratios.append(tokens / cycles)

    cuts = quantiles(ratios, n=1000)
    tail = round(1000 * exact_tail(15))
    low, high = cuts[tail - 1], cuts[-tail]

    assert interval(rows, draws=20000) == pytest.approx((low, high), abs=0.06 * (high - low))


def test_a_clustered_interval_is_wider() -> None:
    """Six turns of one conversation are not six conversations."""
    # the spread between conversations is much larger than within
    rows = draw_conversations(20, 6, 0.3, 0)
    low, high = interval(rows)
    naive_low, naive_high = interval(split(rows))
    assert high - low > 1.5 * (naive_high - naive_low)


def test_one_conversation_has_no_interval() -> None:
    """One conversation does not show how conversations vary, so nothing is ranked by it."""
    one = estimate({"a": [(3, 1), (5, 1)]})
    assert one == (4, -inf, inf)
    assert one.sign == 0


def test_what_was_never_reached_does_not_break_an_interval() -> None:
    """A resample in which no cycle reached the level has no rate, and is left out."""
    assert interval({i: [(i == 3, i >= 3)] for i in range(5)}) == (0, 1)


def test_pairs_cancel_what_makes_a_prompt_easy() -> None:
    """A small gain on every prompt is shown where the intervals of both drafters overlap."""
    rows = draw_conversations(20, 2, 1.0, 5)
    first: Answers = {}
    second: Answers = {}
    gained: dict[int, list[Row]] = {}
    for name, turns in rows.items():
        gained[name] = [(tokens + 2, cycles) for tokens, cycles in turns]
        first |= {(name, turn): row for turn, row in enumerate(turns)}
        second |= {(name, turn): row for turn, row in enumerate(gained[name])}

    more, pairs = compare(first, second)

    assert pairs == 40
    assert more == pytest.approx((0.1, 0.1, 0.1))
    assert more.sign == 1
    assert compare(second, first).estimate.sign == -1

    # the interval of one drafter alone holds the mean of the other
    mean_of_first = ratio([sum(column) for column in zip(*first.values(), strict=True)])
    assert interval(gained)[0] < mean_of_first


def test_equal_drafters_are_seldom_ranked() -> None:
    """Two drafters with one expected length are ranked in about one of twenty cases."""
    ranked = 0
    for seed in range(300):
        generator = random.Random(seed)
        first: Answers = {}
        second: Answers = {}
        for conversation in range(12):
            mean_length = 2 + 0.5 * generator.gauss(0, 1)
            # each conversation suits one of the drafters
            gap = 0.2 * generator.gauss(0, 1)
            for turn in range(2):
                prompt = (conversation, turn)
                first[prompt] = (20 * (mean_length + gap) + generator.gauss(0, 3), 20)
                second[prompt] = (20 * (mean_length - gap) + generator.gauss(0, 3), 20)

        ranked += compare(first, second).estimate.sign != 0

    assert 0.02 <= ranked / 300 <= 0.085


def test_only_shared_prompts_are_compared() -> None:
    """An answer of one drafter alone takes no part; sharing no prompt is an error."""
    first: Answers = {(1, 0): (4, 2), (2, 0): (6, 2), (3, 0): (99, 1)}
    second: Answers = {(1, 0): (8, 2), (2, 0): (6, 2), (4, 0): (9, 9)}
    more, pairs = compare(first, second)
    assert (more.value, pairs) == (14 / 4 - 10 / 4, 2)
    with pytest.raises(ValueError, match="share no prompt: 3 and 1 answers"):
        compare(first, {(7, 0): (1, 1)})
