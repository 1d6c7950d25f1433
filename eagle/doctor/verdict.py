"""What the doctor says: effects of single changes, and a verdict with the figures behind it."""

# K levels

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle.doctor.effects import Measured
from eagle.doctor.probes import GUESS

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
    drawn: tuple[float, float]  # before and after, drafts drawn from the head's law
    drawn_gain: tuple[float, float]  # from, to
    greedy: tuple[float, float]
    greedy_gain: tuple[float, float]
    along: tuple[float, float]  # greedy ones again, read along the texts: more places, so less of it is chance
    errors: tuple[float, float]  # standard errors that the gains of drawn drafts and of `along` are above zero
    level: tuple[float, float]  # how often level 1 is right
    held: float  # what later levels add afterwards, of what they would add, fed with the target's states

    @property
    def able(self) -> float:
        """How often level 1 is right afterwards."""
        return self.level[1]

    @property
    def eases(self) -> bool:
        """Whether it is no mend: a head that never saw its own states is given such as disturb it less."""
        return self.held < HELD and self.level[1] < (1 + LEAST_GREEDY) * self.level[0]

    @property
    def shares(self) -> tuple[float, float]:
        """The gains of drawn and of greedy drafts, as shares of what drafts added before."""
        drawn, greedy = ((after - before) / max(before - 1, 1e-9) for before, after in (self.drawn, self.along))
        return drawn, greedy

    @property
    def gain(self) -> float:
        """The smaller of both: what mends a head raises both, what flattens its law only one."""
        return min(self.shares)

    @property
    def sure(self) -> bool:
        """Whether this was the fault: drawn drafts alone gain by whatever flattens the law of too sure a head."""
        drawn, greedy = self.shares
        least = LEAST_GUESSED if self.kind == GUESS else LEAST_GREEDY
        drawn_least = LEAST
        if self.able < ABLE:
            least = drawn_least = LEAST_ELSE
        sure = self.errors[0] >= SURE and self.errors[1] >= SURE_GREEDY and self.greedy[1] > self.greedy[0]
        return sure and drawn >= drawn_least and greedy >= least and self.able >= ABLE_ELSE and not self.eases

    def __str__(self) -> str:
        def told(what: str, values: tuple[float, float], gain: tuple[float, float]) -> str:
            return f"{what} {values[0]:.3f} -> {values[1]:.3f} ({gain[0]:+.3f} to {gain[1]:+.3f})"

        drawn = told("drawn drafts", self.drawn, self.drawn_gain)
        sure = f"{self.errors[1]:.1f} and {self.errors[0]:.1f} standard errors"
        return f"{self.fault}: {told('τ', self.greedy, self.greedy_gain)}, {drawn}, {sure}"


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
    if own[0] >= ABLE and found.held < FALLEN:
        return (
            f"drafts badly from its own states: {figures}; level 2 is right in {own[1]:.0%}, fed with the target's "
            f"states in {taught[1]:.0%}"
        )
    if own[0] >= HEALTHY:
        return f"healthy: {figures}"
    return f"under-trained: {figures}, and no single change helps"
