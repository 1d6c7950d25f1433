"""How far a run has got: its tokens per weight, on the measured curve of its method on a reference target."""

from __future__ import annotations

import json
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module

from eagle.shipped import STAGES

# `eagle compare recipes/compare/curves.yaml` writes it
CURVES = STAGES / "docs/results/compare_curves.json"
COLUMN = "tree of 25, T = 1"  # of those results
# More tokens are advised where a doubling of them adds at least this share of the tokens that drafts bring.
MIN_GAIN = 0.04
DOUBLINGS = 4  # how far up the curve the run is compared, at most
MORE = "add data or epochs"


class Curve(NamedTuple):
    """Acceptance lengths of a method, from few tokens per weight to many."""

    per_weight: tuple[float, ...]  # training tokens per weight of the head, ascending
    taus: tuple[float, ...]  # the acceptance length after each

    def at(self, per_weight: float) -> float:
        """Return the acceptance length after `per_weight` training tokens per weight of the head.

        Between the measured points it is linear in the logarithm of the tokens.
        """
        positions = [log2(point) for point in self.per_weight]
        # beyond the ends of the curve it is the value at the end
        position = min(max(log2(per_weight), positions[0]), positions[-1])
        right = next(i for i in range(1, len(positions)) if positions[i] >= position)
        left = right - 1
        share = (position - positions[left]) / (positions[right] - positions[left])
        return self.taus[left] + share * (self.taus[right] - self.taus[left])


@cache
def read_curves(path: Path = CURVES) -> dict[str, Curve]:
    """Return each method's curve of acceptance length over training tokens per weight of the head.

    Args:
        path: The results of a comparison, of which COLUMN is read. Without this file there are no curves.
    """
    if not path.is_file():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())
    weights = {arm["arm"]: arm["weights"] for arm in results["arms"] if "weights" in arm}
    [column] = [column for column in results["curves"] if column["column"] == COLUMN]
    curves = {}
    for method, curve in column["curves"].items():
        points = curve["points"]
        # a single point gives no slope
        if len(points) > 1:
            # an arm is named "METHOD, N tokens"; all arms of a method have heads of one size, so that any gives it
            head_weights = weights[f"{method}, {points[0]['tokens']:,} tokens"]
            per_weight = tuple(point["tokens"] / head_weights for point in points)
            curves[method] = Curve(per_weight, tuple(point["value"] for point in points))
    return curves


def compare_with_curve(kind: str, tokens: int, head: Module, path: Path = CURVES) -> str | None:
    """Return a sentence on how far training has come, for the log at the end of a run; None without a curve.

    It compares the run with the measured curve of the same method at the same number of tokens per weight, and says
    whether more tokens would help.

    Args:
        kind: The method.
        tokens: The supervised tokens that the head was trained on, repeated ones included.
        head: The head, whose trainable weights are counted.
        path: Where the curves are read from.
    """
    weights = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    curve = read_curves(path).get(kind)
    if curve is None or not tokens or not weights:
        return None
    per_weight = tokens / weights
    first = curve.per_weight[0]
    last = curve.per_weight[-1]
    source = f"This project measured {kind} heads on a tiny target (docs/results/{path.name})."
    counted = f"{tokens:,} supervised tokens, counted once per epoch,"
    if per_weight < first:
        return (
            f"{counted} are few for a head of {weights:,} weights. {source} With as many tokens per weight as the "
            f"shortest of those runs, this head would have had {_round(first * weights)} tokens; as the longest, "
            f"{_round(last * weights)}. Advice: {MORE}"
        )
    if per_weight >= last:
        return (
            f"{counted} are many for a head of {weights:,} weights. {source} With as many tokens per weight as the "
            f"longest of those runs, this head would have had {_round(last * weights)} tokens"
        )
    # a point further up the curve, and the gain of each doubling of the tokens up to it
    later = min(last, per_weight * 2**DOUBLINGS)
    # one token of each cycle is the target's own and no draft
    accepted = curve.at(per_weight) - 1
    accepted_later = curve.at(later) - 1
    slope = (accepted_later - accepted) / log2(later / per_weight)
    advice = MORE if slope > MIN_GAIN * accepted else "more tokens bring little"
    return (
        f"{counted} trained a head of {weights:,} weights. {source} With as many tokens per weight, such a head had "
        f"{accepted / accepted_later:.0%} of the accepted draft tokens that it had with {later / per_weight:.3g} times "
        f"as many. Each doubling brought {slope:+.2f} accepted tokens. Advice: {advice}"
    )


def would_gain(kind: str, tokens: int, head: Module, path: Path = CURVES) -> bool:
    """Return whether more training tokens would still help a head much; False for methods without a measured curve."""
    described = compare_with_curve(kind, tokens, head, path)
    return described is not None and described.endswith(MORE)


def _round(count: float) -> str:
    """Return a number of tokens as text, rounded to two significant digits."""
    return f"{float(f'{count:.2g}'):,.0f}"
