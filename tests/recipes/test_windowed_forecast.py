"""The forecast counts what a window reads: less to compute, and the memory of a text either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle.drafters import settings_of
from recipes.forecast import empty_head, token_flops, training_bytes
from tests.unrolled_heads import SHAPE


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", [{"kind": "eagle1"}, {"kind": "eagle3", "steps": 2}], ids=["eagle1", "eagle3"]
)
def test_a_window_makes_attention_linear(section: dict[str, Any]) -> None:
    """Flops of a token stop growing with the text; without a window they go on."""
    windows = (None, {"sinks": 1, "recent": 32})
    whole, windowed = (
        empty_head(settings_of({**section, "window": window}, "test"), SHAPE) for window in windows
    )
    grown = [
        token_flops(head, SHAPE, 1024) / token_flops(head, SHAPE, 256) for head in (whole, windowed)
    ]
    assert grown[1] < 1.05 < grown[0]
    held = [training_bytes(head, SHAPE, [512], torch.float32, 1) for head in (whole, windowed)]
    assert held[0] == held[1]
