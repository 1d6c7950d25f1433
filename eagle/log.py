"""Progress and metrics: a console, a JSONL file, and wandb where it is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Item = TypeVar("Item")
OURS = {"eagle", "data_prep", "eval", "recipes", "__main__"}


def script(main: Callable[[list[str]], None]) -> None:
    """A script's `main` on its arguments; what its user can mend ends it with a message instead of a traceback."""
    try:
        main(sys.argv[1:])
    except ValueError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].split(".")[0] not in OURS:  # not said by us: a fault
            raise
        sys.exit(f"error: {error}")


class Rate(ProgressColumn):
    """How much is done a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The speed, once there is one."""
        return Text(f"{task.speed:,.4g} {self.unit}/s" if task.speed else "")


def progress(
    items: Iterable[Item],
    what: str,
    total: int | None,
    *,
    unit: str = "items",
    size: Callable[[Item], int] = lambda _: 1,
    show: bool = True,
) -> Iterator[Item]:
    """The items, with a bar that tells how far, how fast and how long still; an item counts for its size."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(unit), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(what, total=total)
        for item in items:
            yield item
            bar.advance(task, size(item))


class Metrics:
    """One JSON object a line, flushed at once, so that a killed run keeps what it knew."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = path.open("a")

    def write(self, **row: Any) -> None:
        """Append a row."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
