"""The sides of a comparison of training steps, which take turns, and the peak of matrix products beside them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

import torch

from bench.rivals.serve import DTYPES, Work, clock
from bench.train_cost import Sizes

ROOT = Path(__file__).parent.parent
REPEAT_SECONDS = 1.0  # a turn is as many passes as take about so long
# of each study: name, module of bench.rivals, whether the LM head is trained; a rival stands before ours with as many
# weights, and is run by the Python of its name where one is given
SIDES: dict[str, list[tuple[str, str, bool]]] = {
    "eagle1": [("published", "published_step", False), ("ours", "eagle_step", False)],
    "eagle3": [
        ("speculators", "speculators_step", False),
        ("ours_frozen", "eagle_step", False),
        ("modelopt", "modelopt_step", True),
        ("ours_trained", "eagle_step", True),
    ],
    "levels": [("released", "level_step", False), ("ours", "eagle_step", False)],
    "blocks": [("speculators", "speculators_block_step", False), ("ours", "eagle_step", False)],
}


class Side:
    """A process that makes training steps whenever it is asked to."""

    def __init__(self, name: str, python: str, module: str, work: Work) -> None:
        self.name, self.stderr = name, TemporaryFile("w+")  # noqa: SIM115
        self.command = [python, "-m", f"bench.rivals.{module}", json.dumps(asdict(work))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.stderr, text=True)
        self.trained = self._read()  # weights

    def _read(self) -> float:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.stderr.seek(0)
            raise ValueError(
                f"{self.name} stopped with code {self.process.wait()}, expected an answer: run "
                f"{shlex.join(self.command)}, which printed:\n{self.stderr.read()[-2000:]}"
            )
        return float(line)

    def ask(self, question: str) -> float:
        """The seconds of a "pass" over all batches, or the megabytes of a step for "memory"."""
        assert self.process.stdin
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._read()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr.close()


def open_sides(study: str, work: Work, pythons: dict[str, str], stack: ExitStack) -> dict[str, Side]:
    """All sides of a study; every rival trains as many weights as ours."""
    sides = {
        name: stack.enter_context(
            Side(name, pythons.get(name, sys.executable), module, replace(work, train_lm_head=train_lm_head))
        )
        for name, module, train_lm_head in SIDES[study]
    }
    names = list(sides)
    for rival, ours in zip(names[::2], names[1::2], strict=True):
        if sides[ours].trained != sides[rival].trained:
            raise ValueError(
                f"{ours} trains {sides[ours].trained:.0f} weights, expected {sides[rival].trained:.0f} as {rival} "
                f"does: make both train the same tensors in bench/rivals"
            )
    return sides


def peak(sizes: Sizes, dtype: str, device: str, tries: int = 2) -> float:
    """The most operations a second of several big products: a square one, and the step's own shapes."""
    best = 0.0
    for m, k, n in [(2048, 2048, 2048), (1024, sizes.width, sizes.mlp), (256, sizes.width, min(sizes.vocab, 32768))]:
        left, right = (torch.randn(*size, device=device, dtype=DTYPES[dtype]) for size in ((m, k), (n, k)))
        repeats = max(int(1e10 // (2 * m * k * n)), 1) if device == "cpu" else 100
        for _ in range(tries):
            start = clock(device)
            for _ in range(repeats):
                left @ right.T
            best = max(best, repeats * 2 * m * k * n / (clock(device) - start))
    return best


def measure(study: str, work: Work, sizes: Sizes, pythons: dict[str, str], rounds: int) -> dict[str, float]:
    """Of each side memory, and tokens per second by the median and at best; and the peak of matrix products."""
    row: dict[str, float] = {}
    with ExitStack() as stack:
        sides = open_sides(study, work, pythons, stack)
        repeats = {}
        for name, side in sides.items():
            repeats[name] = max(int(REPEAT_SECONDS / side.ask("pass")), 1)
            row[f"{name}_mb"] = side.ask("memory")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        peaks = []
        for _ in range(rounds):
            peaks.append(peak(sizes, work.dtype, work.device))
            for name, side in sides.items():
                seconds[name] += [side.ask("pass") for _ in range(repeats[name])]
    tokens = sum(length for batch in work.batches for length, _ in batch)
    for name, passes in seconds.items():
        row |= {name: tokens / median(passes), f"{name}_best": tokens / min(passes)}
    return row | {"peak": max(peaks), "samples": min(map(len, seconds.values()))}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Four digits of each."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
