"""Results of `bench/methods.py` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.methods_arms import ABLATIONS, ARMS, LONG_CHAIN, METHODS, TWICE
from eval.statistics import Difference, Estimate, Row, estimate, estimate_difference

BASE, ABLATED = "EAGLE-1", "as it is"  # against whom the methods stand, and the ablations
PAIRS = (  # what should be no better, and what should be no worse
    ("EAGLE-1", "HASS"),
    ("EAGLE-1", "HASS, from the first step"),
    ("EAGLE-1", "HASS, no top-10 term"),
    ("EAGLE-1, in two halves", "HASS, no top-10 term"),
    ("EAGLE-1", "EAGLE-3"),
    ("EAGLE-1", "EAGLE-3, 1/4 of the vocabulary"),
    ("HASS", "EAGLE-3"),
    ("HASS, no top-10 term", "EAGLE-3"),
    ("EAGLE-3, random queries", "EAGLE-3"),
    ("EAGLE-3, residual normed, random queries", "EAGLE-3"),
    ("EAGLE-1, equal time", "EAGLE-3"),
    ("EAGLE-1, equal time", "HASS, equal time"),
    ("EAGLE-1", "HASS, no top-10 term, in EAGLE-1's time"),
    ("EAGLE-1", "EAGLE-3, in EAGLE-1's time"),
    (TWICE, "HASS, twice the tokens"),
)
SHOWN = [name for name, arm in METHODS.items() if arm.shapes]
ABLATION_SHAPES = ("chain of 7, T = 0", "tree of 25, T = 0", "chain of 7, T = 1", "tree of 25, T = 1")
COLOURS = {
    "EAGLE-1": "#b0413e",
    "HASS": "#8a6d1b",
    "HASS, from the first step": "#e0a030",
    "HASS, no top-10 term": "#c9a227",
    "EAGLE-3": "#2d6a4f",
    "EAGLE-3, random queries": "#52b788",
}
HIGH, WIDE = 220, 280  # of a panel

Key = tuple[int, int]  # prompt, seed


def runs_of(results: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """The runs of an arm, a seed each."""
    return [run for run in results["runs"] if run["arm"] == arm]


def lengths(results: Mapping[str, Any], arm: str, shape: str) -> dict[Key, Row]:
    """Tokens committed and cycles of every prompt and seed; answers that took no cycle add nothing."""
    return {
        (prompt, run["seed"]): row
        for run in runs_of(results, arm)
        for prompt, row in enumerate(run["decoded"].get(shape, {"rows": []})["rows"])
        if row[1]
    }


def length(results: Mapping[str, Any], arm: str, shape: str) -> Estimate:
    """The acceptance length over all prompts and seeds; whole prompts are drawn."""
    clusters: dict[int, list[Row]] = {}
    for (prompt, _), row in lengths(results, arm, shape).items():
        clusters.setdefault(prompt, []).append(row)
    return estimate(clusters)


def difference(results: Mapping[str, Any], less: str, more: str, shape: str) -> Difference:
    """How much longer the second arm's acceptance length is, over the prompts and seeds that both have."""
    return estimate_difference(lengths(results, less, shape), lengths(results, more, shape), lambda key: key[0])


def methods_table(results: dict[str, Any]) -> str:
    """What each method's heads learned from, and their acceptance lengths, as Markdown."""
    return "\n".join(
        [*_by_arm(results, lambda arm, shape: f"{length(results, arm, shape).value:.3f}"), "", made(results)]
    )


def seeds_table(results: dict[str, Any]) -> str:
    """The acceptance length of every seed, as Markdown."""

    def each(arm: str, shape: str) -> str:
        return ", ".join(f"{pooled(run['decoded'][shape]['rows']):.2f}" for run in runs_of(results, arm))

    return "\n".join(_by_arm(results, each))


def _by_arm(results: dict[str, Any], cell: Callable[[str, str], str]) -> list[str]:
    shapes = list(runs_of(results, BASE)[0]["decoded"])
    lines = [f"| head | seeds | steps | CPU seconds | {' | '.join(shapes)} |", "|---" * (len(shapes) + 4) + "|"]
    for arm in SHOWN:
        if runs := runs_of(results, arm):
            cells = [cell(arm, shape) if shape in runs[0]["decoded"] else "" for shape in shapes]
            about = f"{arm} | {len(runs)} | {runs[0]['steps']:,} | {seconds(results, arm):,.0f}"
            lines.append(f"| {about} | {' | '.join(cells)} |")
    return lines


def seconds(results: Mapping[str, Any], arm: str | None) -> float:
    """CPU seconds of an arm's training and of what it started from, the mean of its seeds."""
    if arm is None:
        return 0.0
    runs = runs_of(results, arm)
    return sum(run["cpu_seconds"] for run in runs) / len(runs) + seconds(results, ARMS[arm].start)


def pairs_table(results: dict[str, Any]) -> str:
    """The differences between methods by prompt and seed, with 95% intervals, as Markdown."""
    shapes = list(runs_of(results, BASE)[0]["decoded"])
    lines = [f"| difference in τ | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
    for less, more in PAIRS:
        if (plain := runs_of(results, less)) and (runs := runs_of(results, more)):
            told = runs[0]["decoded"].keys() & plain[0]["decoded"].keys()
            cells = [said(difference(results, less, more, shape).estimate) if shape in told else "" for shape in shapes]
            lines.append(f"| {more} over {less} | {' | '.join(cells)} |")
    return "\n".join(lines)


def levels_table(results: dict[str, Any]) -> str:
    """How often each level of the long chain is kept where all before it were, as Markdown."""
    depth = len(runs_of(results, BASE)[0]["decoded"][f"{LONG_CHAIN}, T = 0"]["asked"])
    lines = [
        f"| head | T | {' | '.join(f'level {level + 1}' for level in range(depth))} |",
        "|---" * (depth + 2) + "|",
    ]
    for arm in COLOURS:
        for heat in ("0", "1"):
            if runs_of(results, arm):
                cells = (f"{rate:.2f}" for rate in rates(results, arm, heat))
                lines.append(f"| {arm} | {heat} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ablations_table(results: dict[str, Any]) -> str:
    """Each setting of EAGLE-3 against EAGLE-3 as it is, with 95% intervals, as Markdown."""
    lines = [
        f"| EAGLE-3, but | CPU seconds | {' | '.join(ABLATION_SHAPES)} | τ in % |",
        "|---" * (len(ABLATION_SHAPES) + 3) + "|",
    ]
    for arm in (arm for arm in ABLATIONS if runs_of(results, arm)):
        differences = [difference(results, ABLATED, arm, shape) for shape in ABLATION_SHAPES]
        whole = [length(results, ABLATED, shape).value for shape in ABLATION_SHAPES]
        cells = [
            f"{value:.3f}" if arm == ABLATED else said(one.estimate)
            for one, value in zip(differences, whole, strict=True)
        ]
        share = sum(one.estimate.value / value for one, value in zip(differences, whole, strict=True)) / len(whole)
        lines.append(f"| {arm} | {seconds(results, arm):,.0f} | {' | '.join(cells)} | {share:+.1%} |")
    return "\n".join([*lines, "", made(results)])


def curve_table(results: dict[str, Any]) -> str:
    """What validation predicts along the first seed's training, as Markdown."""
    names = ("agreement", "overlap", "chain/tau", "tree/tau")
    lines = [f"| head | step | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for arm in COLOURS:
        for row in runs_of(results, arm)[0]["curve"] if runs_of(results, arm) else []:
            lines.append(f"| {arm} | {row['step']} | {' | '.join(f'{row[name]:.3f}' for name in names)} |")
    return "\n".join(lines)


def rates(results: Mapping[str, Any], arm: str, heat: str) -> list[float]:
    """Of each level of the long chain: how often it is kept where all before it were."""
    found = [run["decoded"][f"{LONG_CHAIN}, T = {heat}"] for run in runs_of(results, arm)]
    asked, kept = (
        [sum(level) for level in zip(*(one[name] for one in found), strict=True)] for name in ("asked", "kept")
    )
    return [part / whole if whole else 0.0 for part, whole in zip(kept, asked, strict=True)]


def pooled(rows: list[Row]) -> float:
    """Tokens per cycle over some answers."""
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def said(value: Estimate) -> str:
    """A difference with its interval; shown ones stand out."""
    mark = "**" if value.sign else ""
    return f"{mark}{value.value:+.3f}{mark} ({value.low:+.2f} to {value.high:+.2f})"


def made(results: Mapping[str, Any]) -> str:
    """What the figures belong to, as a line of Markdown."""
    return f"<sub>{', '.join(f'{key} {value}' for key, value in results['machine'].items())}</sub>"


def plot(results: dict[str, Any]) -> str:
    """Acceptance by level of a chain, greedily and at T = 1: what training on its own drafts is for."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="330" font-family="sans-serif" font-size="12">',
        '<rect width="760" height="330" fill="#ffffff"/>',
    ]
    arms = [arm for arm in COLOURS if runs_of(results, arm)]
    for number, heat in enumerate(("0", "1")):
        parts.append(
            f'<g transform="translate({60 + 370 * number},50)"><text y="-26">kept, by level, T = {heat}</text>'
        )
        parts += [*_panel({arm: rates(results, arm, heat) for arm in arms}), "</g>"]
    for number, arm in enumerate(arms):
        parts.append(f'<text x="{60 + 150 * number}" y="318" fill="{COLOURS[arm]}">— {arm}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(curves: dict[str, list[float]]) -> list[str]:
    parts = []
    for tick in range(0, 11, 2):
        y = HIGH * (1 - tick / 10)
        parts.append(f'<line x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick / 10:g}</text>')
    depth = max(map(len, curves.values()))
    places = [WIDE * level / (depth - 1) for level in range(depth)]
    for level, place in enumerate(places, 1):
        parts.append(f'<text x="{place:.1f}" y="{HIGH + 20}" text-anchor="middle">{level}</text>')
    for arm, curve in curves.items():
        points = (f"{place:.1f},{HIGH * (1 - rate):.1f}" for place, rate in zip(places, curve, strict=True))
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS[arm]}" stroke-width="2"/>')
    return parts
