"""Where nothing can be written, a lock says so at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle.disk import lock_folder, lock_path

LOCK = """
import sys
from eagle.disk import lock_folder, lock_path
for lock in (lock_folder, lock_path):
    try:
        lock(sys.argv[1]).__enter__()
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="folders cannot be made in /proc, not even by root"
)
def test_a_folder_that_cannot_be_made_is_named() -> None:
    """Both locks end instead of trying for ever; in a process of its own, which is ended if one does not."""
    command = [sys.executable, "-c", LOCK, "/proc/nope/features"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("/proc/nope/features cannot be written: [Errno 2]") == 2, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("lock", [lock_folder, lock_path])
def test_a_path_under_a_file_is_named(lock: object, tmp_path: Path) -> None:
    """A regular file where a folder should be."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written: .*Not a directory"):
        with lock(tmp_path / "file/deeper/features"):  # type: ignore[operator]
            pass


def test_a_folder_that_vanishes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another run removes it that found it empty, between the two steps of this one."""
    mkdir, seen = Path.mkdir, []

    def make_and_lose(self: Path, *args: object, **options: object) -> None:
        mkdir(self, *args, **options)  # type: ignore[arg-type]
        if len(seen) < 5:
            seen.append(self)
            os.rmdir(self)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with lock_folder(tmp_path / "store"):
        assert (tmp_path / "store/.lock").exists()
    assert len(seen) == 5
