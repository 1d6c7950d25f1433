"""What the doctor says: effects of single changes, and a verdict with the figures behind it."""

# K levels, M texts, N resamplings

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.doctor.agreement import Agreement
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


@dataclass(frozen=True, slots=True)
class Effect:
    """What one change did, in acceptance lengths of chains; intervals hold 95 %, paired by text."""

    kind: str
    fault: str
    drawn: tuple[float, float]  # before and after, drafts drawn from the head's probs
    drawn_gain: tuple[float, float]  # from, to
    greedy: tuple[float, float]
    greedy_gain: tuple[float, float]
    along: tuple[float, float]  # greedy ones again, read along the texts: more places, so less of it is chance
    errors: tuple[float, float]  # standard errors that the gains of drawn drafts and of `along` are above zero
    level: tuple[float, float]  # how often level 1 is right
    own_state_ratio: float  # what later levels add afterwards, of what they would add, fed with the target's states

    @classmethod
    def compare(cls, probe: Probe, before: Agreement, after: Agreement) -> Effect:
        """The head with a change beside the head as it was, paired by text."""
        drawn, along = (
            (before.drawn_lengths(), after.drawn_lengths()),
            (before.greedy_lengths(), after.greedy_lengths()),
        )
        gain, count = drawn[1] - drawn[0], len(drawn[0])
        again = torch.randint(count, (RESAMPLED, count), generator=torch.Generator().manual_seed(0))
        tau_gain = _chain_lengths(after.counts()[again].sum(1)) - _chain_lengths(before.counts()[again].sum(1))
        return cls(
            probe.kind,
            probe.fault,
            (float(drawn[0].mean()), float(drawn[1].mean())),
            _interval(gain[again].mean(1)),
            (before.tau, after.tau),
            _interval(tau_gain),
            (float(along[0].mean()), float(along[1].mean())),
            (_standard_errors(gain), _standard_errors(along[1] - along[0])),
            (before.rates()[0], after.rates()[0]),
            after.own_state_ratio,
        )

    @property
    def is_none(self) -> bool:
        """Whether nothing that the head guesses has changed."""
        return all(before == after for before, after in (self.drawn, self.greedy, self.along)) and self.errors == (0, 0)

    @property
    def only_eases(self) -> bool:
        """Whether it is no mend: a head that never saw its own states is given such as disturb it less."""
        return self.own_state_ratio < HELD and self.level[1] < (1 + LEAST_GREEDY) * self.level[0]

    @property
    def shares(self) -> tuple[float, float]:
        """The gains of drawn and of greedy drafts, as shares of what drafts added before."""
        drawn, greedy = ((after - before) / max(before - 1, 1e-9) for before, after in (self.drawn, self.along))
        return drawn, greedy

    @property
    def is_sure(self) -> bool:
        """Whether this was the fault: drawn drafts alone gain by whatever flattens the probs of too sure a head."""
        drawn, greedy = self.shares
        least, least_greedy = LEAST, LEAST_GUESSED if self.kind == GUESS else LEAST_GREEDY
        if self.level[1] < ABLE:
            least = least_greedy = LEAST_ELSE
        sure = self.errors[0] >= SURE and self.errors[1] >= SURE_GREEDY and self.greedy[1] > self.greedy[0]
        enough = drawn >= least and greedy >= least_greedy and self.level[1] >= ABLE_ELSE
        return sure and enough and not self.only_eases

    def __str__(self) -> str:
        lengths = (("τ", self.greedy, self.greedy_gain), ("drawn drafts", self.drawn, self.drawn_gain))
        parts = [
            f"{what} {before:.3f} -> {after:.3f} ({low:+.3f} to {high:+.3f})"
            for what, (before, after), (low, high) in lengths
        ]
        return f"{self.fault}: {', '.join(parts)}, {self.errors[1]:.1f} and {self.errors[0]:.1f} standard errors"


def _standard_errors(gain: Tensor) -> float:
    """How many of its standard errors the mean of [M] is above zero."""
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12))


def _interval(values: Tensor) -> tuple[float, float]:
    return float(values.quantile(0.025)), float(values.quantile(0.975))


def _chain_lengths(counts: Tensor) -> Tensor:
    """[N], acceptance lengths from how many slots reach and pass each level, [N, 2, K]."""
    return 1 + (counts[:, 1] / counts[:, 0].clamp(min=1)).cumprod(-1).sum(-1)


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a head, and the figures that say so."""

    verdict: str
    faults: tuple[Effect, ...] = ()
    figures: Agreement | None = None
    tried: tuple[Effect, ...] = ()  # once no fault was left, the best first
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether something is to be mended, or another target to be taken."""
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
    """The verdict; `elsewhere` says why it is another target's head, `moved` how far its norms are from their start."""
    rates = figures.rates()
    summary = f"level 1 names the target's token in {rates[0]:.0%} of the places, τ {figures.tau:.2f}"
    broken = f"broken: {'; '.join(effect.fault for effect in faults)}"
    if faults and faults[-1].level[1] >= ABLE:
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
