"""Expected tokens of a chain, against the figures that papers print and an enumeration of all that may happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest

from eval.page.page_acceptance import expected_tokens, tokens_of_rates
from tests.enumerate_law import Chance, every_outcome

# both ends, where formulas divide by zero, and rates between
RATES = (0.0, 0.1, 0.37, 0.5, 0.8, 0.95, 1.0)


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed"),
    [
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ],
)
def test_the_first_papers_table(alpha: float, gamma: int, speed: float) -> None:
    """With a free draft, tokens per forward are the speedup that Leviathan et al. print."""
    assert round(expected_tokens(alpha, gamma), 2) == speed


def test_figures_printed_elsewhere() -> None:
    """One source prints tokens per step, cut off instead of rounded."""
    assert math.floor(1000 * expected_tokens(0.7, 3)) == 2532
    assert math.floor(1000 * expected_tokens(0.8, 4)) == 3361


def count_tokens(chance: Chance, rates: Sequence[float]) -> int:
    """Return the tokens of a chain: it ends at the first refusal, and the target always adds one."""
    for i, rate in enumerate(rates):
        if not chance.coin(rate):
            return i + 1
    return len(rates) + 1


def enumerate_tokens(rates: Sequence[float]) -> float:
    """Return the expected tokens of a chain over everything that its coins may say."""
    outcomes = every_outcome(partial(count_tokens, rates=rates))
    return sum(count * prob for count, prob in outcomes)


@pytest.mark.parametrize("alpha", RATES)
def test_expected_tokens_are_those_of_every_outcome(alpha: float) -> None:
    """Both forms agree with an enumeration for chains of up to five tokens."""
    for gamma in range(6):
        rates = [alpha] * gamma
        expected = pytest.approx(enumerate_tokens(rates), abs=1e-12)
        assert expected_tokens(alpha, gamma) == expected
        assert tokens_of_rates(rates) == expected


def test_rates_by_position_need_not_be_equal() -> None:
    """Each position has its own rate, given that the one before was accepted."""
    rates = [0.9, 0.5, 0.7]
    assert tokens_of_rates(rates) == pytest.approx(enumerate_tokens(rates))


@pytest.mark.parametrize(("alpha", "gamma"), [(1.2, 1), (-0.1, 1), (0.5, -1)])
def test_what_is_no_rate_is_refused(alpha: float, gamma: int) -> None:
    """The error says that a probability was expected."""
    with pytest.raises(ValueError, match="expected a probability"):
        expected_tokens(alpha, gamma)
