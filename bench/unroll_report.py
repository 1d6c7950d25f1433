"""Results of `bench/unroll_speed.py` as tables and as a picture."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
PAIRS = {"speculators": "frozen", "modelopt": "trained"}  # each rival, and ours with its trainable tensors
# what was aimed at in fp32, by tokens of a text and steps
FASTER = {(256, 3): 1.2, (256, 7): 1.4, (1024, 3): 1.4, (1024, 7): 2.1}
FASTER_AT_SHARE = {(256, 3): 1.4, (256, 7): 1.65, (1024, 3): 1.9, (1024, 7): 2.7}
SMALLER = {(256, 7): 0.45, (1024, 3): 0.40, (1024, 7): 0.35}
OF_LIMIT = 0.7


def ratio(row: Row, suffix: str = "") -> float:
    """How many times faster ours is than the rival nearest to it, by medians, or by the best of each."""
    return min(row[f"ours_{kind}{suffix}"] / row[f"{rival}{suffix}"] for rival, kind in PAIRS.items())


def of_limit(row: Row) -> float:
    """The share of the limit that ours reaches, whichever tensors are trained."""
    return min(row[f"ours_{kind}"] / row[f"limit_{kind}"] for kind in PAIRS.values())


def smaller(row: Row) -> float:
    """The memory of ours in that of the rival nearest to it."""
    return max(row[f"ours_{kind}_mb"] / row[f"{rival}_mb"] for rival, kind in PAIRS.items())


def goals(row: Row) -> dict[str, float]:
    """What a row should reach, where something was said."""
    if row["dtype"] != "fp32":
        return {}
    cell = (row["length"], row["steps"])
    found = {"ratio": (FASTER if row["all"] else FASTER_AT_SHARE).get(cell)}
    if row["all"]:
        found |= {"of_limit": OF_LIMIT if cell in FASTER else None, "memory": SMALLER.get(cell)}
    return {name: value for name, value in found.items() if value is not None}


def shown(results: Row) -> list[Row]:
    """The rows of the tables; those of other steps are for the picture."""
    return [row for row in results["rows"] if row["steps"] in (3, 7)]


def table(results: Row) -> str:
    """Speeds as Markdown; what was aimed at in brackets."""
    lines = [
        "| numbers | T | k | supervised | limit | speculators | ours | limit, LM head trained | modelopt | ours "
        "| ours / the better rival | best / best | of the limit |",
        "|" + "---|" * 13,
    ]
    for row in shown(results):
        aim = goals(row)
        cells = [row["dtype"], f"{row['length']:,}", str(row["steps"]), "all" if row["all"] else f"{row['share']:.2f}"]
        for rival, kind in PAIRS.items():
            cells += [f"{row[name]:,.0f}" for name in (f"limit_{kind}", rival, f"ours_{kind}")]
        cells += [f"**{ratio(row):.2f}**" + _aim(aim, "ratio", ".2f"), f"{ratio(row, '_best'):.2f}"]
        lines.append(f"| {' | '.join([*cells, f'{of_limit(row):.0%}' + _aim(aim, 'of_limit', '.0%')])} |")
    made_by = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{made_by}</sub>"])


def memory_table(results: Row) -> str:
    """Working memory of a step as Markdown; what was aimed at in brackets."""
    lines = [
        "| numbers | T | k | supervised | speculators | ours | modelopt | ours, LM head trained "
        "| ours / the better rival |",
        "|" + "---|" * 9,
    ]
    for row in shown(results):
        cells = [row["dtype"], f"{row['length']:,}", str(row["steps"]), "all" if row["all"] else f"{row['share']:.2f}"]
        for rival, kind in PAIRS.items():
            cells += [f"{row[f'{name}_mb']:,.0f} MB" for name in (rival, f"ours_{kind}")]
        lines.append(f"| {' | '.join([*cells, f'**{smaller(row):.2f}**' + _aim(goals(row), 'memory', '.2f')])} |")
    return "\n".join(lines)


def _aim(aim: dict[str, float], name: str, form: str) -> str:
    return f" ({aim[name]:{form}})" if name in aim else ""


COLOURS = {"modelopt": "#d08c2e", "speculators": "#b0413e", "ours_frozen": "#2d6a4f", "limit_frozen": "#888888"}
NAMES = {"ours_frozen": "ours", "limit_frozen": "limit"}
HIGH, WIDE = 220, 280  # of a panel


def plot(results: Row) -> str:
    """Two panels over the number of steps, in fp32 at T = 1,024: time of a token, and memory."""
    rows = [row for row in results["rows"] if (row["dtype"], row["length"], row["all"]) == ("fp32", 1024, True)]
    rows.sort(key=lambda row: row["steps"])
    costs = {name: [1e6 / row[name] for row in rows] for name in COLOURS}
    sizes = {name: [row[f"{name}_mb"] for row in rows] for name in COLOURS if name != "limit_frozen"}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="330" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="760" height="330" fill="#ffffff"/>')
    for number, (title, curves) in enumerate({"µs per token": costs, "working memory, MB": sizes}.items()):
        parts.append(f'<g transform="translate({60 + 370 * number},50)"><text y="-26">{title}, against steps k</text>')
        parts += [*_panel([row["steps"] for row in rows], curves), "</g>"]
    for number, (side, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{60 + 110 * number}" y="318" fill="{colour}">— {NAMES.get(side, side)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(steps: list[int], curves: dict[str, list[float]]) -> list[str]:
    """Curves over linear axes that begin at 0."""
    if not steps:
        return []
    top = max(value for curve in curves.values() for value in curve)
    parts = []
    for tick in range(5):
        y, value = HIGH * (1 - tick / 4), top * tick / 4
        parts.append(f'<line x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    places = [WIDE * step / steps[-1] for step in steps]
    for place, step in zip(places, steps, strict=True):
        parts.append(f'<text x="{place:.1f}" y="{HIGH + 20}" text-anchor="middle">{step}</text>')
    for side, curve in curves.items():
        points = (f"{place:.1f},{HIGH * (1 - value / top):.1f}" for place, value in zip(places, curve, strict=True))
        line = f'points="{" ".join(points)}" fill="none" stroke="{COLOURS[side]}" stroke-width="2"'
        parts.append(f"<polyline {line}/>")
    return parts
