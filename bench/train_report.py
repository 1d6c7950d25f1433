"""Results of `bench/train_speed.py` as a table and as a picture."""

from __future__ import annotations

import math
from typing import Any


def goals(row: dict[str, Any]) -> dict[str, float]:
    """What a row should reach, where something was said."""
    wide, bf16 = row["vocab"] > 100000, row["dtype"] == "bf16"
    if row["texts"] == "full":
        return {"ratio": 1.4}
    found = {"of_limit": 0.55 if wide and bf16 else 0.65, "memory": 0.1 if wide else 0.25}
    return {**found, "ratio": 2.5 if bf16 else 2.0} if row["length"] >= 1024 else found


def table(results: dict[str, Any]) -> str:
    """The results as Markdown; what was aimed at in brackets."""
    lines = [
        "| numbers | V | T | texts | fill | share | limit, tokens/s | published | ours | ours / published "
        "| of the limit | memory, published | ours | ratio |",
        "|" + "---|" * 14,
    ]
    for row in results["rows"]:
        aim, memory = goals(row), row["ours_mb"] / row["published_mb"]
        texts = f"{row['batch']} real" if row["texts"] == "real" else "1 full"
        cells = [
            row["dtype"],
            f"{row['vocab']:,}",
            f"{row['length']:,}",
            texts,
            f"{row['fill']:.2f}",
            f"{row['share']:.2f}",
        ]
        cells += [f"{row[name]:,.0f}" for name in ("limit", "published", "ours")]
        cells += [f"**{row['ratio']:.2f}**" + _aim(aim, "ratio", ".1f")]
        cells += [f"{row['of_limit']:.0%}" + _aim(aim, "of_limit", ".0%")]
        cells += [f"{row['published_mb']:,.0f} MB", f"{row['ours_mb']:,.0f} MB"]
        cells += [f"{memory:.2f}" + _aim(aim, "memory", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    made_by = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{made_by}</sub>"])


def _aim(aim: dict[str, float], name: str, form: str) -> str:
    return f" ({aim[name]:{form}})" if name in aim else ""


COLOURS = {"published": "#b0413e", "ours": "#2d6a4f", "limit": "#888888"}
PANELS = {"length": "tokens of a text", "vocabulary": "entries of a vocabulary"}
HIGH, WIDE, TOP = 220, 280, 50  # of a panel


def plot(results: dict[str, Any]) -> str:
    """Two panels: microseconds per token against the length of a text, and against the vocabulary; both logarithmic."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="330" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="760" height="330" fill="#ffffff"/>')
    for number, (name, title) in enumerate(PANELS.items()):
        parts.append(f'<g transform="translate({60 + 370 * number},{TOP})"><text y="-26">µs per token, {title}</text>')
        parts += [*_panel(results["curves"][name]), "</g>"]
    for number, (side, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{60 + 90 * number}" y="318" fill="{colour}">— {side}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: list[dict[str, Any]]) -> list[str]:
    costs = [1e6 / row[side] for row in rows for side in COLOURS]
    low, high = math.floor(math.log10(min(costs)) * 3), math.ceil(math.log10(max(costs)) * 3)  # three lines a decade
    places = [WIDE * math.log(row["at"] / rows[0]["at"]) / math.log(rows[-1]["at"] / rows[0]["at"]) for row in rows]

    def down(cost: float) -> float:
        return HIGH * (high - 3 * math.log10(cost)) / (high - low)

    parts = []
    for tick in range(low, high + 1):
        y, cost = down(10 ** (tick / 3)), float(f"{10 ** (tick / 3):.2g}")
        parts.append(f'<line x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{cost:g}</text>')
    for place, row in zip(places, rows, strict=True):
        parts.append(f'<text x="{place:.1f}" y="{HIGH + 20}" text-anchor="middle">{row["at"]:,}</text>')
    for side, colour in COLOURS.items():
        points = (f"{place:.1f},{down(1e6 / row[side]):.1f}" for place, row in zip(places, rows, strict=True))
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts
