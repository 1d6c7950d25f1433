"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774): lossy, it keeps tokens above a probability threshold."""

# N nodes, K of them with children, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.core.tree import DraftTree
from eagle.device import to_host, upload

PUBLISHED = (0.09, 0.3)  # epsilon and delta of Medusa's released code
ENTROPY_SHIFT = 1e-5  # added to a prob before its logarithm, as there


def check_typical(bounds: Any, *, alone: bool, temperature: float) -> None:
    """Refuse invalid bounds, and typical acceptance with a greedy target or another acceptance rule."""
    numbers = bounds if isinstance(bounds, tuple) else ()
    if len(numbers) != 2 or not all(isinstance(bound, float | int) and 0 < bound <= 1 for bound in numbers):
        raise ValueError(
            f"Sampling.typical is {bounds!r}, expected None (lossless), or epsilon and delta, each above 0, at most 1: "
            f"as {PUBLISHED}"
        )
    if temperature == 0:
        raise ValueError("typical acceptance needs a temperature above 0: at 0 a single token is possible")
    if not alone:
        raise ValueError("typical acceptance is a rule of its own: leave out Sampling.rule='block' and lenience")


def floors(probs: Tensor, epsilon: float, delta: float) -> Tensor:
    """[K], the least probability of an accepted token: min(epsilon, delta * e^-entropy)."""
    entropy = -(probs * (probs + ENTROPY_SHIFT).log()).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def walk_typically(
    tree: DraftTree, target_probs: Callable[[Sequence[int]], Tensor], bounds: tuple[float, float]
) -> list[int]:
    """The longest path of tokens above the threshold, the likeliest one of equal length; `target_probs` are [K, V]."""
    if tree.draft_probs is not None:
        raise ValueError("typical acceptance asks the target alone: got sampled drafts, use Budget(draw='likeliest')")
    parents, reached = tree.parents.tolist(), {0: (0, 1.0)}  # a node's length of path, and its probability
    if len(tree) > 1:
        inner, rows = tree.parents[1:].unique(return_inverse=True)
        probs = target_probs(inner.tolist())
        rows, tokens = upload(torch.stack([rows, tree.tokens[1:]]), probs.device)
        numbers = to_host([torch.stack([probs[rows, tokens], floors(probs, *bounds)[rows]])])[0].tolist()
        for node, (parent, prob, floor) in enumerate(zip(parents[1:], *numbers, strict=True), start=1):
            if parent in reached and prob > floor:
                length, likelihood = reached[parent]
                reached[node] = (length + 1, likelihood * prob)
    return tree.path(max(reached, key=reached.__getitem__))
