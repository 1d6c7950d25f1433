"""Which validated head becomes `head/`: the one that accepts most where held-out prompts are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, nan
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Features

Counts = dict[str, list[list[int]]]  # by temperature, as metrics name them: tokens and cycles of each prompt


class Decoding(Protocol):
    """Decodes held-out prompts with a head in training."""

    def decode(self, head: TrainableDrafter, features: Features, held_out: Sequence[int]) -> Counts:
        """What the head's drafts bring on prompts of these conversations."""

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """How much longer the second's acceptance length is, and the ends of its interval, paired by prompt."""


def decode_once(
    accelerator: Accelerator, decoding: Decoding | None, head: TrainableDrafter, features: Features, held_out: list[int]
) -> Counts:
    """What the main process decodes, known to all; nothing where nothing is held out."""
    if decoding is None or not held_out:
        return {}
    counts = [decoding.decode(head, features, held_out) if accelerator.is_main_process else {}]
    broadcast_object_list(counts)
    return counts[0]


def judged(counts: Counts) -> dict[tuple[str, int], list[int]]:
    """Tokens and cycles of each prompt at every temperature: what decides between heads."""
    return {(name, number): row for name, rows in counts.items() for number, row in enumerate(rows)}


def acceptance(rows: Iterable[Sequence[int]]) -> float:
    """Tokens per cycle."""
    tokens, cycles = (sum(column) for column in zip(*rows, strict=True))
    return tokens / max(cycles, 1)


@dataclass
class Choice:
    """The best head of a run so far."""

    step: int = 0
    score: float = -inf
    counts: Counts = field(default_factory=dict)  # what it was judged by; nothing where nothing is decoded
    loss: float = nan  # its cross-entropy on the held-out conversations
    stale: int = 0  # validations since
    start: Counts = field(default_factory=dict)  # what the head of `train.init` decoded, before the first step

    @classmethod
    def parse(cls, state: Any) -> Choice:
        """From a checkpoint; those of earlier releases hold the score alone."""
        return cls(**state) if isinstance(state, dict) else cls(score=state)

    def dump(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def add(self, step: int, counts: Counts, metrics: Mapping[str, float]) -> bool:
        """Judge the head of a step, by what it decoded or else by the predicted acceptance; whether it is the best.

        Without held-out conversations the last is the best.
        """
        score = acceptance(judged(counts).values()) if counts else metrics.get("tree/tau", float(step))
        if bool(counts) != bool(self.counts) and self.score > -inf:  # what is decoded and what is predicted differ
            self.score = -inf
        if score > self.score:
            loss = metrics.get("cross_entropy", nan)
            self.step, self.score, self.counts, self.loss, self.stale = step, score, counts, loss, 0
            return True
        self.stale += 1
        return False

    def has_ended(self, patience: int | None) -> bool:
        """Whether so many validations in a row brought no better head."""
        return patience is not None and self.stale >= patience

    def describe(self, step: int, counts: Counts, metrics: Mapping[str, float], decoding: Decoding) -> str:
        """What was just decoded, beside the best."""
        tau, prompts = acceptance(judged(counts).values()), len(next(iter(counts.values())))
        head = f"step {step}: τ {tau:.2f} on {prompts} held-out prompts"
        if self.step == step:
            return f"{head}, the best so far"
        less, low, high = decoding.compare(counts, self.counts)
        head += f", {less:.2f} ({low:.2f} to {high:.2f}) below that of step {self.step}"
        loss = metrics.get("cross_entropy", nan)
        return f"{head}, while the cross-entropy fell from {self.loss:.3f} to {loss:.3f}" if loss < self.loss else head

    def describe_gain(self, decoding: Decoding) -> str:
        """What training brought to the head that it began from, and which of both to use."""
        before, after = (acceptance(judged(counts).values()) for counts in (self.start, self.counts))
        gain, low, high = decoding.compare(self.start, self.counts)
        interval = f"{gain:+.2f}, {low:+.2f} to {high:+.2f}"
        line = f"from the head of train.init to step {self.step}: τ {before:.2f} -> {after:.2f} ({interval})"
        return line if low > 0 else f"{line}, no sure gain: keep the old head, or train on with more conversations"
