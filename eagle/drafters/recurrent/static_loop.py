"""All levels of a draft as one function of tensors whose shapes no text changes: captured once, and replayed.

Nothing in it reads from the device or follows the length of a text: drafts lie behind the room that texts have, and a
mask hides what a text does not fill. That is what a CUDA graph needs, whose replay is one launch.
"""

# B rows of text, N nodes, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.drafter import Noise

Function = Callable[..., Tensor]
Capture = Callable[[Function, Sequence[Tensor]], Function]
"""A function, and inputs such as it will get -> what runs the same operations on others, wherever these lie."""

ROOM = 256  # columns for texts at least; doubled when they do not do, as each change is captured anew


def text_room(length: int) -> int:
    """The columns that texts of up to this length are given."""
    return max(ROOM, 1 << (length - 1).bit_length())


def capture_cuda(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The function as a CUDA graph: a call copies its inputs to where the graph reads them, and replays it."""
    held = [part.clone() for part in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*held)

    def replay(*inputs: Tensor) -> Tensor:
        for place, part in zip(held, inputs, strict=True):
            place.copy_(part)
        graph.replay()
        return output

    return replay


class StaticLoop:
    """Captured draft loops by what decides their shapes and where their tensors lie."""

    def __init__(self, capture: Capture = capture_cuda) -> None:
        self.capture = capture
        self.known: dict[Hashable, Function | None] = {}

    def __call__(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """The function's result: run the first time, which warms it up, then captured, then replayed."""
        if key not in self.known:
            self.known[key] = None
            return function(*inputs)
        captured = self.known[key] or self.capture(function, inputs)
        self.known[key] = captured
        return captured(*inputs)


@dataclass(slots=True)
class HeldNoise:
    """The shared noise of a text at the levels of one draft, as a tensor: level for level instead of by position."""

    rows: Tensor  # [depth, V]
    noise: Noise
    temperature: float

    def __call__(self, positions: list[int]) -> Tensor:
        """[P, V], at these levels."""
        return torch.stack([self.rows[position] for position in positions])

    def own(self, rows: int) -> Tensor:
        """Refused: noise that is new in every call cannot be replayed."""
        raise ValueError("drafts that are 'sampled' need new noise in every cycle: draft them without a static loop")

    def filter_logits(self, logits: Tensor) -> Tensor:
        """[K, V], the text's own filters."""
        return self.noise.filter_logits(logits)
