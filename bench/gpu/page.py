"""The page of docs that shows what the GPU program has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs/results"
PAGE = "docs/measurements/gpu.md"
HEAD = """# On a GPU

`python -m bench.gpu` measures this package on one GPU ([how to run it](../accelerators.md#measure-on-a-gpu)). This page
is written from its result files by `python -m bench.gpu --page`.
"""
NOTHING = """
No GPU has been at hand since the program exists, so nothing is measured yet.
"""
TITLES = {
    "correct": "Correctness",
    "training": "A training step",
    "decoding": "Decoding",
    "whole_path": "The whole path",
    "kernels": "Kernels",
}
NOTES = {
    "correct": "Lossless: drafted answers against the untouched model's, alone and in a ragged batch, at T = 0 and 1. "
    "Differences in bf16 are near-ties if rounding alone can decide between the two tokens.",
    "training": "Llama-3.1-8B with random weights, bf16 products, four packed conversations of 2,048 tokens, 65% "
    "supervised. MFU is the share of the measured bf16 peak. SpecForge's own figures for EAGLE-3 with 7 steps on one "
    "H200 are 25,400 useful tokens/s and an MFU of 42%.",
    "decoding": "A simulation of acceptance: a small chat model, widened so that a forward costs what a model of this "
    "size costs. Time is measured.",
    "whole_path": "Every stage by its own command in one process. A target with random weights tells speed, not "
    "acceptance.",
    "kernels": "Operations of a step of which stage 2 reached less than 35% of the peak.",
}


def read_units(results: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a stage, nothing where it has not run."""
    file = results / f"gpu_{stage}.json"
    units: dict[str, dict[str, Any]] = json.loads(file.read_text())["units"] if file.exists() else {}
    return units


def describe_unit(stage: str, figures: dict[str, Any], units: dict[str, dict[str, Any]]) -> str:
    """Return what a unit came to in words."""
    if "error" in figures:
        return "failed: " + figures["error"].strip().splitlines()[0]
    line = str(figures["line"])
    peak = units.get("peak", {}).get("FLOP/s")
    if stage == "training" and peak and "step s" in figures and "FLOP/s" in figures:
        line += f"; MFU {figures['FLOP/s'] / peak:.0%}"
        if figures["forecast GB"] is not None:
            line += f"; forecast {figures['forecast GB']:.1f} GB"
    return line


def render_page(results: Path) -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for stage, title in TITLES.items():
        units = read_units(results, stage)
        if not units:
            continue
        about = next(iter(units.values()))
        versions = f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}"
        rows = [f"| {name} | {describe_unit(stage, figures, units)} |" for name, figures in units.items()]
        table = "\n".join(["| what | result |", "|---|---|", *rows])
        made = f"<sub>{versions}, {about['date']}, commit {about['commit']}</sub>"
        parts.append(f"\n## {title}\n\n{NOTES[stage]}\n\n{table}\n\n{made}\n")
    if len(parts) == 1:
        parts.append(NOTHING)
    return "".join(parts)


def write_page(results: Path, out: Path | None = None) -> Path:
    """Write the page, by default to its place in docs."""
    out = out or ROOT / PAGE
    out.write_text(render_page(results))
    return out
