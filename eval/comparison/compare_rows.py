"""The results of a comparison: a file of JSON lines that only grows, and is read again when the command goes on."""

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
        self.length = data.rfind(b"\n") + 1  # of the whole lines
        for number, line in enumerate(data[: self.length].splitlines(), start=1):
            try:
                [(kind, row)] = json.loads(line).items()
            except (ValueError, AttributeError):
                raise ValueError(
                    f"{self.path}:{number} is no row of a comparison: remove that line, and give the same command again"
                ) from None
            self.by_kind.setdefault(kind, []).append(row)

    def of(self, kind: str, **fields: Any) -> list[Entry]:
        """The rows of a kind that have these values."""
        rows = self.by_kind.get(kind, [])
        return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]

    def find_training(self, digest: str, seed: int) -> Entry | None:
        """The cost of training an arm, by the arm's digest; None where it is not done."""
        return next(reversed(self.of("trained", digest=digest, seed=seed)), None)

    def add(self, kind: str, rows: Iterable[Entry]) -> None:
        """Rows that belong together, on the disk when this returns."""
        rows = list(rows)
        lines = "".join(json.dumps({kind: row}, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self.length)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
            self.length = file.tell()
        self.by_kind.setdefault(kind, []).extend(json.loads(json.dumps(rows)))
