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
    """A script's `main` on its arguments; what its user can mend ends it with a message instead of a traceback."""
    try:
        with interrupted_by_user(lambda: "give the same command again"):
            main(sys.argv[1:])
    except ValueError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].split(".")[0] not in OURS:  # not said by us: a fault
            raise
        sys.exit(f"error: {error}")


@contextmanager
def interrupted_by_user(hint: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C within ends the program with `stopped; HINT` and status 130; where several are nested, the inner hint."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends it once more
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped; {hint()}", file=sys.stderr, flush=True)
        sys.exit(STOPPED_BY_SIGINT)


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
    done: int = 0,
    note: Callable[[], str] = str,
) -> Iterator[Item]:
    """The items, with a bar that tells how far, how fast and how long still; an item counts for its size."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(unit), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(what, total=total, completed=done)
        for item in items:
            yield item
            bar.update(task, advance=size(item), description=f"{what} {note()}".rstrip())


def memory_gb() -> float:
    """The most that this process has held, on its accelerator where it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Metrics:
    """One JSON object a line, flushed at once, so that a killed run keeps what it knew; and wandb, where asked for."""

    def __init__(self, path: Path, *, before: int = 0, project: str | None = None, config: Any = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in path.read_text().splitlines() if _step(line) < before] if path.is_file() else []
        aside = path.with_name(f"{path.name}.part")
        aside.write_text("".join(f"{line}\n" for line in kept))
        os.replace(aside, path)
        self.file: TextIO = path.open("a")
        self.run = _wandb(project, path.parent, config) if project else None

    def write(self, **row: Any) -> None:
        """Append a row."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.run is not None:
            self.run.log(row)

    def close(self) -> None:
        """No more rows."""
        self.file.close()
        if self.run is not None:
            self.run.finish()


def _step(line: str) -> float:
    """The step of a row; a torn line is of no step that is kept."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _wandb(project: str, folder: Path, config: Any) -> Any:
    """A wandb run; without a key or a network it is kept on disk for `wandb sync`, and training never waits for it."""
    import wandb

    settings = wandb.Settings(
        init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS, login_timeout=WANDB_SECONDS, silent=True
    )
    try:
        return wandb.init(project=project, dir=folder, config=config, settings=settings)
    except wandb.Error as error:  # no key (UsageError), no network (CommError)
        print(f"wandb is not reached ({error}): the run is kept in {folder}/wandb, send it later with `wandb sync`")
        return wandb.init(project=project, dir=folder, config=config, settings=settings, mode="offline")
