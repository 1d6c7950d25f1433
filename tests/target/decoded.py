"""Short names for what tests of targets do most: decode a prompt to its end, and compare tensors by their norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle import Target, generate
from eagle.core.drafter import Drafter


def decode(target: Target, drafter: Drafter, prompt: Any, count: int, **options: Any) -> list[int]:
    """Return the first `count` tokens of a target's answer, drafted and verified; nothing stops it earlier."""
    return generate(
        target,
        drafter,
        prompt,
        max_new_tokens=count,
        stop=[],
        **options,
    ).tokens


def decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Any,
    count: Any,
    **options: Any,
) -> list[list[int]]:
    """Return the answers to several prompts that are decoded in batches."""
    traces = generate(
        target,
        drafter,
        prompts,
        max_new_tokens=count,
        stop=[],
        **options,
    )
    return [trace.tokens for trace in traces]


def is_close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Tell whether two tensors differ by less than a fraction of the expected norm."""
    difference = (got - expected).norm()
    return got.shape == expected.shape and bool(difference <= tolerance * expected.norm())
