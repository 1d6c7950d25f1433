"""One side of a benchmark: a process that makes training steps whenever it is told to.

Any interpreter with torch runs it, so that each rival stays in an environment of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

Text = tuple[int, list[list[int]]]  # tokens, and spans of supervised ones
Step = Callable[[int], object]  # an update on batch i
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Work:
    """What all sides train on: texts of random tokens and features, and a head of the same sizes."""

    target: str  # a folder with a Llama of the right sizes, or with its config where no side reads its weights
    draft_vocab: int  # the target's first tokens
    batches: list[list[Text]]
    dtype: str  # of autocast, frozen weights and EAGLE-3's features; trained weights are fp32
    steps: int = 0  # of EAGLE-3's unroll; 0 for EAGLE-1
    train_lm_head: bool = False
    device: str = "cpu"
    head: dict[str, Any] = field(default_factory=dict)  # settings of a head that guesses several tokens at once

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype of frozen weights."""
        return DTYPES[self.dtype]

    def tokens_and_mask(self, text: Text) -> tuple[Tensor, Tensor]:
        """Random tokens [T] of the draft vocabulary, and the loss mask [T]."""
        length, spans = text
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in spans:
            mask[start:stop] = True
        return torch.randint(self.draft_vocab, (length,)), mask


def update_step(loss: Callable[[int], Tensor], parameters: Iterable[nn.Parameter], work: Work) -> Step:
    """A step of fused AdamW with gradients clipped by norm, under autocast in bf16."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(i: int) -> None:
        with torch.autocast(work.device, torch.bfloat16, enabled=work.dtype == "bf16"):
            total = loss(i)
        total.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def clock(device: str) -> float:
    """CPU seconds of this process, or seconds once an accelerator has done all that it was given."""
    if device == "cpu":
        return process_time()
    torch.accelerator.synchronize()
    return perf_counter()


def resident_kb(line: str) -> int:
    """A line of this process's status, VmRSS or VmHWM."""
    match = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])


def working_memory(step: Callable[[], object], device: str) -> float:
    """Megabytes that a step needs at its peak, beyond what is held before it."""
    if device != "cpu":
        allocated = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        step()
        return (torch.accelerator.max_memory_allocated() - allocated) / 1e6
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    resident = resident_kb("VmRSS")
    step()
    return (resident_kb("VmHWM") - resident) / 1e3


def serve(side: Callable[[Work], tuple[Step, Iterable[nn.Parameter]]]) -> None:
    """Print how many weights the side trains, then answer each line: seconds of a pass, or megabytes of a step."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a rival prints goes elsewhere
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Work(**json.loads(sys.argv[1]))
    step, parameters = side(work)
    print(sum(parameter.numel() for parameter in parameters if parameter.requires_grad), file=answers)
    for line in sys.stdin:
        gc.collect()
        if line == "memory\n":
            print(working_memory(lambda: step(0), work.device), file=answers)
            continue
        start = clock(work.device)
        for i in range(len(work.batches)):
            step(i)
        print(clock(work.device) - start, file=answers)
