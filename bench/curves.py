"""Draw a training run's loss and τ: `python -m bench.curves RUN/metrics.jsonl`, or again from the file it keeps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eagle.disk import write_text
from eagle.log import script
from eagle.markup import Html, html, tag
from eagle.shipped import commit
from eval.result_files.figures import Scale

ROOT = Path(__file__).parents[1]
KEPT, IMAGES = ROOT / "docs/results/curves.json", ROOT / "docs/images"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 300, 48, 190, 34, 40
# mid-tones, which read on white and on dark
STYLE = "text{fill:#7a828c;font:13px system-ui,sans-serif}.title{font-weight:600}path{fill:none;stroke:#7a828c40}"
COLOURS = ("#2f81f7", "#2da44e", "#c4751c")
LOSSES = {"total": "all 7 positions", "laws/0": "first position"}
TAUS = {
    "tree/tau": "tree, held-out texts",
    "chain/tau": "chain, held-out texts",
    "decoded_tree_tau": "tree, decoded",
}
Line = Sequence[tuple[int, float]]


def read_curves(metrics: Path) -> dict[str, Line]:
    """The losses by step, and the validations' τ."""
    if not metrics.is_file():
        raise ValueError(f"no metrics at {metrics}: expected metrics.jsonl in the folder of a training run")
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in (*LOSSES, *TAUS)}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        for name, value in (row | row.get("validation", {})).items():
            if name in curves:
                curves[name].append((row["step"] + 1, round(value, 3)))
    return dict(curves)


def draw_curves(title: str, lines: Mapping[str, Line], low: float) -> str:
    """Lines over training steps, each with its name at its end, as a picture of its own."""
    steps, values = zip(*[point for line in lines.values() for point in line], strict=True)
    x = replace(Scale.over(steps), high=max(steps), start=LEFT, end=WIDTH - RIGHT)
    y = replace(Scale.over(values, low), start=HEIGHT - BOTTOM, end=TOP)
    parts = [tag("title", title), tag("style", STYLE), _text(0, 16, title, class_="title")]
    for tick in y.ticks():
        parts.append(tag("path", d=f"M{LEFT} {y(tick)}H{WIDTH - RIGHT}"))
        parts.append(_text(LEFT - 8, y(tick) + 4, y.format(tick), text_anchor="end"))
    for tick in x.ticks():
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 18, x.format(tick), text_anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "training step", text_anchor="middle"))
    pairs = list(zip(COLOURS, lines.items(), strict=False))
    for colour, (_, line) in pairs:
        path = "M" + "L".join(f"{x(step)} {y(value)}" for step, value in line)
        parts.append(tag("path", d=path, style=f"stroke:{colour};stroke-width:2.5;stroke-linejoin:round"))
    row = 0.0
    ends = sorted((y(line[-1][1]), name, line[-1][1], colour) for colour, (name, line) in pairs)
    for height, name, value, colour in ends:
        row = max(height + 4, row + 18)  # names of near ends stand below each other
        parts.append(_text(WIDTH - RIGHT + 8, row, f"{name}: {value:.2f}", style=f"fill:{colour}"))
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "role": "img"}
    return tag("svg", html(parts), xmlns="http://www.w3.org/2000/svg", **size) + "\n"


def _text(x: float, y: float, text: str, **attributes: str) -> Html:
    return tag("text", text, x=x, y=y, **attributes)


def draw(kept: Path, images: Path) -> None:
    """Draw both pictures from the kept curves."""
    curves = json.loads(kept.read_text())["curves"]
    for name, title, names, low in (
        ("curve-loss", "Training loss, EAGLE-3 on the tiny target", LOSSES, 0.0),
        ("curve-tau", "Acceptance length τ, EAGLE-3 on the tiny target", TAUS, 1.0),
    ):
        lines = {label: curves[key] for key, label in names.items()}
        write_text(images / f"{name}.svg", draw_curves(title, lines, low))
        print(f"drawn in {images / name}.svg")


def main(argv: list[str]) -> None:
    """Keep the curves of a run, if one is given, and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("metrics", nargs="?", type=Path, help="what training wrote; without, the kept curves")
    args = parser.parse_args(argv)
    if args.metrics:
        if not args.metrics.is_file():
            raise ValueError(f"{args.metrics} is no file: name the metrics.jsonl of a training run")
        curves = {"commit": commit(), "curves": read_curves(args.metrics)}
        write_text(KEPT, json.dumps(curves, separators=(",", ":")) + "\n")
    draw(KEPT, IMAGES)


if __name__ == "__main__":
    script(main)
