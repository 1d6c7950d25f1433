"""The tiny target that the suite shares, trained once for all processes of a run and for the runs after it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import torch

from recipes.tiny import make_target as tiny

ROOT = Path(__file__).parent.parent
STEPS = 40
CONVERSATIONS = 400
# variables that stand for old processors, whose kernels take minutes in bf16
KERNELS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")


def make_fixture_target(folder: Path, seed: int) -> None:
    """Train it, unless it is there, with the processor's own kernels; the other processes of a run wait."""
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # a process of its own, as kernels are chosen at its start
        if any(name in os.environ for name in KERNELS):
            env = {name: value for name, value in os.environ.items() if name not in KERNELS}
            command = [sys.executable, "-m", "tests.fixture_target", folder, str(seed)]
            subprocess.run(command, cwd=ROOT, env=env, check=True)
        else:
            train_target(folder, seed)


def train_target(folder: Path, seed: int) -> None:
    """Train it in fp32, whatever is the fastest on this processor."""
    fastest_dtype = tiny.fastest_dtype
    tiny.fastest_dtype = lambda _: torch.float32
    try:
        tiny.make_target(folder, STEPS, seed, CONVERSATIONS)
    finally:
        tiny.fastest_dtype = fastest_dtype


if __name__ == "__main__":
    train_target(Path(sys.argv[1]), int(sys.argv[2]))
