"""The doctor's verdict: effects of single changes, and the diagnosis with its figures."""

# K levels, M texts

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle.doctor.agreement import Agreement
from eagle.doctor.probes import GUESS, Probe

Cycles = tuple[Tensor, Tensor]  # tokens and cycles of each text
SURE, SURE_GREEDY = 4.0, 2.5  # standard errors over texts that had no part in choosing the change
CLEAR, LEAST_CLEAR = 10.0, 0.25  # errors, and share of the drafted tokens, of a gain in drawn drafts alone
LEAST = 0.005  # of what drawn drafts add to the acceptance length
LEAST_GREEDY = 0.015  # of what greedy ones add; no change of the healthy heads it was chosen on brought both
LEAST_GUESSED = 0.06  # along a rope's theta nothing is sharp: heads trained on short texts lie on a slope
ABLE = 0.35  # of level 1; below, a head stands at no optimum, and accidents of some percent are usual
LEAST_ELSE, ABLE_ELSE = 0.06, 0.1
LEAST_WORTH = 0.01  # of what drafts add; a block's attention and MLP were worth 0.04 and more in healthy heads
HEALTHY = 0.5  # of level 1
FALLEN = 0.6  # of what later levels would add, were they given the target's states
HELD = 0.8  # of that; heads that were trained on their own states stand at 0.84 to 1.03
LOST = 0.05  # of level 1; what has learned for twenty steps is right more often
MOVED = 0.01  # of norms, which start at 1: after some twenty steps


@dataclass(frozen=True)
class Gain:
    """The gain of a change in the acceptance length of decoding, with its standard error over texts."""

    before: float
    after: float
    error: float

    @classmethod
    def between(cls, before: Cycles, after: Cycles) -> Gain:
        """From tokens and cycles of each text; the error is that of a difference of ratios, paired by text."""
        lengths = [float(tokens.sum() / cycles.sum()) for tokens, cycles in (before, after)]
        parts = [
            (tokens - length * cycles) / cycles.mean()
            for length, (tokens, cycles) in zip(lengths, (before, after), strict=True)
        ]
        spread = float((parts[1] - parts[0]).std()) if len(parts[0]) > 1 else 0.0
        return cls(lengths[0], lengths[1], spread / len(parts[0]) ** 0.5)

    @property
    def share(self) -> float:
        """The gain relative to the tokens that drafts added before."""
        return (self.after - self.before) / max(self.before - 1, 1e-9)

    @property
    def errors(self) -> float:
        """The number of standard errors by which the gain exceeds zero."""
        return (self.after - self.before) / max(self.error, 1e-12)

    def __str__(self) -> str:
        low, high = (self.after - self.before + sign * 1.96 * self.error for sign in (-1, 1))
        interval = f"{low:+.3f} to {high:+.3f}, {self.errors:.1f} standard errors"
        return f"{self.before:.3f} -> {self.after:.3f} ({interval})"


@dataclass(frozen=True)
class Effect:
    """The effect of one change on the acceptance of decoded cycles of chains, paired by text."""

    probe: Probe
    before: Agreement
    after: Agreement

    @cached_property
    def drawn(self) -> Gain:
        """The gain where drafts are drawn from the head's probs."""
        return Gain.between(self.before.drawn_cycles, self.after.drawn_cycles)

    @cached_property
    def greedy(self) -> Gain:
        """The gain where drafts are the head's likeliest tokens."""
        return Gain.between(self.before.greedy_cycles, self.after.greedy_cycles)

    @property
    def least(self) -> float:
        """The smaller of both gains, as a share of the drafted tokens: what flattens probs raises only one."""
        return min(self.drawn.share, self.greedy.share)

    @property
    def is_harmful(self) -> bool:
        """Whether the head drafts worse with the change, beyond doubt."""
        return self.drawn.errors <= -SURE and self.greedy.errors <= -SURE_GREEDY

    @property
    def is_idle(self) -> bool:
        """Whether a part that the change removes does no good to a head that can draft."""
        return self.before.rates()[0] >= ABLE and min(self.drawn.share, self.greedy.share) >= -LEAST_WORTH

    @property
    def is_none(self) -> bool:
        """Whether the change left all guesses as they were."""
        unchanged = torch.equal(self.before.overlap, self.after.overlap)
        return unchanged and torch.equal(self.before.hits, self.after.hits)

    @property
    def only_eases(self) -> bool:
        """Whether it only makes own states less disturbing for a head that never saw them, and mends no fault."""
        right_before, right_after = self.before.rates()[0], self.after.rates()[0]
        return self.after.own_state_ratio < HELD and right_after < (1 + LEAST_GREEDY) * right_before

    @property
    def is_sure(self) -> bool:
        """Whether this was the fault; greedy drafts must gain too, as flatter probs alone raise drawn ones."""
        right_after = self.after.rates()[0]
        least, least_greedy = LEAST, LEAST_GUESSED if self.probe.kind == GUESS else LEAST_GREEDY
        if right_after < ABLE:
            least = least_greedy = LEAST_ELSE
        # a head that is sure of its tokens loses its drawn drafts first: greedy ones then need only point the same way
        is_clear = self.drawn.errors >= CLEAR and self.drawn.share >= LEAST_CLEAR
        sure = self.drawn.errors >= SURE and self.greedy.errors >= (1.0 if is_clear else SURE_GREEDY)
        enough = self.drawn.share >= least and self.greedy.share >= least_greedy and right_after >= ABLE_ELSE
        return sure and enough and not self.only_eases

    def __str__(self) -> str:
        gains = (f"{what} {gain}" for what, gain in (("τ", self.greedy), ("drawn drafts", self.drawn)))
        return f"{self.probe.fault}: {', '.join(gains)}"


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

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        if self.figures is not None:
            lines += ["", *describe_levels(self.figures)]
        helped = [fault for fault in self.faults if fault.is_sure]
        idle = [fault for fault in self.faults if not fault.is_sure]
        if helped:
            lines += ["", "what raised acceptance, one change after the other:", *(f"  {fault}" for fault in helped)]
        if idle:
            lines += ["", "what was left out and cost nothing:", *(f"  {fault}" for fault in idle)]
        if self.tried:
            lines += ["", describe_tried(self.tried, bool(self.faults)), *(f"  {effect}" for effect in self.tried[:3])]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip()


def describe_tried(tried: Sequence[Effect], has_faults: bool) -> str:
    """The changes that are no fault and their effects, as the list below shows them."""
    what = f"{len(tried)} {'further ' if has_faults else ''}single changes"
    gains = [effect for effect in tried if effect.least > 0 and effect.drawn.errors >= SURE]
    if not gains:
        return f"{what}, of which none helps; the nearest:"
    most = max(effect.least for effect in gains)
    return (
        f"{what}, of which {len(gains)} help by up to {most:.1%} of the drafted tokens, "
        "too little or too uncertain to be a fault; the nearest:"
    )


def describe_levels(figures: Agreement) -> list[str]:
    """A table of the levels, and the chain's acceptance length."""
    rows = zip(figures.rates(), figures.teacher_forced_rates, figures.overlap, figures.in_text, strict=True)
    lines = [
        f"{len(figures.text_ids)} places in {int(figures.text_ids.max()) + 1} answers of the target:",
        "  level   accepted   fed with the target's states   overlap of the probs",
    ]
    for level, (rate, forced, overlap, in_text) in enumerate(rows, start=1):
        shared = float(overlap[in_text].mean()) if in_text.any() else 0.0
        lines.append(f"  {level:5}   {rate:8.3f}   {forced:28.3f}   {shared:20.3f}")
    chain = f"  acceptance length of a chain of {len(figures.hits)}"
    return [*lines, f"{chain}: greedy τ {figures.decoded_tau:.3f}, drawn drafts {figures.drawn_tau:.3f}"]


def decide(figures: Agreement, faults: Sequence[Effect], fatal: Sequence[str], moved: float) -> str:
    """The verdict; `fatal`: what `inspect` finds in the files, `moved`: how far its norms are from their start."""
    rates = figures.rates()
    elsewhere = [what for what in fatal if "target" in what and "rope" not in what]
    has_rope = any(effect.probe.kind.endswith("rope") for effect in faults)
    in_files = [what for what in fatal if what not in elsewhere and not (has_rope and what.startswith("rope"))]
    summary = f"level 1 names the target's token in {rates[0]:.0%} of the places, τ {figures.decoded_tau:.2f}"
    causes = [*(effect.probe.fault for effect in faults if effect.is_sure), *in_files]
    broken = f"broken: {'; '.join([effect.probe.fault for effect in faults] + in_files)}"
    if faults and not causes:  # a part is idle where another one gives it what it was not trained on, too
        broken = f"broken, cause not found: {'; '.join(effect.probe.fault for effect in faults)}; {summary}"
    if faults and faults[-1].after.rates()[0] >= ABLE:
        return broken
    if elsewhere and rates[0] < HEALTHY:
        return f"made for another target: {summary}"
    if faults or in_files:
        return broken
    if rates[0] < LOST and moved > MOVED:
        return (
            f"made for another target, or broken in a way that was not tried: {summary}, although its norms have moved "
            f"by {moved:.3f} from where training starts"
        )
    if rates[0] >= ABLE and figures.own_state_ratio < FALLEN:
        return (
            f"drafts badly from its own states: {summary}; level 2 is right in {rates[1]:.0%}, fed with the target's "
            f"states in {figures.teacher_forced_rates[1]:.0%}"
        )
    if rates[0] >= HEALTHY:
        return f"healthy: {summary}"
    return f"under-trained: {summary}, and no single change mends it"
