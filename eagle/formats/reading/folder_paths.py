"""The paths of an untrusted folder: no link leads out of it, and nothing is read but plain files."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path

CONFIG_BYTES = 1_000_000  # the longest config or recipe
PLAIN = re.compile(r"[\w][\w.\-+]*")  # a name that leads nowhere else


def folder_at(path: str | Path) -> Path:
    """The folder at a path, which must contain no links."""
    try:
        folder = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"no folder at {path}: {error}; expected one with config.json and weights") from None
    if not folder.is_dir():
        raise ValueError(f"{path} is no folder: expected one with config.json and weights")
    return folder


def check_empty(out: str | Path, source: Path) -> None:
    """Refuse an output folder that is not empty, or that overlaps its source."""
    folder = Path(out)
    aside = folder.with_name(folder.name + ".part")
    for path in (folder, aside):
        if path.is_symlink() or (path.exists() and (path is aside or not path.is_dir() or any(path.iterdir()))):
            raise ValueError(f"{path} is there already: name a new folder, or take it away")
    real = folder.resolve()
    if real.is_relative_to(source) or source.is_relative_to(real):
        raise ValueError(f"{out} lies in {source}, or around it: name another folder for the head")


def plain_file(folder: Path, name: str) -> Path:
    """A regular file of a folder; links may lead only inside it or into the surrounding hub cache."""
    if not PLAIN.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in {folder}: expected letters, digits, dots and dashes")
    real = resolve_inside(folder / name, folder)
    if not stat.S_ISREG(real.stat().st_mode):
        raise ValueError(f"{folder / name} is not a file: expected one with data")
    return real


def resolve_inside(path: Path, folder: Path) -> Path:
    """Where a path really lies, which must be in a folder, or in the hub's cache around it."""
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not any(real.is_relative_to(parent) for parent in (root, *_cache_roots(root))):
        raise ValueError(f"{path} is a link to {real}, outside of the folder: copy the file there if it is meant")
    return real


def check_links(folder: Path) -> None:
    """Refuse a folder of which an entry is a link that leads outside."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink():
            resolve_inside(path, folder)


def read_text(folder: Path, name: str, most: int) -> str:
    """The text of a file in a folder, of so many bytes at most."""
    path, shown = plain_file(folder, name), folder / name
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{shown} has {size:,} bytes, expected at most {most:,}: none is that long")
    try:
        return read_bytes(path, size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is no text: {error}; copy it again") from None


def _cache_roots(folder: Path) -> Iterable[Path]:
    """The folders of the hub's cache to which its snapshots link."""
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            yield parent.parent / "blobs"


def has(folder: Path, name: str) -> bool:
    """Whether a folder has an entry of this name, of any kind."""
    return (folder / name).exists() or (folder / name).is_symlink()


def read_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def check_not_hollow(path: Path, shown: Path) -> None:
    """Refuse sparse files: a long file without data on disk would fill memory with zeros."""
    size = path.stat().st_size
    if getattr(path.stat(), "st_blocks", size) * 512 * 8 < size - 4096:
        raise ValueError(f"{shown} says to have {size:,} bytes, and almost none are on the disk: copy it again")
