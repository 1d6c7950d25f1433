"""What the benchmarks share: the machine that figures belong to, tables and result files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle.decoding.cycle_times import clock_of
from eagle.shipped import commit
from eval.result_files.results import device_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SECONDS = 2.0  # of a product by which a peak is measured


def made_on(**about: Any) -> dict[str, Any]:
    """Return what was measured, and the machine, packages, day and commit that it was measured with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    peaks = {}
    for name, dtype in DTYPES.items():
        peak = measure_peak(dtype) / 1e9
        peaks[f"{name} GFLOP/s"] = round(peak) if peak >= 10 else float(f"{peak:.2g}")
    torch.set_num_threads(threads)
    return {**about, "cpu": device_name("cpu"), **peaks, "threads": threads, **describe_code()}


def describe_code() -> dict[str, Any]:
    """Return the packages, the day and the commit of a measurement."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(date.today()),
        # a copy of a checkout without its history names its commit by this variable
        "commit": os.environ.get("EAGLE_COMMIT") or commit(),
    }


def measure_peak(dtype: torch.dtype, device: str = "cpu", size: int = 2048) -> float:
    """Return the operations a second of a matrix product, the best of a square one at two sizes.

    Args:
        dtype: Of the factors.
        device: Where they are multiplied.
        size: The side of the larger product; the smaller one has a quarter of it.
    """
    best = 0.0
    clock = clock_of(torch.device(device))
    # without instructions for bf16 the large product takes a minute, and a small one tells as much
    for side in (size // 4, size):
        left = torch.randn(side, side, device=device).to(dtype)
        flops = 2 * side**3
        if best and flops / best > MAX_SECONDS:
            break
        # the first try allocates; products on an accelerator are timed together
        repeats = 1 if device == "cpu" else 20
        for _ in range(3):
            start = clock()
            for _ in range(repeats):
                left @ left
            best = max(best, repeats * flops / (clock() - start))
    return best


def markdown(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    about: Mapping[str, Any] | None = None,
) -> str:
    """Return a table as Markdown, with what it was made on below it.

    Args:
        header: The title of each column.
        rows: Cells of any type, as many as the header has.
        about: What `made_on` returned; None leaves the line below the table out.
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    if about is not None:
        lines += ["", machine_line(about)]
    return "\n".join(lines)


def machine_line(about: Mapping[str, Any]) -> str:
    """Return what tables were made on, as a line below them."""
    details = ", ".join(f"{key} {value}" for key, value in about.items())
    return f"<sub>{details}</sub>"


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
