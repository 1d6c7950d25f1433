"""Work that is kept line by line in parts, one per process, until it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from eagle.data.store import differences
from eagle.disk import write_whole


def is_whole(out: Path, settings: dict[str, Any]) -> bool:
    """Whether the answers are all there already; what was made with other settings is refused."""
    note, parts = Path(f"{out}.settings"), Path(f"{out}.parts")
    if out.exists() or parts.exists():
        try:
            made = json.loads(note.read_text()) if note.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{note} is damaged ({error}): remove {out}, {note} and {parts}") from None
        if wrong := [f"{name} was {old!r}, is {new!r}" for name, old, new in differences(made, settings)]:
            raise ValueError(
                f"{out if out.exists() else parts} was made with other settings: {'; '.join(wrong)}. Give "
                f"regenerate.out another name, or remove {out}, {note} and {parts}"
            )
    return out.exists()


def begin(out: Path, settings: dict[str, Any]) -> None:
    """Note what makes the parts, then make room for them: parts without such a note are refused."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(f"{out}.settings"), [json.dumps(settings, indent=1).encode()])
    Path(f"{out}.parts").mkdir(exist_ok=True)


def finished(out: Path) -> dict[str, tuple[Path, int]]:
    """Where the line of each finished conversation begins; what a killed run left half is none."""
    found = {}
    for path in sorted(Path(f"{out}.parts").glob("part-*.jsonl")):
        with path.open("rb") as file:
            offset = 0
            for line in file:
                if (name := _conversation_of(line)) is not None:
                    found[name] = (path, offset)
                else:
                    print(f"{path}: the line at byte {offset} is damaged; its conversation is answered again")
                offset += len(line)
    return found


def _conversation_of(line: bytes) -> str | None:
    """Which conversation a line has finished; None where it is not what this project wrote."""
    try:
        outcome = json.loads(line)
        whole = {"id", "record", "notes", "tokens"} <= outcome.keys() and isinstance(outcome["id"], str)
    except (ValueError, AttributeError):
        return None
    return outcome["id"] if whole else None


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
    write_whole(out, ((json.dumps(record) + "\n").encode() for record in records))
    for path in Path(f"{out}.parts").iterdir():
        path.unlink()
    Path(f"{out}.parts").rmdir()
