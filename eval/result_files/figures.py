"""Draw figures as inline SVG, without a library or a script. The page's style sheet holds colours and margins.

Figures are as wide as the page gives them: x is in percent of the plotted area, y in pixels, and text keeps its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from eagle.markup import Html, tag
from eval.result_files.statistics import Estimate, format_number, format_percent

# pixels of the narrowest figure, for which labels are set: a wider one has more room between them
WIDTH = 310
# pixels around the plotted area; left and right are those of the style sheet, by kind of figure
LEFT = {"plot": 48, "dots": 14}
RIGHT = {"plot": 12, "dots": 20}
TOP = 22
BOTTOM = 36
# widths of letters in shares of their size, those of wide system fonts
NARROW = 0.43
WIDE = 1.0
OTHER = 0.66
NARROW_LETTERS = frozenset(" .,:;|!'()[]-/fijlrtI")
WIDE_LETTERS = frozenset("mw@%ABCDEFGHJKLMNOPQRSTUVWXYZ")
GAP = 6
# SVG paths around the origin: circle, square, diamond, triangle
MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-5L4.6 3.4H-4.6z",
)
# those of the style sheet, that of `none` included
COLOURS = 6
Points = Sequence[tuple[float, Estimate]]
# x in percent of the plotted area, or in pixels as text; y in pixels
Position = tuple[float | str, float]


@dataclass(frozen=True)
class Scale:
    """Maps values of an axis to coordinates."""

    low: float
    high: float
    start: float = 0
    end: float = 100
    percent: bool = False
    step: float | None = None  # between the numbers shown; None for about five of them

    @classmethod
    def over(cls, values: Sequence[float], low: float = 0, percent: bool = False) -> Scale:
        """Return a scale from `low` to a round value that holds all finite values.

        Args:
            values: What the axis shows; infinite ends of intervals do not count.
            low: The beginning of the axis.
            percent: Whether the axis shows its numbers as percentages.
        """
        top = max(filter(isfinite, values), default=low)
        if top <= low:
            top = low + 1

        # the axis ends at a tick, so that its last number stands at its end
        scale = cls(low, top, percent=percent)
        ticks = scale.ticks()
        step = scale.high - low
        if len(ticks) > 1:
            step = ticks[-1] - ticks[-2]

        # floats that are a whole number of steps but for rounding get no further step
        num_steps = ceil((scale.high - low) / step - 1e-6)
        return replace(scale, high=low + num_steps * step)

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, clipped to the ends of the axis."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        """Return about five round values."""
        step = self.step or self._round_step()
        # an end of the axis that rounding moved past a tick keeps the tick
        first = ceil(self.low / step - 1e-6)
        last = floor(self.high / step + 1e-6)
        return [round(i * step, 9) for i in range(first, last + 1)]

    def _round_step(self) -> float:
        rough = (self.high - self.low) / 5
        power = 10.0 ** floor(log10(rough))
        # the smallest of 1, 2, 5 times a power of ten that is wide enough
        return next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.99)

    def format(self, value: float) -> str:
        """Return a number as the axis shows it."""
        if self.percent:
            return f"{value:.0%}"
        return f"{value:g}"


@dataclass(frozen=True)
class Doublings(Scale):
    """An axis of logarithms to base 2 that shows the numbers themselves, as multiples of `first`."""

    first: float = 1

    def format(self, value: float) -> str:
        """Return the number whose logarithm this is."""
        return f"{self.first * 2**value:,.0f}"


def legend(names: Mapping[str, int]) -> Html:
    """Draw the colour and shape of each series beside its name."""
    chips = []
    for name, series in names.items():
        drawing = tag("svg", _mark(series, ("7", 7)), viewBox="0 0 14 14", aria_hidden="true")
        chips.append(tag("li", drawing, tag("span", name)))
    return tag("ul", chips, class_="legend")


def draw_dots(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[int, Estimate]]]],
    scale: Scale,
    *,
    reference: float,
    unit: str = "",
    note: str = "",
) -> Html:
    """Draw a row for each name, with a point and its interval for each series.

    Args:
        title: Stands above the figure, and names it to a screen reader.
        rows: A name, and its points as series and value. A single point has its value in words.
        scale: The values that the width shows.
        reference: The value of the dashed line.
        unit: What stands after every number.
        note: A sentence below the title.
    """
    parts = []
    # the top of the next row, in pixels
    y = 0.0
    for name, points in rows:
        parts += _label(name, points, y + 14, unit)
        for i, (series, value) in enumerate(points):
            # series below each other, so that intervals do not hide each other
            at = y + 26 + 12 * i
            hint = f"{name}: {format_number(value, unit)}"
            positions = [(scale(figure), at) for figure in value]
            parts.append(_point(series, value, positions, hint))
        y += 26 + 12 * len(points)
        parts.append(_line((0, y - 3), (100, y - 3), "rule"))

    x = scale(reference)
    grid = [_columns(scale, 4, y - 3, unit), _line((x, 4), (x, y - 3), "reference")]
    # points are drawn over the grid
    return _figure(title, note, y + 18, [grid, parts], kind="dots")


def _columns(scale: Scale, top: float, foot: float, unit: str) -> list[Html]:
    """Draw a vertical line at each tick, with its number below it."""
    parts = [_line((scale(tick), top), (scale(tick), foot), "grid") for tick in scale.ticks()]
    return parts + _numbers(scale, foot + 15, "dots", unit)


def _numbers(scale: Scale, y: float, kind: str, unit: str = "") -> list[Html]:
    """Write the numbers of a horizontal axis, as many as have room in the narrowest figure."""
    ticks = scale.ticks()
    labels = [scale.format(tick) + unit for tick in ticks]
    step = _every(labels, _area(kind) / max(len(ticks) - 1, 1))
    numbers = []
    for tick, label in list(zip(ticks, labels, strict=True))[::step]:
        numbers.append(_text((scale(tick), y), label, "tick", "middle"))
    return numbers


def _area(kind: str) -> int:
    """Return the pixels between the margins of the narrowest figure."""
    return WIDTH - LEFT[kind] - RIGHT[kind]


def _every(labels: Sequence[str], pitch: float) -> int:
    """Return n such that every n-th label has room, at `pitch` pixels from one to the next."""
    widest = max(text_width(label, 11) for label in labels)
    return ceil((widest + GAP) / pitch)


def text_width(text: str, size: float) -> float:
    """Return about how many pixels a text is wide, on the wide side."""
    shares = 0.0
    for letter in text:
        if letter in NARROW_LETTERS:
            shares += NARROW
        elif letter in WIDE_LETTERS or not letter.isascii():
            shares += WIDE
        else:
            shares += OTHER
    return shares * size


def _label(name: str, points: Sequence[tuple[int, Estimate]], y: float, unit: str) -> list[Html]:
    """Write the name of a row, cut where it has no room, and the value of a single point at the right."""
    value = ""
    if len(points) == 1:
        [(_, single)] = points
        value = format_number(single, unit)
    room = _area("dots") + LEFT["dots"] - text_width(value, 12) - GAP
    return [
        _text((f"-{LEFT['dots']}", y), _shorten(name, room), "label"),
        _text((100, y), value, "value", "end"),
    ]


def draw_plot(
    title: str,
    series: Sequence[tuple[int, Points]],
    *,
    x: Scale,
    y: Scale,
    axes: tuple[str, str],
    note: str = "",
    diagonal: bool = False,
) -> Html:
    """Draw points with vertical intervals.

    Args:
        title: Stands above the figure, and names it to a screen reader.
        series: The number of a series, which decides colour and shape, and its points.
        x: The values that the width shows.
        y: The values that the height shows.
        axes: The titles of x and y.
        note: A sentence below the title.
        diagonal: Whether a dashed line shows where x and y are equal.
    """
    height = 226
    # pixels count downwards, so the axis starts at its larger coordinate
    y = replace(y, start=height - BOTTOM, end=TOP)
    parts = _axes(x, y, height, axes)

    if diagonal:
        low = max(x.low, y.low)
        high = min(x.high, y.high)
        parts.append(_line((x(low), y(low)), (x(high), y(high)), "reference"))

    for i, (series_index, points) in enumerate(series):
        finite = [(x(at), value) for at, value in points if isfinite(value.value)]
        drawn = []
        # the line is drawn first, below the points
        for (left, before), (right, after) in pairwise(finite):
            drawn.append(_line((left, y(before.value)), (right, y(after.value)), "trace"))
        for at, value in finite:
            hint = format_number(value)
            if y.percent:
                hint = format_percent(value)
            positions = [(at, y(figure)) for figure in value]
            drawn.append(_point(series_index, value, positions, hint))

        # side by side, so that intervals at the same value do not hide each other
        aside = 3 * (i - (len(series) - 1) / 2)
        moved = f"translate({aside} 0)"
        parts.append(tag("g", drawn, class_=_colour(series_index), transform=moved))
    return _figure(title, note, height, parts)


def draw_bars(
    title: str,
    shares: Sequence[float],
    *,
    y: Scale,
    series: int,
    axes: tuple[str, str],
    note: str = "",
) -> Html:
    """Draw a bar for 0, 1, 2 ... with its share above it.

    Args:
        title: Stands above the figure, and names it to a screen reader.
        shares: The heights of the bars, from 0 to 1.
        y: The shares that the height shows.
        series: Decides the colour.
        axes: The titles of x and y.
        note: A sentence below the title.
    """
    height = 168
    x = Scale(-0.5, len(shares) - 0.5, step=1)
    y = replace(y, start=height - BOTTOM, end=TOP)
    # pixels from bar to bar
    pitch = _area("plot") / len(shares)
    labels = [f"{share:.0%}" for share in shares]
    step = _every(labels, pitch)
    bars = []
    for i, (share, label) in enumerate(zip(shares, labels, strict=True)):
        top = y(share)
        hint = tag("title", f"{i}: {share:.1%}")
        # a line, whose width is in pixels
        width = round(min(pitch - 3, 34), 1)
        at = f"{x(i):g}%"
        bar = tag("line", hint, x1=at, x2=at, y1=y.start, y2=top, class_="bar", stroke_width=width)
        bars.append(bar)
        # a share that would be shown as 0% has no text
        if share >= 0.005 and i % step == 0:
            bars.append(_text((x(i), top - 4), label, "tick", "middle"))

    parts = _axes(x, y, height, axes)
    parts.append(tag("g", bars, class_=_colour(series)))
    return _figure(title, note, height, parts)


def _figure(
    title: str, note: str, height: float, parts: Sequence[object], *, kind: str = "plot"
) -> Html:
    """Return a drawing under its title and a note; later parts cover earlier ones.

    Args:
        title: Stands above the drawing, and names it to a screen reader.
        note: A sentence below the title.
        height: In pixels.
        parts: Elements of the drawing.
        kind: Decides the margins.
    """
    drawing = tag("svg", tag("title", title), parts, height=ceil(height), role="img", class_=kind)
    below = tag("span", note, class_="note") if note else ""
    caption = tag("figcaption", tag("strong", title), below)
    return tag("figure", caption, drawing)


def _axes(x: Scale, y: Scale, height: float, titles: tuple[str, str]) -> list[Html]:
    """Draw both axes with their numbers and titles."""
    foot = height - BOTTOM
    grid = []
    numbers = []
    # numbers stand in the margins, so that lines and points do not cross them
    for value in y.ticks():
        grid.append(_line(("-8", y(value)), (100, y(value)), "grid"))
        numbers.append(_text(("-14", y(value) + 4), y.format(value), "tick", "end"))
    return [
        *grid,
        *numbers,
        *_numbers(x, foot + 16, "plot"),
        _line(("-8", foot), (100, foot), "rule"),
        _text((100, height - 5), titles[0], "title", "end"),
        _text((f"-{LEFT['plot']}", 11), titles[1], "title"),
    ]


def _colour(series: int) -> str:
    """Return the style sheet's class for a series; 0 is the grey of `none`."""
    if not series:
        return "s0"
    return f"s{(series - 1) % (COLOURS - 1) + 1}"


def _mark(series: int, position: Position, hint: str = "") -> Html:
    """Draw a point. Its colour and its shape both tell the series."""
    x, y = position
    outline = tag("path", d=MARKS[series % len(MARKS)], class_="point")
    # a drawing of its own, since a path has no percents
    shape = tag("svg", outline, x=_x(x), y=y)
    return tag("g", tag("title", hint) if hint else "", shape, class_=_colour(series))


def _point(series: int, value: Estimate, positions: Sequence[Position], hint: str) -> Html:
    """Draw a mark on its interval, if it has one; the positions are those of the value and of both ends."""
    centre, low, high = positions
    # under the mark, which stays whole
    whisker = _line(low, high, "whisker") if isfinite(value.low) else ""
    return tag("g", whisker, _mark(series, centre, hint), class_=_colour(series))


def _x(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}%"


def _text(position: Position, value: object, kind: str, anchor: str = "start") -> Html:
    x, y = position
    return tag("text", value, x=_x(x), y=round(y, 1), class_=kind, text_anchor=anchor)


def _line(start: Position, end: Position, kind: str) -> Html:
    x, y = start
    u, v = end
    return tag("line", x1=_x(x), y1=y, x2=_x(u), y2=v, class_=kind)


def _shorten(name: str, room: float) -> str:
    """Return the name, cut to what is at most `room` pixels wide."""
    if text_width(name, 13) <= room:
        return name
    length = len(name) - 1
    while length > 1 and text_width(f"{name[:length]}…", 13) > room:
        length -= 1
    return f"{name[:length]}…"
