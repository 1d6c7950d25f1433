"""The doctor's verdict: effects of single changes, and the diagnosis with its figures."""

# K levels, M texts, N resamplings

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle.doctor.agreement import Agreement, chain_lengths
from eagle.doctor.probes import GUESS, Probe

RESAMPLED = 1000  # times, for an interval
SURE, SURE_GREEDY = 4.0, 2.5  # standard errors over texts that had no part in choosing the change
LEAST = 0.004  # of what drawn drafts add to the acceptance length
LEAST_GREEDY = 0.04  # of what greedy ones add; no change of fourteen healthy heads brought more than a third of it
LEAST_GUESSED = 0.06  # along a rope's theta nothing is sharp: heads trained on short texts lie on a slope
ABLE = 0.35  # of level 1; below, a head stands at no optimum, and accidents of some percent are usual
LEAST_ELSE, ABLE_ELSE = 0.25, 0.1
HEALTHY = 0.5  # of level 1
FALLEN = 0.6  # of what later levels would add, were they given the target's states
HELD = 0.8  # of that; heads that were trained on their own states stand at 0.84 to 1.03
LOST = 0.05  # of level 1; what has learned for twenty steps is right more often
MOVED = 0.01  # of norms, which start at 1: after some twenty steps


@dataclass(frozen=True)
class Effect:
    """The effect of one change on the acceptance of chains, paired by text."""

    probe: Probe
    before: Agreement
    after: Agreement

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """[M] each, acceptance lengths before and after, drafts drawn from the head's probs."""
        return self.before.drawn_lengths(), self.after.drawn_lengths()

    @cached_property
    def greedy(self) -> tuple[Tensor, Tensor]:
        """[M] each, acceptance lengths of greedy drafts before and after, read along the texts."""
        return self.before.greedy_lengths(), self.after.greedy_lengths()

    @property
    def shares(self) -> tuple[float, float]:
        """The gains of drawn and greedy drafts, relative to the tokens that drafts added before."""
        pairs = ((float(before.mean()), float(after.mean())) for before, after in (self.drawn, self.greedy))
        drawn, greedy = ((after - before) / max(before - 1, 1e-9) for before, after in pairs)
        return drawn, greedy

    @property
    def errors(self) -> tuple[float, float]:
        """The number of standard errors by which these gains exceed zero."""
        gains = (lengths[1] - lengths[0] for lengths in (self.drawn, self.greedy))
        drawn, greedy = (float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12)) for gain in gains)
        return drawn, greedy

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
        drawn, greedy = self.shares
        right_after = self.after.rates()[0]
        least, least_greedy = LEAST, LEAST_GUESSED if self.probe.kind == GUESS else LEAST_GREEDY
        if right_after < ABLE:
            least = least_greedy = LEAST_ELSE
        sure = self.errors[0] >= SURE and self.errors[1] >= SURE_GREEDY and self.after.tau > self.before.tau
        enough = drawn >= least and greedy >= least_greedy and right_after >= ABLE_ELSE
        return sure and enough and not self.only_eases

    def intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """95 % intervals of the gains in τ and in drawn drafts, over resampled texts."""
        count = len(self.drawn[0])
        again = torch.randint(count, (RESAMPLED, count), generator=torch.Generator().manual_seed(0))
        before, after = (chain_lengths(agreement.counts()[again].sum(1)) for agreement in (self.before, self.after))
        gains = (after - before, (self.drawn[1] - self.drawn[0])[again].mean(1))
        tau, drawn = ((float(gain.quantile(0.025)), float(gain.quantile(0.975))) for gain in gains)
        return tau, drawn

    def __str__(self) -> str:
        lengths = (self.before.tau, self.after.tau), [float(length.mean()) for length in self.drawn]
        parts = [
            f"{what} {before:.3f} -> {after:.3f} ({low:+.3f} to {high:+.3f})"
            for what, (before, after), (low, high) in zip(("τ", "drawn drafts"), lengths, self.intervals(), strict=True)
        ]
        return f"{self.probe.fault}: {', '.join(parts)}, {self.errors[1]:.1f} and {self.errors[0]:.1f} standard errors"


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
        if self.faults:
            lines += [
                "",
                "what raised acceptance, one change after the other:",
                *(f"  {fault}" for fault in self.faults),
            ]
        if self.tried:
            further = "further " if self.faults else ""
            what = f"{len(self.tried)} {further}single changes, of which none helps; the nearest:"
            lines += ["", what, *(f"  {effect}" for effect in self.tried[:3])]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip()


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
    return [*lines, f"{chain}: greedy τ {figures.tau:.3f}, drawn drafts {float(figures.drawn_lengths().mean()):.3f}"]


def decide(figures: Agreement, faults: Sequence[Effect], elsewhere: Sequence[str], moved: float) -> str:
    """The verdict; `elsewhere`: why it is another target's head, `moved`: how far its norms are from their start."""
    rates = figures.rates()
    summary = f"level 1 names the target's token in {rates[0]:.0%} of the places, τ {figures.tau:.2f}"
    broken = f"broken: {'; '.join(effect.probe.fault for effect in faults)}"
    if faults and faults[-1].after.rates()[0] >= ABLE:
        return broken
    if elsewhere and rates[0] < HEALTHY:
        return f"made for another target: {summary}"
    if faults:
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
    return f"under-trained: {summary}, and no single change helps"
