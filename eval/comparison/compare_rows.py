"""Store the results of a comparison: a file of JSON lines that only grows, and is read when the command goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Rows:
    """Lines of one kind each: `run`, `clock`, `trained`, `answer`, `row`; a torn last line is cut off."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self.by_kind: dict[str, list[Entry]] = {}
        data = self.path.read_bytes() if self.path.exists() else b""
        # of the whole lines
        self.length = data.rfind(b"\n") + 1
        for line_number, line in enumerate(data[: self.length].splitlines(), start=1):
            try:
                [(kind, row)] = json.loads(line).items()
            except (ValueError, AttributeError):
                raise ValueError(
                    f"{self.path}:{line_number} is no row of a comparison: "
                    "remove that line, and give the same command again"
                ) from None
            self.by_kind.setdefault(kind, []).append(row)

    def of(self, kind: str, **fields: Any) -> list[Entry]:
        """Return the rows of a kind that have these values; a row that lacks a field has None in it."""
        rows = self.by_kind.get(kind, [])
        for name, value in fields.items():
            rows = [row for row in rows if row.get(name) == value]
        return rows

    def find_training(self, digest: str, seed: int) -> Entry | None:
        """Return the cost of training an arm, by the arm's digest, or None where it is not done."""
        trained = self.of("trained", digest=digest, seed=seed)
        return trained[-1] if trained else None

    def add(self, kind: str, rows: Iterable[Entry]) -> None:
        """Add rows that belong together; they are on the disk when this returns."""
        rows = list(rows)
        lines = ""
        for row in rows:
            lines += json.dumps({kind: row}, separators=(",", ":"), ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            # a torn last line is cut off
            file.truncate(self.length)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
            self.length = file.tell()

        # as they will be read: tuples become lists
        self.by_kind.setdefault(kind, []).extend(json.loads(json.dumps(rows)))
