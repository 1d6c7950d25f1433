"""What the benchmarks share: the machine that figures belong to, runs that take turns, tables and result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from time import process_time
from timeit import repeat
from typing import Any, TypeVar

import torch
import transformers

from eagle.shipped import commit
from eval.result_files.results import device_name

T = TypeVar("T")
MAX_SECONDS = 2.0  # of a product by which a peak is measured


def made_on(**about: Any) -> dict[str, Any]:
    """What was measured, and the machine, packages, day and commit that it was measured with."""
    return {
        **about,
        "cpu": device_name("cpu"),
        **{f"{name} GFLOP/s": peak for name, peak in measure_peaks().items()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(date.today()),
        "commit": commit(),
    }


def measure_peaks(
    size: int = 2048, tries: int = 3, timer: Callable[[], float] = process_time
) -> dict[str, int | float]:
    """Billions of operations a second of a square matrix product on one CPU thread, by the name of its dtype."""
    threads, peaks = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        # without instructions for bf16 the large product takes a minute, and a small one tells as much
        small = time_product(size // 4, dtype, tries, timer)
        is_slow = 64 * small > MAX_SECONDS
        side, seconds = (size // 4, small) if is_slow else (size, time_product(size, dtype, tries, timer))
        peak = 2 * side**3 / seconds / 1e9
        peaks[name] = round(peak) if peak >= 10 else float(f"{peak:.2g}")  # bf16 without its instructions: below 1
    torch.set_num_threads(threads)
    return peaks


def time_product(size: int, dtype: torch.dtype, tries: int, timer: Callable[[], float]) -> float:
    """Return the least seconds of a product of square matrices."""
    matrix = torch.ones(size, size, dtype=dtype)
    return min(repeat(lambda: matrix @ matrix, timer=timer, number=1, repeat=tries))


def take_turns(rounds: int, runs: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each run returned in every round; all take turns, so that a drifting machine hurts all alike."""
    figures: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            figures[name].append(run())
    return figures


@contextmanager
def time_inside(modules: Iterable[Any], methods: Iterable[tuple[Any, str]] = ()) -> Iterator[list[float]]:
    """CPU seconds spent in forwards of modules and in methods of objects, the outermost counted, as a list of one."""
    seconds, depth, started = [0.0], 0, 0.0

    def start(*_: Any) -> None:
        nonlocal depth, started
        started = process_time() if depth == 0 else started
        depth += 1

    def stop(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        seconds[0] += process_time() - started if depth == 0 else 0.0

    def timed(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start()
            try:
                return call(*args, **kwargs)
            finally:
                stop()

        return run

    handles = [hook for m in modules for hook in (m.register_forward_pre_hook(start), m.register_forward_hook(stop))]
    methods = list(methods)
    for owner, name in methods:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
        for owner, name in methods:
            delattr(owner, name)


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]], about: Mapping[str, Any] | None = None) -> str:
    """A table as Markdown, with what it was made on below it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    if about is not None:
        lines += ["", f"<sub>{', '.join(f'{key} {value}' for key, value in about.items())}</sub>"]
    return "\n".join(lines)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
