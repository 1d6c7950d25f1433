"""How a model's layers lay out the states that they hand on, and the one state a token that a tap gives."""

# B sequences, T tokens, S streams, D width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.target.structure import FAILURES

CAUSAL_TOKENS = 12  # of the texts by which a target is found to be a causal model
PLAIN = "[B, T, D]"
STREAMS_FIRST = "[S, B, T, D]"
STREAMS_THIRD = "[B, T, S, D]"
STREAMS_JOINED = "[B, T, S * D]"
TOKENS_FIRST = "[T, B, D]"


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a layer's input. Of several streams a tap gives their mean, as engines do (vLLM, DeepSeek-V4)."""

    axes: str
    width: int

    def read(self, states: Tensor) -> Tensor:
        """Return [B, T, D], one state a token."""
        if self.axes == STREAMS_FIRST:
            return states.mean(0)
        if self.axes == STREAMS_THIRD:
            return states.mean(2)
        if self.axes == STREAMS_JOINED:
            return states.unflatten(-1, (-1, self.width)).mean(2)
        if self.axes == TOKENS_FIRST:
            return states.transpose(0, 1)
        return states


def find_layout(states: Tensor, length: int, width: int) -> Layout | None:
    """Return the layout of a layer's input for one sequence of `length` tokens, more than one; None if unknown.

    One sequence tells them apart whatever the number of streams: its batch axis is 1 and is next to that of its tokens.
    """
    *axes, last = states.shape
    if axes == [1, length]:
        is_joined = last > width and last % width == 0
        return Layout(STREAMS_JOINED, width) if is_joined else Layout(PLAIN, last)
    if axes == [length, 1]:
        return Layout(TOKENS_FIRST, last)
    if len(axes) == 3 and axes[1:] == [1, length]:
        return Layout(STREAMS_FIRST, last)
    if len(axes) == 3 and axes[:2] == [1, length]:
        return Layout(STREAMS_THIRD, last)
    return None


def refuse_taps(taps: Sequence[int], count: int, layouts: Mapping[int, Layout], kind: str) -> None:
    """Raise a ValueError for taps that are not inputs of one width of a target's `count` layers."""
    wrong = [tap for tap in taps if not -1 <= tap < count]
    if wrong:
        raise ValueError(
            f"taps {wrong} are no layer inputs of this target: expected 0..{count - 1}, or -1 for the LM head's "
            f"input ({count} would be ambiguous: with or without the final norm); a head's are named by drafter.taps"
        )
    wrong = [tap for tap in taps if tap not in layouts]
    if wrong:
        raise ValueError(
            f"taps {wrong} of {kind} are inputs of layers that a text does not run, or no states [batch, tokens, "
            f"width] with or without streams: expected some of {sorted(layouts)} (-1 is the LM head's input), named by "
            "drafter.taps"
        )
    widths = {tap: layouts[tap].width for tap in taps}
    if len({*widths.values()}) > 1:
        raise ValueError(
            f"{kind} hands on states of different widths, {widths} by tap (-1 is the LM head's input): expected "
            "taps of one width"
        )


@torch.inference_mode()
def find_feature_fault(reader: Any) -> str | None:
    """Return why a head cannot learn from a model's states of a text, in words; None if it can."""
    tokens = torch.arange(3, 3 + CAUSAL_TOKENS) % reader.config.vocab_size
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % reader.config.vocab_size
    # the states before the last token, which a causal model computes without it
    states = reader.read_texts(torch.stack([tokens, changed]))[:, :-1].float()
    change = float((states[0] - states[1]).norm() / states[0].norm())
    # rounding, which in half precision grows from layer to layer
    limit = 1e-3 if reader.original.dtype in (torch.float32, torch.float64) else 0.1
    if change <= limit:
        return None
    return (
        "reads each token of a text with those behind it in view "
        f"(another last token changes the states before it by {change:.1%}), so a head would learn from the tokens "
        "that it is to draft"
    )


def tell_what_works(reader: Any) -> str:
    """Return a sentence on what a model is good for that cannot read trees."""
    try:
        fault = find_feature_fault(reader)
    except (*FAILURES, ImportError):  # as of a kernel that is not installed
        return "Its forward over a text fails, too."
    if fault:
        return f"Nor are there features for a head: it {fault}."
    return "Taps, extraction and training work; decoding does not."
