"""Measured rows -> tables: `python -m eval.report RESULTS.jsonl` prints the newest run as Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit that figures were measured at."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"


def loops(tokens: Sequence[int], window: int = 64, period: int = 16) -> bool:
    """Whether the last `window` tokens repeat with a period of at most `period`."""
    tail = list(tokens[-window:])
    return len(tail) == window and any(tail[step:] == tail[:-step] for step in range(1, period + 1))


def newest_run(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What made the last run in a results file, and its rows."""
    run: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        if "run" in row:
            run, rows = row["run"], []
        else:
            rows.append(row)
    return run, rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per temperature and drafter: acceptance length, speed, speed-up over `none`, and whether nothing was lost."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    speed = {key: _total(group, "tokens") / _total(group, "seconds") for key, group in groups.items()}
    return [
        {
            "temperature": temperature,
            "drafter": name,
            "acceptance_length": _total(group, "committed") / max(_total(group, "cycles"), 1),
            "tokens_per_second": speed[temperature, name],
            "speed_up": speed[temperature, name] / speed[temperature, "none"],
            "identical": all(row["identical"] for row in group),
            "loops": sum(row["loops"] for row in group) / len(group),
        }
        for (temperature, name), group in groups.items()
    ]


def _total(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows)


def markdown(path: str | Path) -> str:
    """The newest run as a table, with what made it."""
    run, rows = newest_run(path)
    lines = [
        "| T | drafter | acceptance length τ | tokens/s | speed-up | output | answers that loop |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary(rows):
        lines.append(
            f"| {row['temperature']:g} | `{row['drafter']}` | {row['acceptance_length']:.2f} | "
            f"{row['tokens_per_second']:.0f} | {row['speed_up']:.2f} × | "
            f"{'identical' if row['identical'] else '**differs**'} | {row['loops']:.0%} |"
        )
    lines.append("")
    lines.append(f"<sub>{', '.join(f'{key} {value}' for key, value in run.items())}</sub>")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(sys.argv[1]))
