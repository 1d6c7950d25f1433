"""The fast suite as on other machines: other trained weights, kernels, threads, load and order; a table of failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

SPIN = "import time\nend = time.monotonic() + 7200\nwhile time.monotonic() < end: pass"


@dataclass(frozen=True)
class Variant:
    """How a run of the suite differs from the usual one."""

    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    spinning: int = 0  # processes beside it

    def __str__(self) -> str:
        words = [*self.options, *(f"{name}={value}" for name, value in self.env.items())]
        if self.spinning:
            words.append(f"beside {self.spinning} spinning processes")
        return " ".join(words)


def kernels(threads: int, aten: str, onednn: str, mkl: str) -> dict[str, str]:
    """Return variables that stand for another processor: its kernels round otherwise."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_CBWR": mkl,
    }


VARIANTS = {
    "an old processor": Variant(
        ("--fixture-seed=1",), kernels(1, "default", "SSE41", "COMPATIBLE")
    ),
    "a busy machine": Variant(
        ("--fixture-seed=2",), kernels(2, "avx2", "AVX2", "AVX2"), spinning=2
    ),
    "another order": Variant(
        ("--fixture-seed=3", "--reversed", "--hypothesis-profile=new"), {"OMP_NUM_THREADS": "1"}
    ),
}


@contextmanager
def spin(count: int) -> Iterator[None]:
    """Run so many processes that take all they get, until the block ends."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_suite(variant: Variant, arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return what failed, one line a test, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", *variant.options, *arguments]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    lines = []
    with spin(variant.spinning):
        with subprocess.Popen(command, env={**os.environ, **variant.env}, **pipes) as run:  # type: ignore[call-overload]
            # shown while it runs, as that takes long
            for line in run.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if run.returncode and not failed:
        failed = [f"pytest ended with status {run.returncode}"]
    return failed, lines[-1] if lines else "nothing"


def main(arguments: Sequence[str]) -> int:
    """Run the suite in these variants (in all without names), with these options of pytest."""
    options = [argument for argument in arguments if argument not in VARIANTS]
    chosen = [name for name in VARIANTS if name in arguments] or list(VARIANTS)
    rows = []
    for name in chosen:
        print(f"\n{name}: {VARIANTS[name]}", flush=True)
        start = perf_counter()
        failed, last = run_suite(VARIANTS[name], options)
        minutes = (perf_counter() - start) / 60
        rows.append((name, failed, f"{minutes:.1f} minutes; {last}"))
    print("\n| variant | how it differs | failed | run |\n|---|---|---|---|")
    for name, failed, last in rows:
        print(f"| {name} | {VARIANTS[name]} | {len(failed)} | {last} |")
    for name, failed, _ in rows:
        for line in failed:
            print(f"{name}: {line}")
    return int(any(failed for _, failed, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
