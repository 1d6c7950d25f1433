"""Stages of a demo: commands that run in order, each with a sentence on what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from rich.console import Console

from eagle.device import choose_threads

QUIET = {
    # Waiting threads soon sleep, so that they do not slow down other work.
    "GOMP_SPINCOUNT": "10000",
    # A model this small is loaded at once.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}


class Stage(NamedTuple):
    """A command, and what a reader should know before it runs."""

    title: str
    about: str
    seconds: int  # on two idle cores
    command: list[str]


def run(stages: Sequence[Stage]) -> None:
    """Run the stages in order; stop at the first that fails."""
    # The best number of threads for training is timed on matrices of the head's size.
    left = torch.ones(512, 256)
    right = torch.ones(256, 1024)
    threads = choose_threads(lambda: [left @ right for _ in range(8)])
    plain_env = {**QUIET, **os.environ}
    training_env = {**plain_env, "OMP_NUM_THREADS": str(threads)}
    console = Console(highlight=False)
    for number, stage in enumerate(stages, start=1):
        console.print(
            f"\n[bold]\\[{number}/{len(stages)}] {stage.title}[/bold] (about {stage.seconds} s)"
        )
        console.print(stage.about, style="dim", soft_wrap=True)
        # Programs that decode choose their own number of threads.
        is_decoding = stage.command[1] in ("eval.measure", "eval.lossless", "eagle")
        env = plain_env if is_decoding else training_env
        start = perf_counter()
        process = subprocess.run([sys.executable, *stage.command], env=env)
        if process.returncode:
            sys.exit(f"stage {number} failed: {' '.join(stage.command)}")
        console.print(f"{perf_counter() - start:.0f} s", style="dim")


def show_report(path: Path) -> None:
    """Print where the report is, and open it if there is a screen."""
    print(f"Report: {path}")
    has_screen = (
        sys.platform in ("darwin", "win32")
        or os.environ.get("DISPLAY")
        or os.environ.get("WAYLAND_DISPLAY")
    )
    if sys.stdout.isatty() and has_screen:
        webbrowser.open(path.resolve().as_uri())
