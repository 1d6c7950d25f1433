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
MAX_PENDING = 2  # jobs that `run_ahead` has submitted beyond the one that the caller waits for


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
    # the number of supervised tokens in the whole training step, by which losses are divided; None: that of the batch
    divisor: float | None = None

    @classmethod
    def join(
        cls, drafts_by_sequence: Sequence[Drafts | None], lengths: Sequence[int]
    ) -> Drafts | None:
        """Return the drafts of concatenated sequences as one, or None if no sequence has any.

        A slot is the index of the token whose target state a draft starts from; in the result it is an index in the
        concatenation. A batch concatenates its sequences without padding.

        Args:
            drafts_by_sequence: Of each sequence, with slots counted from its own first token; None: it has no drafts.
            lengths: The number of tokens of each sequence, by which slots are shifted.
        """
        # not strict: there is one more start, that after the last sequence
        starts = accumulate(lengths, initial=0)
        moved = []
        for drafts, start in zip(drafts_by_sequence, starts, strict=False):
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
        """Return a copy with tokens and states on another device; slots and counts stay on the host."""
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
    # how many of its first tokens it shares with the example before it, if both are of one conversation
    shared: int = 0
    shown: Shown | None = None  # the printed conversation, if images are among its tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences concatenated without padding."""

    tokens: Tensor  # [N]
    # [N] bool, which tokens are supervised; on the host, because the shapes of a forward depend on their number
    loss_mask: Tensor
    features: Tensor  # [N, L, D]
    lengths: tuple[int, ...]  # the number of tokens of each sequence
    taps: tuple[int, ...]  # the tap of each of the L features
    seeds: tuple[int, ...]  # random seed of each sequence
    progress: float = 0.0  # how much of the training is done, from 0 to 1
    # the head's `divisors` of the whole training step, of which this batch may be a part; None: of the batch alone
    divisors: tuple[float, ...] | None = None
    # chains of the head, if it drafted while the target wrote these sequences
    drafts: Drafts | None = None
    # [N, K], the token indices of the draft that starts at each slot; None where slots read the sequence: `on_drafts`
    branches: Tensor | None = None

    @property
    def slots(self) -> int:
        """The number of supervised tokens, which is also the number of slots that count in the loss.

        Slot i has the target's state at token i, reads token i + 1 and predicts token i + 2: the supervised one.
        """
        return int(self.loss_mask.sum())

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """The loss mask of each sequence, [T] for its T tokens: true at supervised ones."""
        return self.loss_mask.split(self.lengths)

    def select_taps(self, taps: tuple[int, ...]) -> Tensor:
        """Return the target's hidden states at these taps, [N, len(taps), D]: width D, at each of N tokens.

        A tap is the index of a layer of the target, whose input was recorded as a feature.
        """
        if taps == self.taps:
            return self.features
        return torch.stack([self.features[:, self.taps.index(tap)] for tap in taps], dim=1)

    def places_behind(self, slots: Tensor, steps: Tensor | int) -> Tensor:
        """Return the indices, in the batch, of the tokens that drafts from these slots read in one of their steps.

        A draft from slot s reads token s + 1 in its first step, then s + 2, and so on: tokens of the sequence, or
        the head's own drafts in a batch made by `on_drafts`. Near the end of a sequence an index may belong to another
        sequence; such entries have no weight in the loss.

        Args:
            slots: [S], for each of S drafts the token index whose target state it starts from.
            steps: The step, counted from 1; or a tensor with the step of each slot.
        """
        # an index must exist to be gathered, even where it has no weight
        in_sequence = (slots + steps).clamp(max=len(self.tokens) - 1)
        # branches are set by `on_drafts`: for each slot, the token indices of the draft that starts there
        if self.branches is None:
            return in_sequence
        # the first step reads the token that the target chose, so step 2 reads the first drafted token
        last = self.branches.shape[1] - 1
        if not isinstance(steps, int):
            drafted = self.branches[slots, (steps - 2).clamp(0, last)]
            return torch.where(steps < 2, in_sequence, drafted)
        if steps < 2:
            return in_sequence
        return self.branches[slots, min(steps - 2, last)]

    def on_drafts(self) -> Batch:
        """Return the batch with its drafts appended, for a loss on what the head drafted by itself.

        Only the slots where a draft starts are supervised, and a draft's steps after the first read the drafted tokens
        in place of the sequence's. A slot is the index of the token whose target state a draft starts from.
        """
        assert self.drafts is not None
        # A drafts of K tokens each, padding included: slots [A], tokens [A, K], the target's states [A, K, L, D]
        slots = self.drafts.slots
        tokens = self.drafts.tokens
        states = self.drafts.states
        # slot s reads token s + 1 and predicts token s + 2, so that token is marked for it
        mask = torch.zeros_like(self.loss_mask)
        mask[slots + 2] = True
        # [A, K], the token indices of the drafted tokens once they are appended
        indices = len(self.tokens) + torch.arange(tokens.numel()).view(tokens.shape)
        # a row for each token of the sequences, so that a slot is the index of its row; rows of other tokens stay 0
        branches = torch.zeros(len(self.tokens), tokens.shape[1], dtype=torch.long)
        branches[slots] = indices
        # the mask and the lengths stay those of the sequences: appended tokens are read, and never supervised
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens.flatten()]),
            features=torch.cat([self.features, states.flatten(0, 1)]),
            loss_mask=mask,
            branches=branches.to(self.tokens.device, non_blocking=True),
            drafts=None,
        )

    def pin_memory(self) -> Batch:
        """Return a copy with tokens and features in pinned host memory, for copies that overlap with computing."""
        return replace(self, tokens=_pin(self.tokens), features=_pin(self.features))

    def to(self, device: torch.device) -> Batch:
        """Return a copy with tokens, features and drafts on another device; the host does not wait for the transfer.

        The loss mask stays on the host, because the shapes of a forward depend on it.
        """
        tokens = self.tokens.to(device, non_blocking=True)
        features = self.features.to(device, non_blocking=True)
        drafts = None if self.drafts is None else self.drafts.to(device)
        return replace(self, tokens=tokens, features=features, drafts=drafts)


def _pin(tensor: Tensor) -> Tensor:
    """Return a host tensor in pinned (page-locked) memory, from which copies to a GPU overlap with computing.

    A tensor on a device is returned as it is.
    """
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def lengths_of(examples: Sequence[Example]) -> list[int]:
    """Return the number of tokens of each example, which decides how examples are packed into batches.

    Examples that are stored on disk have an attribute `lengths`, so that none of them is read.
    """
    # examples on disk know their lengths without being read
    stored = getattr(examples, "lengths", None)
    if stored is not None:
        return [int(length) for length in stored]
    return [len(example.tokens) for example in examples]


def count_shared(first: Tensor, second: Tensor) -> int:
    """Return the number of tokens that two sequences [T] share from their beginning.

    Two examples of one conversation share a prefix, of which the target then computes features once.
    """
    length = min(len(first), len(second))
    differing = (first[:length] != second[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def trim_mask(loss_mask: Tensor) -> Tensor:
    """Return the loss mask up to its last supervised token, with the first two entries false: no drafter predicts them.

    Tokens after the last supervised one have no influence on the loss, so a batch leaves them out.

    Args:
        loss_mask: [T] bool, true at the supervised ones of a sequence's T tokens. It is not changed.

    Returns:
        [up to T] bool; empty if no other token is supervised.
    """
    # the first slot has the state of token 0, reads token 1 and predicts token 2
    mask = loss_mask.clone()
    mask[:2] = False
    indices = mask.nonzero()
    if not len(indices):
        return mask[:0]
    return mask[: int(indices[-1]) + 1]


def gate_mask(mask: Tensor, gate: str) -> Tensor:
    """Return the loss mask that the recipe key `train.gate` asks for, of the same length.

    With "predicted" it is the mask itself: a slot counts if the token that it predicts is supervised. With "read" it is
    shifted by two, as in published code: slot s, which reads the target's state at token s and predicts token s + 2,
    counts if token s is supervised.

    Args:
        mask: [T] bool, true at the supervised ones of a sequence's T tokens.
        gate: "predicted" or "read".
    """
    if gate != "read":
        return mask
    shifted = torch.cat([mask.new_zeros(2), mask[:-2]])
    # a sequence of one token stays as short as it is
    return shifted[: len(mask)]


def collate(
    examples: Sequence[Example], taps: tuple[int, ...], seeds: Sequence[int] | None = None
) -> Batch:
    """Return one batch of examples with features, concatenated, each cut after its last supervised token.

    Args:
        examples: With their features, the target's hidden states [T, L, D]: T tokens, L taps, width D.
        taps: The L taps of these features: indices of the target's layers.
        seeds: The random seed of each example; by default its index.
    """
    # nothing after the last supervised token has an influence on the loss
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


def token_counts(sequences: Iterable[Tensor], vocab_size: int) -> Tensor:
    """Return how often each token of the vocabulary occurs in these sequences, [V].

    Args:
        sequences: The supervised tokens of each training sequence, on the host.
        vocab_size: V, the size of the target's vocabulary.
    """
    # sequences are read one by one, so that only one of them is in memory; its tokens alone are counted, because a pass
    # over the counts of a large vocabulary takes longer than all else
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in sequences:
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ValueError(
                f"token {int(tokens.max())} is supervised, the target's vocabulary has {vocab_size}: "
                "the tokenizer is not this target's"
            )
        counts.index_add_(0, tokens, counts.new_ones(len(tokens)))
    return counts


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` most frequent tokens, ascending, as a draft vocabulary; ties go to the lower id.

    Args:
        counts: [V], how often each token of the target's vocabulary occurs.
        size: The number of tokens to keep.
    """
    if not 0 < size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} was asked for, expected 1 to {len(counts)}, the target's own"
        )
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class Features(Protocol):
    """Examples with features, stored or computed when they are read."""

    taps: tuple[int, ...]  # the target's layers whose inputs are the features
    # everything that decides the features, by which a resumed run notices a change
    identity: dict[str, Any]
    together: bool  # whether all processes must read at once, each equally often
    sampled: bool  # whether a loss mask may differ from `mask`, and is known only once the example is read

    def __len__(self) -> int:
        """Return the number of examples."""

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices, with their features.

        They are read from a disk, or computed by a forward of the target.
        """

    def mask(self, index: int) -> Tensor:
        """Return the loss mask of an example, [T] bool, true at supervised tokens, without reading its features."""

    def tokens_and_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the token ids and the loss mask of an example, both [T], without reading its features."""


def run_ahead(jobs: Iterable[Callable[[], Result]]) -> Generator[Result]:
    """Yield the results of jobs in order, while a thread already runs the next `MAX_PENDING` jobs.

    Loading the next batches overlaps with the training step on those that were yielded.

    Args:
        jobs: Functions without arguments; an error of one is raised where its result would be yielded.
    """
    # a single thread, so that jobs run in their order
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for job in jobs:
            pending.append(thread.submit(job))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
