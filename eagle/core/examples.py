"""Training examples, batches, and the interface of a source of features."""

# N tokens of all texts, T of one, L taps, D target width

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
MAX_PENDING = 2  # batches that a thread loads or writes


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of one conversation; `loss_mask` marks those of the assistant's answers."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    features: Tensor | None = None  # [T, L, D]


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts concatenated without padding."""

    tokens: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, on the host: which slots count decides shapes
    features: Tensor  # [N, L, D]
    lengths: tuple[int, ...]  # of the texts
    taps: tuple[int, ...]  # which target state each of the L is
    seeds: tuple[int, ...]  # random seed of each text
    progress: float = 0.0  # how much of the training is done, from 0 to 1
    divisors: tuple[float, ...] | None = None  # of the step that this is a part of, as the head's `divisors` sum them

    @property
    def slots(self) -> int:
        """The number of supervised tokens."""
        return int(self.loss_mask.sum())

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """The loss mask of each text."""
        return self.loss_mask.split(self.lengths)

    def select_taps(self, taps: tuple[int, ...]) -> Tensor:
        """[N, len(taps), D], the features of these taps."""
        if taps == self.taps:
            return self.features
        return torch.stack([self.features[:, self.taps.index(tap)] for tap in taps], dim=1)

    def pin_memory(self) -> Batch:
        """A copy in pinned host memory, from which an accelerator copies while computing; pinned tensors are kept."""
        tokens, features = (
            tensor.pin_memory() if tensor.device.type == "cpu" else tensor for tensor in (self.tokens, self.features)
        )
        return replace(self, tokens=tokens, features=features)

    def to(self, device: torch.device) -> Batch:
        """A copy with tokens and features on another device; the host does not wait for it."""
        tokens, features = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.features))
        return replace(self, tokens=tokens, features=features)


def trim_mask(loss_mask: Tensor) -> Tensor:
    """The loss mask up to its last supervised token, without the first two tokens, which no drafter predicts."""
    mask = loss_mask.clone()
    mask[:2] = False
    indices = mask.nonzero()
    return mask[: int(indices[-1]) + 1] if len(indices) else mask[:0]


def collate(examples: Sequence[Example], taps: tuple[int, ...], seeds: Sequence[int] | None = None) -> Batch:
    """One batch of examples with features, each cut after its last supervised token."""
    masks = [trim_mask(example.loss_mask) for example in examples]
    lengths = tuple(len(mask) for mask in masks)
    return Batch(
        torch.cat([example.tokens[:length] for example, length in zip(examples, lengths, strict=True)]),
        torch.cat(masks),
        torch.cat([example.features[:length] for example, length in zip(examples, lengths, strict=True)]),  # type: ignore[index]
        lengths,
        taps,
        tuple(seeds or range(len(examples))),
    )


def token_counts(texts: Iterable[Tensor], vocab_size: int) -> Tensor:
    """[V], how often each token occurs in these texts."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in texts:
        text_counts = torch.bincount(tokens, minlength=vocab_size)
        if len(text_counts) > vocab_size:
            raise ValueError(
                f"token {len(text_counts) - 1} is supervised, the target's vocabulary has {vocab_size}: "
                "the tokenizer is not this target's"
            )
        counts += text_counts
    return counts


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """[D], the `size` most frequent tokens in ascending order; ties go to the lower token."""
    if not 0 < size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} was asked for, expected 1 to {len(counts)}, the target's own")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class Features(Protocol):
    """Examples with features, stored or computed when they are read."""

    taps: tuple[int, ...]
    identity: dict[str, Any]
    together: bool  # whether all processes must read at once, each equally often
    sampled: bool  # whether loss masks are other than `mask` says, and known of what was read alone

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples at these indices, with their features."""
        ...

    def mask(self, index: int) -> Tensor:
        """[T], the loss mask of an example."""
        ...

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of an example."""
        ...


def run_ahead(jobs: Iterable[Callable[[], Result]]) -> Generator[Result]:
    """Yield the jobs' results in order; a thread runs them ahead of the caller."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for job in jobs:
            pending.append(thread.submit(job))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
