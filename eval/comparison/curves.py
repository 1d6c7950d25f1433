"""Fit curves of acceptance length over training tokens, find where two of them cross, and draw them."""

# D bootstrap samples of conversations, N counts of tokens, B exponents

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import log2
from typing import Any

import torch
from torch import Tensor

from eagle.markup import Html, tag
from eval.comparison.compare_table import (
    NO_DATA,
    ComparisonTable,
    Key,
    column_name,
    group_by_conversation,
)
from eval.page.page_parts import drafter_panels, make_page
from eval.result_files.figures import Doublings, Scale, draw_plot
from eval.result_files.statistics import Estimate, Row, column_sums, draw_counts

EXPONENTS = torch.logspace(-2, 0.5, 120, dtype=torch.float64)  # [B]
DRAWS = 1000
# at each end of an interval
TAIL = 0.025
# of the samples: curves that cross in fewer may not cross
SURE = 0.95
# counts, to fit three numbers
FEWEST = 4
# the last point is predicted from those of at most 1/8 of its tokens, or from the fewest
HELD_BACK = 8
WITH_INTERVAL = "{value:.2f} ({low:.2f} to {high:.2f})"
CHANGE = "{value:+.2f} ({low:+.2f} to {high:+.2f})"
PREDICTED = "{value:.2f} from {from:,}: {error:+.2f}"
CROSSING = "{value:,} tokens ({low:,} to {high:,})"


def describe_curves(table: ComparisonTable) -> list[dict[str, Any]]:
    """Return points, fits, predictions and crossings of all curves, for each shape and temperature.

    Returns:
        What `comparison.json` holds as "curves", and what `draw_curves` and `curve_lines` take.
    """
    if not table.comparison.curves:
        return []
    columns = []
    for shape, temperature in table.columns:
        name = column_name(shape, temperature)
        columns.append({"column": name, **describe_column(table, shape, temperature)})
    return columns


def describe_column(table: ComparisonTable, shape: str, temperature: float) -> dict[str, Any]:
    """Return the curves of one shape at one temperature, all resampled by the same conversations."""
    curves = {}
    for name, arms in table.comparison.curves.items():
        counts = []
        taus = []
        for arm in arms:
            lengths = table.lengths(arm, shape, temperature)
            # a comparison that goes on lacks the last points
            if lengths:
                # the count that its budget names: heads of one count are compared with one another
                counts.append(arm.section.tokens)
                taus.append(draw_taus(lengths))
        if counts:
            curves[name] = torch.tensor(counts, dtype=torch.float64), torch.stack(taus)

    # a cycle commits at most one token of every level, and the target's own
    max_tau = float(table.comparison.shapes[shape].depth + 1)
    described = {name: describe_curve(*points, max_tau) for name, points in curves.items()}
    return {"curves": described, "crossings": list(find_crossings(curves))}


def draw_taus(lengths: dict[Key, Row]) -> Tensor:
    """Return the acceptance length of all answers, and of each sample of conversations  # [1 + D]"""
    clusters = group_by_conversation(lengths)
    # all arms in one order, so that a sample is of the same conversations
    sums = column_sums({name: clusters[name] for name in sorted(clusters, key=str)})
    drawn = torch.cat([sums.sum(0)[None], draw_counts(len(sums), DRAWS) @ sums])
    return drawn[:, 0] / drawn[:, 1]


def describe_curve(counts: Tensor, taus: Tensor, most: float) -> dict[str, Any]:
    """Return points and fit with their intervals, and how well the first points predict the last.

    Args:
        counts: Training tokens of each point, in order  # [N]
        taus: The acceptance length of all answers, then of each sample  # [N, 1 + D]
        most: The acceptance length that no head can exceed.

    Returns:
        The "points"; with enough of them a "fit" and what "a doubling more" of tokens would add; and how the last
        point is "predicted" from the first ones.
    """
    points = [
        {"tokens": int(count), **_estimate(tau)} for count, tau in zip(counts, taus, strict=True)
    ]
    figures: dict[str, Any] = {"points": points}

    last = counts[-1:]
    if len(counts) >= FEWEST:
        fitted = fit(counts, taus, most)
        ceiling, scale, exponent = fitted.unbind(1)
        figures["fit"] = {
            "ceiling": _estimate(ceiling),
            "scale": _estimate(scale),
            "exponent": _estimate(exponent),
        }
        gain = curve(2 * last, fitted) - curve(last, fitted)
        figures["a doubling more"] = _estimate(gain[0])

    # the fit is checked on a point that it has not seen
    few = max(int((counts <= counts[-1] / HELD_BACK).sum()), FEWEST)
    if few < len(counts):
        predicted = curve(last, fit(counts[:few], taus[:few], most))[0]
        figures["predicted"] = {
            "from": int(counts[few - 1]),
            "at": int(counts[-1]),
            **_estimate(predicted),
            "error": float(predicted[0] - taus[-1, 0]),
        }
    return figures


def fit(counts: Tensor, taus: Tensor, most: float) -> Tensor:
    """Fit `ceiling - scale * (tokens / 1000) ** -exponent` by least squares  # [D, 3]

    The scale is not below 0, so that no curve falls. The ceiling is not above `most`, the tokens of a cycle that
    accepts the deepest path.

    Args:
        counts: Training tokens of each point  # [N]
        taus: Acceptance lengths of each point, one for each sample  # [N, D]
        most: The highest ceiling.

    Returns:
        Ceiling, scale and exponent of each sample.
    """
    # each exponent of a grid leaves a straight line in `falls`, whose slope and offset have a closed form
    falls = (counts / 1000) ** -EXPONENTS[:, None]  # [B, N]
    mean_fall = falls.mean(1, keepdim=True)  # [B, 1]
    centred = falls - mean_fall
    means = taus.mean(0)  # [D]
    slope = (centred @ (taus - means)) / centred.square().sum(1, keepdim=True)  # [B, D]
    scale = (-slope).clamp(min=0)
    ceiling = means + scale * mean_fall

    # where that is too high, the best scale under the highest ceiling
    bounded = (falls @ (most - taus)) / falls.square().sum(1, keepdim=True)
    scale = torch.where(ceiling > most, bounded.clamp(min=0), scale)
    ceiling = ceiling.clamp(max=most)

    # each sample takes the exponent of the grid that leaves the least squared error
    fitted = ceiling[:, None] - scale[:, None] * falls[..., None]  # [B, N, D]
    errors = (fitted - taus).square().sum(1)  # [B, D]
    best = errors.argmin(0)
    samples = torch.arange(taus.shape[1])
    return torch.stack([ceiling[best, samples], scale[best, samples], EXPONENTS[best]], dim=1)


def curve(counts: Tensor, fitted: Tensor) -> Tensor:
    """Return the fitted acceptance lengths  # [N, D]"""
    ceiling, scale, exponent = fitted.unbind(1)
    return ceiling - scale * (counts[:, None] / 1000) ** -exponent


def find_crossings(curves: dict[str, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield where the second of two curves overtakes the first, between their measured points.

    Args:
        curves: Counts of tokens [N] and acceptance lengths [N, 1 + D] by the curve's name.
    """
    for first, second in combinations(curves, 2):
        first_counts, first_taus = curves[first]
        second_counts, second_taus = curves[second]
        shared = [count for count in first_counts.tolist() if count in second_counts.tolist()]
        # a crossing lies between two points
        if len(shared) < 2:
            continue
        differences = []
        for count in shared:
            first_tau = first_taus[first_counts == count][0]
            second_tau = second_taus[second_counts == count][0]
            differences.append(second_tau - first_tau)
        gaps = torch.stack(differences)  # [N, D]
        crossed = cross(torch.tensor(shared, dtype=torch.float64), gaps)
        crosses = crossed.isfinite()
        # the first is that of all answers: without it no sample's crossing counts
        if crosses[0]:
            crossings = crossed[crosses]
            yield {
                "first": first,
                "second": second,
                "overtakes": second if gaps[-1, 0] > 0 else first,
                **{name: round(value) for name, value in _estimate(crossings).items()},
                # of the samples in which they cross
                "share": len(crossings) / len(crossed),
            }


def cross(counts: Tensor, gaps: Tensor) -> Tensor:
    """Return the tokens at which a gap last changes its sign, straight between points over log tokens  # [D]

    NaN where it does not.

    Args:
        counts: Training tokens that both curves were measured at  # [N]
        gaps: The second acceptance length minus the first  # [N, D]
    """
    logs = counts.log10()[:, None].expand_as(gaps)  # [N, D]
    changes = (gaps[:-1] > 0) != (gaps[1:] > 0)  # [N - 1, D]
    share = gaps[:-1] / (gaps[:-1] - gaps[1:])
    at = logs[:-1] + share * (logs[1:] - logs[:-1])

    # argmax finds the first change, so the order is reversed
    last = len(changes) - 1 - changes.flip(0).int().argmax(0)
    return torch.where(changes.any(0), 10 ** at.gather(0, last[None])[0], torch.nan)


def _estimate(drawn: Tensor) -> dict[str, float]:
    """Return the figure, which is the first, and its interval over the samples."""
    samples = drawn
    if len(drawn) > 1:
        samples = drawn[1:]
    ends = torch.tensor([TAIL, 1 - TAIL]).double()
    low, high = torch.quantile(samples, ends).tolist()
    return {"value": float(drawn[0]), "low": low, "high": high}


def draw_curves(columns: Sequence[dict[str, Any]]) -> str:
    """Draw the curves of each draft tree and temperature over a logarithmic axis of tokens.

    Args:
        columns: As `describe_curves` returns them; those without curves have no figure.

    Returns:
        An HTML file. The vertical bars are 95% intervals over prompts.
    """
    # a curve has one colour in all figures
    names: dict[str, int] = {}
    figures = []
    for column in columns:
        series = []
        taus: list[float] = []
        counts: set[int] = set()
        for name, described in column["curves"].items():
            points = described["points"]
            counts |= {point["tokens"] for point in points}
            taus += [point["high"] for point in points]
            series.append((names.setdefault(name, len(names) + 1), points))
        if series:
            title = f"Acceptance length of {column['column']}"
            figures.append(_draw_column(title, series, sorted(counts), taus))
    title = "Acceptance length by training tokens"
    return make_page(title, tag("h1", title), drafter_panels(names, figures))


def _draw_column(
    title: str,
    series: Sequence[tuple[int, list[dict[str, Any]]]],
    counts: Sequence[int],
    taus: Sequence[float],
) -> Html:
    """Draw the curves of one draft tree at one temperature; `taus` are the ends of their intervals."""
    first = counts[0]
    drawn = []
    for number, points in series:
        values = [Estimate(point["value"], point["low"], point["high"]) for point in points]
        doublings = [log2(point["tokens"] / first) for point in points]
        drawn.append((number, list(zip(doublings, values, strict=True))))
    last = max(log2(counts[-1] / first), 1)
    return draw_plot(
        title,
        drawn,
        x=Doublings(0, last, step=1, first=first),
        y=Scale.over(taus, 1),
        axes=("training tokens", "τ"),
    )


def curve_table(figures: Mapping[str, Any]) -> str:
    """Return the tables of a comparison's curves."""
    return "\n".join(curve_lines(figures["curves"])).strip()


def curve_lines(columns: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield tables in Markdown: points by tokens, and what was fitted to them."""
    for column in columns:
        curves = {}
        for name, described in column["curves"].items():
            curves[name] = {
                point["tokens"]: f"{point['value']:.2f}" for point in described["points"]
            }
        # a row for each curve, and a column for each count that any of them has
        counts = sorted(set[int]().union(*curves.values()))
        titles = [f"{column['column']}, tokens", *(f"{count:,}" for count in counts)]
        titles += ["the last, predicted", "ceiling", "a doubling more"]
        yield ""
        yield f"| {' | '.join(titles)} |"
        yield "|---|" + "---:|" * (len(titles) - 1)
        for name, points in curves.items():
            cells = [name, *(points.get(count, NO_DATA) for count in counts)]
            cells += _fitted_cells(column["curves"][name])
            yield f"| {' | '.join(cells)} |"

        for crossing in column["crossings"]:
            if crossing["share"] >= SURE:
                ahead = crossing["overtakes"]
                behind = crossing["first"]
                if ahead == behind:
                    behind = crossing["second"]
                yield ""
                yield f"{ahead} overtakes {behind} at {CROSSING.format(**crossing)}."


def _fitted_cells(curve: dict[str, Any]) -> list[str]:
    cells = [NO_DATA]
    if "predicted" in curve:
        cells = [PREDICTED.format(**curve["predicted"])]
    # both need a fit
    if "fit" not in curve:
        return [*cells, NO_DATA, NO_DATA]
    return [
        *cells,
        WITH_INTERVAL.format(**curve["fit"]["ceiling"]),
        CHANGE.format(**curve["a doubling more"]),
    ]
