"""A target that says something whatever a training run came to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle import Target


@pytest.fixture(scope="session")
def repeating_target(eight_token_dir: Path) -> Target:
    """A random target that says eight tokens in turn and never ends."""
    return Target.load(eight_token_dir, dtype=torch.float32)
