"""The MLP speculator, against the published formulas for one slot and one stage at a time."""

# H the target's width, D that of a stage, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.drafters import settings_of
from eagle.drafters.levels.mlp_speculator import MlpSpeculator
from tests import single_slots
from tests.single_slots import distance_from_loop
from tests.unrolled_heads import SHAPE, Weights

EPS = 1e-6
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"inner_dim": 20, "scale_input": True},
    "tied": {
        "tie_weights": True,
        "inner_dim": 56,
        "loss": "tokens",
    },
    "tied and scaled": {"tie_weights": True, "scale_input": True},
}


def new_head(**settings: Any) -> MlpSpeculator:
    """Return a head in fp64, all of whose weights differ from how they start."""
    head: MlpSpeculator = single_slots.new_head(kind="mlp_speculator", **settings)
    return head


def stages(
    weights: Weights,
    settings: Any,
    state: Tensor,
    tokens: Sequence[int],
) -> Iterator[Tensor]:
    """Yield [V], the logits of each stage: gelu(ln(w P s + e E x))."""
    inner = len(weights["proj.0.weight"])
    # the weights of state and token, such that their sum keeps its variance
    w = 0.5 ** (0.5 / settings.levels)
    e = math.sqrt((1 - w**2) * inner / 2)
    if settings.scale_input:
        state = state / (state.square().mean() + EPS).sqrt() / math.sqrt(2)
    for level, token in enumerate(tokens[: settings.levels]):
        stage = 0 if settings.tie_weights else level
        # the first projection is from the target's width, and is never shared
        project = min(level, 1) if settings.tie_weights else level
        embedded = weights[f"emb.{stage}.weight"][token]
        mixed = weights[f"proj.{project}.weight"] @ state + e / w * embedded
        # a root mean square norm with a shift: w cancels
        normed = mixed / (mixed.square().mean() + EPS).sqrt()
        normed = normed * weights[f"ln.{stage}.weight"] + weights[f"ln.{stage}.bias"]
        state = normed * (1 + torch.erf(normed / math.sqrt(2))) / 2
        yield weights[f"head.{stage}.weight"] @ state


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """Up to the rounding of the weights of slots, which are fp32."""
    assert distance_from_loop(stages, new_head(**VARIANTS[variant])) < 1e-6


def test_stages_out_of_order_are_seen() -> None:
    """The comparison fails if the last two stages change places."""
    head: Any = new_head(**VARIANTS["narrow"])
    read_token = head.read_token

    def read_swapped(level: int, *given: Any) -> Tensor:
        return read_token((0, 2, 1)[level], *given)

    head.read_token = read_swapped
    assert distance_from_loop(stages, head) > 1e-4


def test_first_weights_are_as_published() -> None:
    """Matrices have the variance 1 / D, norms are one and have no shift."""
    torch.manual_seed(0)
    settings = settings_of({"kind": "mlp_speculator", "inner_dim": 64}, "test")
    head = MlpSpeculator.for_target(settings, SHAPE)
    for module in (*head.emb, *head.proj, *head.head):
        assert module.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
        assert abs(module.weight.mean().item()) < 0.01
    for norm in head.ln:
        assert norm.weight.eq(1).all()
        assert norm.bias.eq(0).all()
    # as wide as the target where the recipe gives no width
    assert new_head().proj[0].weight.shape == (SHAPE.hidden_size, SHAPE.hidden_size)
