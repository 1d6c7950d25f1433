"""Intervals against closed forms, a naive loop, and data whose true figure is known."""

from __future__ import annotations

import random
from math import inf, sqrt
from statistics import NormalDist, mean, quantiles, stdev

import pytest
from scipy.stats import t as student

from eval.result_files.statistics import Row, _tail, estimate, estimate_difference, interval, ratio


def conversations(number: int, turns: int, spread: float, seed: int) -> dict[int, list[Row]]:
    """Tokens and cycles of made-up answers: 2 tokens a cycle on average, `spread` apart between conversations."""
    drawn = random.Random(seed)
    rows: dict[int, list[Row]] = {}
    for conversation in range(number):
        rate = 2 + drawn.gauss(0, spread)
        rows[conversation] = [(rate * 20 + drawn.gauss(0, 2), 20) for _ in range(turns)]
    return rows


def apart(rows: dict[int, list[Row]]) -> dict[int, list[Row]]:
    """The same rows as if each were a conversation of its own."""
    return dict(enumerate([row] for turns in rows.values() for row in turns))


def share_covered(clustered: bool, repeats: int = 800) -> float:
    """How often the interval holds the true 2."""
    held = 0
    for seed in range(repeats):
        rows = conversations(8, 6, 0.3, seed)
        low, high = interval(rows if clustered else apart(rows), draws=400, seed=seed)
        held += low <= 2 <= high
    return held / repeats


@pytest.mark.parametrize("number", [6, 8, 20, 80])
def test_the_tail_is_that_of_students_law(number: int) -> None:
    """The expansion of Student's quantile is close enough; few conversations have their tails cut less."""
    exact = NormalDist().cdf(-float(student.ppf(0.975, number - 1)) * sqrt(number / (number - 1)))
    assert _tail(number, 0.95) == pytest.approx(exact, rel=0.1)
    assert _tail(number, 0.95) < 0.025


def test_a_mean_has_students_interval() -> None:
    """Of a plain mean the interval is known in closed form."""
    drawn = random.Random(1)
    values = [drawn.gauss(5, 1) for _ in range(60)]
    low, high = interval({place: [(value, 1)] for place, value in enumerate(values)}, draws=20000)
    half = float(student.ppf(0.975, 59)) * stdev(values) / sqrt(60)
    assert (low, high) == pytest.approx((mean(values) - half, mean(values) + half), abs=0.06 * half)


def test_an_interval_is_that_of_a_naive_loop() -> None:
    """Whole conversations are drawn with replacement, and their rows pooled before the ratio is taken."""
    rows, drawn = conversations(15, 3, 0.5, 3), random.Random(0)
    rows[0] *= 4  # conversations differ in length
    found = []
    for _ in range(6000):
        pooled = [row for name in drawn.choices(list(rows), k=len(rows)) for row in rows[name]]
        found.append(sum(row[0] for row in pooled) / sum(row[1] for row in pooled))
    tail = NormalDist().cdf(-float(student.ppf(0.975, 14)) * sqrt(15 / 14))
    cuts = quantiles(found, n=1000)
    naive = cuts[round(1000 * tail) - 1], cuts[round(1000 * (1 - tail)) - 1]
    assert interval(rows, draws=20000) == pytest.approx(naive, abs=0.06 * (naive[1] - naive[0]))


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say() -> None:
    """With but eight conversations 92 to 97% hold the truth; were their rows taken as independent, few would."""
    assert 0.92 <= share_covered(clustered=True) <= 0.97
    assert share_covered(clustered=False) < 0.8


def test_a_clustered_interval_is_wider() -> None:
    """Six turns of one conversation are not six conversations."""
    rows = conversations(20, 6, 0.3, 0)
    (low, high), (naive_low, naive_high) = interval(rows), interval(apart(rows))
    assert high - low > 1.5 * (naive_high - naive_low)


def test_one_conversation_has_no_interval() -> None:
    """What never varied says nothing of how it varies, so nothing can be ranked by it."""
    one = estimate({"a": [(3, 1), (5, 1)]})
    assert one == (4, -inf, inf)
    assert one.sign == 0


def test_what_was_never_reached_does_not_break_an_interval() -> None:
    """A draw in which no cycle came so far has no rate, and is left out."""
    low, high = interval({place: [(place == 3, place >= 3)] for place in range(5)})
    assert (low, high) == (0, 1)


def test_pairs_cancel_what_makes_a_prompt_easy() -> None:
    """A small gain on every prompt is seen where the intervals of both overlap almost wholly."""
    rows = conversations(20, 2, 1.0, 5)
    first = {(name, turn): row for name, turns in rows.items() for turn, row in enumerate(turns)}
    second = {prompt: (tokens + 2, cycles) for prompt, (tokens, cycles) in first.items()}
    more, pairs = estimate_difference(first, second, lambda prompt: prompt[0])
    assert pairs == 40
    assert more == pytest.approx((0.1, 0.1, 0.1))
    assert more.sign == 1
    assert estimate_difference(second, first, lambda prompt: prompt[0]).estimate.sign == -1
    gained = interval({name: [second[name, turn] for turn in range(2)] for name in rows})
    assert gained[0] < ratio(
        [sum(row[0] for row in first.values()), sum(row[1] for row in first.values())]
    )


def test_no_difference_is_seldom_shown_where_there_is_none() -> None:
    """Two drafters of one law are ranked in about one of twenty cases."""
    wrong = 0
    for seed in range(300):
        drawn = random.Random(seed)
        first, second = {}, {}
        for prompt in ((conversation, turn) for conversation in range(12) for turn in range(2)):
            easy = 2 + 0.5 * random.Random(f"{seed} {prompt[0]}").gauss(0, 1)
            aside = 0.2 * random.Random(f"{seed} {prompt[0]} aside").gauss(
                0, 1
            )  # each suits one of the drafters
            first[prompt] = (20 * (easy + aside) + drawn.gauss(0, 3), 20)
            second[prompt] = (20 * (easy - aside) + drawn.gauss(0, 3), 20)
        wrong += (
            estimate_difference(
                first, second, lambda prompt: prompt[0], draws=400, seed=seed
            ).estimate.sign
            != 0
        )
    assert 0.02 <= wrong / 300 <= 0.085


def test_only_shared_prompts_are_compared() -> None:
    """What one of the two did not answer takes no part; sharing nothing is an error."""
    first, second = (
        {(1, 0): (4, 2), (2, 0): (6, 2), (3, 0): (99, 1)},
        {(1, 0): (8, 2), (2, 0): (6, 2), (4, 0): (9, 9)},
    )
    more, pairs = estimate_difference(first, second, lambda prompt: prompt[0])
    assert (more.value, pairs) == (14 / 4 - 10 / 4, 2)
    with pytest.raises(ValueError, match="share no prompt: 3 and 1 answers"):
        estimate_difference(first, {(7, 0): (1, 1)}, lambda prompt: prompt[0])
