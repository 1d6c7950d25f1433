"""Write results files: an answer becomes a row, rows are appended, and files of several processes become one."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle.core.trace import Cycle, Trace
from eval.result_files.results import Key, Results, ends_in_loop, item_key, prompt_key, read_results

Row = dict[str, Any]


def read_stored(path: Path) -> Results:
    """Return the rows of earlier runs. A torn last line is cut off the file, and what processes left is merged."""
    if not path.exists():
        # the header that says what made them is gone
        for part in _parts(path):
            print(f"{part} belongs to no results file, and is removed")
            part.unlink()
        return Results(path, [], [])
    for file in (path, *_parts(path)):
        _cut_torn_line(file)
    merge_parts(path)
    return read_results(path)


def part_of(path: Path, rank: int) -> Path:
    """Return the file of one of several processes, beside the results."""
    return path.with_name(f"{path.stem}.process{rank}{path.suffix}")


def merge_parts(path: Path) -> None:
    """Append the rows of the processes' files that the results lack, and remove these files."""
    parts = _parts(path)
    if not parts:
        return

    known = {item_key(json.loads(line)) for line in path.read_bytes().splitlines()}
    for part in parts:
        lines = part.read_bytes().splitlines(keepends=True)
        # a merge that was interrupted has copied some of them
        new = [line for line in lines if item_key(json.loads(line)) not in known]
        with path.open("ab") as file:
            file.write(b"".join(new))
        part.unlink()


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.process*{path.suffix}"))


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        print(
            f"{path}: the last line is torn; its {len(data) - end} bytes are cut off, and it is measured again"
        )
        with path.open("r+b") as file:
            file.truncate(end)


class ResultsWriter:
    """Appends rows to a results file; a file that other settings made is moved aside first."""

    def __init__(self, stored: Results, settings: dict[str, Any], *, again: bool = False) -> None:
        self.path = stored.path
        self.id = secrets.token_hex(4)
        self.settings = json.loads(json.dumps(settings))
        # by key and drafter
        self.rows: dict[Key, dict[str, Row]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if stored.headers and not again and self._is_same(stored.header):
            self.id = stored.header["id"]
            for row in stored.answers:
                if row["run"] == self.id:
                    self._remember(row)
        elif stored.headers or stored.answers:
            # early releases wrote no id
            old_id = stored.header.get("id", secrets.token_hex(4))
            aside = self.path.with_stem(f"{self.path.stem}-{old_id}")
            self.path.rename(aside)
            print(
                f"the earlier content of {self.path} is in {aside} now, and measuring starts from the beginning"
            )

    def begin(self, start: dict[str, Any]) -> None:
        """Write the header of the rows that follow.

        Args:
            start: What may differ in a run that goes on: amount and date, beside the settings, which may not.
        """
        self._append([{"run": {"id": self.id, **start, **self.settings}}])

    def add(self, *rows: Row) -> None:
        """Write answers; they are in the file when this returns."""
        self.add_batch(None, rows)

    def add_batch(self, batch: dict[str, Any] | None, rows: Iterable[Row]) -> None:
        """Write the seconds of a batch's steps, and the answers that ended in the last of them.

        Args:
            batch: The sums of the steps; None for answers that were decoded alone.
            rows: The answers; all of them are in the file when this returns.
        """
        rows = list(rows)
        lines = [{"run": self.id, **row} for row in rows]
        if batch is not None:
            lines.insert(0, {"run": self.id, "batch": batch})
        # in one write, so that an interruption does not part them
        self._append(lines)
        for row in rows:
            self._remember(row)

    def _is_same(self, header: dict[str, Any]) -> bool:
        """Return whether the file was made with these settings; print the names of those that differ."""
        changed = [key for key, value in self.settings.items() if header.get(key) != value]
        if changed:
            print(f"{self.path} was measured with other settings ({', '.join(changed)})")
        return not changed

    def _remember(self, row: Row) -> None:
        self.rows.setdefault(prompt_key(row), {})[row["drafter"]] = row

    def _append(self, lines: list[Row]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with self.path.open("a") as file:
            file.write(text)


def row_of(trace: Trace, wall: float, cpu: float) -> Row:
    """Return a trace as the columns of a row."""
    return {
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.tokens),
        "finish": trace.finish,
        "seconds": round(wall, 6),
        "cpu_seconds": round(cpu, 6),
        "loops": ends_in_loop(trace.tokens),
        "digest": hashlib.sha256(json.dumps(trace.tokens).encode()).hexdigest()[:16],
        "text": trace.text,
        "cycles": list(map(cycle_of, trace.cycles)),
    }


def cycle_of(cycle: Cycle) -> Row:
    """Return a cycle as a row holds it."""
    row = {
        "nodes": cycle.nodes,
        "depth": cycle.depth,
        "accepted": cycle.accepted,
        "committed": cycle.committed,
        "context": cycle.context,
        "path": cycle.path,
    }
    if cycle.confidence:
        row["confidence"] = [(round(prob, 4), accepted) for prob, accepted in cycle.confidence]
    row["seconds"] = {part: round(seconds, 7) for part, seconds in (cycle.seconds or {}).items()}
    return row


def batch_row_of(trace: Trace, share: float, cpu_share: float, latency: float, session: str) -> Row:
    """Return the row of an answer decoded in a batch: its share of each step's seconds, and those since admission.

    Cycles of one session with one number are the same forward, of so many `rows`. Their seconds are the whole cycle's.
    """
    row = row_of(trace, share, cpu_share)
    row["latency"] = round(latency, 6)
    row["session"] = session
    for recorded, cycle in zip(row["cycles"], trace.cycles, strict=True):
        recorded["number"] = cycle.number
        recorded["rows"] = cycle.rows
    return row
