"""The norm of all heads: the same with and without a gradient, and of weights and rows of two dtypes without a word."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from eagle.drafters.parts.decoder_block import Norm


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Else torch gives each of its own once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def test_a_norm_of_two_dtypes_warns_of_nothing(
    every_warning: None, recwarn: pytest.WarningsRecorder
) -> None:
    """As in validation in bf16, whose weights stay fp32."""
    norm = Norm(8, 1e-6)
    for of_weights, of_rows in product((torch.float32, torch.bfloat16), repeat=2):
        norm = norm.to(of_weights)
        torch.manual_seed(0)
        x = torch.randn(3, 8).to(of_rows)
        learned = norm(x)
        with torch.no_grad():
            torch.testing.assert_close(norm(x), learned.detach())
    assert not [str(warning.message) for warning in recwarn]
