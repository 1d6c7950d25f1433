"""The doctor's verdict: effects of single changes, and the diagnosis with its figures."""

# K levels, M sequences

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle.doctor.agreement import Agreement
from eagle.doctor.probes import GUESS, Probe

Cycles = tuple[Tensor, Tensor]  # tokens [M] and cycles [M]
# standard errors over sequences that had no part in choosing the change
SURE = 4.0
SURE_GREEDY = 2.5
# errors, and share of the drafted tokens, of a gain in sampled drafts that needs little of greedy ones
CLEAR = 10.0
MIN_CLEAR = 0.25
SURE_BESIDE_CLEAR = 1.0
# shares of what drafts add to the acceptance length, from which on a gain is a fault
MIN_SAMPLED = 0.005
MIN_GREEDY = 0.015  # no change of the healthy heads it was chosen on brought both
# along a rope's theta nothing is sharp: heads trained on short sequences lie on a slope
MIN_GUESSED = 0.06
# of level 1; below, a head stands at no optimum, and accidents of some percent are usual
MIN_RATE = 0.35
MIN_OF_WEAK = 0.06
ABLE_OF_WEAK = 0.1
MIN_WORTH = 0.01  # of what drafts add; a block's attention and MLP were worth 0.04 and more in healthy heads
HEALTHY_RATE = 0.5  # of level 1
MIN_OWN_STATE_RATIO = 0.6  # of what later levels would add, were they given the target's states
EASED = 0.8  # of that; heads that were trained on their own states stand at 0.84 to 1.03
MAX_RATE_UNRELATED = 0.05  # of level 1; what has learned for twenty steps is right more often
MIN_NORM_SHIFT = 0.01  # of norms, which start at 1: after some twenty steps


@dataclass(frozen=True)
class Gain:
    """The gain of a change in the acceptance length of decoding, with its standard error over sequences."""

    before: float
    after: float
    error: float

    @classmethod
    def between(cls, before: Cycles, after: Cycles) -> Gain:
        """Compare the acceptance lengths before and after a change, paired by sequence.

        Args:
            before: Tokens and cycles of each sequence; the acceptance length is their ratio over all sequences.
            after: The same after the change.
        """
        lengths = []
        residuals = []
        for tokens, cycles in (before, after):
            length = float(tokens.sum() / cycles.sum())
            lengths.append(length)
            # delta method: the first-order change of the ratio tokens / cycles by each sequence
            residuals.append((tokens - length * cycles) / cycles.mean())
        count = len(residuals[0])
        # a single sequence says nothing of the spread
        spread = float((residuals[1] - residuals[0]).std()) if count > 1 else 0.0
        return cls(lengths[0], lengths[1], spread / count**0.5)

    @property
    def share(self) -> float:
        """The gain relative to the tokens per cycle that drafts added before: the target's own token is left out."""
        return (self.after - self.before) / max(self.before - 1, 1e-9)

    @property
    def errors(self) -> float:
        """The number of standard errors by which the gain exceeds zero."""
        return (self.after - self.before) / max(self.error, 1e-12)

    def __str__(self) -> str:
        """Return both acceptance lengths, and the gain as a 95% interval."""
        gain = self.after - self.before
        margin = 1.96 * self.error
        interval = (
            f"{gain - margin:+.3f} to {gain + margin:+.3f}, {self.errors:.1f} standard errors"
        )
        return f"{self.before:.3f} -> {self.after:.3f} ({interval})"


@dataclass(frozen=True)
class Effect:
    """The effect of one change on the acceptance of decoded cycles of chains, paired by sequence."""

    probe: Probe
    before: Agreement
    after: Agreement
    needs_more: bool = False  # whether the head was trained on few tokens

    @cached_property
    def sampled(self) -> Gain:
        """The gain where drafts are sampled from the head's probs."""
        return Gain.between(self.before.sampled_cycles, self.after.sampled_cycles)

    @cached_property
    def greedy(self) -> Gain:
        """The gain where drafts are the head's likeliest tokens."""
        return Gain.between(self.before.greedy_cycles, self.after.greedy_cycles)

    @property
    def min_share(self) -> float:
        """The smaller of both gains, as a share of the drafted tokens: flatter probs alone raise only one of them."""
        return min(self.sampled.share, self.greedy.share)

    @property
    def min_rate(self) -> float:
        """The rate of level 1 below which a head stands at no optimum, so that accidents are usual."""
        return HEALTHY_RATE if self.needs_more else MIN_RATE

    @property
    def is_harmful(self) -> bool:
        """Whether the head drafts worse with the change, beyond doubt."""
        return self.sampled.errors <= -SURE and self.greedy.errors <= -SURE_GREEDY

    @property
    def is_idle(self) -> bool:
        """Whether a branch that the change removes does no good to a head that can draft."""
        return self.before.rates()[0] >= self.min_rate and self.min_share >= -MIN_WORTH

    @property
    def is_unchanged(self) -> bool:
        """Whether the change left all guesses as they were."""
        same_probs = torch.equal(self.before.overlap, self.after.overlap)
        return same_probs and torch.equal(self.before.hits, self.after.hits)

    @property
    def only_eases(self) -> bool:
        """Whether the change mends no fault, and only lets a head cope better with the states that it makes itself.

        That is so if, even with the change, later levels add far fewer tokens from the head's own states than from the
        target's, and level 1, which reads the target's, has hardly gained.
        """
        first_rate = self.before.rates()[0]
        has_gained = self.after.rates()[0] >= (1 + MIN_GREEDY) * first_rate
        return self.after.own_state_ratio < EASED and not has_gained

    @property
    def is_sure(self) -> bool:
        """Whether this was a fault beyond doubt: both gains are large, and many standard errors above zero.

        Greedy drafts must gain too, as flatter probs alone raise the gain of sampled drafts.
        """
        # how often the first drafted token is right with the change
        first_rate = self.after.rates()[0]
        # of a gain, `share` is relative to the tokens that drafts added, and `errors` counts its standard errors
        min_sampled = MIN_SAMPLED
        min_greedy = MIN_GUESSED if self.probe.kind == GUESS else MIN_GREEDY
        if first_rate < self.min_rate:
            min_sampled = min_greedy = MIN_OF_WEAK
        # a fault costs a head with sharp probs its sampled drafts first: beside a clear gain of those, greedy drafts
        # need only gain a little
        is_clear = self.sampled.errors >= CLEAR and self.sampled.share >= MIN_CLEAR
        min_greedy_errors = SURE_BESIDE_CLEAR if is_clear else SURE_GREEDY
        return (
            self.sampled.errors >= SURE
            and self.sampled.share >= min_sampled
            and self.greedy.errors >= min_greedy_errors
            and self.greedy.share >= min_greedy
            and first_rate >= ABLE_OF_WEAK
            and not self.only_eases
        )

    def to_json(self) -> dict[str, Any]:
        """Return the change, whether it mends a fault beyond doubt, and its gains."""
        gains = {"greedy": self.greedy, "sampled": self.sampled}
        return {"change": self.probe.fault, "is_sure": self.is_sure, **gains}

    def __str__(self) -> str:
        return f"{self.probe.fault}: τ {self.greedy}, sampled drafts {self.sampled}"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a head, with its figures."""

    verdict: str
    faults: tuple[Effect, ...] = ()
    figures: Agreement | None = None
    tried: tuple[Effect, ...] = ()  # once no fault was left, the best first
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the head has a fault or belongs to another target."""
        return self.verdict.startswith(("broken", "made for another target"))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict with its figures: acceptance by level, and the gains of what was changed."""
        values: dict[str, Any] = {
            "verdict": self.verdict,
            "broken": self.broken,
            "faults": [effect.to_json() for effect in self.faults],
            "tried": [effect.to_json() for effect in self.tried],
            "notes": self.notes,
        }
        if self.figures is not None:
            values["levels"] = self.figures.rates()
            values["greedy_tau"] = self.figures.greedy_tau
            values["sampled_tau"] = self.figures.sampled_tau
        return values

    def __str__(self) -> str:
        """Return the report that `eagle doctor` prints: verdict, levels, faults, the nearest other changes, notes."""
        lines = [f"verdict: {self.verdict}"]
        if self.figures is not None:
            lines += ["", *describe_levels(self.figures)]
        # the other faults are branches whose removal costs nothing
        helped = [fault for fault in self.faults if fault.is_sure]
        idle = [fault for fault in self.faults if not fault.is_sure]
        for title, effects in (
            ("what raised acceptance, one change after the other:", helped),
            ("what was left out and cost nothing:", idle),
            (describe_tried(self.tried, bool(self.faults)), self.tried[:3]),
        ):
            if effects:
                lines += ["", title]
                lines += [f"  {effect}" for effect in effects]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip()


def describe_tried(tried: Sequence[Effect], has_faults: bool) -> str:
    """Return the title above the list of changes that are no fault: how many were tried, and how many help a little."""
    what = f"{len(tried)} {'further ' if has_faults else ''}single changes"
    shares = [
        effect.min_share
        for effect in tried
        if effect.sampled.errors >= SURE and effect.min_share > 0
    ]
    if not shares:
        return f"{what}, of which none helps; the nearest:"
    return (
        f"{what}, of which {len(shares)} help by up to {max(shares):.1%} of the drafted tokens, "
        "too little or too uncertain to be a fault; the nearest:"
    )


def describe_levels(figures: Agreement) -> list[str]:
    """Return the lines of a table with the acceptance at each level, and a line with the chain's acceptance length."""
    lines = [
        f"{len(figures.seq_ids)} places in {int(figures.seq_ids.max()) + 1} answers of the target:",
        "  level   accepted   fed with the target's states   overlap of the probs",
    ]
    rates = zip(figures.rates(), figures.teacher_forced_rates, strict=True)
    for level, (rate, forced) in enumerate(rates):
        # [S] bool, the slots whose sequence goes on to this level
        in_seq = figures.in_seq[level]
        overlap = float(figures.overlap[level, in_seq].mean()) if in_seq.any() else 0.0
        lines.append(f"  {level + 1:5}   {rate:8.3f}   {forced:28.3f}   {overlap:20.3f}")
    chain = f"  acceptance length of a chain of {len(figures.hits)}"
    return [
        *lines,
        f"{chain}: greedy τ {figures.greedy_tau:.3f}, sampled drafts {figures.sampled_tau:.3f}",
    ]


def decide(
    figures: Agreement,
    faults: Sequence[Effect],
    fatal: Sequence[str],
    norm_shift: float,
    needs_more: bool = False,
) -> str:
    """Return the verdict on a head in one line.

    It is broken, made for another target, drafts badly from its own states, is healthy or under-trained.

    Args:
        figures: The agreement of the unchanged head.
        faults: Repairs that raised agreement, each on top of the one before, or branches whose removal changed nothing.
        fatal: What `inspect` finds in the files, in its words: what names the target, rope apart, says that the head
            belongs to another one.
        norm_shift: How far the head's norms are from where training starts.
        needs_more: Whether the head was trained on so few tokens that more would bring much.
    """
    # of each level, how often its token is right after those before were
    rates = figures.rates()
    summary = f"level 1 names the target's token in {rates[0]:.0%} of the places, τ {figures.greedy_tau:.2f}"
    # findings that say the head belongs to another target, and all others
    misfits = [what for what in fatal if "target" in what and "rope" not in what]
    in_files = [what for what in fatal if what not in misfits]
    if any(effect.probe.kind.endswith("rope") for effect in faults):
        # the rope repair says more than what the files say of the rope
        in_files = [what for what in in_files if not what.startswith("rope")]
    names = [effect.probe.fault for effect in faults]
    broken = f"broken: {'; '.join(names + in_files)}"
    if faults and not in_files and not any(effect.is_sure for effect in faults):
        # an idle branch may also be a symptom: another one may feed it what it was not trained on
        broken = f"broken, cause not found: {'; '.join(names)}; {summary}"
    # once repaired it agrees with this target, so it was not made for another one
    if faults and faults[-1].after.rates()[0] >= MIN_RATE:
        return broken
    if misfits and rates[0] < HEALTHY_RATE:
        return f"made for another target: {summary}"
    if faults or in_files:
        return broken
    if rates[0] < MAX_RATE_UNRELATED and norm_shift > MIN_NORM_SHIFT:
        return (
            f"made for another target, or broken in a way that was not tried: {summary}, although its norms have moved "
            f"by {norm_shift:.3f} from where training starts"
        )
    # it drafts far better from the target's states than from those that it makes itself
    if rates[0] >= MIN_RATE and figures.own_state_ratio < MIN_OWN_STATE_RATIO:
        return (
            f"drafts badly from its own states: {summary}; level 2 is right in {rates[1]:.0%}, fed with the target's "
            f"states in {figures.teacher_forced_rates[1]:.0%}"
        )
    if rates[0] >= HEALTHY_RATE:
        return f"healthy: {summary}"
    under_trained = f"under-trained: {summary}, and no single change mends it"
    if needs_more:
        return f"{under_trained}; it was trained on few tokens, and more data or epochs help"
    return under_trained
