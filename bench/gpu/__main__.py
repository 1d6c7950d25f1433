"""Measure this package on a GPU, in stages by their value: `python -m bench.gpu --minutes 8`.

Every stage has a time budget and consists of units. The figures of a unit are written as soon as it ends, to
`gpu_STAGE.json`. A unit that fails, hangs or crashes costs only itself. The next call skips what has a result, so a
second call goes on where the first one ended. `--rehearse` runs every stage with tiny sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

from bench.gpu.page import PAGE, RESULTS, write_page
from bench.gpu.worker import Worker, check_accelerator, list_units

MIN_SECONDS = 10  # a unit is not begun in the last seconds of a stage


class Stage(NamedTuple):
    """A part of the program."""

    name: str  # its module in bench.gpu
    seconds: float  # of one call, unless other stages leave more
    workers: int  # units at once; timings run alone


STAGES = (
    Stage("correct", 90, workers=10),
    Stage("training", 120, workers=1),
    Stage("decoding", 150, workers=1),
    Stage("whole_path", 120, workers=1),
    Stage("kernels", 45, workers=1),
)


class StageRun:
    """The units of a stage that have no result yet, and the file that gets their results."""

    def __init__(self, stage: Stage, context: dict[str, Any], again: bool) -> None:
        self.stage = stage
        self.context = context
        self.file = Path(context["results"]) / f"gpu_{stage.name}.json"
        self.lock = Lock()
        self.units: dict[str, Any] = {}
        if self.file.exists() and not again:
            self.units = json.loads(self.file.read_text())["units"]
        names = list_units(stage.name, context)
        # what failed before is tried again, once everything else has been
        self.queue = deque(name for name in names if name not in self.units)
        self.queue.extend(name for name in names if "error" in self.units.get(name, {}))
        self.kept = len(names) - len(self.queue)

    def run(self, deadline: float) -> None:
        """Run units until the queue is empty or the deadline is near."""
        if not self.queue:
            return
        count = 1 if self.context["rehearse"] else min(self.stage.workers, len(self.queue))
        threads = [Thread(target=self._work, args=(deadline,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, deadline: float) -> None:
        """Give one worker unit after unit; replace it when it has failed."""
        worker: Worker | None = None
        while (left := deadline - monotonic()) > MIN_SECONDS:
            with self.lock:
                if not self.queue:
                    break
                name = self.queue.popleft()
            worker = worker or Worker(self.stage.name, self.context)
            figures = worker.run(name, left)
            with self.lock:
                self._record(name, figures)
            if "error" in figures:
                worker.close()
                worker = None
        if worker:
            worker.close()

    def _record(self, name: str, figures: dict[str, Any]) -> None:
        """Write the figures at once: whatever comes next may end the program."""
        self.units[name] = figures
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".tmp")
        partial.write_text(json.dumps({"units": self.units}, indent=1, ensure_ascii=False) + "\n")
        partial.replace(self.file)
        told = figures.get("error") or figures["line"]
        print(f"{self.stage.name:10} {name:34} {figures['seconds']:6.1f} s  {told}", flush=True)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    summary = (__doc__ or "").split("\n\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=summary)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--minutes", type=float, default=8, help="time for this call (default: %(default)s)")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--again", nargs="+", choices=names, default=[], help="measure these anew")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try the program, on a CPU too")
    parser.add_argument("--results", type=Path, help=f"folder of the result files (default: {RESULTS})")
    parser.add_argument("--inputs", type=Path, help="what `python -m bench.gpu.prepare` left")
    parser.add_argument("--page", action="store_true", help=f"only write {PAGE} from the result files")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the stages, tell what is left, write the page; 1 if a unit of a rehearsal failed."""
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as work:
        results = args.results or (Path(work) / "results" if args.rehearse else RESULTS)
        if args.page:
            print(f"wrote {write_page(results)}")
            return 0
        if not args.rehearse:
            check_accelerator()
        context = {
            "rehearse": args.rehearse,
            "results": str(results.resolve()),
            "work": work,
            "inputs": str(args.inputs.resolve()) if args.inputs else None,
        }
        start = monotonic()
        end = start + 60 * args.minutes
        chosen = [stage for stage in STAGES if stage.name in args.stages]
        runs = [StageRun(stage, context, stage.name in args.again) for stage in chosen]
        for run in runs:
            if run.kept:
                print(f"{run.stage.name:10} {run.kept} units have a result: kept", flush=True)
            began = monotonic()
            run.run(min(end, began + run.stage.seconds))
            print(f"{run.stage.name:10} {monotonic() - began:.0f} s", flush=True)
        # a second pass gives the time that is left to what did not fit into its budget
        for run in runs:
            run.run(end)
        left = {run.stage.name: len(run.queue) for run in runs if run.queue}
        failed = [(run, name) for run in runs for name in run.units if "error" in run.units[name]]
        print(f"{monotonic() - start:.0f} s; units left for another call: {left or 'none'}; {len(failed)} failed")
        if args.rehearse:
            write_page(results, Path(work) / "page.md")  # try that, too
        return int(args.rehearse and bool(failed or left))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
