"""Where nothing can be written, a lock says so at once.

tests/test_wrong_inputs.py has whole commands there, and in folders that cannot be made.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle.disk import describe_bytes, lock_folder, lock_path


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
    """Another run may remove a folder that it finds empty."""
    mkdir = Path.mkdir
    lost: list[Path] = []

    def make_and_lose(self: Path, *args: object, **options: object) -> None:
        mkdir(self, *args, **options)  # type: ignore[arg-type]
        # another run removes it between the two steps of this one
        if len(lost) < 5:
            lost.append(self)
            os.rmdir(self)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with lock_folder(tmp_path / "store"):
        assert (tmp_path / "store/.lock").exists()
    assert len(lost) == 5


@pytest.mark.parametrize(
    ("count", "words"),
    [(999, "999 bytes"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (15e11, "1.5 TB")],
)
def test_bytes_are_in_the_unit_of_what_is_printed(count: float, words: str) -> None:
    """A value that rounds up to a thousand of a unit is one of the next."""
    assert describe_bytes(count) == words
