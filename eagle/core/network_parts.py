"""The parts of a trained network, as `eagle doctor` asks about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parts:
    """What a network is made of that a conversion can exchange in silence; `eagle doctor` asks about each of them."""

    by_tap: tuple[str, ...] = ()  # parameters whose columns, and stacks whose modules, come one for each tap
    halves: tuple[tuple[str, ...], ...] = ()  # matrices, those of one input together, that read embedding and state
    alike: tuple[tuple[str, str], ...] = ()  # pairs of parameters of one shape beside those of blocks
    tokens: tuple[str, ...] = ()  # settings that name a token of the vocabulary
    levels: int | None = None  # so many tokens are guessed in one forward; None where each level reads the one before
