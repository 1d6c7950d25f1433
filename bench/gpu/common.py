"""What the stages of `bench.gpu` share: sizes, the device, clocks, and the record of what a unit was run on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from eagle.device import best_device
from eagle.shipped import commit

Figures = dict[str, Any]
Unit = Callable[[], Figures]
"""Measures one thing; returns figures that JSON can hold, with a summary in words as "line"."""


@dataclass(frozen=True)
class Context:
    """What the units of a call are run with."""

    rehearse: bool  # tiny sizes, few cases
    results: Path  # the folder with the result files of all stages
    work: Path  # a folder for whatever a stage makes
    inputs: Path | None = None  # what `bench.gpu.prepare` left: a target, its heads and prompts

    @property
    def device(self) -> torch.device:
        """The accelerator, or the CPU in a rehearsal without one."""
        return torch.device(best_device())


# Llama-3.1-8B, and the smallest model that has every part of it
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def describe_run() -> Figures:
    """Return the device, versions, day and commit that belong beside every figure."""
    device = best_device()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{device}, {platform.processor() or platform.machine()}"
    return {
        "device": name,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "date": str(date.today()),
        # a copy of a checkout without its history says which commit it is by this variable
        "commit": os.environ.get("EAGLE_COMMIT") or commit(),
    }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(step: Callable[[], object], device: torch.device, steps: int, windows: int = 3) -> float:
    """Return the median seconds of a step, over windows of several steps with one wait at the end.

    A wait after every step would hide that the host runs ahead of the device.
    """
    times = []
    for _ in range(windows):
        synchronize(device)
        start = perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        times.append((perf_counter() - start) / steps)
    return median(times)


def reset_peak(device: torch.device) -> int:
    """Start a new peak of allocated memory; return the bytes that are held now. CPUs do not count."""
    if device.type == "cpu":
        return 0
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that were allocated since `reset_peak`."""
    if device.type == "cpu":
        return 0
    return torch.accelerator.max_memory_allocated(device)
