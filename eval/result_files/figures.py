"""Small figures as inline SVG, without a library or a script; the page's style sheet holds colours and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log10

from eagle.markup import Html, tag
from eval.result_files.statistics import Estimate

WIDTH = 340  # of every figure: a phone's column, so that its text is as large there as on a desk
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 22, 36
MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.5-3.5h7v7h-7z", "M0-5L5 0L0 5L-5 0z", "M0-5L4.6 3.4H-4.6z")
COLOURS = 6
Points = Sequence[tuple[float, Estimate]]
Path = tuple[int, ...]  # ranks among siblings, from the root to a node


@dataclass(frozen=True)
class Scale:
    """Maps values of an axis to coordinates."""

    low: float
    high: float
    start: float = 0
    end: float = WIDTH
    percent: bool = False
    step: float | None = None  # between the numbers shown; None for about five of them

    @classmethod
    def over(cls, values: Sequence[float], low: float = 0, percent: bool = False) -> Scale:
        """From `low` to a round value that holds all of the finite values."""
        top = max([value for value in values if isfinite(value)], default=low)
        scale = cls(low, top if top > low else low + 1, percent=percent)
        ticks = scale.ticks()
        step = ticks[-1] - ticks[-2] if len(ticks) > 1 else scale.high - low
        return replace(scale, high=low + ceil((scale.high - low) / step - 1e-6) * step)

    def __call__(self, value: float) -> float:
        """The coordinate of a value; values outside of the axis are clipped to its ends."""
        inside = min(max(value, self.low), self.high)
        return round(self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values, about five of them."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** floor(log10(rough))
        step = self.step or next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.99)
        first, last = ceil(self.low / step - 1e-6), floor(self.high / step + 1e-6)
        return [round(number * step, 9) for number in range(first, last + 1)]

    def format(self, value: float) -> str:
        """A number as the axis shows it."""
        return f"{value:.0%}" if self.percent else f"{value:g}"


def format_number(value: Estimate, unit: str = "", digits: int = 2) -> str:
    """A figure with its interval."""
    text = f"{value.value:.{digits}f}{unit}"
    return f"{text} [{value.low:.{digits}f}, {value.high:.{digits}f}]" if isfinite(value.low) else text


def format_percent(value: Estimate) -> str:
    """A share with its interval."""
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]" if isfinite(value.low) else f"{value.value:.1%}"


def legend(names: Mapping[str, int]) -> Html:
    """The colour and shape of each series."""
    chips = [
        tag("li", tag("svg", _mark(series, 7, 7), viewBox="0 0 14 14", aria_hidden="true"), tag("span", name))
        for name, series in names.items()
    ]
    return tag("ul", chips, class_="legend")


def draw_dots(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[int, Estimate]]]],
    scale: Scale,
    reference: float,
    unit: str = "",
    note: str = "",
) -> Html:
    """A row for every name with a point and its interval for every series; a single point has its value in words."""
    scale = replace(scale, start=8, end=WIDTH - 14)
    parts = []
    y = 0.0
    for name, points in rows:
        single = len(points) == 1
        parts.append(_text(0, y + 14, _shorten(name, 28 if single else 44), "label"))
        if single:
            parts.append(_text(WIDTH, y + 14, format_number(points[0][1], unit), "value", "end"))
        for place, (series, value) in enumerate(points):
            at = y + 26 + 12 * place
            whisker = (scale(value.low), at, scale(value.high), at)
            hint = f"{name}: {format_number(value, unit)}"
            parts.append(_point(series, value, whisker, _mark(series, scale(value.value), at, hint)))
        y += 26 + 12 * len(points)
        parts.append(_line(scale.start, y - 3, scale.end, y - 3, "rule"))
    grid = [_line(scale(value), 4, scale(value), y - 3, "grid") for value in scale.ticks()]
    grid.append(_line(scale(reference), 4, scale(reference), y - 3, "reference"))
    ticks = [_text(scale(value), y + 12, scale.format(value) + unit, "tick", "middle") for value in scale.ticks()]
    return _figure(title, note, y + 18, grid, parts, ticks)


def draw_plot(
    title: str,
    series: Sequence[tuple[int, Points]],
    x: Scale,
    y: Scale,
    axes: tuple[str, str],
    note: str = "",
    joined: bool = True,
    diagonal: bool = False,
) -> Html:
    """Points with vertical intervals over two axes, joined or not; on the diagonal both axes agree."""
    height = 226
    x = replace(x, start=LEFT + 8, end=WIDTH - RIGHT)
    y = replace(y, start=height - BOTTOM, end=TOP)
    parts = _axes(x, y, height, axes)
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        parts.append(_line(x(low), y(low), x(high), y(high), "reference"))
    for place, (number, points) in enumerate(series):
        # side by side, so that intervals at the same value do not hide each other
        aside = 3 * (place - (len(series) - 1) / 2) if joined else 0
        finite = [(round(x(at) + aside, 1), value) for at, value in points if isfinite(value.value)]
        if joined and len(finite) > 1:
            path = "M" + "L".join(f"{at} {y(value.value)}" for at, value in finite)
            parts.append(tag("g", tag("path", d=path, class_="trace"), class_=_colour(number)))
        for at, value in finite:
            hint = format_percent(value) if y.percent else format_number(value)
            whisker = (at, y(value.low), at, y(value.high))
            parts.append(_point(number, value, whisker, _mark(number, at, y(value.value), hint)))
    return _figure(title, note, height, parts)


def draw_bars(
    title: str, shares: Sequence[float], y: Scale, series: int, axes: tuple[str, str], note: str = ""
) -> Html:
    """A bar for 0, 1, 2 ... with its share above it."""
    height = 168
    x = Scale(-0.5, len(shares) - 0.5, LEFT, WIDTH - RIGHT, step=1)
    y = replace(y, start=height - BOTTOM, end=TOP)
    wide = min((x.end - x.start) / len(shares) - 4, 34)
    bars = [
        tag("g", [
            tag("rect", x=round(x(place) - wide / 2, 1), y=y(share), width=round(wide, 1),
                height=round(y.start - y(share), 1), class_="bar"),
            _text(x(place), y(share) - 4, f"{share:.0%}" if share >= 0.005 else "", "tick", "middle"),
        ])
        for place, share in enumerate(shares)
    ]  # fmt: skip
    return _figure(title, note, height, _axes(x, y, height, axes), tag("g", bars, class_=_colour(series)))


def draw_stack(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> Html:
    """A bar for every name, cut into parts; the parts' names are classes of the style sheet."""
    totals = [sum(value for _, value in parts) for _, parts in rows]
    scale = replace(Scale.over(totals), start=0, end=WIDTH - 8)
    bars = []
    y = 0.0
    for (name, parts), total in zip(rows, totals, strict=True):
        bars.append(_text(0, y + 14, _shorten(name, 30), "label"))
        bars.append(_text(WIDTH, y + 14, f"{total:.3g} {unit}", "value", "end"))
        done = 0.0
        for part, value in parts:
            left, right = scale(done), scale(done + value)
            hint = tag("title", f"{name}: {part} {value:.3g} {unit}")
            bars.append(tag("rect", hint, x=left, y=y + 20, width=max(right - left - 1, 0.3), height=12, class_=part))
            done += value
        y += 42
    ticks = [_text(scale(value), y + 10, scale.format(value), "tick", "middle") for value in scale.ticks()[1:-1]]
    grid = [_line(scale(value), 18, scale(value), y - 4, "grid") for value in scale.ticks()]
    return _figure(title, "", y + 16, grid, bars, ticks)


def draw_tree(title: str, shares: Mapping[Path, float]) -> Html:
    """A tree from left to right: at each node its rank among its siblings, and how often the target went there."""
    depth = max(map(len, shares))
    column = (WIDTH - 40) / max(depth, 1)
    places = {path: (14 + len(path) * column, 22 + 36 * row) for path, row in assign_rows(shares).items()}
    edges, nodes = [], []
    for path, (x, y) in places.items():
        if path:
            u, v = places[path[:-1]]
            bend = f"M{u:.1f} {v:.1f}C{u + column / 2:.1f} {v:.1f} {x - column / 2:.1f} {y:.1f} {x:.1f} {y:.1f}"
            edges.append(tag("path", d=bend, class_="edge", stroke_width=round(1 + 9 * shares[path], 1)))
        name = f"ranks {', '.join(str(rank + 1) for rank in path)}" if path else "the last committed token"
        hint = tag("title", f"{name}: {shares[path]:.1%}")
        circle = tag("circle", hint, cx=round(x, 1), cy=round(y, 1), r=9, class_="node")
        rank = _text(x, y + 4, path[-1] + 1 if path else "·", "rank", "middle")
        nodes.append(tag("g", circle, rank, _text(x, y + 20, f"{shares[path]:.0%}", "tick", "middle")))
    return _figure(title, "", max(y for _, y in places.values()) + 26, edges, nodes)


def assign_rows(shares: Mapping[Path, float]) -> dict[Path, int]:
    """A row for every node: a first child stays on its parent's, every other one opens a new row below."""
    rows: dict[Path, int] = {}
    with_child = set()
    below = 0
    for path in sorted(shares):  # depth first
        if path and path[:-1] in with_child:
            below += 1
            rows[path] = below
        else:
            rows[path] = rows[path[:-1]] if path else 0
        with_child.add(path[:-1] if path else None)
    return rows


def _figure(title: str, note: str, height: float, *parts: object) -> Html:
    """A drawing of the common width under its title and a note."""
    drawing = tag("svg", tag("title", title), parts, viewBox=f"0 0 {WIDTH} {ceil(height)}", role="img")
    caption = tag("figcaption", tag("strong", title), tag("span", note, class_="note") if note else "")
    return tag("figure", caption, drawing)


def _axes(x: Scale, y: Scale, height: float, titles: tuple[str, str]) -> list[Html]:
    """Axes, their numbers and their titles."""
    foot = height - BOTTOM
    return [
        *[_line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid") for value in y.ticks()],
        *[_text(LEFT - 6, y(value) + 4, y.format(value), "tick", "end") for value in y.ticks()],
        *[_text(x(value), foot + 16, x.format(value), "tick", "middle") for value in x.ticks()],
        _line(LEFT, foot, WIDTH - RIGHT, foot, "rule"),
        _text(WIDTH - RIGHT, height - 5, titles[0], "title", "end"),
        _text(0, 11, titles[1], "title"),
    ]


def _colour(series: int) -> str:
    """The style sheet's class for a series; 0 is the grey of `none`."""
    return f"s{(series - 1) % (COLOURS - 1) + 1}" if series else "s0"


def _mark(series: int, x: float, y: float, hint: str = "") -> Html:
    """A point: its colour and its shape both tell the series."""
    shape = tag("path", d=MARKS[series % len(MARKS)], transform=f"translate({x} {y})", class_="point")
    return tag("g", tag("title", hint) if hint else "", shape, class_=_colour(series))


def _point(series: int, value: Estimate, whisker: tuple[float, float, float, float], mark: Html) -> Html:
    """A point on its interval, if it has one."""
    return tag("g", _line(*whisker, "whisker") if isfinite(value.low) else "", mark, class_=_colour(series))


def _text(x: float, y: float, value: object, kind: str = "tick", anchor: str = "start") -> Html:
    return tag("text", value, x=round(x, 1), y=round(y, 1), class_=kind, text_anchor=anchor)


def _line(x: float, y: float, u: float, v: float, kind: str) -> Html:
    return tag("path", d=f"M{x} {y}L{u} {v}", class_=kind)


def _shorten(name: str, room: int) -> str:
    """The name, cut to so many letters."""
    return name if len(name) <= room else name[: room - 1] + "…"
