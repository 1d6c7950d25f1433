"""Stage 4, every stage by its own command: the rehearsal of one method, on this device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.gpu.worker import Context, Figures, Unit
from bench.rehearsal import Rehearsal


def units(context: Context) -> dict[str, Unit]:
    """Return one unit."""
    return {"eagle1": partial(rehearse, context)}


def rehearse(context: Context) -> Figures:
    """Return what the stages took and what came out of them."""
    folder = Path(context.work) / "path"
    folder.mkdir()
    rehearsal = Rehearsal(folder, context.pick("qwen3-0.6b", "small"), ["eagle1"])
    rehearsal.run_all()
    line = ", ".join(f"{row['stage']} {row['seconds']:.0f} s" for row in rehearsal.rows)
    return {"line": line, "stages": rehearsal.rows}
