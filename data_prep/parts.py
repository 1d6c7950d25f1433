"""Keep answers line by line in parts, one part per process, until all are there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from eagle.data.identity import differences
from eagle.disk import write_whole


def is_whole(out: Path, settings: dict[str, Any]) -> bool:
    """Return whether all answers exist already; those made with other settings are refused."""
    noted = read_settings(out)
    if noted is not None:
        wrong = [
            f"{name} was {old!r}, is {new!r}" for name, old, new in differences(noted, settings)
        ]
        if wrong:
            # The parts are removed once the whole file is there.
            found = Path(f"{out}.parts")
            if out.exists():
                found = out
            raise ValueError(
                f"{found} was made with other settings: {'; '.join(wrong)}. Give "
                f"regenerate.out another name, or remove {out}, {out}.settings and {out}.parts"
            )
    return out.exists()


def read_settings(out: Path) -> dict[str, Any] | None:
    """Return the settings with which the answers were begun, None if there are no answers yet."""
    note = Path(f"{out}.settings")
    parts = Path(f"{out}.parts")
    if not out.exists() and not parts.exists():
        return None
    noted: Any = {}
    if note.is_file():
        try:
            noted = json.loads(note.read_text())
        except ValueError as error:
            raise ValueError(
                f"{note} is damaged ({error}): remove {out}, {note} and {parts}"
            ) from None
    if not isinstance(noted, dict):
        raise ValueError(
            f"{note} is damaged (it holds {noted!r:.40}, no settings): remove {out}, {note} and {parts}"
        )
    return noted


def begin(out: Path, settings: dict[str, Any]) -> None:
    """Note the settings, then make room for the parts: parts without such a note are refused."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(f"{out}.settings"), [json.dumps(settings, indent=1).encode()])
    Path(f"{out}.parts").mkdir(exist_ok=True)


def read_parts(out: Path) -> dict[str, bytes]:
    """Return the line of each finished conversation by its id; lines that a killed run left incomplete are printed."""
    lines = {}
    for path in sorted(Path(f"{out}.parts").glob("part-*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                name = _name_in(line)
                if name is None:
                    print(f"{path}: line {number} is damaged; its conversation is answered again")
                else:
                    lines[name] = line
    return lines


def _name_in(line: bytes) -> str | None:
    """Return the id in a line, None if the line is damaged."""
    try:
        outcome = json.loads(line)
        if not {"id", "record", "notes", "tokens"} <= outcome.keys():
            return None
        name = outcome["id"]
    except (ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def open_part(out: Path, index: int) -> TextIO:
    """Return the part of one process, to be appended to."""
    path = Path(f"{out}.parts") / f"part-{index:05d}.jsonl"
    if path.exists():
        # A killed run may have left half a line.
        with path.open("rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return path.open("a", encoding="utf-8")


def join_parts(out: Path, names: Iterable[str]) -> None:
    """Write the records of these conversations, in this order, to one file that is whole at once; remove the parts."""
    lines = read_parts(out)
    records = (json.loads(lines[name])["record"] for name in names if name in lines)
    write_whole(out, ((json.dumps(record) + "\n").encode() for record in records if record))
    shutil.rmtree(f"{out}.parts")
