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

BATCH_SIZE = 64  # answers that are written in a batch
Key = tuple[int, int]
"""The seed of a step, and the index of one of its examples."""


class OwnDrafts:
    """Features of which some are of answers that the target writes again, with drafts of a head.

    `write` writes the answers of several steps with the head as it is then; `read` gives those of a step, by the seed
    that torch then has. Seed and index decide which texts they are, which answer is written, and its noise. While the
    head is evaluated, all texts are those of the data.
    """

    sampled = True
    together = True

    def __init__(
        self, features: Features, target: Target, head: Any, policy: OnPolicySection
    ) -> None:
        self.features = features
        self.target = target
        self.head = head
        self.policy = policy
        self.taps = features.taps
        self.identity = features.identity
        self.written: dict[Key, Example] = {}

    def __len__(self) -> int:
        return len(self.features)

    def mask(self, index: int) -> Tensor:
        """Return [T], the loss mask of an example of the data."""
        return self.features.mask(index)

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and loss mask of an example of the data."""
        return self.features.text(index)

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples with their features.

        An example whose answer was written again for this step comes as it was written, with features computed now.
        """
        if not self.head.training:
            return self.features.read(indices)
        # training seeds torch before every step, so that the seed names the step in all processes
        step_seed = torch.initial_seed()
        written: dict[int, Example] = {}
        unchanged = []
        for index in dict.fromkeys(indices):  # each once
            if (step_seed, index) in self.written:
                written[index] = self.written[step_seed, index]
            else:
                unchanged.append(index)
        examples: dict[int, Example] = {}
        if unchanged:
            examples |= zip(unchanged, self.features.read(unchanged), strict=True)
        if written:
            live = LiveFeatures(self.target, list(written.values()), self.identity)
            examples |= zip(written, live.read(range(len(written))), strict=True)
        return [examples[index] for index in indices]

    def write(self, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Write the answers of the steps with these seeds and examples; those written before are dropped."""
        chosen = []
        for seed, indices in steps:
            for index in dict.fromkeys(indices):
                if _draw((seed, index)) < self.policy.share * 2**64:
                    chosen.append((seed, index))
        self.written = dict(zip(chosen, self._write(chosen), strict=True)) if chosen else {}

    def _write(self, keys: Sequence[Key]) -> list[Example]:
        """Return the conversations cut at one of their answers, which is written again."""
        prompts = []
        limits = []
        samplings = []
        for seed, index in keys:
            tokens, mask = self.features.text(index)
            # another number than the one that chose the conversation
            start, end = choose_answer(mask, mix64(_draw((seed, index))))
            prompts.append(tokens[:start].tolist())
            limits.append(end - start)
            samplings.append(
                Sampling(temperature=self.policy.temperature, seed=seed, request=index)
            )
        # a fixed chain: every cycle drafts as many tokens
        recorder = Recorder(self._decoding_head(), self.taps)
        traces = generate(
            self.target,
            recorder,
            prompts,
            budget=Budget.fixed(chain_paths(self.policy.depth)),
            sampling=samplings,
            max_new_tokens=limits,
            batch_size=BATCH_SIZE,
        )
        examples = []
        for row, trace in enumerate(traces):
            examples.append(
                self._example(trace.checked().prompt, trace.tokens, recorder.records[row])
            )
        return examples

    def _decoding_head(self) -> Any:
        """Return a copy of the head as it is now, that drafts."""
        head = in_dtype(copy.deepcopy(self.head).to(self.target.device), self.target.model.dtype)
        # a target in training has other weights
        self.target.forget()
        return head.bind(self.target.head)

    def _example(self, prompt: list[int], answer: list[int], record: Record) -> Example:
        """Return a written text, with the drafts of all its cycles but the last, which no draft follows."""
        tokens = torch.tensor(prompt + answer)
        mask = torch.arange(len(tokens)) >= len(prompt)
        cycles = record.cycles
        if not cycles:
            return Example(tokens, mask)
        depth = self.policy.depth
        stop_tokens = set(self.target.stop_tokens)
        no_tokens = torch.zeros(depth, dtype=torch.long)
        drafted = []
        draft_tokens = []
        for cycle in cycles:
            draft = cycle.tokens.tolist()
            # after a stop token nothing is drafted
            length = next(
                (count for count, token in enumerate(draft, start=1) if token in stop_tokens),
                len(draft),
            )
            drafted.append(length)
            draft_tokens.append(torch.cat([cycle.tokens, no_tokens])[:depth])
        states = torch.stack([_pad(cycle.states, depth) for cycle in cycles])
        drafts = Drafts(
            slots=torch.tensor([cycle.slot for cycle in cycles]),
            accepted=torch.tensor([cycle.accepted for cycle in cycles]),
            drafted=torch.tensor(drafted),
            tokens=torch.stack(draft_tokens),
            states=round_features(states, self.identity["dtype"]),
        )
        return Example(tokens, mask, drafts=drafts)


@dataclass(frozen=True, slots=True)
class DraftedCycle:
    """A chain that was drafted, and what became of it."""

    slot: int  # the token after it is the draft's root
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
        # the first of `self.taps`
        self.recorded_taps = len(taps)
        self.reads = replace(drafter.reads, states=True)
        self.rates_nodes = drafter.rates_nodes
        self.records: dict[int, Record] = {}

    def open(self) -> RecorderState:
        """Return the state for several texts drafted together."""
        return RecorderState(self, self.drafter.open())

    def open_with(self, texts: Any) -> RecorderState:
        """Return the state for several texts, with access to the target's cache rows."""
        return RecorderState(self, self.drafter.open_with(texts))

    def bind_target(self, view: Any) -> None:
        """Pass the target's layers on."""
        self.drafter.bind_target(view)


class RecorderState:
    """The texts of a `Recorder`."""

    def __init__(self, recorder: Recorder, drafts: Any) -> None:
        self.recorder = recorder
        self.drafts = drafts

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a text in a row."""
        self.recorder.records[row] = Record()
        self.drafts.admit(row, noise)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return the other drafter's trees, after what became of its last ones is recorded."""
        drafter_taps = self.recorder.drafter.taps
        columns = [self.recorder.taps.index(tap) for tap in drafter_taps]
        passed_on = {}
        for row, update in updates.items():
            self._record(self.recorder.records[row], update)
            features = None
            if drafter_taps and update.features is not None:
                features = update.features[:, columns]
            passed_on[row] = replace(update, features=features, tree=None, states=None)
        return self.drafts.propose(passed_on, budgets)

    def _record(self, record: Record, update: Committed) -> None:
        """Record the cycle that this update ends."""
        if update.tree is not None and update.states is not None and len(update.tree) > 1:
            # the root is no draft
            cycle = DraftedCycle(
                slot=record.committed - 1,
                tokens=update.tree.tokens[1:],
                states=update.states[1:, : self.recorder.recorded_taps].clone(),
                accepted=len(update.tokens) - 1,
            )
            record.cycles.append(cycle)
        record.committed += len(update.tokens)

    def fork(self, row: int, other: int) -> None:
        """Copy a row."""
        self.recorder.records[other] = copy.deepcopy(self.recorder.records[row])
        self.drafts.fork(row, other)

    def release(self, row: int) -> None:
        """Release a row; its record stays."""
        self.drafts.release(row)


def _draw(key: Key) -> int:
    """Return a number below 2^64 that belongs to an example in a step."""
    seed, index = key
    return mix64(mix64(seed) + index)


def _pad(states: Tensor, depth: int) -> Tensor:
    """Return [depth, L, D], the states with the last one repeated."""
    # zeros have no norm, and their gradients would be NaN
    padding = states[-1:].expand(depth, *states.shape[1:])
    return torch.cat([states, padding])[:depth]
