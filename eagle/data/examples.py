"""Training examples, batches of them, and what a source of features offers."""

# N tokens of all texts, T of one, L taps, D target width

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
READ_AHEAD = 2  # batches


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as the target reads it; `loss_mask` marks the tokens that the assistant said."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    features: Tensor | None = None  # [T, L, D]


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts end to end, nothing padded."""

    tokens: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, on the host: which slots count decides shapes
    features: Tensor  # [N, L, D]
    lengths: tuple[int, ...]  # of the texts
    taps: tuple[int, ...]  # which target state each of the L is
    seeds: tuple[int, ...]  # of all that is drawn at random for each text

    @property
    def slots(self) -> int:
        """How many tokens are supervised."""
        return int(self.loss_mask.sum())

    def tapped(self, taps: tuple[int, ...]) -> Tensor:
        """[N, len(taps), D], the states of those taps."""
        if taps == self.taps:
            return self.features
        return self.features[:, [self.taps.index(tap) for tap in taps]]

    def pinned(self) -> Batch:
        """The same batch where an accelerator can fetch it while it computes."""
        return replace(self, tokens=self.tokens.pin_memory(), features=self.features.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tokens, features = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.features))
        return replace(self, tokens=tokens, features=features)


def supervised(loss_mask: Tensor) -> Tensor:
    """The loss mask without a text's first two tokens, which no drafter writes, up to its last supervised one."""
    mask = loss_mask.clone()
    mask[:2] = False
    where = mask.nonzero()
    return mask[: int(where[-1]) + 1] if len(where) else mask[:0]


def collate(examples: Sequence[Example], taps: tuple[int, ...], seeds: Sequence[int] | None = None) -> Batch:
    """One batch of examples that carry features; what follows the last supervised token of a text is left out."""
    masks = [supervised(example.loss_mask) for example in examples]
    features = [example.features[: len(mask)] for example, mask in zip(examples, masks, strict=True)]  # type: ignore[index]
    return Batch(
        torch.cat([example.tokens[: len(mask)] for example, mask in zip(examples, masks, strict=True)]),
        torch.cat(masks),
        torch.cat(features),
        tuple(len(mask) for mask in masks),
        taps,
        tuple(seeds or range(len(examples))),
    )


def token_counts(said: Iterable[Tensor], vocab_size: int) -> Tensor:
    """[V], how often each token stands in these texts."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in said:
        found = torch.bincount(tokens, minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(
                f"token {len(found) - 1} is supervised, the target's vocabulary has {vocab_size}: "
                "the tokenizer is not this target's"
            )
        counts += found
    return counts


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """[D], the most frequent tokens in ascending order; of equally frequent ones the lower."""
    if not 0 < size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} was asked for, expected 1 to {len(counts)}, the target's own")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class Features(Protocol):
    """Examples with features, stored or computed when they are read: training cannot tell."""

    taps: tuple[int, ...]
    identity: dict[str, Any]
    together: bool  # whether all processes must read at once, each as often as the others

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int]) -> list[Example]:
        """Those examples, with their features."""
        ...

    def mask(self, place: int) -> Tensor:
        """[T], the loss mask of an example."""
        ...

    def said(self, place: int) -> Tensor:
        """The supervised tokens of an example."""
        ...


def ahead(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """The results in order; a thread works on the next ones meanwhile."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1) as reader:
        for job in jobs:
            waiting.append(reader.submit(job))
            if len(waiting) > READ_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
