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

# by temperature, named as in the metrics: for each prompt, the pair [generated tokens, decoding cycles]
Counts = dict[str, list[list[int]]]


class Decoding(Protocol):
    """Decodes held-out prompts with a head in training."""

    def decode(self, head: TrainableDrafter, features: Features, held_out: Sequence[int]) -> Counts:
        """Decode prompts of the held-out conversations (indices) with the head's drafts; return tokens and cycles."""

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """Return the difference of acceptance length, second minus first, and the ends of its confidence interval.

        Both decoded the same prompts, which are compared in pairs.
        """


def decode_once(
    accelerator: Accelerator,
    decoding: Decoding | None,
    head: TrainableDrafter,
    features: Features,
    held_out: list[int],
) -> Counts:
    """Decode held-out prompts on the main process alone, and return its counts on all processes.

    Args:
        accelerator: Every process calls with its own, since the counts are broadcast.
        decoding: Decodes the prompts; None where this run decodes nothing.
        head: The head that drafts, with whole weights.
        features: The source of the conversations.
        held_out: Indices of the conversations that are not trained on.

    Returns:
        For each temperature, by its name in the metrics, [generated tokens, target forwards] of each prompt. {} where
        nothing is decoded.
    """
    if decoding is None or not held_out:
        return {}
    counts = [decoding.decode(head, features, held_out) if accelerator.is_main_process else {}]
    # all processes must judge the head alike, or they would disagree on when to stop
    broadcast_object_list(counts)
    return counts[0]


def group_by_prompt(counts: Counts) -> dict[tuple[str, int], list[int]]:
    """Return [tokens, cycles] of each decoded prompt by (name of the temperature, index of the prompt).

    A cycle is one forward of the target over a draft.
    """
    by_prompt = {}
    for temperature, pairs in counts.items():
        for i, pair in enumerate(pairs):
            by_prompt[temperature, i] = pair
    return by_prompt


def acceptance_length(pairs: Iterable[Sequence[int]]) -> float:
    """Return the mean acceptance length, tokens per target forward, over pairs [tokens, cycles]."""
    tokens, cycles = (sum(column) for column in zip(*pairs, strict=True))
    # without any cycle there are no tokens either: the length is 0
    return tokens / max(cycles, 1)


@dataclass
class Choice:
    """The best head of a run so far, and how long ago it was found. Checkpoints keep it."""

    step: int = 0  # after which it was validated
    score: float = -inf  # its acceptance length, decoded or else predicted
    # what it decoded; {} where validation decodes nothing
    counts: Counts = field(default_factory=dict)
    loss: float = nan  # its cross-entropy on the held-out conversations
    stale: int = 0  # validations since then, which brought no better head
    # what the head of `train.init` decoded, before the first step
    start: Counts = field(default_factory=dict)

    @classmethod
    def parse(cls, state: Any) -> Choice:
        """Return the choice from the entry "best" of a checkpoint: a dict of its fields, or the score alone.

        Checkpoints of earlier releases hold only the score.
        """
        return cls(**state) if isinstance(state, dict) else cls(score=state)

    def add(self, step: int, counts: Counts, metrics: Mapping[str, float]) -> bool:
        """Keep the head of a step if it is the best so far, and return whether it is.

        A head's score is its decoded acceptance length, or else the predicted one. A head is better if more of its
        drafts are accepted.

        Args:
            step: The step after which the head was validated.
            counts: What it decoded, or {}.
            metrics: The figures of its validation, {} without held-out conversations.
        """
        # "tree/tau" is the predicted acceptance length with the fixed tree of EAGLE-1; without held-out conversations
        # the score is the step, so that the last head is the best
        score = metrics.get("tree/tau", float(step))
        if counts:
            score = acceptance_length(group_by_prompt(counts).values())
        # decoded and predicted acceptance lengths cannot be compared: the first score of another kind wins
        if bool(counts) != bool(self.counts):
            self.score = -inf
        # `not >` and not `<=`, so that a score of NaN never wins
        if not score > self.score:
            self.stale += 1
            return False
        self.step = step
        self.score = score
        self.counts = counts
        self.loss = metrics.get("cross_entropy", nan)
        self.stale = 0
        return True

    def has_ended(self, patience: int | None) -> bool:
        """Return whether `patience` validations in a row brought no better head, which ends the run; None: never."""
        return patience is not None and self.stale >= patience

    def describe(
        self, step: int, counts: Counts, metrics: Mapping[str, float], decoding: Decoding
    ) -> str:
        """Return a line for the log that compares the head just decoded with the run's best one; call `add` first.

        Args:
            step: The step after which the head was decoded.
            counts: Its tokens and cycles (target forwards) by prompt.
            metrics: The figures of its validation, of which the cross-entropy is read.
            decoding: It estimates the difference between two heads and its interval.
        """
        line = f"step {step}: {describe_tau(counts)}"
        if self.step == step:
            return f"{line}, the best so far"
        # the acceptance length of the best head minus that of this one, and the ends of its interval
        difference, low, high = decoding.compare(counts, self.counts)
        line += f", {difference:.2f} ({low:.2f} to {high:.2f}) below that of step {self.step}"
        # a falling loss with a shorter acceptance length shows that the loss no longer measures what counts
        loss = metrics.get("cross_entropy", nan)
        if loss < self.loss:
            line += f", while the cross-entropy fell from {self.loss:.3f} to {loss:.3f}"
        return line

    def describe_gain(self, decoding: Decoding) -> str:
        """Return a line that compares the best head with that of `train.init`, from which the run began.

        `decoding` estimates the difference of their acceptance lengths on the same prompts, and its interval.
        """
        before = acceptance_length(group_by_prompt(self.start).values())
        after = acceptance_length(group_by_prompt(self.counts).values())
        gain, low, high = decoding.compare(self.start, self.counts)
        interval = f"{gain:+.2f}, {low:+.2f} to {high:+.2f}"
        line = f"from the head of train.init to step {self.step}: τ {before:.2f} -> {after:.2f} ({interval})"
        # the interval of the gain includes zero
        if not low > 0:
            line += ", no sure gain: keep the old head, or train on with more conversations"
        return line


def describe_tau(counts: Counts) -> str:
    """Return the acceptance length of decoded prompts, and their number, as a phrase for the log.

    `counts` are tokens and cycles (target forwards) of each prompt, by temperature.
    """
    # every temperature decodes the same prompts
    prompts = len(next(iter(counts.values())))
    tau = acceptance_length(group_by_prompt(counts).values())
    return f"τ {tau:.2f} on {prompts} held-out prompts"


def describe_predicted(metrics: Mapping[str, float], trees: Mapping[str, Paths]) -> str:
    """Return the acceptance lengths that validation predicts without decoding, as a phrase for the log.

    Args:
        metrics: The figures of validation, among them "NAME/tau" for each tree.
        trees: The trees that a prediction was made for, by name.
    """
    predictions = []
    for name, paths in trees.items():
        predictions.append(f"{metrics[f'{name}/tau']:.2f} with a {name} of {len(paths)}")
    return f"predicted τ {', '.join(predictions)}, on held-out conversations"
