"""What the doctor says: effects of single changes, and a verdict with the figures behind it."""

# K levels

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle.doctor.measure import Measured, length
from eagle.doctor.probes import GUESS

SURE = 4.0  # standard errors over the texts; with 50 probes one head in 600 is above it by chance
LEAST = 0.004  # of what drafts add to the acceptance length, in a head that stands at an optimum
LEAST_GUESSED = 0.02  # along a rope's theta nothing is sharp: heads trained on short texts lie on a slope
ABLE = 0.35  # of level 1; below, a head stands at no optimum, and accidents of some percent are usual
LEAST_ELSE, ABLE_ELSE = 0.25, 0.1
HEALTHY = 0.5  # of level 1
FALLEN = 0.6  # of what later levels would add, were they given the target's states
LOST = 0.05  # of level 1; what has learned for twenty steps is right more often
MOVED = 0.01  # of norms, which start at 1: after some twenty steps


@dataclass(frozen=True, slots=True)
class Effect:
    """What one change did, in acceptance lengths of chains; intervals hold 95 %, paired by text."""

    kind: str
    fault: str
    drawn: tuple[float, float]  # before and after, drafts drawn from the head's law
    drawn_gain: tuple[float, float]  # from, to
    greedy: tuple[float, float]
    greedy_gain: tuple[float, float]
    errors: float  # standard errors that the gain of drawn drafts is above zero
    able: float  # how often level 1 is right afterwards

    @property
    def share(self) -> float:
        """The gain of drawn drafts, as a share of what drafts added before."""
        return (self.drawn[1] - self.drawn[0]) / max(self.drawn[0] - 1, 1e-9)

    @property
    def sure(self) -> bool:
        """Whether this was the fault, and no accident."""
        least = LEAST_ELSE if self.able < ABLE else LEAST_GUESSED if self.kind == GUESS else LEAST
        return self.errors >= SURE and self.share >= least and self.able >= ABLE_ELSE

    def __str__(self) -> str:
        def told(what: str, values: tuple[float, float], gain: tuple[float, float]) -> str:
            return f"{what} {values[0]:.3f} -> {values[1]:.3f} ({gain[0]:+.3f} to {gain[1]:+.3f})"

        drawn = told("drawn drafts", self.drawn, self.drawn_gain)
        return f"{self.fault}: {told('τ', self.greedy, self.greedy_gain)}, {drawn}, {self.errors:.1f} standard errors"


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a head, and the figures that say so."""

    verdict: str
    faults: tuple[Effect, ...] = ()
    figures: Measured | None = None
    tried: tuple[Effect, ...] = ()  # once no fault was left, the best first
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether something is to be mended, or another target to be taken."""
        return self.verdict.startswith(("broken", "made for another target"))

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        if self.figures is not None:
            lines += ["", *levels(self.figures)]
        if self.faults:
            lines += ["", "what raised acceptance, one change after the other:", *(f"  {one}" for one in self.faults)]
        if self.tried:
            further = "further " if self.faults else ""
            what = f"{len(self.tried)} {further}single changes, of which none helps; the nearest:"
            lines += ["", what, *(f"  {one}" for one in self.tried[:3])]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip()


def levels(found: Measured) -> list[str]:
    """The figures of each level, and of the chain."""
    rows = zip(found.rates(), found.taught, found.overlap, found.there, strict=True)
    lines = [
        f"{len(found.texts)} places in {int(found.texts.max()) + 1} answers of the target:",
        "  level   accepted   fed with the target's states   overlap of the laws",
    ]
    for level, (own, taught, overlap, there) in enumerate(rows, start=1):
        shared = float(overlap[there].mean()) if there.any() else 0.0
        lines.append(f"  {level:5}   {own:8.3f}   {taught:28.3f}   {shared:19.3f}")
    soft = float(found.soft().mean())
    lines.append(
        f"  acceptance length of a chain of {len(found.hits)}: greedy τ {found.tau:.3f}, drawn drafts {soft:.3f}"
    )
    return lines


def verdict(found: Measured, faults: Sequence[Effect], elsewhere: Sequence[str], moved: float) -> str:
    """What it is; `elsewhere` says why it is another target's head, `moved` how far its norms are from their start."""
    own, taught, able = found.rates(), found.taught, faults[-1].able if faults else 0.0
    figures = f"level 1 names the target's token in {own[0]:.0%} of the places, τ {found.tau:.2f}"
    broken = f"broken: {'; '.join(one.fault for one in faults)}"
    if able >= ABLE:
        return broken
    if elsewhere and own[0] < HEALTHY:
        return f"made for another target: {figures}"
    if faults:
        return broken
    if own[0] < LOST and moved > MOVED:
        return (
            f"made for another target, or broken in a way that was not tried: {figures}, although its norms have moved "
            f"by {moved:.3f} from where training starts"
        )
    if own[0] >= ABLE and length(own[1:]) - 1 < FALLEN * (length(taught[1:]) - 1):
        return (
            f"drafts badly from its own states: {figures}; level 2 is right in {own[1]:.0%}, fed with the target's "
            f"states in {taught[1]:.0%}"
        )
    if own[0] >= HEALTHY:
        return f"healthy: {figures}"
    return f"under-trained: {figures}, and no single change helps"
