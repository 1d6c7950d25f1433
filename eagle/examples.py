"""Training examples, batches of them, and what a source of features offers."""

# B batch, T tokens, L taps, D target width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as the target reads it; `loss_mask` marks the tokens that the assistant said."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    features: Tensor | None = None  # [T, L, D]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right with unsupervised slots."""

    tokens: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool
    features: Tensor  # [B, T, L, D]
    lengths: Tensor  # [B]
    taps: tuple[int, ...]  # which target state each of the L is

    def tapped(self, taps: tuple[int, ...]) -> Tensor:
        """[B, T, len(taps), D], the states of those taps."""
        return self.features[:, :, [self.taps.index(tap) for tap in taps]]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tokens, loss_mask, features, lengths = (
            tensor.to(device) for tensor in (self.tokens, self.loss_mask, self.features, self.lengths)
        )
        return Batch(tokens, loss_mask, features, lengths, self.taps)


def collate(examples: Sequence[Example], taps: tuple[int, ...]) -> Batch:
    """One batch of examples that carry features."""

    def side_by_side(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    features = [example.features for example in examples]
    assert all(feature is not None for feature in features), "collate needs examples with features"
    return Batch(
        side_by_side([example.tokens for example in examples]),
        side_by_side([example.loss_mask for example in examples]),
        side_by_side(features),  # type: ignore[arg-type]
        torch.tensor([len(example.tokens) for example in examples]),
        taps,
    )


class Features(Protocol):
    """Examples with features, stored or computed when they are read: training cannot tell."""

    taps: tuple[int, ...]
    identity: dict[str, Any]

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int]) -> list[Example]:
        """Those examples, with their features."""
        ...
