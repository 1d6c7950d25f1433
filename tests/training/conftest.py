"""What tests of training share: the tiny recipe over one store, which no test changes in place."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import prepared


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the store lies that `command` reads."""
    return tmp_path_factory.mktemp("features") / "store"


@pytest.fixture(scope="session")
def command(tiny_target_dir: Path, store_folder: Path) -> list[str]:
    """Return the arguments of a run of twelve steps: two epochs of 24 conversations, four a step, in fp32."""
    return prepared(tiny_target_dir, store_folder.parent)
