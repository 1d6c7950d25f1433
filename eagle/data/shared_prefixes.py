"""The target's states of texts that begin alike, each token computed once."""

# T tokens of a text, L taps, D target width

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from eagle.data.shard_plan import group_texts
from eagle.target.state import TargetState
from eagle.target.target import Target


def can_read_on(target: Target) -> bool:
    """Whether states of a text that is read on from its prefix are those of its plain forward, up to rounding.

    Where layers keep a state, nothing would be saved: it can be taken up only where an earlier text ended.
    """
    try:
        with target.lock:
            target.reader.check(rows=2)
    except ValueError:  # it cannot read trees
        return False
    return not (target.sharded or target.reader.mixers.mixers or target.reader.follows_steps)


def read_on(target: Target, texts: Sequence[list[int]], shared: Sequence[int], taps: tuple[int, ...]) -> list[Tensor]:
    """[T, L, D] of each text; tokens that it shares with the one before it are read once."""
    state, groups = TargetState(target, taps), group_texts(shared)
    features: dict[int, Tensor] = {}
    for turn in zip_longest(*groups):  # the first text of every group, then the second ones
        for number, group in zip(turn, groups, strict=True):
            if group[0] in state.rows:
                state.release(group[0])
            if number is not None:
                state.admit(group[0], texts[number])
        numbers = {group[0]: number for number, group in zip(turn, groups, strict=True) if number is not None}
        while state.prompts:
            for row, output in state.read_prompts().items():
                assert output.features is not None
                features[numbers[row]] = output.features
    return [features[number] for number in range(len(texts))]
