"""Record whole runs by the commands that users give: what `metrics.jsonl` holds of twenty steps, in fp32."""

from __future__ import annotations

import json
import re
import shutil
from math import isclose
from pathlib import Path
from typing import Any

from tests.golden import access

SPEEDS = ("tokens_per_second", "memory_gb")
LEVEL = re.compile(r"/\d")  # in the name of a figure
DIGITS = 6
NEARLY = 1e-4  # relative: sums over two processes are taken in another order
USUAL = (
    "train.max_steps=20",
    "train.epochs=9",
    "train.lr=1e-3",
    "train.validation=0.1",
    "train.decode=2",
    "train.checkpoint_every=8",
    "train.keep=9",
    "features.dtype=float32",
    "features.store=null",
    "eval.max_new_tokens=8",
)
# one for each part of the loop that a method does not decide
LOOPS = {
    "accumulated": (
        "drafter={kind: eagle3, steps: 2}",
        "train.accumulation=2",
        "train.clip_by=value",
    ),
    "mean over texts": ("drafter={kind: medusa}", "train.mean_over=texts", "train.accumulation=4"),
    "mean over all": (
        "drafter={kind: dflash}",
        "train.mean_over=all",
        "train.schedule=cosine",
        "train.gate=read",
    ),
    "stem": (
        "drafter={kind: eagle1}",
        "train.schedule=wsd",
        "train.clip=.inf",
        "train.weight_decay=0.1",
    ),
    "on policy": ("drafter={kind: eagle3, steps: 2}", "train.on_policy={every: 4, depth: 3}"),
    "own samples": ("drafter={kind: draft_model, samples: own}", "train.choose=last"),
    "from a store": ("drafter={kind: eagle3, steps: 2, draft_vocab: 200}", "train.decode=null"),
}
RESUMED = ("eagle3", "hydra", "draft_model")
PARALLEL = "eagle3"


def run_items(folder: Path) -> dict[str, Any]:
    """Return the metrics of a run of each method and of each kind of loop; others are compared with those."""
    access.write_target(folder)
    items: dict[str, Any] = {}
    for name in access.TRAINED:
        items[f"run of {name}"] = train_method(folder, name, folder / "runs" / name)
    for name, overrides in LOOPS.items():
        items[f"loop {name}"] = train_loop(folder, name, overrides)
    items["joint training"] = train_jointly(folder)
    for name in RESUMED:
        items |= resumed_of(folder, name, items[f"run of {name}"])
    parallel = train_on_two(folder, folder / "parallel")
    same = is_nearly(parallel, items[f"run of {PARALLEL}"])
    items[f"{PARALLEL}, on two processes, as on one"] = same
    return items


def is_nearly(metrics: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two runs log at the same steps, and the same losses up to rounding."""
    if metrics.keys() != others.keys():
        return False
    for step, row in metrics.items():
        loss = row.get("total", 0.0)
        other = others[step].get("total", 0.0)
        if not isclose(loss, other, rel_tol=NEARLY):
            return False
    return True


def train_method(folder: Path, name: str, out: Path) -> dict[str, Any]:
    """Train a method as it is by default."""
    return train(folder, f"drafter={{kind: {name}}}", out=out)


def train(folder: Path, *overrides: str, out: Path) -> dict[str, Any]:
    """Train by `eagle train`; returns the metrics."""
    access.train_command(access.recipe_arguments(folder, *USUAL, *overrides, f"train.out={out}"))
    return read_metrics(out)


def resumed_of(folder: Path, name: str, whole: dict[str, Any]) -> dict[str, Any]:
    """Go on with a run as one that was killed after its first checkpoint; its metrics are to be those of the whole."""
    out = folder / "resumed" / name
    shutil.copytree(folder / "runs" / name, out)
    checkpoints = sorted(
        (out / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-"))
    )
    for checkpoint in checkpoints[1:]:
        shutil.rmtree(checkpoint)
    return {
        f"{name}, killed and resumed, as the whole run": train_method(folder, name, out) == whole
    }


def train_loop(folder: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train one of `LOOPS`, with what it needs before."""
    out = folder / "loops" / name
    if name == "from a store":
        overrides = (*overrides, f"features.store={folder / 'store'}")
        access.extract_command(access.recipe_arguments(folder, *USUAL, *overrides))
    return train(folder, *overrides, out=out)


def train_jointly(folder: Path) -> dict[str, Any]:
    """Train a target with its heads, from the heads of an earlier run."""
    out = folder / "joint"
    overrides = ("drafter={kind: medusa}", "joint={heads: 0.2, head_lr: 3}", "train.decode=null")
    access.train_jointly_command(
        access.recipe_arguments(folder, *USUAL, *overrides, f"train.out={out}")
    )
    return read_metrics(out)


def train_on_two(folder: Path, out: Path) -> dict[str, Any]:
    """Train on two processes, as a launcher starts them."""
    arguments = access.recipe_arguments(
        folder, *USUAL, f"drafter={{kind: {PARALLEL}}}", f"train.out={out}"
    )
    command = access.launched("ddp", str(access.ROOT / "recipes/train_eagle.py"), *arguments)
    # a script is looked for beside itself, not in this checkout
    done = access.finished(command, PYTHONPATH=str(access.ROOT))
    assert done.returncode == 0, done.stdout
    return read_metrics(out)


def read_metrics(out: Path) -> dict[str, Any]:
    """Return what a run has logged, by step, without what depends on the machine's speed."""
    rows: dict[str, Any] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        if "validation" in row:
            rows[f"validation at {step}"] = rounded(row["validation"])
        else:
            rows[f"training at {step}"] = rounded(row)
    return rows


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's figures with few digits, which is all that fp32 has; those of single levels are left out."""
    figures = {}
    for key, value in row.items():
        if key in SPEEDS or LEVEL.search(key):
            continue
        figures[key] = value
        if isinstance(value, float):
            figures[key] = float(f"{value:.{DIGITS}g}")
    return figures
