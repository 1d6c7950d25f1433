"""Which validated head becomes `head/`: the one that accepts most where held-out prompts are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Features
from eagle.core.tree import Paths

# by temperature, as metrics name them: tokens and cycles of each prompt
Counts = dict[str, list[list[int]]]


class Decoding(Protocol):
    """Decodes held-out prompts with a head in training."""

    def decode(self, head: TrainableDrafter, features: Features, held_out: Sequence[int]) -> Counts:
        """Return what the head's drafts bring on prompts of these conversations."""

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """Return how much longer the second's acceptance length is, and its interval's ends, paired by prompt."""


def decode_once(
    accelerator: Accelerator,
    decoding: Decoding | None,
    head: TrainableDrafter,
    features: Features,
    held_out: list[int],
) -> Counts:
    """Return what the main process decodes on all processes; {} where nothing is held out."""
    if decoding is None or not held_out:
        return {}
    counts = [decoding.decode(head, features, held_out) if accelerator.is_main_process else {}]
    broadcast_object_list(counts)
    return counts[0]


def judged(counts: Counts) -> dict[tuple[str, int], list[int]]:
    """Return tokens and cycles of each prompt at every temperature, which decide between heads."""
    by_prompt = {}
    for temperature, rows in counts.items():
        for i, row in enumerate(rows):
            by_prompt[temperature, i] = row
    return by_prompt


def acceptance(rows: Iterable[Sequence[int]]) -> float:
    """Return the tokens per cycle of rows of tokens and cycles."""
    tokens, cycles = (sum(column) for column in zip(*rows, strict=True))
    return tokens / max(cycles, 1)


@dataclass
class Choice:
    """The best head of a run so far."""

    step: int = 0
    score: float = -inf
    # what it was judged by; nothing where nothing is decoded
    counts: Counts = field(default_factory=dict)
    loss: float = nan  # its cross-entropy on the held-out conversations
    stale: int = 0  # validations since
    # what the head of `train.init` decoded, before the first step
    start: Counts = field(default_factory=dict)

    @classmethod
    def parse(cls, state: Any) -> Choice:
        """Return a choice from a checkpoint; those of earlier releases hold the score alone."""
        return cls(**state) if isinstance(state, dict) else cls(score=state)

    def add(self, step: int, counts: Counts, metrics: Mapping[str, float]) -> bool:
        """Judge the head of a step; returns whether it is the best.

        It is judged by what it decoded or else by the predicted acceptance. Without held-out conversations the last
        head is the best.
        """
        score = metrics.get("tree/tau", float(step))
        if counts:
            score = acceptance(judged(counts).values())
        # what is decoded and what is predicted cannot be compared
        if bool(counts) != bool(self.counts):
            self.score = -inf
        if not score > self.score:
            # a score that is not a number is no better one
            self.stale += 1
            return False
        self.step = step
        self.score = score
        self.counts = counts
        self.loss = metrics.get("cross_entropy", nan)
        self.stale = 0
        return True

    def has_ended(self, patience: int | None) -> bool:
        """Return whether so many validations in a row brought no better head."""
        return patience is not None and self.stale >= patience

    def describe(
        self, step: int, counts: Counts, metrics: Mapping[str, float], decoding: Decoding
    ) -> str:
        """Return a sentence that compares what was just decoded with the best."""
        line = f"step {step}: {describe_tau(counts)}"
        if self.step == step:
            return f"{line}, the best so far"
        difference, low, high = decoding.compare(counts, self.counts)
        line += f", {difference:.2f} ({low:.2f} to {high:.2f}) below that of step {self.step}"
        loss = metrics.get("cross_entropy", nan)
        if loss < self.loss:
            line += f", while the cross-entropy fell from {self.loss:.3f} to {loss:.3f}"
        return line

    def describe_gain(self, decoding: Decoding) -> str:
        """Return what training brought to the head that it began from, and which of both to use."""
        before = acceptance(judged(self.start).values())
        after = acceptance(judged(self.counts).values())
        gain, low, high = decoding.compare(self.start, self.counts)
        interval = f"{gain:+.2f}, {low:+.2f} to {high:+.2f}"
        line = f"from the head of train.init to step {self.step}: τ {before:.2f} -> {after:.2f} ({interval})"
        if not low > 0:
            line += ", no sure gain: keep the old head, or train on with more conversations"
        return line


def describe_tau(counts: Counts) -> str:
    """Return the acceptance length of decoded prompts, and their number."""
    prompts = len(next(iter(counts.values())))
    return f"τ {acceptance(judged(counts).values()):.2f} on {prompts} held-out prompts"


def describe_predicted(metrics: Mapping[str, float], trees: Mapping[str, Paths]) -> str:
    """Return the acceptance lengths that validation predicts without decoding, each with the tree that it is of."""
    parts = []
    for name, paths in trees.items():
        parts.append(f"{metrics[f'{name}/tau']:.2f} with a {name} of {len(paths)}")
    return f"predicted τ {', '.join(parts)}, on held-out conversations"
