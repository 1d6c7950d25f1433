"""Examples -> examples with the target's hidden states: one code for stored and for live features."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from eagle.drafter import TrainableDrafter
from eagle.examples import Example
from eagle.recipe import Recipe
from eagle.target import Target


def taps_of(method: type[TrainableDrafter]) -> tuple[int, ...]:
    """All that a method reads: when drafting, and in its loss."""
    return tuple(sorted({*method.taps, *method.teacher_taps}, key=lambda tap: (tap == -1, tap)))


def with_features(
    target: Target, examples: Iterable[Example], taps: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Example]:
    """The same examples, each with its features [T, L, D], in order."""
    for example in examples:
        features = target.features(example.tokens[None], taps)[0]
        yield dataclasses.replace(example, features=features.to("cpu", dtype))


def identity(recipe: Recipe, taps: tuple[int, ...]) -> dict[str, Any]:
    """What made the features; a reader that expects anything else refuses them."""
    data = hashlib.sha256(Path(recipe.data.train).read_bytes()).hexdigest()
    return {
        "target": recipe.target.model_dump(mode="json"),
        "data": {**recipe.data.model_dump(mode="json"), "sha256": data},
        "taps": list(taps),
        "dtype": recipe.features.dtype,
    }
