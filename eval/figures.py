"""Small figures as inline SVG: no library, no script; colours and sizes come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log10

from eval.markup import Html, tag
from eval.statistics import Estimate

WIDTH = 340  # of every figure: a phone's column, so that its text is as large there as on a desk
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 22, 36
MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.5-3.5h7v7h-7z", "M0-5L5 0L0 5L-5 0z", "M0-5L4.6 3.4H-4.6z")
COLOURS = 6
Points = Sequence[tuple[float, Estimate]]


@dataclass(frozen=True)
class Scale:
    """From a value to a place on the page."""

    low: float
    high: float
    start: float = 0
    end: float = WIDTH
    percent: bool = False
    step: float | None = None  # between the numbers shown; None for about five of them

    @classmethod
    def over(cls, values: Sequence[float], low: float = 0, **options: bool) -> Scale:
        """From `low` to a round value that holds all of the finite values."""
        top = max([value for value in values if isfinite(value)], default=low)
        scale = cls(low, top if top > low else low + 1, **options)
        step = scale.ticks()[-1] - scale.ticks()[-2] if len(scale.ticks()) > 1 else scale.high - low
        return replace(scale, high=low + ceil((scale.high - low) / step - 1e-6) * step)

    def __call__(self, value: float) -> float:
        """The place; what lies outside of the axis ends at its edge."""
        inside = min(max(value, self.low), self.high)
        return round(self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values, about five of them."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** floor(log10(rough))
        step = self.step or next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.99)
        first, last = ceil(self.low / step - 1e-6), floor(self.high / step + 1e-6)
        return [round(number * step, 9) for number in range(first, last + 1)]

    def name(self, value: float) -> str:
        """A number as the axis shows it."""
        return f"{value:.0%}" if self.percent else f"{value:g}"

    def shown(self, value: Estimate) -> str:
        """A figure of this axis with its interval, in words."""
        return percent(value) if self.percent else number(value)


def number(value: Estimate, unit: str = "", digits: int = 2) -> str:
    """A figure with its interval, in words."""
    if not isfinite(value.low):
        return f"{value.value:.{digits}f}{unit}"
    return f"{value.value:.{digits}f}{unit} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def percent(value: Estimate) -> str:
    """A share with its interval, in words."""
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]" if isfinite(value.low) else f"{value.value:.1%}"


def figure(title: str, drawing: Html, note: object = "") -> Html:
    """A drawing under its title, with what there is to say of it."""
    said = tag("span", note, class_="note") if note else ""
    return tag("figure", tag("figcaption", tag("strong", title), said), drawing)


def svg(height: float, label: str, *parts: object) -> Html:
    """A drawing of the common width."""
    return tag("svg", tag("title", label), parts, viewBox=f"0 0 {WIDTH} {ceil(height)}", role="img")


def colour(series: int) -> str:
    """The style sheet's class for a series; 0 is the grey of `none`."""
    return f"s{(series - 1) % (COLOURS - 1) + 1}" if series else "s0"


def mark(series: int, x: float, y: float, hint: str = "") -> Html:
    """A point: its colour and its shape both tell the series."""
    shape = tag("path", d=MARKS[series % len(MARKS)], transform=f"translate({x} {y})", class_="point")
    return tag("g", tag("title", hint) if hint else "", shape, class_=colour(series))


def legend(names: Mapping[str, int]) -> Html:
    """What each colour and shape means."""
    chips = [
        tag("li", tag("svg", mark(series, 7, 7), viewBox="0 0 14 14", aria_hidden="true"), tag("span", name))
        for name, series in names.items()
    ]
    return tag("ul", chips, class_="legend")


def words(x: float, y: float, value: object, kind: str = "tick", anchor: str = "start") -> Html:
    """Words at a place."""
    return tag("text", value, x=round(x, 1), y=round(y, 1), class_=kind, text_anchor=anchor)


def line(x: float, y: float, u: float, v: float, kind: str) -> Html:
    """A straight line."""
    return tag("path", d=f"M{x} {y}L{u} {v}", class_=kind)


def clipped(name: str, room: int) -> str:
    """A name that fits into so many letters."""
    return name if len(name) <= room else name[: room - 1] + "…"


def dots(
    rows: Sequence[tuple[str, Sequence[tuple[int, Estimate]]]],
    label: str,
    unit: str = "",
    start: float = 0,
    reference: float | None = None,
    to: float | None = None,
) -> Html:
    """A row for every name, in it a point and its interval for every series; a single point has its value in words."""
    ends = [end for _, points in rows for _, value in points for end in (value.value, value.high)]
    scale = replace(Scale.over([*ends, reference or start, to or start], start), start=8, end=WIDTH - 14)
    parts, y = [], 0.0
    for name, points in rows:
        single = len(points) == 1
        parts.append(words(0, y + 14, clipped(name, 28 if single else 44), "label"))
        if single:
            parts.append(words(WIDTH, y + 14, number(points[0][1], unit), "value", "end"))
        for place, (series, value) in enumerate(points):
            parts.append(_lying(series, scale, value, y + 26 + 12 * place, f"{name}: {number(value, unit)}"))
        y += 26 + 12 * len(points)
        parts.append(line(scale.start, y - 3, scale.end, y - 3, "rule"))
    grid = [line(scale(value), 4, scale(value), y - 3, "grid") for value in scale.ticks()]
    if reference is not None:
        grid.append(line(scale(reference), 4, scale(reference), y - 3, "reference"))
    names = [words(scale(value), y + 12, scale.name(value) + unit, "tick", "middle") for value in scale.ticks()]
    return svg(y + 18, label, grid, parts, names)


def _lying(series: int, scale: Scale, value: Estimate, y: float, hint: str) -> Html:
    """A point on its interval."""
    reach = line(scale(value.low), y, scale(value.high), y, "whisker") if isfinite(value.low) else ""
    return tag("g", reach, mark(series, scale(value.value), y, hint), class_=colour(series))


def plot(
    series: Sequence[tuple[int, Points]],
    x: Scale,
    y: Scale,
    titles: tuple[str, str],
    label: str,
    joined: bool = True,
    diagonal: bool = False,
) -> Html:
    """Points with upright intervals over two axes, joined or not; the diagonal is where both axes agree."""
    height = 226
    x, y = replace(x, start=LEFT + 8, end=WIDTH - RIGHT), replace(y, start=height - BOTTOM, end=TOP)
    parts = _frame(x, y, height, titles)
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        parts.append(line(x(low), y(low), x(high), y(high), "reference"))
    for place, (number_, points) in enumerate(series):
        # side by side, so that intervals at the same value do not hide each other
        aside = 3 * (place - (len(series) - 1) / 2) if joined else 0
        kept = [(round(x(at) + aside, 1), value) for at, value in points if isfinite(value.value)]
        if joined and len(kept) > 1:
            path = "M" + "L".join(f"{at} {y(value.value)}" for at, value in kept)
            parts.append(tag("g", tag("path", d=path, class_="trace"), class_=colour(number_)))
        for at, value in kept:
            reach = line(at, y(value.low), at, y(value.high), "whisker") if isfinite(value.low) else ""
            parts.append(tag("g", reach, mark(number_, at, y(value.value), y.shown(value)), class_=colour(number_)))
    return svg(height, label, parts)


def _frame(x: Scale, y: Scale, height: float, titles: tuple[str, str]) -> list[Html]:
    """Axes, their numbers and their titles."""
    foot = height - BOTTOM
    return [
        *[line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid") for value in y.ticks()],
        *[words(LEFT - 6, y(value) + 4, y.name(value), "tick", "end") for value in y.ticks()],
        *[words(x(value), foot + 16, x.name(value), "tick", "middle") for value in x.ticks()],
        line(LEFT, foot, WIDTH - RIGHT, foot, "rule"),
        words(WIDTH - RIGHT, height - 5, titles[0], "title", "end"),
        words(0, 11, titles[1], "title"),
    ]


def bars(shares: Sequence[float], y: Scale, series: int, titles: tuple[str, str], label: str) -> Html:
    """A bar for 0, 1, 2 ...: the share of each, said above it."""
    height = 168
    x = Scale(-0.5, len(shares) - 0.5, LEFT, WIDTH - RIGHT, step=1)
    y = replace(y, start=height - BOTTOM, end=TOP)
    wide = min((x.end - x.start) / len(shares) - 4, 34)
    drawn = [
        tag("g", [
            tag("rect", x=round(x(place) - wide / 2, 1), y=y(share), width=round(wide, 1),
                height=round(y.start - y(share), 1), class_="bar"),
            words(x(place), y(share) - 4, f"{share:.0%}" if share >= 0.005 else "", "tick", "middle"),
        ])
        for place, share in enumerate(shares)
    ]  # fmt: skip
    return svg(height, label, _frame(x, y, height, titles), tag("g", drawn, class_=colour(series)))


def stack(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], label: str, unit: str) -> Html:
    """A bar for every name, cut into parts; the parts' names are classes of the style sheet."""
    totals = [sum(value for _, value in parts) for _, parts in rows]
    scale = replace(Scale.over(totals), start=0, end=WIDTH - 8)
    drawn, y = [], 0.0
    for (name, parts), total in zip(rows, totals, strict=True):
        drawn.append(words(0, y + 14, clipped(name, 30), "label"))
        drawn.append(words(WIDTH, y + 14, f"{total:.3g} {unit}", "value", "end"))
        done = 0.0
        for part, value in parts:
            left, right = scale(done), scale(done + value)
            hint = tag("title", f"{name}: {part} {value:.3g} {unit}")
            drawn.append(tag("rect", hint, x=left, y=y + 20, width=max(right - left - 1, 0.3), height=12, class_=part))
            done += value
        y += 42
    ticks = [words(scale(value), y + 10, scale.name(value), "tick", "middle") for value in scale.ticks()[1:-1]]
    grid = [line(scale(value), 18, scale(value), y - 4, "grid") for value in scale.ticks()]
    return svg(y + 16, label, grid, drawn, ticks)


def branches(shares: Mapping[tuple[int, ...], float], label: str) -> Html:
    """A tree from left to right: at each node its rank among its siblings, and how often the target went there."""
    deepest = max(map(len, shares))
    column, rows = (WIDTH - 40) / max(deepest, 1), _rows(shares)
    place = {path: (14 + len(path) * column, 22 + 36 * row) for path, row in rows.items()}
    edges, nodes = [], []
    for path, (x, y) in place.items():
        if path:
            u, v = place[path[:-1]]
            bend = f"M{u:.1f} {v:.1f}C{u + column / 2:.1f} {v:.1f} {x - column / 2:.1f} {y:.1f} {x:.1f} {y:.1f}"
            edges.append(tag("path", d=bend, class_="edge", stroke_width=round(1 + 9 * shares[path], 1)))
        ranks = ", ".join(str(rank + 1) for rank in path)
        hint = f"{f'ranks {ranks}' if path else 'the last committed token'}: {shares[path]:.1%}"
        circle = tag("circle", tag("title", hint), cx=round(x, 1), cy=round(y, 1), r=9, class_="node")
        rank = words(x, y + 4, path[-1] + 1 if path else "·", "rank", "middle")
        nodes.append(tag("g", circle, rank, words(x, y + 20, f"{shares[path]:.0%}", "tick", "middle")))
    return svg(max(y for _, y in place.values()) + 26, label, edges, nodes)


def _rows(shares: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], int]:
    """A row for every node: a first child stays on its parent's, every other one opens a new row below."""
    rows: dict[tuple[int, ...], int] = {}
    below = 0
    for path in sorted(shares):  # depth first
        first = not path or path == min(other for other in shares if other and other[:-1] == path[:-1])
        if not first:
            below += 1
        rows[path] = (rows[path[:-1]] if path else 0) if first else below
    return rows
