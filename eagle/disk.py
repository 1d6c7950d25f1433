"""Safe writing to disk: locks, atomic files and checksums."""

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
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

LOCK = ".lock"
ATTEMPTS = 1000  # to take a lock, before giving up: other runs may remove the file or its folder in between


class DiskError(ValueError):
    """A disk refused to write; the message says it in words."""


@contextmanager
def lock_folder(folder: str | Path, *, hold: bool = True, wait: bool = False) -> Iterator[None]:
    """Lock a folder, created if need be, against other runs that write it, until the block or the process ends.

    Of the processes of one command the first holds the lock for all; the others pass `hold=False`. With `wait` a run
    that holds it is waited for, else it is an error.
    """
    folder = Path(folder)
    with _hold_lock(folder / LOCK, folder, hold, wait):
        yield


@contextmanager
def lock_path(path: str | Path, *, hold: bool = True) -> Iterator[None]:
    """Lock a file, or a folder that is replaced whole, against other runs, by a lock file beside it.

    Of the processes of one command the first holds the lock for all; the others pass `hold=False`.
    """
    path = Path(path)
    with _hold_lock(path.with_name(path.name + LOCK), path, hold, wait=False):
        yield


@contextmanager
def _hold_lock(lock: Path, protected: Path, hold: bool, wait: bool) -> Iterator[None]:
    """Lock the file `lock`, and remove it at the end of the block; messages name the `protected` path.

    Args:
        lock: The lock file.
        protected: What it protects.
        hold: Whether this process locks; another of the same command does it otherwise.
        wait: Whether to wait for a run that has locked it; else that is an error.
    """
    if not hold:
        yield
        return
    # folders that this run makes are removed with the lock if it leaves nothing in them
    new_folders = [folder for folder in lock.parents if not folder.exists()]
    file = None
    try:
        file = _acquire(lock, protected, wait)
        yield
    finally:
        if file is not None:
            # removed while it is still locked: a run that waits for it sees that the path has another inode or none,
            # and opens a new file
            lock.unlink(missing_ok=True)
            file.close()
        with suppress(OSError):
            for folder in new_folders:
                folder.rmdir()


def _acquire(lock: Path, protected: Path, wait: bool) -> TextIO | None:
    """Return the lock file, open and locked by this process; None, with a warning, where the filesystem has no locks.

    The lock ends when the file is closed. `protected` is named in messages; `wait` is that of `_hold_lock`.
    """
    fault: OSError | None = None
    for _ in range(ATTEMPTS):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = _lock_file(lock, protected, wait)
            if file:
                return file
        except FileNotFoundError as error:
            # another run has just removed the empty folder, or no folder can be made there: try again
            fault = error
        except OSError as error:
            # the folder is read-only, or on a network's filesystem without locks
            if not lock.parent.is_dir():
                raise ValueError(f"{protected} cannot be written: {error}") from None
            print(
                f"no lock on {protected} ({error.strerror}): start no second run that writes it",
                file=sys.stderr,
            )
            return None
    reason = fault or "other runs begin and end there without a pause"
    raise ValueError(
        f"{protected} cannot be written: {reason}. Name a folder on a disk that can be written"
    )


def _lock_file(path: Path, protected: Path, wait: bool) -> TextIO | None:
    """Open and lock the file; None if a run that has ended removed it meanwhile, so that another must be opened.

    The file gets the process and the time of its lock, which other runs show. A lock that another run holds is waited
    for with `wait`, else a ValueError.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        if wait:
            print(
                f"waiting for the run that is writing {protected} ({file.read()})", file=sys.stderr
            )
            fcntl.flock(file, fcntl.LOCK_EX)
            # the other run removed the file before it freed the lock
            file.close()
            return None
        raise ValueError(
            f"another run is writing {protected} ({file.read() or 'it began just now'}): wait for its end, stop it, "
            "or write somewhere else"
        ) from None
    # the run that held the lock may have removed this file between opening and locking
    if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M}")
    file.flush()
    return file


def part_file(path: Path) -> Path:
    """Return a temporary path beside a file, under which it is written until it is complete."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` unless the block fails; its folder is created."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")
    # a device or a pipe, as /dev/stdout, is written to and not replaced
    if path.exists() and not path.is_file():
        yield path
        return
    # a symbolic link stays, and the file that it leads to is replaced
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_file(path)
    part.touch(exist_ok=False)
    # the mode that the umask gives, set again below: safetensors would leave a file that only its owner can read
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        os.replace(part, path)
    except OSError as error:
        if error.filename in (None, str(part)):  # a full disk names no file
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: str | Path, pieces: Iterable[bytes]) -> None:
    """Write a file atomically, and flush it to the disk."""
    with replacing(path) as part, part.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        # a device or a pipe, which `replacing` lets write directly, cannot be flushed to a disk
        if part.is_file():
            os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    write_whole(path, [text.encode()])


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file atomically, or what torch.save writes where the name ends in .pt or .bin."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(path) as part:
        try:
            if Path(path).suffix in (".pt", ".bin"):
                torch.save(tensors, part)
            else:
                save_file(tensors, part, metadata)
        # save_file and torch.save raise these on a full disk
        except (SafetensorError, RuntimeError) as error:
            raise DiskError(
                f"{path} cannot be written: {error}. Make room, or name a folder elsewhere"
            ) from error


@contextmanager
def open_tensors(path: str | Path) -> Iterator[Any]:
    """Open a safetensors file to read it; a file that is cut off, or is not safetensors, is refused by its name."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file: {error}. Make or fetch it anew"
        ) from None


def apply_umask(folder: Path) -> None:
    """Give all files in a folder the mode of a new file, whatever the library that wrote them chose."""
    # a new file shows the mode that the umask gives
    probe = part_file(folder / "mode")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def describe_bytes(count: float) -> str:
    """Return a number of bytes in words: three digits and a fitting unit, as `1.5 GB`."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        # as it will be printed: 999.7 rounds to 1000
        if float(f"{count:.3g}") < 1000:
            break
        count /= 1000
        unit = larger
    return f"{count:.3g} {unit}"
