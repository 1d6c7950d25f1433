"""Time the demo from nothing, on one thread and on all, alone and beside a busy process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from eagle.disk import write_text
from eagle.log import script
from eagle.shipped import commit
from eval.result_files.figures import format_number
from eval.result_files.results import ACCEPTANCE_LENGTH, CPU_SPEED_UP, SPEED_UP, read_results
from recipes.tiny.demo import RESULTS

KEPT = Path(__file__).parents[1] / "docs/results/demo_times.json"
THREADS = sorted({1, os.cpu_count() or 1})


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """One core at work on something else, if that is wanted."""
    command = [sys.executable, "-c", "while True: pass"]
    other = subprocess.Popen(command) if wanted else None
    try:
        yield
    finally:
        if other:
            other.kill()
            other.wait()


def time_demo(threads: int, beside_other_work: bool) -> dict[str, Any]:
    """Run the demo in an empty folder; its minutes, and τ and the speed-up of the head by temperature."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, busy_process(beside_other_work):
        start = perf_counter()
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-m", "recipes.tiny.demo"], cwd=folder, env=env, check=True)
        minutes = (perf_counter() - start) / 60
        results = read_results(Path(folder) / RESULTS)
        row = {"threads": threads, "busy": beside_other_work, "load_before": load, "minutes": round(minutes, 2)}
        for group in results.groups():
            if group.drafter == "eagle1":
                metrics = {"tau": ACCEPTANCE_LENGTH, "speed_up": SPEED_UP, "cpu_speed_up": CPU_SPEED_UP}
                row |= {
                    f"{name} T={group.temperature:g}": format_number(group.estimate(metric))
                    for name, metric in metrics.items()
                }
        return {**row, "machine": results.header.get("machine")}


def print_table(rows: list[dict[str, Any]]) -> None:
    """The runs as a table of markdown."""
    names = [name for name in rows[0] if name != "machine"]
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in names)} |")


def main(argv: list[str]) -> None:
    """Run the demo in each of the four ways, keep the figures, and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_times", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args(argv)
    rows = []
    for threads in args.threads:
        for busy in (False, True):
            rows.append(time_demo(threads, busy))
            write_text(args.out, json.dumps({"commit": commit(), "runs": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    script(main)
