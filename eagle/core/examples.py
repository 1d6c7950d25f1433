"""Training examples, batches, and the interface of a source of features."""

# N tokens of all texts, T of one, L taps, D target width, A drafts, K tokens of each

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
MAX_PENDING = 2  # batches that a thread loads or writes


@dataclass(frozen=True, slots=True)
class Drafts:
    """Chains that a head drafted while the target wrote a text, and the target's states after their tokens.

    A draft continues the token behind its slot. Those of a batch count slots among all tokens.
    """

    slots: Tensor  # [A], on the host
    accepted: Tensor  # [A], how many of its tokens the target accepted, on the host
    drafted: Tensor  # [A], how many it has; what stands behind them counts for nothing, on the host
    tokens: Tensor  # [A, K]
    states: Tensor  # [A, K, L, D]
    divisor: float | None = None  # supervised tokens of the step that they are a part of; None for those of the batch

    @classmethod
    def join(cls, parts: Sequence[Drafts | None], lengths: Sequence[int]) -> Drafts | None:
        """The drafts of several texts of these lengths, one behind the other; None where no text has any."""
        starts = accumulate(lengths, initial=0)
        moved = [replace(part, slots=part.slots + start) for part, start in zip(parts, starts, strict=False) if part]
        if not moved:
            return None
        slots, accepted, drafted, tokens, states = (
            torch.cat([getattr(part, name) for part in moved])
            for name in ("slots", "accepted", "drafted", "tokens", "states")
        )
        return cls(slots, accepted, drafted, tokens, states)

    def to(self, device: torch.device) -> Drafts:
        """A copy with tokens and states on another device."""
        tokens, states = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.states))
        return replace(self, tokens=tokens, states=states)


@dataclass(frozen=True, slots=True)
class Shown:
    """A text with images as its chat template prints it, from which a processor makes tokens and what is seen."""

    text: str
    images: tuple[tuple[str, str], ...]  # the file and the sha256 of each


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of one conversation; `loss_mask` marks those of the assistant's answers."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    features: Tensor | None = None  # [T, L, D]
    drafts: Drafts | None = None  # by a head that helped to write it
    shared: int = 0  # how many of its first tokens the example before it has too, which is of the same conversation
    shown: Shown | None = None  # where images stand among its tokens


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
    drafts: Drafts | None = None  # of a head, in texts that were written with it
    branches: Tensor | None = None  # [N, K], the places of the tokens drafted from each slot, where slots read drafts

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

    def places_behind(self, places: Tensor, steps: Tensor | int) -> Tensor:
        """The places of the tokens that a draft from these slots reads after so many steps, at least one.

        What lies beyond the text counts for nothing.
        """
        plain = (places + steps).clamp(max=len(self.tokens) - 1)
        if self.branches is None:
            return plain
        last = self.branches.shape[1] - 1
        if isinstance(steps, int):  # the first reads what the target chose
            return plain if steps < 2 else self.branches[places, min(steps - 2, last)]
        return torch.where(steps < 2, plain, self.branches[places, (steps - 2).clamp(0, last)])

    def on_drafts(self) -> Batch:
        """The texts with the slots of the drafts alone supervised, from which levels read the drafted tokens."""
        assert self.drafts is not None
        slots, tokens, states = self.drafts.slots, self.drafts.tokens, self.drafts.states
        mask = torch.zeros_like(self.loss_mask)
        mask[slots + 2] = True
        places = len(self.tokens) + torch.arange(tokens.numel()).view(tokens.shape)
        branches = torch.zeros(len(self.tokens), tokens.shape[1], dtype=torch.long)
        branches[slots] = places
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens.flatten()]),
            features=torch.cat([self.features, states.flatten(0, 1)]),
            loss_mask=mask,
            branches=branches.to(self.tokens.device, non_blocking=True),
            drafts=None,
        )

    def pin_memory(self) -> Batch:
        """A copy in pinned host memory, from which an accelerator copies while computing; pinned tensors are kept."""
        tokens, features = (
            tensor.pin_memory() if tensor.device.type == "cpu" else tensor for tensor in (self.tokens, self.features)
        )
        return replace(self, tokens=tokens, features=features)

    def to(self, device: torch.device) -> Batch:
        """A copy with tokens and features on another device; the host does not wait for it."""
        tokens, features = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.features))
        drafts = None if self.drafts is None else self.drafts.to(device)
        return replace(self, tokens=tokens, features=features, drafts=drafts)


def lengths_of(examples: Sequence[Example]) -> list[int]:
    """The number of tokens of each example; examples on disk know it without being read."""
    known = getattr(examples, "lengths", None)
    return [len(example.tokens) for example in examples] if known is None else [int(length) for length in known]


def count_shared(one: Tensor, other: Tensor) -> int:
    """The number of tokens that two texts [T] share from their beginning."""
    length = min(len(one), len(other))
    differing = (one[:length] != other[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def trim_mask(loss_mask: Tensor) -> Tensor:
    """The loss mask up to its last supervised token, without the first two tokens, which no drafter predicts."""
    mask = loss_mask.clone()
    mask[:2] = False
    indices = mask.nonzero()
    return mask[: int(indices[-1]) + 1] if len(indices) else mask[:0]


def gate_mask(mask: Tensor, gate: str) -> Tensor:
    """The loss mask; shifted by two with "read", as published: a slot counts if the token that it reads does."""
    return torch.cat([mask.new_zeros(2), mask[:-2]])[: len(mask)] if gate == "read" else mask


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
        drafts=Drafts.join([example.drafts for example in examples], lengths),
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

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and loss mask of an example."""
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
