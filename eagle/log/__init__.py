"""How a command ends, what it tells of its progress, and the metrics of a run."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from math import isfinite
from pathlib import Path
from time import monotonic
from traceback import walk_tb
from types import FrameType
from typing import IO, Any, TextIO, TypeVar

import yaml
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
from rich.table import Column
from rich.text import Text

from eagle.interrupts import MESSAGES, QUIET, interrupted_by_user, leave_message
from eagle.web import hide_users

Item = TypeVar("Item")
OURS = {
    "eagle",
    "data_prep",
    "eval",
    "recipes",
    "tests",
    "__main__",
}  # the packages of this project
JSON_HELP = "print the result as one JSON object; all other text goes to stderr"
# parts of the messages of gloo and NCCL when another process has ended
LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "remote process exited",
)
# packages that load models; an error below one of their LOADING_FUNCTIONS is a fault of what was to be loaded
LOADER_PACKAGES = {
    "transformers",
    "huggingface_hub",
    "peft",
    "tokenizers",
}
LOADING_FUNCTIONS = {"from_pretrained", "snapshot_download", "cached_files"}
# the names of their arguments that say what is loaded
LOADED_ARGUMENTS = (
    "pretrained_model_name_or_path",
    "repo_id",
    "path_or_repo_id",
    "model_id",
)
ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or name a folder on another disk"
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another one"
    ),
    errno.ENOENT: "check the path",
    errno.EISDIR: "it is a folder: name a file",
    errno.EEXIST: "a file is where a folder should be: name another one",
    errno.ENOTDIR: "a part of it is a file: name a folder",
}


# -- how a command ends -----------------------------------------------------------------------------------------------


def script(
    main: Callable[[list[str]], Any], argv: list[str] | None = None, status: int = 1
) -> None:
    """Run a command's `main`, and end the process as a command should: errors that a user can mend have no traceback.

    Args:
        main: The command. It takes the arguments.
        argv: The arguments; by default those of the process.
        status: The exit status after an error that its user can mend.
    """
    try:
        with interrupted_by_user(lambda: "give the same command again"):
            try:
                main(sys.argv[1:] if argv is None else argv)
            except SystemExit:
                # argparse ends so after it has printed a help
                sys.stdout.flush()
                raise
            # a broken pipe must show here, where it is handled, and not at the exit of the interpreter
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has seen enough. What is still buffered goes to /dev/null, or the
        # interpreter would report the broken pipe at its exit. An output that is no file has no descriptor to replace.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Exception, SystemExit) as error:
        # another process ended first, and the launcher reports that one
        if MESSAGES in os.environ and is_peer_failure(error):
            sys.exit(status)
        sentence = describe_error(error)
        # a bug, whose traceback is wanted, or a SystemExit with a status
        if sentence is None:
            raise
        sentence = hide_users(sentence)
        # the launcher prints messages that are left for it, each once
        if not leave_message(sentence):
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        sys.exit(status)


@contextmanager
def json_alone(asked: bool) -> Iterator[Callable[[Any], None]]:
    """Yield a function that prints a value as JSON, for the option `--json`.

    In the block all other text goes to stderr, or nowhere if the user wants quiet, so that stdout has JSON alone.

    Args:
        asked: Whether the command line has `--json`. Without it the function prints nothing, and text goes to stdout.
    """
    out = sys.stdout

    def write(value: Any) -> None:
        """Print a value as one line of JSON to the real stdout, if that was asked for."""
        if asked:
            print(json.dumps(as_json(value)), file=out, flush=True)

    other_text: TextIO = out
    if asked:
        other_text = io.StringIO() if QUIET in os.environ else sys.stderr
    with redirect_stdout(other_text):
        yield write


def as_json(value: Any) -> Any:
    """Return a value in the types of JSON.

    Dataclasses and named tuples become objects, NaN and infinite numbers null, and values of other types their text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif hasattr(value, "_asdict"):
        # only named tuples have it
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if isinstance(value, int | None) else str(value)


def is_peer_failure(error: BaseException) -> bool:
    """Return whether an error says only that a collective operation failed because another process has ended."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)


def describe_error(error: BaseException) -> str | None:
    """Return a sentence on an error that a user can mend (what was got, expected, and to be done); None for a bug."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else None
    # the frames that the error passed, from the outermost to the one that raised it
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # a ValueError that this project raised has such a sentence already
    if isinstance(error, ValueError) and _package_of(frames[-1]) in OURS:
        return str(error)
    for frame in frames:
        if frame.f_code.co_name in LOADING_FUNCTIONS and _package_of(frame) in LOADER_PACKAGES:
            return _describe_loading(error, frame)
    if isinstance(error, OSError) and error.errno is not None:
        advice = ADVICE.get(error.errno, "mend that, and give the same command again")
        return f"{error.filename or 'the disk'}: {error.strerror}: {advice}"
    # these classes are known by their names, as their packages take long to import
    name = type(error).__name__
    if name == "SafetensorError":
        return f"a safetensors file cannot be read or written: {error}; is it cut off, or the disk full? Make it again"
    if isinstance(error, yaml.YAMLError):
        return f"this is no YAML: {' '.join(str(error).split())}"
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return f"out of memory: {first_line(error)}. Lower batch_size or max_length, or raise train.accumulation"
    if is_peer_failure(error):
        return f"another process of this run has ended, which says why: {first_line(error)}"
    return str(error) if isinstance(error, ConnectionError) else None


def _describe_loading(error: BaseException, frame: FrameType) -> str:
    """Return a sentence on a model or file that a library could not load.

    Args:
        error: What the library raised.
        frame: The outermost of its frames, whose local variables say what was to be loaded.
    """
    name = "what was named"
    for variable in LOADED_ARGUMENTS:
        if frame.f_locals.get(variable):
            name = str(frame.f_locals[variable])
            break
    # a name that begins like a path is no hub id
    if name.startswith(("/", ".", "~")) and not Path(name).exists():
        return f"no folder at {name}: expected a model that save_pretrained wrote, or a hub id; check the path"
    reason = (
        first_line(error)
        if isinstance(error, OSError | ValueError)
        else f"{type(error).__name__}, {error}"
    )
    return (
        f"{name} cannot be loaded: {first_line(reason)} Expected a folder that save_pretrained wrote, whole and of a "
        "model that transformers knows, or a hub id that this machine can reach: check the name and its files"
    )


def first_line(error: object) -> str:
    """Return the first line of an error's text, as a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].strip()
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _package_of(frame: FrameType) -> str:
    """Return the top-level package whose code runs in a frame, such as "transformers"."""
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


# -- progress ---------------------------------------------------------------------------------------------------------

WIDE = 100  # columns that a terminal must have to show a bar
EVERY = 60.0  # seconds between two lines of a log
PER_MINUTE = 60
PER_HOUR = 3600


class Rate(ProgressColumn):
    """A progress column with the items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Return the speed, once it is known."""
        return Text(describe_rate(task.speed, self.unit) if task.speed else "")


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
    """Yield the items while a progress bar is shown on stderr, or lines of text where stderr is no terminal.

    Args:
        items: The items to work on.
        what: The name of the work.
        total: The size of all items together; None if it is not known.
        unit: What sizes count, such as "steps".
        size: Returns the size of an item; by default each counts 1.
        show: Whether anything is shown.
        done: The size of the items that were done earlier, before a resumption.
        note: Returns a text that is shown beside the progress.
    """
    console = Console(stderr=True)
    show = show and QUIET not in os.environ
    # outside of a terminal rich would show a bar only at its end
    if show and not console.is_terminal and not console.is_jupyter:
        with ProgressLines(what, unit, total, done, note=note, out=console.file) as lines:
            for item in items:
                yield item
                lines.done += size(item)
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}")]
    elapsed: list[ProgressColumn] = []
    # in a narrow terminal these would wrap the line
    if console.width >= WIDE:
        columns.append(BarColumn())
        elapsed = [TimeElapsedColumn(), TextColumn("elapsed")]
    columns += [
        MofNCompleteColumn(),
        Rate(unit),
        *elapsed,
        TimeRemainingColumn(),
        TextColumn("left"),
    ]
    with Progress(*columns, console=console, disable=not show) as bar:
        task = bar.add_task(what, total=total, completed=done)
        for item in items:
            yield item
            bar.update(task, advance=size(item), description=f"{what} {note()}".rstrip())


class ProgressLines:
    """Prints a line a minute with what is done, how fast, and the time left, and one at the end of the block.

    The arguments are those of `progress`; `clock` and `every` (seconds between lines) are for tests.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None,
        done: int = 0,
        *,
        note: Callable[[], str] = str,
        out: IO[str] | None = None,
        clock: Callable[[], float] = monotonic,
        every: float = EVERY,
    ) -> None:
        """Start the clock; the lines begin with the block."""
        self.what = what
        self.unit = unit
        self.total = total
        self.done = done
        self.done_before = done  # the speed counts from here
        self.note = note
        self.out = out or sys.stderr
        self.clock = clock
        self.every = every
        self.begun = clock()
        self.ended = threading.Event()
        # a thread, as a single item may take longer than a minute
        self.thread = threading.Thread(target=self._print_regularly, daemon=True)

    def __enter__(self) -> ProgressLines:
        """Start the thread that prints a line a minute."""
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End that thread, and print the last line."""
        self.ended.set()
        self.thread.join()
        self._print()

    def describe(self) -> str:
        """Return the line to print now, such as "train: 10 of 20 (50%) steps, 2.0 steps/s, 0:00:05 elapsed"."""
        seconds = self.clock() - self.begun
        speed = 0.0
        if seconds > 0:
            speed = (self.done - self.done_before) / seconds
        facts = [f"{self.what}: {describe_done(self.done, self.total)} {self.unit}"]
        if speed > 0:
            facts.append(describe_rate(speed, self.unit))
        facts.append(f"{describe_seconds(seconds)} elapsed")
        if speed > 0 and self.total is not None and self.done < self.total:
            facts.append(f"{describe_seconds((self.total - self.done) / speed)} left")
        note = self.note()
        if note:
            facts.append(note)
        return ", ".join(facts)

    def _print_regularly(self) -> None:
        """Print a line every `every` seconds until the block ends; a thread runs this."""
        while not self.ended.wait(self.every):
            self._print()

    def _print(self) -> None:
        """Print a line now."""
        print(self.describe(), file=self.out, flush=True)


def describe_done(done: int, total: int | None) -> str:
    """Return "DONE of TOTAL (PERCENT)", or without a total only how much is done."""
    if total is None:
        return f"{done:,}"
    line = f"{done:,} of {total:,}"
    if total:
        line += f" ({done / total:.0%})"
    return line


def describe_rate(speed: float, unit: str) -> str:
    """Return a speed with at least two figures; slow work is counted per minute or per hour.

    Args:
        speed: Units per second.
        unit: What is counted.
    """
    value = speed
    per = "s"
    if speed * PER_MINUTE < 1:
        value = speed * PER_HOUR
        per = "h"
    elif speed < 1:
        value = speed * PER_MINUTE
        per = "min"
    # as many decimals as two figures need
    decimals = max(0, 2 - len(str(int(value))))
    return f"{value:,.{decimals}f} {unit}/{per}"


def describe_seconds(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


# -- metrics ----------------------------------------------------------------------------------------------------------


def memory_gb() -> float:
    """Return the peak memory of this process in GB, on the accelerator where it has one."""
    # imported late, as it takes seconds and commands that only show progress do without it
    import torch

    # bytes, while ru_maxrss counts KiB
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Metrics:
    """A file of metrics, one JSON object a line, flushed after every row."""

    def __init__(self, path: Path, *, before: int = 0) -> None:
        """Open a file to append to it.

        Rows of the training step `before` and later ones are removed, as a run that resumes there writes them again.
        The removed lines are kept in `dropped`. With 0 the file starts empty.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        if path.is_file():
            lines = path.read_text().splitlines()
        kept = [line for line in lines if _step_of(line) < before]
        self.dropped = [line for line in lines if _step_of(line) >= before]
        # replaced in one step, so that a killed process leaves the old file or the new one
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, path)
        self.file: TextIO = path.open("a")

    def write(self, **row: Any) -> None:
        """Append a row of figures by name, among them its training step as `step`."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _step_of(line: str) -> float:
    """Return the step of a row; infinity, so that it is dropped, for a line that was cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
