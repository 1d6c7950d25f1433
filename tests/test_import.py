"""Importing the package is cheap, and every public name is where it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagle

TIMED = """
import time, torch, transformers
begun = time.process_time()
import eagle
print(time.process_time() - begun)
"""


@pytest.mark.slow
def test_import_takes_under_a_second_and_a_half() -> None:
    """Beyond what torch and transformers take; deepspeed and wandb stay out."""
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.5
    use = (
        "import sys, eagle; [getattr(eagle, n) for n in eagle.__all__]; print({*sys.modules} & {'wandb', 'deepspeed'})"
    )
    assert subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_public_names_resolve_and_others_are_refused() -> None:
    """Ten names or fewer, each at hand; a wrong one says which there are."""
    assert len(eagle.__all__) <= 10
    assert all(getattr(eagle, name) is not None for name in eagle.__all__)
    with pytest.raises(AttributeError, match="public names are Budget"):
        _ = eagle.Engine
