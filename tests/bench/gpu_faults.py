"""A stage of `bench.gpu` whose units fail in every way that a unit can fail."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bench.gpu.worker import Context, Figures, Unit


def units(context: Context) -> dict[str, Unit]:
    """Return a unit for each kind of fault, and one that works before and after them."""
    marker = Path(context.work) / "second call"

    def work() -> Figures:
        return {"line": "worked", "device": "of this test"}

    def fail() -> Figures:
        if marker.exists():  # what is wrong may be mended between two calls
            return {"line": "mended"}
        raise ValueError("a planted error")

    # without an exception, as when the system kills a process
    def crash() -> Figures:
        print("the last words", file=sys.stderr, flush=True)
        os._exit(7)

    def hang() -> Figures:
        # longer than any test waits
        time.sleep(600)
        return {"line": "too late"}

    def talk() -> Figures:
        # what a unit prints goes to the log, and is not taken for its result
        print('{"line": "not a result"}')
        return {"line": "worked, though it printed"}

    faults: dict[str, Unit] = {
        "first": work,
        "fail": fail,
        "crash": crash,
        "talk": talk,
        "last": work,
    }
    if not marker.exists():
        faults["hang"] = hang  # to the end of the stage's time, which one call is enough for
    return faults
