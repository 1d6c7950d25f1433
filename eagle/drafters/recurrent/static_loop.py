"""All levels of a draft as one function of tensors whose shapes no sequence changes: captured once, and replayed.

Nothing in it reads from the device or follows the length of a sequence. Drafts lie after the room that sequences have,
and a mask hides what a sequence does not fill. That is what a CUDA graph needs, whose replay is one launch.
"""

# P positions, K rows, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.drafter import Noise

Function = Callable[..., Tensor]
Capture = Callable[[Function, Sequence[Tensor]], Function]
"""A function and example inputs -> a function that runs the same operations on other inputs, wherever these lie."""

MIN_ROOM = 256  # columns for sequences at least; doubled when they do not suffice, as each change is captured again


def text_capacity(length: int) -> int:
    """Return the columns that sequences of up to this length are given."""
    return max(MIN_ROOM, 1 << (length - 1).bit_length())


def capture_cuda(function: Function, inputs: Sequence[Tensor]) -> Function:
    """Return the function as a CUDA graph: a call copies its inputs to where the graph reads them, and replays it."""
    buffers = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*buffers)

    def replay(*inputs: Tensor) -> Tensor:
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return output

    return replay


class StaticLoop:
    """Captured draft loops by what decides their shapes and where their tensors lie."""

    def __init__(self, capture: Capture = capture_cuda) -> None:
        self.capture = capture
        self.captured: dict[Hashable, Function | None] = {}

    def __call__(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """Return the function's result: run the first time, which warms it up, then captured, then replayed."""
        if key not in self.captured:
            self.captured[key] = None
            return function(*inputs)
        captured = self.captured[key]
        if captured is None:
            captured = self.captured[key] = self.capture(function, inputs)
        return captured(*inputs)


@dataclass(slots=True)
class PrecomputedNoise:
    """The noise that target and drafter share, at the levels of one draft: a tensor by level instead of by position."""

    rows: Tensor  # [depth, V]
    noise: Noise
    temperature: float

    def __call__(self, positions: list[int]) -> Tensor:
        """Return [P, V], at these levels."""
        return torch.stack([self.rows[position] for position in positions])

    def draft_noise(self, rows: int) -> Tensor:
        """Refuse: noise that is new in every call cannot be replayed."""
        raise ValueError(
            "drafts that are 'sampled' need new noise in every cycle: draft them without a static loop"
        )

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return [K, V], by the filters of the sequence."""
        return self.noise.filter_logits(logits)
