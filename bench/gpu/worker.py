"""A process that measures units one after the other, and what the program knows of it.

A crash of the device spoils the process that caused it. So units run in a worker, which is replaced after a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TAIL = 1500  # characters of what a failed worker printed


class Worker:
    """A worker seen from the program: units go to its input, figures come from its output as lines of JSON."""

    def __init__(self, stage: str, context: dict[str, Any]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "bench.gpu.worker", stage, json.dumps(context)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # what a unit starts ends with it
        )

    def run(self, unit: str, seconds: float) -> dict[str, Any]:
        """Return the figures of a unit, or what became of it under "error"."""
        start = monotonic()
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(unit + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        figures: dict[str, Any] = {"seconds": round(monotonic() - start, 1)}
        if line:
            return figures | json.loads(line)
        if ready:
            status = self.process.wait()
            return figures | {"error": f"the worker ended with status {status}: {self._tail()}"}
        return figures | {"error": f"not done after {seconds:.0f} s: {self._tail()}"}

    def _tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-TAIL:]

    def close(self) -> None:
        """End the worker with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.log.close()


def check_accelerator() -> None:
    """Raise a ValueError where there is no accelerator: the sizes of a run would take a CPU days."""
    code = "from eagle.device import best_device; print(best_device())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    if done.stdout.split()[-1] == "cpu":
        raise ValueError("torch finds no accelerator here, expected a GPU: `--rehearse` tries the program on a CPU")


def list_units(stage: str, context: dict[str, Any]) -> list[str]:
    """Return the names of a stage's units in their order, from a process of its own.

    The program itself imports no torch: it would hold memory of the device.
    """
    code = (
        "import json, sys\n"
        "from bench.gpu.worker import open_stage\n"
        "print(json.dumps(list(open_stage(sys.argv[1], json.loads(sys.argv[2])))))"
    )
    command = [sys.executable, "-c", code, stage, json.dumps(context)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"stage {stage} cannot be opened:\n{done.stderr[-TAIL:]}")
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def open_stage(stage: str, context: dict[str, Any]) -> Any:
    """Return the units of a stage by name."""
    from bench.gpu.common import Context

    paths = {name: Path(context[name]) for name in ("results", "work")}
    inputs = Path(context["inputs"]) if context["inputs"] else None
    name = stage if "." in stage else f"bench.gpu.{stage}"
    module = importlib.import_module(name)
    return module.units(Context(rehearse=context["rehearse"], inputs=inputs, **paths))


def serve(stage: str, context: dict[str, Any]) -> None:
    """Measure each unit that is named on a line of standard input, until one fails."""
    from bench.gpu.common import describe_run

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to the log
    units = open_stage(stage, context)
    about = describe_run()
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            print(json.dumps(about | units[name]()), file=answers)
        except Exception as error:  # of any kind: it is the unit's result
            traceback.print_exc()
            told = traceback.format_exc()[-TAIL:]
            print(json.dumps(about | {"error": f"{type(error).__name__}: {error}", "traceback": told}), file=answers)
            return  # the device may be in any state


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
