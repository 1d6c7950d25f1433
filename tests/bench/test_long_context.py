"""Costs at long contexts: what is timed is what is meant, and the closed form finds crossings that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import long_context
from eagle.core.tree import DraftTree

CONTEXTS = (64, 128, 256, 512)
# seconds of a forward, a draft and a verification: a + b * context
COSTS = {"target 1": (4.0, 0.05), "target 4": (5.0, 0.05), "sparse 3": (14.0, 0.0), "full 3": (12.0, 0.15)}


def seconds_of(costs: dict[str, tuple[float, float]]) -> long_context.Seconds:
    """Times that lie on these lines."""
    return {name: {at: base + slope * at for at in CONTEXTS} for name, (base, slope) in costs.items()}


def crossing(other: str, rate: float, lines: dict[str, Any]) -> float | None:
    """From where on the sparse cache is the faster one."""
    sides = [long_context.per_token(lines, name, rate, 3) for name in ("sparse", other)]
    return long_context.crossing(*sides, CONTEXTS)


@pytest.mark.parametrize("rate", [0.6, 0.7])
def test_crossings_are_those_of_the_lines(rate: float) -> None:
    """(14 + 5 + 0.05 C) / E = 4 + 0.05 C without a draft, and 14 = 12 + 0.15 C for a draft by all columns."""
    seconds, tokens = seconds_of(COSTS), 1 + rate + rate**2 + rate**3
    expected = (19 / tokens - 4) / (0.05 - 0.05 / tokens)
    for lines in (long_context.fit_lines(seconds, (64, 512)), long_context.between_contexts(seconds)):
        assert crossing("none", rate, lines) == pytest.approx(expected, rel=2e-3)
        assert crossing("full", rate, lines) == 0  # 14 < 12 + 0.15 * 64
    slow = long_context.fit_lines(seconds_of(COSTS | {"sparse 3": (400.0, 0.0)}), CONTEXTS)
    assert crossing("none", rate, slow) is None


def test_a_crossing_that_is_not_on_the_line_is_seen() -> None:
    """Measured costs that bend are not those of a line: what is predicted then differs from what is measured."""
    seconds = seconds_of(COSTS)
    for place in (128, 256):
        seconds["target 1"][place] *= 0.8
    predicted, measured = (
        crossing("none", 0.7, lines)
        for lines in (long_context.fit_lines(seconds, (64, 512)), long_context.between_contexts(seconds))
    )
    assert predicted and measured and measured > 1.05 * predicted


@pytest.mark.slow
def test_all_actions_are_timed_behind_so_much_text() -> None:
    """Forwards and drafts stand where they would behind a text that was read."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 64}
    target = long_context.random_target(**sizes, num_attention_heads=4, num_key_value_heads=2)
    state = long_context.hold_text(target, 40, 64)
    assert state.length(0) == 40 and all(rows.buffer[0, 0, :40].any() for rows in state.cache.buffers[:6])
    assert state.read({0: DraftTree.chain([1, 1])})[0].positions == [41, 42]
    for name, drafter in long_context.drafters_of(target).items():
        propose = long_context.drafting(drafter, state, 64)
        assert [len(propose(3)[0]), len(propose(7)[0])] == [4, 8], name
    with torch.inference_mode():
        seconds = long_context.measure(target, (32, 64), 1)
    assert {name.rpartition(" ")[0] for name in seconds} == {"target", *long_context.drafters_of(target)}
    rows = list(long_context.crossings(seconds, (32, 64)))
    found: Any = {"seconds": seconds, "crossings": rows, "machine": {}}
    assert len(rows) == 2 * 2 * (2 * 4 + 16) and "| EAGLE-1 7 |" in long_context.table(found)
