"""Measure units of a stage in a process of their own: `python -m bench.gpu.worker STAGE CONTEXT UNIT ...`.

A crash of the device spoils the process that caused it. So this one ends after a unit that failed, and the program
starts another.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from bench.machine import describe_code
from eagle.device import best_device

T = TypeVar("T")
Figures = dict[str, Any]
Unit = Callable[[], Figures]
"""Measures one thing; returns figures that JSON can hold, with a summary in words as "line"."""
UNFINISHED = "the worker did not finish this unit"


@dataclass(frozen=True)
class Context:
    """What the units of a call are run with."""

    call: str  # names the call
    rehearse: bool  # tiny sizes, few cases
    results: str  # the folder with the result files of all stages
    work: str  # a folder for whatever a stage makes
    inputs: str = ""  # a folder as `eagle demo --tiny` leaves: a target, its heads and prompts

    @property
    def device(self) -> torch.device:
        """The accelerator, or the CPU in a rehearsal without one."""
        return torch.device(best_device())

    def pick(self, real: T, tiny: T) -> T:
        """Return the value of a rehearsal, or the real one."""
        return tiny if self.rehearse else real


def list_units(stage: str, context: Context) -> dict[str, Unit]:
    """Return the units of a stage by name, in their order."""
    module = importlib.import_module(stage if "." in stage else f"bench.gpu.{stage}")
    units: dict[str, Unit] = module.units(context)
    return units


def result_file(results: str | Path, stage: str) -> Path:
    """Return the file to which every unit of a stage adds a line."""
    return Path(results) / f"gpu_{stage.rpartition('.')[2]}.jsonl"


def read_units(results: str | Path, stage: str) -> dict[str, Figures]:
    """Return the last figures of each unit, nothing where the stage has not run."""
    file = result_file(results, stage)
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # what was measured again replaces what came before
    return {row["unit"]: row for row in rows}


def write_unit(results: str, stage: str, figures: Figures) -> None:
    """Add the figures of a unit; several workers may do so at once."""
    file = result_file(results, stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(figures, ensure_ascii=False) + "\n")


def describe_device() -> Figures:
    """Return what belongs beside every figure: device, versions, day and commit."""
    name = f"{best_device()}, {platform.machine()}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return {
        "device": name,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **describe_code(),
    }


def main(stage: str, context: Context, names: list[str]) -> None:
    """Measure units until one fails; each begins with a line that stays if the process ends within it.

    Args:
        stage: A module of `bench.gpu`, or the full name of another.
        context: What the units are run with.
        names: The units, in their order.

    Raises:
        SystemExit: A unit failed, and those after it were not begun.
    """
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    # whatever a unit prints goes to the log
    os.dup2(2, 1)
    units = list_units(stage, context)
    about = describe_device()
    for name in names:
        start = monotonic()
        figures = {"unit": name, "call": context.call, **about}
        write_unit(context.results, stage, {**figures, "seconds": 0.0, "error": UNFINISHED})
        try:
            figures |= units[name]()
        except Exception as error:
            # of any kind: it is the unit's result
            traceback.print_exc()
            figures |= {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc()[-1500:],
            }
        figures["seconds"] = round(monotonic() - start, 1)
        write_unit(context.results, stage, figures)
        summary = figures.get("error") or figures["line"]
        print(f"{stage:10} {name:34} {figures['seconds']:6.1f} s  {summary}", file=terminal)
        if "error" in figures:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Context(**json.loads(sys.argv[2])), sys.argv[3:])
