"""Measure this package on a GPU, in stages by their value: `python -m bench.gpu --minutes 8`.

Every stage has a time budget and consists of units. The figures of a unit are written as soon as it ends, to
`gpu_STAGE.jsonl`. A unit that fails, hangs or crashes costs only itself. The next call skips what has a result, so a
second call goes on where the first one ended. `--rehearse` runs every stage with tiny sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, time_ns
from typing import NamedTuple, TextIO

from bench.gpu.page import PAGE, RESULTS, ROOT, write_page
from bench.gpu.worker import UNFINISHED, Context, list_units, read_units, result_file, write_unit
from eagle.device import best_device

MIN_SECONDS = 10  # a worker is not started in the last seconds of a stage


class Stage(NamedTuple):
    """A part of the program."""

    name: str  # its module in bench.gpu
    seconds: float  # of one call, unless other stages leave more
    workers: int  # units at once; timings run alone


STAGES = (
    Stage("correct", 90, workers=10),
    Stage("training", 150, workers=1),
    Stage("decoding", 150, workers=1),
    Stage("whole_path", 180, workers=1),
)


class Worker:
    """A process that measures units, with all that it starts."""

    def __init__(self, stage: Stage, context: Context, names: Sequence[str]) -> None:
        self.stage = stage
        self.context = context
        self.log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [
            sys.executable,
            "-m",
            "bench.gpu.worker",
            stage.name,
            json.dumps(asdict(context)),
            *names,
        ]
        # a session of its own: what a unit starts ends with it
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=self.log, start_new_session=True)

    def end(self, deadline: float) -> str:
        """Wait until the deadline, end the process, and return why a unit may be unfinished."""
        try:
            status = self.process.wait(max(deadline - monotonic(), 0))
            reason = f"the worker ended with status {status}"
        except subprocess.TimeoutExpired:
            reason = "not done at the end of the stage's time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.seek(0)
        return f"{reason}: {self.log.read()[-1500:]}"


def list_pending(stage: Stage, context: Context) -> list[str]:
    """Return the units without a result, then those that failed in an earlier call."""
    names = list_units(stage.name, context)
    units = read_units(context.results, stage.name)
    fresh = []
    failed = []
    for name in names:
        if name not in units:
            fresh.append(name)
        elif "error" in units[name] and units[name]["call"] != context.call:
            failed.append(name)
    return fresh + failed


def run_stage(stage: Stage, context: Context, deadline: float) -> None:
    """Run units until each has a result or the deadline is near.

    Args:
        stage: What is measured, and by how many workers at once.
        context: What the units are run with.
        deadline: By the monotonic clock.

    Raises:
        ValueError: A worker ended before its first unit began.
    """
    while deadline - monotonic() > MIN_SECONDS:
        names = list_pending(stage, context)
        if not names:
            break
        count = 1 if context.rehearse else min(stage.workers, len(names))
        # worker i gets every `count`-th unit from the i-th on
        workers = [Worker(stage, context, names[i::count]) for i in range(count)]
        for i, worker in enumerate(workers):
            reason = worker.end(deadline)
            units = read_units(context.results, stage.name)
            own = [units[name] for name in names[i::count] if name in units]
            unfinished = [figures for figures in own if figures.get("error") == UNFINISHED]
            for figures in unfinished:
                write_unit(context.results, stage.name, {**figures, "error": reason})
                print(f"{stage.name:10} {figures['unit']:34} {reason.splitlines()[0]}", flush=True)
            # a worker that measured nothing would do so again
            if not own:
                raise ValueError(f"stage {stage.name} cannot be opened: {reason}")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    summary = (__doc__ or "").split("\n\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=summary)
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--minutes", type=float, default=8, help="time for this call (default: %(default)s)"
    )
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--again", nargs="+", choices=names, default=[], help="measure these anew")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes: try the program, on a CPU too"
    )
    parser.add_argument(
        "--results", type=Path, help=f"folder of the result files (default: {RESULTS})"
    )
    parser.add_argument(
        "--inputs", type=Path, help="what `eagle demo --tiny` left: a target, its head and prompts"
    )
    parser.add_argument(
        "--page", action="store_true", help=f"only write {PAGE} from the result files"
    )
    return parser.parse_args(argv)


def run_stages(args: argparse.Namespace, context: Context) -> int:
    """Run the stages, tell what is left, write the page; return 1 if a unit of a rehearsal failed."""
    start = monotonic()
    end = start + 60 * args.minutes
    stages = [stage for stage in STAGES if stage.name in args.stages]

    for stage in stages:
        if stage.name in args.again:
            result_file(context.results, stage.name).unlink(missing_ok=True)
        kept = len(list_units(stage.name, context)) - len(list_pending(stage, context))
        if kept:
            print(f"{stage.name:10} {kept} units have a result: kept", flush=True)
        # a rehearsal on a busy CPU takes the time that it needs
        run_stage(stage, context, context.pick(min(end, monotonic() + stage.seconds), end))

    # a second pass gives the time that is left to what did not fit into its budget
    for stage in stages:
        run_stage(stage, context, end)

    left = {stage.name: len(list_pending(stage, context)) for stage in stages}
    left = {name: count for name, count in left.items() if count}
    failed = 0
    for stage in stages:
        units = read_units(context.results, stage.name)
        failed += sum("error" in figures for figures in units.values())
    print(
        f"{monotonic() - start:.0f} s; units left for another call: {left or 'none'}; {failed} failed"
    )
    return int(args.rehearse and bool(failed or left))


def main(argv: list[str]) -> int:
    """Measure, or write the page of what was measured."""
    args = parse_arguments(argv)
    if args.page:
        print(f"wrote {write_page(args.results or RESULTS)}")
        return 0
    if not args.rehearse and best_device() == "cpu":
        # the sizes of a run would take a CPU days
        raise ValueError(
            "torch finds no accelerator here, expected a GPU: `--rehearse` tries the program on a CPU"
        )
    with tempfile.TemporaryDirectory() as work:
        results = args.results or RESULTS
        if args.rehearse and args.results is None:
            # figures of tiny sizes are no results
            results = Path(work) / "results"
        context = Context(str(time_ns()), args.rehearse, results=str(results.resolve()), work=work)
        if args.inputs:
            context = replace(context, inputs=str(args.inputs.resolve()))
        return run_stages(args, context)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
