"""Training examples, batches, and the interface of a source of features."""

# N tokens of all sequences, T of one, L taps, D target width, A drafts, K tokens of each

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
    """Chains that a head drafted while the target wrote a sequence, and the target's states after their tokens.

    A draft continues the sequence after the token that follows its slot. In a batch, slots are indices of all tokens.
    """

    slots: Tensor  # [A], on the host
    accepted: Tensor  # [A], how many of its tokens the target accepted, on the host
    drafted: Tensor  # [A], how many tokens it has; what follows them is padding, on the host
    tokens: Tensor  # [A, K]
    states: Tensor  # [A, K, L, D]
    # supervised tokens of the step that they are a part of; None for those of the batch
    divisor: float | None = None

    @classmethod
    def join(cls, parts: Sequence[Drafts | None], lengths: Sequence[int]) -> Drafts | None:
        """Return the drafts of concatenated sequences of these lengths, with slots among all tokens, or None."""
        starts = accumulate(lengths, initial=0)
        moved = []
        for drafts, start in zip(parts, starts, strict=False):
            if drafts is not None:
                moved.append(replace(drafts, slots=drafts.slots + start))
        if not moved:
            return None
        return cls(
            slots=torch.cat([drafts.slots for drafts in moved]),
            accepted=torch.cat([drafts.accepted for drafts in moved]),
            drafted=torch.cat([drafts.drafted for drafts in moved]),
            tokens=torch.cat([drafts.tokens for drafts in moved]),
            states=torch.cat([drafts.states for drafts in moved]),
        )

    def to(self, device: torch.device) -> Drafts:
        """Return a copy with tokens and states on another device."""
        tokens = self.tokens.to(device, non_blocking=True)
        states = self.states.to(device, non_blocking=True)
        return replace(self, tokens=tokens, states=states)


@dataclass(frozen=True, slots=True)
class Shown:
    """A conversation with images as its chat template prints it, from which a processor makes tokens and pixels."""

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
    """Sequences concatenated without padding."""

    tokens: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, on the host: which slots count decides shapes
    features: Tensor  # [N, L, D]
    lengths: tuple[int, ...]  # of the sequences
    taps: tuple[int, ...]  # which target state each of the L is
    seeds: tuple[int, ...]  # random seed of each sequence
    progress: float = 0.0  # how much of the training is done, from 0 to 1
    # of the step that this is a part of, as the head's `divisors` sum them
    divisors: tuple[float, ...] | None = None
    drafts: Drafts | None = None  # of a head, in sequences that were written with it
    # [N, K], the indices of the tokens drafted from each slot, where slots read drafts
    branches: Tensor | None = None

    @property
    def slots(self) -> int:
        """The number of supervised tokens."""
        return int(self.loss_mask.sum())

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """The loss mask of each sequence."""
        return self.loss_mask.split(self.lengths)

    def select_taps(self, taps: tuple[int, ...]) -> Tensor:
        """Return the features [N, len(taps), D] of these taps."""
        if taps == self.taps:
            return self.features
        return torch.stack([self.features[:, self.taps.index(tap)] for tap in taps], dim=1)

    def places_behind(self, places: Tensor, steps: Tensor | int) -> Tensor:
        """Return the indices of the tokens that drafts from some slots read.

        An index beyond the sequence is that of some other token: its row has no weight.

        Args:
            places: The slots, as indices of all tokens.
            steps: The steps of the draft up to this token, at least one.
        """
        plain = (places + steps).clamp(max=len(self.tokens) - 1)
        if self.branches is None:
            return plain
        # the first step reads what the target chose, later ones read the draft
        last = self.branches.shape[1] - 1
        if not isinstance(steps, int):
            drafted = self.branches[places, (steps - 2).clamp(0, last)]
            return torch.where(steps < 2, plain, drafted)
        if steps < 2:
            return plain
        return self.branches[places, min(steps - 2, last)]

    def on_drafts(self) -> Batch:
        """Return the batch with its drafts appended, for a loss on what the head drafted by itself.

        Only the slots of drafts are supervised, and their levels read the drafted tokens in place of the sequence's.
        """
        assert self.drafts is not None
        slots = self.drafts.slots
        tokens = self.drafts.tokens
        states = self.drafts.states
        # a slot reads the token after it and predicts the next one
        mask = torch.zeros_like(self.loss_mask)
        mask[slots + 2] = True
        # [A, K], where the drafted tokens are appended
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
        """Return a copy in pinned host memory, from which an accelerator copies while it computes."""
        return replace(self, tokens=_pin(self.tokens), features=_pin(self.features))

    def to(self, device: torch.device) -> Batch:
        """Return a copy with tokens and features on another device; the host does not wait for it."""
        tokens = self.tokens.to(device, non_blocking=True)
        features = self.features.to(device, non_blocking=True)
        drafts = None if self.drafts is None else self.drafts.to(device)
        return replace(self, tokens=tokens, features=features, drafts=drafts)


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def lengths_of(examples: Sequence[Example]) -> list[int]:
    """Return the number of tokens of each example; examples on disk know it without being read."""
    stored = getattr(examples, "lengths", None)
    if stored is not None:
        return [int(length) for length in stored]
    return [len(example.tokens) for example in examples]


def count_shared(first: Tensor, second: Tensor) -> int:
    """Return the number of tokens that two sequences [T] share from their beginning."""
    length = min(len(first), len(second))
    differing = (first[:length] != second[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def trim_mask(loss_mask: Tensor) -> Tensor:
    """Return the loss mask up to its last supervised token, without the first two, which no drafter predicts."""
    # the first draft is made from the state after one token, for the token after the next
    mask = loss_mask.clone()
    mask[:2] = False
    indices = mask.nonzero()
    if not len(indices):
        return mask[:0]
    return mask[: int(indices[-1]) + 1]


def gate_mask(mask: Tensor, gate: str) -> Tensor:
    """Return the loss mask [T]; with "read" shifted by two, as published: a slot counts if the token it reads does."""
    if gate != "read":
        return mask
    shifted = torch.cat([mask.new_zeros(2), mask[:-2]])
    return shifted[: len(mask)]  # of a sequence shorter than two tokens


def collate(
    examples: Sequence[Example], taps: tuple[int, ...], seeds: Sequence[int] | None = None
) -> Batch:
    """Return one batch of examples with features, each cut after its last supervised token."""
    masks = [trim_mask(example.loss_mask) for example in examples]
    lengths = tuple(len(mask) for mask in masks)
    tokens = []
    features = []
    for example, length in zip(examples, lengths, strict=True):
        tokens.append(example.tokens[:length])
        features.append(example.features[:length])  # type: ignore[index]
    return Batch(
        tokens=torch.cat(tokens),
        loss_mask=torch.cat(masks),
        features=torch.cat(features),
        lengths=lengths,
        taps=taps,
        seeds=tuple(seeds or range(len(examples))),
        drafts=Drafts.join([example.drafts for example in examples], lengths),
    )


def token_counts(texts: Iterable[Tensor], vocab_size: int) -> Tensor:
    """Return how often [V] each token occurs in these sequences."""
    # one after the other, so that no more than one is in memory
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
    """Return the `size` most frequent tokens [D] in ascending order; ties go to the lower token."""
    if not 0 < size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} was asked for, expected 1 to {len(counts)}, the target's own"
        )
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class Features(Protocol):
    """Examples with features, stored or computed when they are read."""

    taps: tuple[int, ...]
    identity: dict[str, Any]
    together: bool  # whether all processes must read at once, each equally often
    sampled: bool  # whether a loss mask may differ from `mask`, and is known only once the example is read

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices, with their features."""
        ...

    def mask(self, index: int) -> Tensor:
        """Return the loss mask [T] of an example."""
        ...

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and the loss mask of an example."""
        ...


def run_ahead(jobs: Iterable[Callable[[], Result]]) -> Generator[Result]:
    """Yield the jobs' results in order; a thread runs them ahead of the caller."""
    # one thread, so that jobs run in their order
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for job in jobs:
            pending.append(thread.submit(job))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
