"""Progress and metrics: a console, a JSONL file, and wandb where it is asked for."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, TextIO, TypeVar

import torch
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
WANDB_SECONDS = 10
OURS = {"eagle", "data_prep", "eval", "recipes", "__main__"}
STOPPED_BY_SIGINT = 130  # the exit status that shells give to Ctrl-C


def script(main: Callable[[list[str]], None]) -> None:
    """Run a script's `main`; a ValueError of this project ends it with its message instead of a traceback."""
    try:
        with interrupted_by_user(lambda: "give the same command again"):
            main(sys.argv[1:])
    except ValueError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].split(".")[0] not in OURS:  # a bug, not a message
            raise
        sys.exit(f"error: {error}")


@contextmanager
def interrupted_by_user(hint: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C in the block ends the program with `stopped; HINT` and status 130; nested, the inner hint counts."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends it once more
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped; {hint()}", file=sys.stderr, flush=True)
        sys.exit(STOPPED_BY_SIGINT)


class Rate(ProgressColumn):
    """A progress column with the items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The speed, once it is known."""
        return Text(f"{task.speed:,.4g} {self.unit}/s" if task.speed else "")


def progress(
    items: Iterable[Item],
    what: str,
    total: int | None,
    *,
    unit: str = "items",
    size: Callable[[Item], int] = lambda _: 1,
    show: bool = True,
    done: int = 0,
    note: Callable[[], str] = str,
) -> Iterator[Item]:
    """Yield the items while showing a progress bar, in which an item counts for its size."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(unit), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(what, total=total, completed=done)
        for item in items:
            yield item
            bar.update(task, advance=size(item), description=f"{what} {note()}".rstrip())


def memory_gb() -> float:
    """Peak memory of this process in GB, on the accelerator where it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Metrics:
    """Metrics as JSON lines, flushed at once, and to wandb if `project` is given; rows from `before` on are dropped."""

    def __init__(self, path: Path, *, before: int = 0, project: str | None = None, config: Any = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(f"{line}\n" for line in lines if _step_of(line) < before))
        os.replace(part, path)
        self.file: TextIO = path.open("a")
        self.run = _wandb(project, path.parent, config) if project else None

    def write(self, **row: Any) -> None:
        """Append a row."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.run is not None:
            self.run.log(row)

    def close(self) -> None:
        """Close the file and the wandb run."""
        self.file.close()
        if self.run is not None:
            self.run.finish()


def _step_of(line: str) -> float:
    """The step of a row; infinity for a torn line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _wandb(project: str, folder: Path, config: Any) -> Any:
    """A wandb run, offline on disk for `wandb sync` without a key or a network; training never waits for it."""
    import wandb

    settings = wandb.Settings(
        init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS, login_timeout=WANDB_SECONDS, silent=True
    )
    try:
        return wandb.init(project=project, dir=folder, config=config, settings=settings)
    except wandb.Error as error:  # no key (UsageError), no network (CommError)
        print(f"wandb is not reached ({error}): the run is kept in {folder}/wandb, send it later with `wandb sync`")
        return wandb.init(project=project, dir=folder, config=config, settings=settings, mode="offline")
