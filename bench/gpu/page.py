"""The page of docs that shows what the GPU program has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.worker import read_units

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs/results"
PAGE = "docs/measurements/gpu.md"
HEAD = """# On a GPU

`python -m bench.gpu` measures this package on one GPU ([how to run it](../install.md#measure-on-a-gpu)). This page
is written from its result files by `python -m bench.gpu --page`.
"""
NOTHING = """
No GPU has been at hand since the program exists, so nothing is measured yet.
"""
# the title of each stage, and what its figures are of
SECTIONS = {
    "correct": (
        "Correctness",
        "Lossless: drafted answers against the untouched model's, alone and in a ragged batch, at T = 0 and 1. "
        "Differences in bf16 are near-ties if rounding alone can decide between the two tokens.",
    ),
    "training": (
        "A training step",
        "Llama-3.1-8B with random weights, bf16 products, four packed conversations of 2,048 tokens, 65% supervised. "
        "MFU is the share of the measured bf16 peak. SpecForge's own figures for EAGLE-3 with 7 steps on one H200 are "
        "25,400 useful tokens/s and an MFU of 42%.",
    ),
    "decoding": (
        "Decoding",
        "A simulation of acceptance: a small chat model, widened so that a forward costs what a model of this size "
        "costs. Time is measured.",
    ),
    "whole_path": (
        "The whole path",
        "Every stage by its own command, as `make rehearsal`. Random weights tell speed, not acceptance.",
    ),
}


def describe_unit(figures: dict[str, Any]) -> str:
    """Return what a unit came to in words."""
    if "error" in figures:
        return "failed: " + figures["error"].strip().splitlines()[0]
    return str(figures["line"])


def render_page(results: Path) -> str:
    """Return the page as Markdown."""
    sections = []
    for stage, (title, note) in SECTIONS.items():
        units = read_units(results, stage)
        if not units:
            continue
        rows = [f"| {name} | {describe_unit(figures)} |" for name, figures in units.items()]
        table = "\n".join(["| what | result |", "|---|---|", *rows])
        about = next(iter(units.values()))
        made = f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, {about['date']}"
        sections.append(
            f"\n## {title}\n\n{note}\n\n{table}\n\n<sub>{made}, commit {about['commit']}</sub>\n"
        )
    return HEAD + ("".join(sections) or NOTHING)


def write_page(results: Path) -> Path:
    """Write the page to its place in docs."""
    (ROOT / PAGE).write_text(render_page(results))
    return ROOT / PAGE
