"""Draw a comparison's curves: one panel for each draft tree and temperature, as an SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

# told apart with and without colours: the eighth and later curves are dashed
COLOURS = ("#2f81f7", "#d1701c", "#2da44e", "#bf3989", "#8250df", "#9a6700", "#57606a")
STYLE = "text{fill:#7a828c;font:12px system-ui,sans-serif}.title{font-weight:600}.grid{stroke:#7a828c40;fill:none}"
# of a panel
WIDTH = 440
HEIGHT = 260
# its margins; the names of the curves stand in the right one
LEFT = 34
NAMES = 120
TOP = 30
BOTTOM = 34
# between names beside the ends of curves
APART = 13


def draw_curves(columns: Sequence[dict[str, Any]]) -> str:
    """Draw all panels in two columns; the vertical bars are 95% intervals over prompts.

    Args:
        columns: As `describe_curves` returns them; those without curves have no panel.

    Returns:
        An SVG file.
    """
    shown = [column for column in columns if column["curves"]]
    # a curve has one colour in all panels
    names: dict[str, None] = {}
    for column in shown:
        names |= dict.fromkeys(column["curves"])

    panels = ""
    for i, column in enumerate(shown):
        panel = "".join(_Panel(column, list(names)).draw())
        panels += f'<g transform="translate({WIDTH * (i % 2)} {HEIGHT * (i // 2)})">{panel}</g>'
    width = WIDTH * min(len(shown), 2)
    height = HEIGHT * ceil(len(shown) / 2)
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    title = "<title>Acceptance length by tokens learned from</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<style>{STYLE}</style>{panels}</svg>\n'


class _Panel:
    """The curves of one draft tree at one temperature, over a logarithmic axis of tokens."""

    def __init__(self, column: dict[str, Any], names: list[str]) -> None:
        self.title = column["column"]
        self.names = names
        self.curves: dict[str, list[dict[str, float]]] = {}
        points = []
        for name, curve in column["curves"].items():
            self.curves[name] = curve["points"]
            points += curve["points"]
        self.counts = sorted({point["tokens"] for point in points})

        # τ in halves; at least one half, for heads of which nothing is accepted
        self.low = floor(min(point["low"] for point in points) * 2) / 2
        self.high = max(ceil(max(point["high"] for point in points) * 2) / 2, self.low + 0.5)

    def x(self, tokens: float) -> float:
        """Return the coordinate of a count of tokens."""
        first = log10(self.counts[0])
        length = max(log10(self.counts[-1]) - first, 1e-9)
        return round(LEFT + (log10(tokens) - first) / length * (WIDTH - LEFT - NAMES), 1)

    def y(self, tau: float) -> float:
        """Return the coordinate of an acceptance length."""
        share = (tau - self.low) / (self.high - self.low)
        # pixels count downwards
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def draw(self) -> Iterator[str]:
        """Yield title, axes and curves as SVG."""
        yield f'<text x="{LEFT}" y="16" class="title">τ, {escape(self.title)}, by tokens</text>'
        for step in range(round((self.high - self.low) * 2) + 1):
            tau = self.low + step / 2
            yield f'<path d="M{LEFT} {self.y(tau)}H{WIDTH - NAMES}" class="grid"/>'
            yield f'<text x="{LEFT - 6}" y="{self.y(tau) + 4}" text-anchor="end">{tau:g}</text>'
        for tokens in self.counts:
            label = _short(tokens)
            yield f'<text x="{self.x(tokens)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'

        # a name stands where its curve ends, unless another name is there
        ends = {name: self.y(points[-1]["value"]) for name, points in self.curves.items()}
        heights = _spread(ends)
        for name, points in self.curves.items():
            yield from self._draw_curve(name, points, heights[name])

    def _draw_curve(
        self, name: str, points: list[dict[str, float]], height: float
    ) -> Iterator[str]:
        """Yield a curve, its intervals, and its name at its end."""
        index = self.names.index(name)
        ink = COLOURS[index % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
        path = "L".join(f"{self.x(point['tokens'])} {self.y(point['value'])}" for point in points)
        yield f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="2"{dash}/>'
        for point in points:
            bar = f"M{self.x(point['tokens'])} {self.y(point['low'])}V{self.y(point['high'])}"
            yield f'<path d="{bar}" stroke="{ink}" stroke-opacity=".35"/>'
        end = self.x(points[-1]["tokens"]) + 6
        yield f'<text x="{end}" y="{height + 4}" style="fill:{ink}">{escape(name)}</text>'


def _spread(heights: dict[str, float]) -> dict[str, float]:
    """Move the heights of names apart where they would cover one another, within the panel."""
    order = sorted(heights, key=lambda name: heights[name])
    spread = [heights[name] for name in order]
    # down, until each is below the one before it
    for i in range(1, len(spread)):
        spread[i] = max(spread[i], spread[i - 1] + APART)
    # and up again, where they leave the panel
    below: float = HEIGHT - BOTTOM
    for i in reversed(range(len(spread))):
        spread[i] = min(spread[i], below)
        below = spread[i] - APART
    return dict(zip(order, spread, strict=True))


def _short(tokens: float) -> str:
    if tokens >= 1_000_000:
        return f"{tokens / 1e6:g} M"
    return f"{tokens / 1000:g} k"
