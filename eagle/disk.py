"""Writing to disk beside other processes: locks, files that are whole or not there, and their checksums."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from safetensors.torch import save_file
from torch import Tensor

LOCK = ".lock"


@contextmanager
def lock_folder(folder: str | Path, *, hold: bool = True) -> Iterator[None]:
    """Refuse to every other run to write a folder, which is made if need be, until the block or the process ends.

    Of the processes of one command the first holds the lock for all; the others pass `hold=False`.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        with _locked(folder / LOCK, folder, hold):
            yield
    finally:
        if hold and is_new:
            with suppress(OSError):  # it holds something
                folder.rmdir()


@contextmanager
def lock_path(path: str | Path, *, hold: bool = True) -> Iterator[None]:
    """Refuse to every other run to write a file, or a folder that is replaced whole, by a lock beside it."""
    path = Path(path)
    with _locked(path.with_name(path.name + LOCK), path, hold):
        yield


@contextmanager
def _locked(lock: Path, what: Path, hold: bool) -> Iterator[None]:
    file = _acquire(lock, what) if hold else None
    try:
        yield
    finally:
        if file is not None:
            lock.unlink(missing_ok=True)
            file.close()


def _acquire(lock: Path, what: Path) -> TextIO | None:
    """The lock file, locked by this process; None where nothing can be locked, which is said."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(
                    f"another run is writing {what} ({file.read() or 'it began just now'}): wait for its end, stop it, "
                    "or write somewhere else"
                ) from None
            if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                break
            file.close()  # of a run that has ended, and removed it
        except FileNotFoundError:  # a folder that another run has just removed, as it was empty
            continue
        except OSError as error:  # read-only, or a network's filesystem without locks
            if not lock.parent.is_dir():
                raise ValueError(f"{what} cannot be written: {error}") from None
            print(f"no lock on {what} ({error.strerror}): start no second run that writes it", file=sys.stderr)
            return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M}")
    file.flush()
    return file


def part_file(path: Path) -> Path:
    """A name of its own, beside a file, to write it under before it is whole."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file to write, in a folder that is there, which takes the place of `path` unless the block fails."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")
    if path.exists() and not path.is_file():  # a device or a pipe, as /dev/stdout
        yield path
        return
    path = path.resolve()  # a link stays, and the file that it leads to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_file(path)
    part.touch(exist_ok=False)
    mode = part.stat().st_mode  # as the umask has it; safetensors would leave a file that only its owner can read
    try:
        yield part
        part.chmod(mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: str | Path, pieces: Iterable[bytes]) -> None:
    """Write a file so that it is there whole or not at all."""
    with replacing(path) as part, part.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        if part.is_file():
            os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Write a text so that it is there whole or not at all."""
    write_whole(path, [text.encode()])


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file so that it is there whole or not at all, readable for whom the umask allows it."""
    with replacing(path) as part:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, part, metadata)


def apply_umask(folder: Path) -> None:
    """Give the files that another library wrote into a folder the mode of any new file."""
    probe = part_file(folder / "mode")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
