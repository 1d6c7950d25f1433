"""Blockwise heads, against the published formulas for one slot and one level at a time."""

# K levels, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.core.examples import Batch, collate
from eagle.drafters import settings_of
from eagle.drafters.levels.blockwise import Blockwise
from tests import single_slots
from tests.single_slots import LEVELS, distance_from_loop
from tests.unrolled_heads import SHAPE, SPANS, TAPS, Weights, computed, frozen_head, texts_of

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"inner_dim": 7},
    "tokens": {"loss": "tokens"},
}
STEPS = 60


def new_head(**settings: Any) -> Blockwise:
    """Return a head in fp64, all of whose weights differ from how they start."""
    head: Blockwise = single_slots.new_head(kind="blockwise", **settings)
    return head


@pytest.fixture
def batch() -> Batch:
    """Return sequences with answers of many tokens, of one, at the end, and of none."""
    return collate(texts_of(SPANS, torch.float64), TAPS)


def levels_of(
    weights: Weights,
    settings: Any,
    state: Tensor,
    tokens: Sequence[int],
) -> Iterator[Tensor]:
    """Yield [V], the logits of each level: y_k = x + (down relu(up x))_k."""
    hidden = (weights["up.weight"] @ state + weights["up.bias"]).clamp(min=0)
    width = len(state)
    for level in range(settings.levels):
        rows = slice(level * width, (level + 1) * width)
        change = weights["down.weight"][rows] @ hidden + weights["down.bias"][rows]
        yield weights["frozen"] @ (state + change)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """Up to the rounding of the weights of slots, which are fp32."""
    assert distance_from_loop(levels_of, new_head(**VARIANTS[variant])) < 1e-6


def test_levels_out_of_order_are_seen() -> None:
    """The comparison fails if each level reads the state of the next one."""
    head: Any = new_head()
    read_token = head.read_token

    def read_next_level(
        level: int,
        state: Tensor,
        *given: Any,
    ) -> Tensor:
        read = read_token(level, state, *given)
        return read if level else read.roll(-SHAPE.hidden_size, -1)

    head.read_token = read_next_level
    assert distance_from_loop(levels_of, head) > 1e-3


def sampled_losses(batch: Batch) -> dict[int, list[Weights]]:
    """Return loss and gradients of steps with different seeds, by the level that is trained."""
    head = new_head(drawn=True)
    target_head = frozen_head(torch.float64)
    found: dict[int, list[Weights]] = {level: [] for level in range(LEVELS)}
    for seed in range(STEPS):
        torch.manual_seed(seed)
        terms = head(batch, target_head)
        # the same seed samples the same level
        torch.manual_seed(seed)
        step = computed(head, batch, target_head)
        assert terms["total"] == step["total"]
        assert len(terms) == 1 + LEVELS
        (level,) = [level for level in range(LEVELS) if terms[f"draft_probs/{level}"] > 0]
        assert terms["total"] == terms[f"draft_probs/{level}"]
        found[level].append(step)
    return found


def test_a_sampled_level_is_all_levels_in_expectation(batch: Batch) -> None:
    """Levels are sampled evenly, and the mean over them is the step of all levels."""
    losses = sampled_losses(batch)
    for steps in losses.values():
        # 20 of 60 are expected, with a standard deviation of 3.7
        assert 10 < len(steps) < 30
        for step in steps:
            assert all(torch.equal(step[name], steps[0][name]) for name in step)
    for name, whole in computed(new_head(), batch, frozen_head(torch.float64)).items():
        by_level = torch.stack([steps[0][name] for steps in losses.values()])
        torch.testing.assert_close(
            by_level.mean(0),
            whole,
            rtol=1e-12,
            atol=1e-12,
        )
        assert not any(torch.allclose(one_level, whole) for one_level in by_level)


def test_a_head_that_does_not_train_samples_nothing(batch: Batch) -> None:
    """Its loss is that of all levels, whatever the seed."""
    target_head = frozen_head(torch.float64)
    sampled = new_head(drawn=True).eval()(batch, target_head)
    whole = new_head().eval()(batch, target_head)
    assert sampled.keys() == whole.keys()
    assert all(torch.equal(sampled[name], whole[name]) for name in whole)


def test_a_new_head_predicts_the_targets_next_token(batch: Batch) -> None:
    """Every level gives the target's own logits of its state."""
    head = Blockwise.for_target(settings_of({"kind": "blockwise"}, "test"), SHAPE).double()
    slot_indices, hidden = head.level_states(batch, frozen_head(torch.float64))
    target_hidden = batch.select_taps((-1,))[slot_indices, 0]
    assert all(torch.equal(state, target_hidden) for state in hidden)
