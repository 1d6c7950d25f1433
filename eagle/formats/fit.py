"""Whether a head was made for a target like this one."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter


def check_fit(head: TrainableDrafter, target: Any, name: str) -> None:
    """Refuse a head whose states, tokens or layers a target does not have; `target` is its config, or its files."""
    if not (head.taps or head.reads.texts):  # a language model of its own, which reads nothing but tokens
        return
    advice = "name the target that its recipe.yaml names"
    head_sizes, sizes = ((shape.hidden_size, shape.vocab_size) for shape in (head.shape, target))
    if head_sizes != sizes:
        raise ValueError(
            f"{name} was made for a target of width {head_sizes[0]} and {head_sizes[1]} tokens, this one has "
            f"{sizes[0]} and {sizes[1]}: {advice}"
        )
    if (deepest := max(head.taps, default=-1)) >= target.num_hidden_layers:
        raise ValueError(
            f"{name} was made for a deeper target: it reads the input of layer {deepest}, this one has "
            f"{target.num_hidden_layers} layers: {advice}"
        )
