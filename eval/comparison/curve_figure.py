"""The figure of a comparison's curves: one panel for each draft tree and temperature, as an SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

# told apart with and without colours: the eighth and later curves are dashed
COLOURS = ("#2f81f7", "#d1701c", "#2da44e", "#bf3989", "#8250df", "#9a6700", "#57606a")
STYLE = "text{fill:#7a828c;font:12px system-ui,sans-serif}.title{font-weight:600}.grid{stroke:#7a828c40;fill:none}"
WIDTH, HEIGHT, LEFT, NAMES, TOP, BOTTOM = 440, 260, 34, 120, 30, 34  # of a panel, and its margins
APART = 13  # between names beside the ends of curves


def draw_curves(columns: Sequence[dict[str, Any]]) -> str:
    """All panels, two side by side; the vertical bars are 95% intervals over prompts."""
    shown = [column for column in columns if column["curves"]]
    names = list(dict.fromkeys(name for column in shown for name in column["curves"]))
    rows, wide = ceil(len(shown) / 2), min(len(shown), 2)
    panels = "".join(
        f'<g transform="translate({WIDTH * (number % 2)} {HEIGHT * (number // 2)})">{panel}</g>'
        for number, panel in enumerate("".join(_panel(column, names)) for column in shown)
    )
    size = f'viewBox="0 0 {WIDTH * wide} {HEIGHT * rows}" width="{WIDTH * wide}"'
    title = "<title>Acceptance length by tokens learned from</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<style>{STYLE}</style>{panels}</svg>\n'


def _panel(column: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    points = {name: one["points"] for name, one in column["curves"].items()}
    every = [point for one in points.values() for point in one]
    low = floor(min(point["low"] for point in every) * 2) / 2
    high = max(ceil(max(point["high"] for point in every) * 2) / 2, low + 0.5)  # heads of which nothing is accepted
    first, last = (log10(end(point["tokens"] for point in every)) for end in (min, max))

    def x(tokens: float) -> float:
        return round(LEFT + (log10(tokens) - first) / max(last - first, 1e-9) * (WIDTH - LEFT - NAMES), 1)

    def y(tau: float) -> float:
        return round(HEIGHT - BOTTOM - (tau - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    yield f'<text x="{LEFT}" y="16" class="title">τ, {escape(column["column"])}, by tokens</text>'
    for step in range(round((high - low) * 2) + 1):
        tau = low + step / 2
        yield f'<path d="M{LEFT} {y(tau)}H{WIDTH - NAMES}" class="grid"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tau) + 4}" text-anchor="end">{tau:g}</text>'
    for tokens in sorted({point["tokens"] for point in every}):
        yield f'<text x="{x(tokens)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(tokens)}</text>'
    ends = _spread({name: y(one[-1]["value"]) for name, one in points.items()})
    for name, one in points.items():
        place = names.index(name)
        ink, dash = COLOURS[place % len(COLOURS)], ' stroke-dasharray="5 3"' if place >= len(COLOURS) else ""
        path = "L".join(f"{x(point['tokens'])} {y(point['value'])}" for point in one)
        yield f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="2"{dash}/>'
        for point in one:
            bar = f"M{x(point['tokens'])} {y(point['low'])}V{y(point['high'])}"
            yield f'<path d="{bar}" stroke="{ink}" stroke-opacity=".35"/>'
        end = x(one[-1]["tokens"]) + 6
        yield f'<text x="{end}" y="{ends[name] + 4}" style="fill:{ink}">{escape(name)}</text>'


def _spread(places: dict[str, float]) -> dict[str, float]:
    """Heights of names, moved down where they would cover one another, and up again where they leave the panel."""
    order = sorted(places, key=lambda name: places[name])
    heights = [places[name] for name in order]
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + APART)
    below: float = HEIGHT - BOTTOM
    for number in reversed(range(len(heights))):
        heights[number] = min(heights[number], below)
        below = heights[number] - APART
    return dict(zip(order, heights, strict=True))


def _short(tokens: int) -> str:
    return f"{tokens / 1e6:g} M" if tokens >= 1_000_000 else f"{tokens / 1000:g} k"
