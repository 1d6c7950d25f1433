"""What tests of stores share."""

from __future__ import annotations

import pytest
import torch

from eagle import Target
from tests.families import build


@pytest.fixture(scope="module")
def target() -> Target:
    """A random Llama of four layers."""
    torch.manual_seed(5)
    return Target(build("llama"))
