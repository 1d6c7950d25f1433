"""How far a run has got: its tokens per weight, on the measured curve of its method on a reference target."""

from __future__ import annotations

import json
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module

from eagle.shipped import STAGES

CURVES = STAGES / "docs/results/compare_curves.json"  # `eagle compare recipes/compare/curves.yaml` writes it
COLUMN = "tree of 25, T = 1"
WORTH = 0.04  # of what drafts bring, a doubling: below it more tokens cost more than they bring
FAR = 4  # doublings ahead


class Curve(NamedTuple):
    """Acceptance lengths of a method, from few tokens per weight to many."""

    per_weight: tuple[float, ...]
    taus: tuple[float, ...]

    def at(self, per_weight: float) -> float:
        """Straight over the logarithm between points; beyond the ends, that of the end."""
        places = [log2(one) for one in self.per_weight]
        place = min(max(log2(per_weight), places[0]), places[-1])
        after = next(number for number in range(1, len(places)) if places[number] >= place)
        share = (place - places[after - 1]) / (places[after] - places[after - 1])
        return self.taus[after - 1] + share * (self.taus[after] - self.taus[after - 1])


@cache
def read_curves(path: Path = CURVES) -> dict[str, Curve]:
    """The curves of a comparison's results by method; none where the file is missing."""
    if not path.is_file():
        return {}
    figures: dict[str, Any] = json.loads(path.read_text())
    weights = {arm["arm"]: arm["weights"] for arm in figures["arms"] if "weights" in arm}
    [column] = [column for column in figures["curves"] if column["column"] == COLUMN]
    curves = {}
    for name, one in column["curves"].items():
        points = one["points"]
        if len(points) > 1:
            count = weights[f"{name}, {points[0]['tokens']:,} tokens"]
            curves[name] = Curve(
                tuple(point["tokens"] / count for point in points), tuple(point["value"] for point in points)
            )
    return curves


def describe_reached(kind: str, tokens: int, head: Module, path: Path = CURVES) -> str | None:
    """What so many supervised tokens brought on the reference target; None for methods without a curve."""
    weights = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    if (curve := read_curves(path).get(kind)) is None or not tokens or not weights:
        return None
    reached, source = tokens / weights, f"on the reference target ({path.name})"
    counted = f"{tokens:,} supervised tokens"
    first, last = (_round(per_weight * weights) for per_weight in (curve.per_weight[0], curve.per_weight[-1]))
    if reached < curve.per_weight[0]:
        return (
            f"{counted} are few: {kind} was measured {source} with {first} to {last} tokens, counted for a "
            f"head of this size ({weights:,} weights): train longer"
        )
    if reached >= curve.per_weight[-1]:
        return (
            f"{counted} are as many as {kind} was measured with {source}, or more: {last}, counted for a head of "
            f"this size ({weights:,} weights)"
        )
    ahead = min(curve.per_weight[-1], reached * 2**FAR)
    gained, later = curve.at(reached) - 1, curve.at(ahead) - 1
    slope = (later - gained) / log2(ahead / reached)
    advice = "train longer" if slope > WORTH * gained else "more tokens bring little"
    return (
        f"{counted} for {weights:,} weights: with as many for each weight, {kind} had {gained / later:.0%} of the "
        f"accepted drafts that it had with {ahead / reached:.3g} times as many, {source}; a doubling brought "
        f"{slope:+.2f} accepted tokens: {advice}"
    )


def _round(count: float) -> str:
    """A number of tokens with two digits that count."""
    return f"{float(f'{count:.2g}'):,.0f}"
