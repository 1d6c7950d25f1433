"""A method in a file outside: trained on two processes, measured, compared, saved and loaded by commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outside_methods import go_the_road

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_method_outside_goes_the_road_of_a_method_inside(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Every process of every verb knows the file; the installed wheel goes the same road in test_packaging.py."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny").symlink_to(tiny_target_dir)

    def run(line: str) -> tuple[int, str]:
        # the package from this checkout, the method from the folder
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "eagle", *shlex.split(line)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    go_the_road(run, tmp_path)
