"""The shapes of the states between a model's layers, from which a tap takes one state for each token."""

# B sequences, T tokens, S streams, D width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.target.structure import FAILURES

CAUSAL_TOKENS = 12  # tokens of the sequences by which a model is found to be causal
# the layouts, by their axes
PLAIN = "[B, T, D]"
STREAMS_FIRST = "[S, B, T, D]"
STREAMS_THIRD = "[B, T, S, D]"
STREAMS_JOINED = "[B, T, S * D]"
TOKENS_FIRST = "[T, B, D]"


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a layer's input, which a tap reads.

    A model may have several streams of states. A tap then gives their mean, as vLLM does for DeepSeek-V4.
    """

    axes: str  # one of the constants above
    width: int  # of a state in one stream

    def read(self, states: Tensor) -> Tensor:
        """Return [B, T, D], one state of width D for each of T tokens of B sequences, from a tapped layer's input.

        Several streams of states become their mean.
        """
        if self.axes == STREAMS_FIRST:
            return states.mean(0)
        if self.axes == STREAMS_THIRD:
            return states.mean(2)
        if self.axes == STREAMS_JOINED:
            # over the S streams of [B, T, S, D]
            return states.unflatten(-1, (-1, self.width)).mean(2)
        if self.axes == TOKENS_FIRST:
            return states.transpose(0, 1)
        return states


def find_layout(states: Tensor, length: int, width: int) -> Layout | None:
    """Return the layout of a layer's input; None if it is unknown.

    Layouts are [B, T, D] (PLAIN) and [T, B, D] (TOKENS_FIRST) for B sequences of T tokens with states of width D. With
    S streams of states they are [S, B, T, D] (STREAMS_FIRST), [B, T, S, D] (STREAMS_THIRD) and [B, T, S * D]
    (STREAMS_JOINED). The axes of a single sequence show which one it is, whatever the number of streams: the batch
    axis, of size 1, is next to the tokens' axis.

    Args:
        states: a layer's input for one sequence.
        length: its number of tokens, more than one.
        width: the config's width of a state.
    """
    *axes, last = states.shape
    if axes == [1, length]:
        # several streams may be joined in the last axis
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
    """Raise a ValueError for taps that a target does not have, or whose states differ in width.

    Args:
        taps: indices of layers whose inputs are read, or -1 for the LM head's input.
        count: the number of the target's layers.
        layouts: by tap the shape of the states there, for the taps that can be read.
        kind: the model's type, for messages.
    """
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
    """Return in words why a draft head cannot learn from a model's states; None if it can.

    It cannot if the model is not causal. A trial changes the last token, and compares the states before it.

    Args:
        reader: the `TreeReader` that runs the model.
    """
    tokens = torch.arange(3, 3 + CAUSAL_TOKENS) % reader.config.vocab_size
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % reader.config.vocab_size
    # of both sequences, the states before the last token, which a causal model computes without it
    states = reader.read_sequences(torch.stack([tokens, changed]))[:, :-1].float()
    change = float((states[0] - states[1]).norm() / states[0].norm())
    # the relative difference that rounding may make, which in half precision grows from layer to layer
    limit = 1e-3 if reader.original.dtype in (torch.float32, torch.float64) else 0.1
    if change <= limit:
        return None
    return (
        "reads each token of a sequence with those behind it in view "
        f"(another last token changes the states before it by {change:.1%}), so a head would learn from the tokens "
        "that it is to draft"
    )


def tell_what_works(reader: Any) -> str:
    """Return a sentence that says what can still be done with a model that cannot read draft trees, for an error.

    Args:
        reader: the `TreeReader` that runs the model.
    """
    try:
        fault = find_feature_fault(reader)
    # ImportError comes from kernels that are not installed
    except (*FAILURES, ImportError):
        return "Its forward over a sequence fails, too."
    if fault:
        return f"Nor are there features for a head: it {fault}."
    return "Taps, extraction and training work; decoding does not."
