"""One side of a benchmark: a process that makes a training step whenever it is told to.

Any interpreter with torch runs it, so that each rival stays in an environment of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import process_time

import torch
from torch import Tensor, nn

from bench.resident import beyond


@dataclass(frozen=True)
class Work:
    """What all sides train on: one text with random tokens and features, and a head of the same sizes."""

    target: str  # a folder with a Llama of the right sizes
    draft_vocab: int  # the target's first tokens
    length: int
    spans: list[list[int]]  # where the assistant speaks
    steps: int
    dtype: str
    head_trained: bool  # the head's LM head

    def mask(self) -> Tensor:
        """[T], the text's loss mask."""
        mask = torch.zeros(self.length, dtype=torch.bool)
        for start, stop in self.spans:
            mask[start:stop] = True
        return mask

    def text(self) -> tuple[Tensor, Tensor]:
        """Its tokens [T], all of the draft vocabulary, and its loss mask."""
        return torch.randint(self.draft_vocab, (self.length,)), self.mask()

    @property
    def numbers(self) -> torch.dtype:
        """What frozen weights and features are kept in."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32


Made = tuple[Callable[[], Tensor], Iterable[nn.Parameter]]
"""A call that finds the loss, and all that it trains."""


def serve(side: Callable[[Work], Made]) -> None:
    """Make the side that the command line describes, then answer each line with its CPU seconds or its megabytes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a rival prints goes elsewhere
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Work(**json.loads(sys.argv[1]))
    loss, parameters = side(work)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bf16"):
            total = loss()
        total.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def seconds() -> float:
        begun = process_time()
        step()
        return process_time() - begun

    print(sum(parameter.numel() for parameter in trained), file=answers)
    for line in sys.stdin:
        gc.collect()
        print(beyond(step) if line == "memory\n" else seconds(), file=answers)
