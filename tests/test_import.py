"""Importing the package is cheap, and every public name is where it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagle

HEAVY = {"datasets", "deepspeed", "pandas", "pyarrow", "wandb"}


@pytest.mark.slow
def test_import_loads_no_heavy_package() -> None:
    """Not even with every public name."""
    # in a process of its own, as this one has imported everything
    use = f"import sys, eagle; [getattr(eagle, n) for n in eagle.__all__]; print({{*sys.modules}} & {HEAVY})"
    done = subprocess.run(
        [sys.executable, "-c", use],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_public_names_resolve_and_others_are_refused() -> None:
    """Eleven names or fewer, each at hand; a wrong one says which there are."""
    assert len(eagle.__all__) <= 11
    assert all(getattr(eagle, name) is not None for name in eagle.__all__)
    with pytest.raises(AttributeError, match="public names are Budget"):
        _ = eagle.Engine
