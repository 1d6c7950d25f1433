"""README's first two commands work in a clean clone: an environment of its own, no cache, nothing built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, commands

KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
)  # and how packages are reached; nothing of this run's environment
PACKAGES = ("PIP_", "HTTP", "http", "SSL_", "REQUESTS_")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last commit, in a folder of its own."""
    folder = tmp_path_factory.mktemp("clone") / "eagle"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "last"),
    [("make demo", "Lossless: yes"), ("make test", " passed")],
    ids=["demo", "test"],
)
def test_the_first_commands_run_in_a_clean_clone(line: str, last: str, clone: Path) -> None:
    """The main job, then the tests; the second uses what the first has installed."""
    assert line in commands(ROOT / "README.md")[:2]
    # what a new shell of the reader's would have
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith(PACKAGES)
    }
    environment["PYTHON"] = os.path.realpath(sys.executable)
    # the demo without a download
    environment["DEMO"] = "--tiny"
    done = subprocess.run(
        line.split(),
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert last in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
