"""All levels of a draft as one function of tensors with fixed shapes, which a CUDA graph captures once and replays.

A replay is one launch. A graph needs shapes that do not depend on the length of a sequence, and must not read values
from the device. So the cache columns of drafts come after the columns that are reserved for sequences, and a mask hides
the reserved columns that a sequence does not fill.
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
"""Gets a function and example inputs; returns a function that runs the same operations on other inputs, which may be at
other addresses."""

# the fewest cache columns reserved for sequences; doubled when they do not suffice, as each change is captured again
MIN_ROOM = 256


def sequence_capacity(length: int) -> int:
    """Return how many cache columns (tokens) are reserved for sequences of up to `length` tokens: a power of two.

    A captured draft (CUDA graph) is valid for one number of columns, so the number should change rarely. It is at least
    MIN_ROOM.
    """
    return max(MIN_ROOM, 1 << (length - 1).bit_length())


def capture_cuda(function: Function, inputs: Sequence[Tensor]) -> Function:
    """Capture a function as a CUDA graph, and return a function that replays it.

    A graph reads its inputs from fixed addresses, so a call copies its inputs there. Every call returns the same output
    tensor, which the next call overwrites.

    Args:
        function: Maps tensors to a tensor, by kernels that do not depend on the tensors' values.
        inputs: Tensors of the shapes, dtypes and devices of later inputs.
    """
    buffers = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*buffers)

    def replay(*inputs: Tensor) -> Tensor:
        """Return the captured function's output for these inputs, in the same tensor at every call."""
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return output

    return replay


class StaticLoop:
    """The captured draft loops of a head, by a key of everything that decides their shapes and addresses."""

    def __init__(self, capture: Capture = capture_cuda) -> None:
        """Begin without captured functions; `capture` turns a function of tensors into one that can be replayed."""
        self.capture = capture
        # None for a key whose function has run once and is not captured yet
        self.captured: dict[Hashable, Function | None] = {}

    def __call__(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """Return the result of a function for these inputs, which a captured function may overwrite at the next call.

        The first call with a key runs the function, the second captures it, and later ones replay it.

        Args:
            key: Everything that decides the function's shapes and the addresses that it reads.
            function: Maps the inputs to a tensor.
            inputs: Tensors, which may be others in every call.
        """
        # a CUDA graph can only be captured after a run that allocated memory and compiled kernels
        if key not in self.captured:
            self.captured[key] = None
            return function(*inputs)
        captured = self.captured[key]
        if captured is None:
            captured = self.captured[key] = self.capture(function, inputs)
        return captured(*inputs)


@dataclass(slots=True)
class PrecomputedNoise:
    """The target's sampling noise at the positions of one draft, as a tensor that a replayed graph gets as an input.

    It implements `Noise` with levels in place of positions: level 0 is the first drafted token.
    """

    rows: Tensor  # [depth, V], the noise at each level
    noise: Noise  # of the sequence
    temperature: float

    def __call__(self, positions: list[int]) -> Tensor:
        """Return the noise [P, V] at these P levels, over the target's V tokens; level 0 is the first drafted token."""
        return torch.stack([self.rows[position] for position in positions])

    def draft_noise(self, rows: int) -> Tensor:
        """Raise ValueError, because noise that is new in every call cannot be replayed."""
        raise ValueError(
            "drafts that are 'sampled' need new noise in every cycle: draft them without a static loop"
        )

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return logits [K, V] of K nodes, far lower for tokens that the sequence's top-p and other filters exclude."""
        return self.noise.filter_logits(logits)
