"""Work that is kept line by line in parts, one per process, until it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO


def is_whole(out: Path, settings: dict[str, Any]) -> bool:
    """Whether the answers are all there already; what was made with other settings is refused."""
    note, parts = Path(f"{out}.settings"), Path(f"{out}.parts")
    if out.exists() or parts.exists():
        made = json.loads(note.read_text()) if note.is_file() else {}
        if wrong := _differences(made, settings):
            raise ValueError(
                f"{out if out.exists() else parts} was made with other settings: {'; '.join(wrong)}. Give "
                f"regenerate.out another name, or remove {out}, {note} and {parts}"
            )
    return out.exists()


def _differences(made: Any, wanted: Any, where: str = "") -> list[str]:
    if isinstance(made, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*made, *wanted])
        return [line for key in keys for line in _differences(made.get(key), wanted.get(key), f"{where}.{key}")]
    return [] if made == wanted else [f"{where.lstrip('.')} was {made!r}, is {wanted!r}"]


def begin(out: Path, settings: dict[str, Any], index: int) -> None:
    """Make room for the parts, and note what makes them."""
    Path(f"{out}.parts").mkdir(parents=True, exist_ok=True)
    _replace(Path(f"{out}.settings"), [json.dumps(settings, indent=1).encode()], index)


def _replace(path: Path, lines: Iterable[bytes], index: int = 0) -> None:
    half = path.with_name(f"{path.name}.half-{index}")
    with half.open("wb") as file:
        file.writelines(lines)
    os.replace(half, path)


def finished(out: Path) -> dict[str, tuple[Path, int]]:
    """Where the line of each finished conversation begins; what a killed run left half is none."""
    found = {}
    for path in sorted(Path(f"{out}.parts").glob("part-*.jsonl")):
        with path.open("rb") as file:
            offset = 0
            for line in file:
                try:
                    found[json.loads(line)["id"]] = (path, offset)
                except ValueError:
                    print(f"{path}: the line at byte {offset} is damaged; its conversation is answered again")
                offset += len(line)
    return found


def open_part(out: Path, index: int) -> TextIO:
    """This process's part, to be appended to, without the half line that a killed run may have left."""
    path = Path(f"{out}.parts") / f"part-{index:05d}.jsonl"
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return path.open("a", encoding="utf-8")


def lines_of(out: Path, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The finished lines of these conversations, in their order."""
    places = finished(out)
    files = {path: path.open("rb") for path, _ in places.values()}
    for name in names:
        if name in places:
            path, offset = places[name]
            files[path].seek(offset)
            yield json.loads(files[path].readline())
    for file in files.values():
        file.close()


def put_together(out: Path, names: list[str]) -> None:
    """All records in source order, in one file that is whole from its first moment; the parts go."""
    records = (line["record"] for line in lines_of(out, names) if line["record"])
    _replace(out, ((json.dumps(record) + "\n").encode() for record in records))
    for path in Path(f"{out}.parts").iterdir():
        path.unlink()
    Path(f"{out}.parts").rmdir()
