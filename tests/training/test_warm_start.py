"""What the benchmark of warm starts reads off two runs."""

from __future__ import annotations

from typing import Any

import pytest

from bench.warm_start import dip, reached


def a_run(*lengths: float) -> dict[str, Any]:
    """A run that was validated every ten steps."""
    return {"curve": [{"step": 10 * number, "tree/tau": length} for number, length in enumerate(lengths)]}


@pytest.mark.parametrize(
    ("warm", "step", "worst"),
    [
        ((2.0, 2.2, 2.5, 2.4), 20, 0.2),
        ((2.5, 2.3, 2.6), 0, -0.2),
        ((2.0, 2.1, 2.3), None, 0.1),
    ],
)
def test_a_warm_start_is_read_against_the_cold_ones_end(
    warm: tuple[float, ...], step: int | None, worst: float
) -> None:
    """The first step that is as good as the cold start's last, not its best; and the worst against what was given."""
    cold = a_run(1.1, 2.9, 2.5)
    assert reached(cold, a_run(*warm), "tree/tau") == step
    assert dip(a_run(*warm), "tree/tau") == pytest.approx(worst)
