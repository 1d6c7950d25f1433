"""Training texts that the target writes with drafts of the head in training, whose rejected tokens are kept too."""

# A drafts, K tokens of each, N nodes, L taps, D target width

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.examples import Drafts, Example, Features
from eagle.core.noise import mix64
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures
from eagle.data.on_policy import choose_answer
from eagle.data.stored_rows import round_features
from eagle.decoding.decode import generate
from eagle.device import in_dtype
from eagle.recipe import OnPolicySection
from eagle.target.target import Target

TOGETHER = 64  # answers that are written side by side
Key = tuple[int, int]
"""The seed of a step, and the index of one of its examples."""


class OwnDrafts:
    """Features of which some are of answers that the target writes anew, with drafts of a head.

    `write` writes the answers of several steps with the head as it is then; `read` gives those of a step, by the seed
    that torch then has. Seed and index decide which texts they are, which answer is written, and its noise. While the
    head is evaluated, all texts are those of the data.
    """

    sampled = together = True

    def __init__(self, features: Features, target: Target, head: Any, policy: OnPolicySection) -> None:
        self.features, self.target, self.head, self.policy = features, target, head, policy
        self.taps, self.identity = features.taps, features.identity
        self.written: dict[Key, Example] = {}

    def __len__(self) -> int:
        return len(self.features)

    def mask(self, index: int) -> Tensor:
        """[T], the loss mask of an example of the data."""
        return self.features.mask(index)

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and loss mask of an example of the data."""
        return self.features.text(index)

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of an example of the data."""
        return self.features.supervised_tokens(index)

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples with their features, those that were written for this step in place of the data's."""
        if not self.head.training:
            return self.features.read(indices)
        keys = {index: (torch.initial_seed(), index) for index in indices}
        told = [index for index in dict.fromkeys(indices) if keys[index] not in self.written]
        examples = dict(zip(told, self.features.read(told), strict=True)) if told else {}
        written = [self.written[key] for key in keys.values() if key in self.written]
        if written:
            live = iter(LiveFeatures(self.target, written, self.identity).read(range(len(written))))
            examples |= {index: next(live) for index, key in keys.items() if key in self.written}
        return [examples[index] for index in indices]

    def write(self, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Write the answers of the steps with these seeds and examples; those written before are dropped."""
        keys = [(seed, index) for seed, indices in steps for index in dict.fromkeys(indices)]
        chosen = [key for key in keys if _draw(key) < self.policy.share * 2**64]
        self.written = dict(zip(chosen, self._write(chosen), strict=True)) if chosen else {}

    def _write(self, keys: Sequence[Key]) -> list[Example]:
        """The conversations cut at one of their answers, which is written anew."""
        prompts, limits, samplings = list[list[int]](), list[int](), list[Sampling]()
        for seed, index in keys:
            tokens, mask = self.features.text(index)
            start, end = choose_answer(mask, mix64(_draw((seed, index))))
            prompts.append(tokens[:start].tolist())
            limits.append(end - start)
            samplings.append(Sampling(temperature=self.policy.temperature, seed=seed, request=index))
        recorder = Recorder(self._decoding_head(), self.taps)
        traces = generate(
            self.target,
            recorder,
            prompts,
            budget=Budget.fixed(chain_paths(self.policy.depth)),
            sampling=samplings,
            max_new_tokens=limits,
            batch_size=TOGETHER,
        )
        return [
            self._example(trace.checked().prompt, trace.tokens, recorder.records[row])
            for row, trace in enumerate(traces)
        ]

    def _decoding_head(self) -> Any:
        """A copy of the head as it is now, that drafts."""
        head = in_dtype(copy.deepcopy(self.head).to(self.target.device), self.target.model.dtype)
        self.target.forget()  # a target in training has other weights
        return head.bind(self.target.head)

    def _example(self, prompt: list[int], answer: list[int], record: Record) -> Example:
        """A written text, with the drafts of all its cycles but the last, which no draft follows."""
        tokens = torch.tensor(prompt + answer)
        mask, stops = torch.arange(len(tokens)) >= len(prompt), set(self.target.stop_tokens)
        if not record.cycles:
            return Example(tokens, mask)
        levels, drafted = self.policy.depth, list[Tensor]()
        for cycle in record.cycles:
            ends = [number for number, token in enumerate(cycle.tokens.tolist(), start=1) if token in stops]
            drafted.append(torch.tensor(min(ends, default=len(cycle.tokens))))  # behind a stop nothing is drafted
        empty = torch.zeros(levels, dtype=torch.long)
        rows = torch.stack([torch.cat([cycle.tokens, empty])[:levels] for cycle in record.cycles])
        states = torch.stack([_pad(cycle.states, levels) for cycle in record.cycles])
        states = round_features(states, self.identity["dtype"])
        slots, accepted = (
            torch.tensor([getattr(cycle, name) for cycle in record.cycles]) for name in ("slot", "accepted")
        )
        return Example(tokens, mask, drafts=Drafts(slots, accepted, torch.stack(drafted), rows, states))


@dataclass(frozen=True, slots=True)
class DraftedCycle:
    """A chain that was drafted, and what became of it."""

    slot: int  # the token behind it is the draft's root
    tokens: Tensor  # [K]
    states: Tensor  # [K, L, D], the target's after each
    accepted: int  # how many tokens the target accepted


@dataclass(slots=True)
class Record:
    """The cycles of one text."""

    committed: int = 0  # tokens so far
    cycles: list[DraftedCycle] = field(default_factory=list)


class Recorder(Drafter):
    """Drafts as another drafter does, and records its chains with the target's states after their tokens."""

    def __init__(self, drafter: Drafter, taps: tuple[int, ...]) -> None:
        self.drafter = drafter
        self.taps = tuple(dict.fromkeys((*taps, *drafter.taps)))
        self.recorded = len(taps)  # of the taps, those that are kept
        self.reads = replace(drafter.reads, states=True)
        self.rates_nodes = drafter.rates_nodes
        self.records: dict[int, Record] = {}

    def open(self) -> RecorderState:
        """The state for several texts drafted together."""
        return RecorderState(self, self.drafter.open())

    def open_with(self, texts: Any) -> RecorderState:
        """The state for several texts, with access to the target's cache rows."""
        return RecorderState(self, self.drafter.open_with(texts))

    def bind_target(self, view: Any) -> None:
        """Pass the target's layers on."""
        self.drafter.bind_target(view)


class RecorderState:
    """The texts of a `Recorder`."""

    def __init__(self, recorder: Recorder, drafts: Any) -> None:
        self.recorder, self.drafts = recorder, drafts

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a text in a row."""
        self.recorder.records[row] = Record()
        self.drafts.admit(row, noise)

    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """The other drafter's trees, after what became of its last ones is recorded."""
        own, taps = self.recorder.drafter.taps, self.recorder.taps
        places, told = [taps.index(tap) for tap in own], {}
        for row, update in updates.items():
            self._record(self.recorder.records[row], update)
            features = update.features[:, places] if own and update.features is not None else None
            told[row] = replace(update, features=features, tree=None, states=None)
        return self.drafts.propose(told, budgets)

    def _record(self, record: Record, update: Committed) -> None:
        """Record the cycle that this update ends."""
        if update.tree is not None and update.states is not None and len(update.tree) > 1:
            states = update.states[1:, : self.recorder.recorded].clone()
            record.cycles.append(
                DraftedCycle(record.committed - 1, update.tree.tokens[1:], states, len(update.tokens) - 1)
            )
        record.committed += len(update.tokens)

    def fork(self, row: int, other: int) -> None:
        """Copy a row."""
        self.recorder.records[other] = copy.deepcopy(self.recorder.records[row])
        self.drafts.fork(row, other)

    def release(self, row: int) -> None:
        """Release a row; its record stays."""
        self.drafts.release(row)


def _draw(key: Key) -> int:
    """A number below 2^64 that belongs to an example in a step."""
    return mix64(mix64(key[0]) + key[1])


def _pad(states: Tensor, levels: int) -> Tensor:
    """[levels, L, D], the states with the last one repeated: zeros have no norm, and their gradients would be nan."""
    return torch.cat([states, states[-1:].expand(levels, *states.shape[1:])])[:levels]
