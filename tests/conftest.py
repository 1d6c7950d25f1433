"""One tiny target, trained at a fraction of its steps, for the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle import Target

STEPS = 40


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target/` and `data/`, as `recipes/tiny/make_target.py` leaves it."""
    from recipes.tiny.make_target import make_target

    folder = tmp_path_factory.mktemp("tiny")
    make_target(folder, steps=STEPS, max_conversations=400)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """That target in fp32, shared by all tests: each `generate` begins anew."""
    return Target.load(tiny_target_dir / "target", dtype=torch.float32)
