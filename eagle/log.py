"""Progress and metrics: a console, a JSONL file, and wandb where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def progress(items: Iterable[Item], what: str, total: int, *, show: bool = True) -> Iterator[Item]:
    """The items, with a bar that tells how far, how fast and how long still."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        yield from bar.track(items, total=total, description=what)


class Metrics:
    """One JSON object a line, flushed at once, so that a killed run keeps what it knew."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = path.open("a")

    def write(self, **row: Any) -> None:
        """Append a row."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
