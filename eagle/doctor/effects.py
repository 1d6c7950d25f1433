"""How far a head's laws go along with the target's, slot by slot, so that two readings of one head can be paired."""

# S slots, K levels, V vocabulary, M texts

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.data.examples import Batch

ROWS = 128  # of logits held at once


@dataclass(frozen=True)
class Reading:
    """A head, and how it is given what it reads."""

    head: Any
    frozen: TargetHead
    token_back: int = 0  # how many places before its due the token stands
    state_back: int = 0  # and the state

    def given(self, batch: Batch) -> Batch:
        """The batch as the head is given it."""
        tokens, features = batch.tokens, batch.features
        if self.token_back:
            tokens = _back(tokens, batch.lengths, self.token_back)
        if self.state_back:
            features = _back(features, batch.lengths, self.state_back)
        return replace(batch, tokens=tokens, features=features)


def _back(rows: Tensor, lengths: tuple[int, ...], places: int) -> Tensor:
    """In each text every row is that of so many places before; the first ones stay."""
    return torch.cat([torch.cat([part[:places], part[:-places]]) for part in rows.split(lengths)])


@dataclass(frozen=True)
class Measured:
    """What a head did at every slot [S] in each of K levels, the first fed by the target, the others by itself."""

    overlap: Tensor  # [K, S], of its law with the target's: how often a draft drawn from it is accepted
    hits: Tensor  # [K, S], whether its likeliest token is the target's
    there: Tensor  # [K, S], whether the text goes on that far
    said: Tensor  # [S], whether the text goes on as the greedy target would
    texts: Tensor  # [S], the text of each slot

    @cached_property
    def reached(self) -> Tensor:
        """[K, S], whether a greedy chain comes to that level and the text tells what is right there."""
        hits, rows = self.hits & self.there, [self.there[0]]
        for level in range(1, len(hits)):
            said = _later(self.said, level - 1) & self.there[level]
            rows.append(rows[-1] & hits[level - 1] & said)
        return torch.stack(rows)

    def rates(self, hits: Tensor | None = None, chosen: Tensor | None = None) -> list[float]:
        """How often each level is right where the levels before it were, in some texts."""
        hits = self.hits if hits is None else hits
        reached = self.reached if chosen is None else self.reached & chosen
        return [float((hits[k] & reached[k]).sum() / reached[k].sum().clamp(min=1)) for k in range(len(reached))]

    @property
    def taught(self) -> list[float]:
        """The same where every level reads the target's states instead of its own: level 1 of a later slot."""
        return self.rates(torch.stack([_later(self.hits[0], level) for level in range(len(self.hits))]))

    @property
    def held(self) -> float:
        """What later levels add from the head's own states, as a share of what they would from the target's."""
        return (length(self.rates()[1:]) - 1) / max(length(self.taught[1:]) - 1, 1e-9)

    @property
    def tau(self) -> float:
        """The acceptance length that a greedy chain of K drafts would have."""
        return length(self.rates())

    def counts(self) -> Tensor:
        """[M, 2, K], of each text how many slots reach a level and how many stay in it."""
        both = torch.stack([self.reached, self.reached & self.hits]).double()  # [2, K, S]
        return self._by_text(both).movedim(-1, 0)

    def soft(self) -> Tensor:
        """[M], of each text the mean acceptance length of chains drawn from the head's law."""
        return self._mean_length(self.overlap)

    def greedy(self) -> Tensor:
        """[M], of each text the mean length of chains that name the target's likeliest token, read along the text."""
        return self._mean_length(self.hits.double())

    def _mean_length(self, accepted: Tensor) -> Tensor:
        """[M], 1 + the mean over slots of how many levels [K, S] in a row are accepted."""
        chains = (accepted * self.there).cumprod(0).sum(0)
        return 1 + self._by_text(chains) / self._by_text(torch.ones_like(chains)).clamp(min=1)

    def _by_text(self, values: Tensor) -> Tensor:
        """[.., M], sums of [.., S]."""
        sums = values.new_zeros(*values.shape[:-1], int(self.texts.max()) + 1)
        return sums.index_add_(-1, self.texts, values)


def length(rates: list[float]) -> float:
    """The acceptance length of a chain whose levels are accepted so often."""
    total, way = 1.0, 1.0
    for rate in rates:
        way *= rate
        total += way
    return total


def _later(values: Tensor, places: int) -> Tensor:
    """[S], the value of the slot so many places further; False behind the last."""
    later = torch.zeros_like(values)
    later[: len(values) - places or None] = values[places:] if places else values
    return later


@torch.no_grad()
def measured(reading: Reading, batch: Batch, target: TargetHead, levels: int) -> Measured:
    """The head on every answered slot of the texts, unrolled over its own states as it drafts."""
    head, device = reading.head, batch.tokens.device
    found = head.unroll(reading.given(batch), reading.frozen, levels)
    places, count = found.places, len(batch.tokens)
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths)).to(device)
    true, texts = batch.tapped((-1,))[:, 0], owner[places]
    following = batch.tokens[(places + 2).clamp(max=count - 1)]
    columns: list[list[Tensor]] = []
    for level, state in enumerate(found.states):
        at = places + 1 + level
        there = (at + 1 < count) & (owner[(at + 1).clamp(max=count - 1)] == texts)
        rows = _rows(
            lambda state, true: _compared(head, reading.frozen, target, state, true),
            state,
            true[at.clamp(max=count - 1)],
        )
        columns.append([*rows.unbind(1), there])
    overlap, hits, choices, there = (torch.stack(column).cpu() for column in zip(*columns, strict=True))
    said = choices[0].long() == following.cpu()
    return Measured(overlap.double(), hits.bool(), there.bool(), said, texts.cpu())


def _rows(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    return torch.cat([function(*parts) for parts in zip(*(tensor.split(ROWS) for tensor in rows), strict=True)])


def _compared(head: Any, frozen: TargetHead, target: TargetHead, state: Tensor, true: Tensor) -> Tensor:
    """[n, 3]: overlap, whether the likeliest tokens agree, and the target's."""
    law, own = (logits.float().softmax(-1) for logits in (target.logits(true), head.logits(state, frozen)))
    choice, likeliest, drafts = law.argmax(-1), own.argmax(-1), head.drafts
    if drafts is not None:
        drafts = drafts.clamp(0, law.shape[-1] - 1)
        law, likeliest = law[:, drafts], drafts[likeliest]
    overlap = torch.minimum(own, law).sum(-1)
    return torch.stack([overlap, likeliest == choice, choice], dim=1).double()
