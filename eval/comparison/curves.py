"""Curves of a comparison: acceptance length against tokens learned from, a fit of each, and where two of them cross."""

# D draws of conversations, N counts of tokens, B exponents

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from eval.comparison.compare_plan import Arm
from eval.comparison.compare_table import NO_DATA, ComparisonTable, Key, column_name, group_by_conversation
from eval.result_files.statistics import Row, column_sums, draw_counts

EXPONENTS = torch.logspace(-2, 0.5, 120, dtype=torch.float64)  # [B]
DRAWS, TAIL = 1000, 0.025
SURE = 0.95  # of the draws: curves that cross in fewer may not cross
FEWEST = 4  # counts, to fit three numbers
HELD_BACK = 8  # times fewer tokens than the last count: from those points, or the fewest, it is predicted


def describe_curves(table: ComparisonTable) -> list[dict[str, Any]]:
    """Every column of shape and temperature: points, fits, predictions and crossings of all curves."""
    return [
        {"column": column_name(shape, temperature), **describe_column(table, shape, temperature)}
        for shape, temperature in table.columns
        if table.comparison.curves
    ]


def describe_column(table: ComparisonTable, shape: str, temperature: float) -> dict[str, Any]:
    """The curves of one shape at one temperature, all resampled by the same conversations."""
    curves = {}
    for name, arms in table.comparison.curves.items():
        measured = {_tokens(arm): lengths for arm in arms if (lengths := table.lengths(arm, shape, temperature))}
        if measured:
            taus = torch.stack([draw_taus(lengths) for lengths in measured.values()])
            curves[name] = torch.tensor(list(measured), dtype=torch.float64), taus
    most = float(table.comparison.shapes[shape].depth + 1)
    return {
        "curves": {name: describe_curve(counts, taus, most) for name, (counts, taus) in curves.items()},
        "crossings": list(find_crossings(curves)),
    }


def draw_taus(lengths: dict[Key, Row]) -> Tensor:
    """The acceptance length of all answers, and of each draw of conversations  # [1 + D]"""
    clusters = group_by_conversation(lengths)
    sums = column_sums({name: clusters[name] for name in sorted(clusters, key=str)})  # for all arms in one order
    drawn = torch.cat([sums.sum(0)[None], draw_counts(len(sums), DRAWS, 0) @ sums])
    return drawn[:, 0] / drawn[:, 1]


def describe_curve(counts: Tensor, taus: Tensor, most: float) -> dict[str, Any]:
    """Points with intervals, the fit with its, and how well the first points predict the last."""
    figures: dict[str, Any] = {
        "points": [{"tokens": int(count), **_estimate(tau)} for count, tau in zip(counts, taus, strict=True)]
    }
    if len(counts) >= FEWEST:
        fitted = fit(counts, taus, most)
        figures["fit"] = dict(zip(("ceiling", "scale", "exponent"), map(_estimate, fitted.unbind(1)), strict=True))
        figures["a doubling more"] = _estimate(curve(2 * counts[-1:], fitted)[0] - curve(counts[-1:], fitted)[0])
    few = max(int((counts <= counts[-1] / HELD_BACK).sum()), FEWEST)
    if few < len(counts):
        predicted = curve(counts[-1:], fit(counts[:few], taus[:few], most))[0]
        figures["predicted"] = {"from": int(counts[few - 1]), "at": int(counts[-1]), **_estimate(predicted)}
        figures["predicted"]["error"] = float(predicted[0] - taus[-1, 0])
    return figures


def fit(counts: Tensor, taus: Tensor, most: float) -> Tensor:
    """Ceiling, scale and exponent of `ceiling - scale * (tokens / 1000) ** -exponent`, by least squares  # [D, 3]

    For each exponent the other two are a straight line's. The scale is not below 0, so that no curve falls, and the
    ceiling not above `most`, the tokens of a cycle that keeps the deepest path.
    """
    falls = (counts / 1000) ** -EXPONENTS[:, None]  # [B, N]
    centred = falls - falls.mean(1, keepdim=True)
    means = taus.mean(0)  # [D]
    scale = (-(centred @ (taus - means)) / centred.square().sum(1, keepdim=True)).clamp(min=0)  # [B, D]
    ceiling = means + scale * falls.mean(1, keepdim=True)
    bounded = (falls @ (most - taus)) / falls.square().sum(1, keepdim=True)  # with the highest ceiling
    scale = torch.where(ceiling > most, bounded.clamp(min=0), scale)
    ceiling = ceiling.clamp(max=most)
    errors = (ceiling[:, None] - scale[:, None] * falls[..., None] - taus).square().sum(1)  # [B, D]
    best = errors.argmin(0)
    rows = torch.arange(taus.shape[1])
    return torch.stack([ceiling[best, rows], scale[best, rows], EXPONENTS[best]], dim=1)


def curve(counts: Tensor, fitted: Tensor) -> Tensor:
    """The fitted acceptance lengths  # [N, D]"""
    ceiling, scale, exponent = fitted.unbind(1)
    return ceiling - scale * (counts[:, None] / 1000) ** -exponent


def find_crossings(curves: dict[str, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Where the second of two curves overtakes the first, between their measured points."""
    for (first, (less, one)), (second, (more, other)) in combinations(curves.items(), 2):
        counts = [count for count in less.tolist() if count in more.tolist()]
        if len(counts) < 2:
            continue
        gaps = torch.stack([other[more == count][0] - one[less == count][0] for count in counts])  # [N, D]
        crossed = cross(torch.tensor(counts, dtype=torch.float64), gaps)
        if crossed.isfinite()[0]:
            crossings = crossed[crossed.isfinite()]
            yield {
                **{"first": first, "second": second, "overtakes": second if gaps[-1, 0] > 0 else first},
                **{name: round(value) for name, value in _estimate(crossings).items()},
                "share": len(crossings) / len(crossed),  # of the draws in which they cross
            }


def cross(counts: Tensor, gaps: Tensor) -> Tensor:
    """The tokens at which a gap last changes its sign, straight between points over log tokens  # [D]

    NaN where it does not.
    """
    places = counts.log10()[:, None].expand_as(gaps)
    changes = (gaps[:-1] > 0) != (gaps[1:] > 0)
    share = gaps[:-1] / (gaps[:-1] - gaps[1:])
    at = places[:-1] + share * (places[1:] - places[:-1])
    last = len(changes) - 1 - changes.flip(0).int().argmax(0)
    return torch.where(changes.any(0), 10 ** at.gather(0, last[None])[0], torch.nan)


def _estimate(drawn: Tensor) -> dict[str, float]:
    """The figure, which is the first, and its interval over the draws."""
    low, high = torch.quantile(drawn[1:] if len(drawn) > 1 else drawn, torch.tensor([TAIL, 1 - TAIL]).double()).tolist()
    return {"value": float(drawn[0]), "low": low, "high": high}


def _tokens(arm: Arm) -> float:
    """The count that its budget names: heads of one count are compared with one another."""
    assert isinstance(arm.section.tokens, int)
    return float(arm.section.tokens)


WITH_INTERVAL, CHANGE = "{value:.2f} ({low:.2f} to {high:.2f})", "{value:+.2f} ({low:+.2f} to {high:+.2f})"


def curve_table(figures: Mapping[str, Any]) -> str:
    """The tables of a comparison's curves."""
    return "\n".join(curve_lines(figures["curves"])).strip()


def curve_lines(columns: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Tables in Markdown: points by tokens, and what was fitted to them."""
    for column in columns:
        counts = sorted({point["tokens"] for one in column["curves"].values() for point in one["points"]})
        titles = [f"{column['column']}, tokens", *(f"{count:,}" for count in counts)]
        titles += ["the last, predicted", "ceiling", "a doubling more"]
        yield from ("", f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1))
        for name, one in column["curves"].items():
            points = {point["tokens"]: f"{point['value']:.2f}" for point in one["points"]}
            cells = [name, *(points.get(count, NO_DATA) for count in counts), *_fitted_cells(one)]
            yield f"| {' | '.join(cells)} |"
        for crossing in column["crossings"]:
            if crossing["share"] >= SURE:
                ahead, names = crossing["overtakes"], {crossing["first"], crossing["second"]}
                at = "{value:,} tokens ({low:,} to {high:,})".format(**crossing)
                yield from ("", f"{ahead} overtakes {(names - {ahead}).pop()} at {at}.")


def _fitted_cells(one: dict[str, Any]) -> Iterator[str]:
    predicted = "{value:.2f} from {from:,}: {error:+.2f}"
    yield predicted.format(**one["predicted"]) if "predicted" in one else NO_DATA
    yield WITH_INTERVAL.format(**one["fit"]["ceiling"]) if "fit" in one else NO_DATA
    yield CHANGE.format(**one["a doubling more"]) if "fit" in one else NO_DATA
