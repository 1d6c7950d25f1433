"""Launchers x precisions x methods: what several processes learn in parts is what one learns of whole steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import each_head
import pytest
import torch
from trained import RECIPE, ROOT, apart, finished, launched, rows, weights

pytestmark = pytest.mark.slow
DRIVER = str(ROOT / "tests/each_head.py")
HALVED = (
    "eagle1",
    "hass",
    "draft_model",
    "own",
    "medusa",
    "dflash",
    "pace",
    "eagle3",
)  # trained in bf16, too
HEADS = {"float32": tuple(each_head.HEADS), "bfloat16": HALVED}
LR = 1e-3
PATIENCE = 900  # seconds, on a machine that others use too
# of losses, relative: sums in another order, in bf16 after four updates that differ by roundings of weights in bf16
LOSSES = {"float32": 1e-5, "bfloat16": 2e-3}
# of all weights on average: in bf16 the sign of gradients near zero is chance, and Adam's first steps are as long as lr
WEIGHTS = {"float32": 1e-6, "bfloat16": LR / 10}


def command(
    tiny: Path, out: Path, dtype: str, names: tuple[str, ...], *kill: str, parts: int = 2
) -> list[str]:
    """Five steps of each head on features that are computed meanwhile, each step in so many parts a process."""
    overrides = {
        "target.path": tiny / "target",
        "target.dtype": "float32",
        "data.train": tiny / "data/train.jsonl",
        "data.limit": 24,
        "data.max_length": 96,
        "features.store": "null",
        "features.dtype": "float32",
        "train.dtype": dtype,
        "train.lr": LR,
        "train.epochs": 1,
        "train.validation": 0.2,
        "train.checkpoint_every": 2,
        "train.accumulation": parts,
    }
    return [
        DRIVER,
        str(out),
        ",".join(names),
        *kill,
        RECIPE,
        *(f"{key}={value}" for key, value in overrides.items()),
    ]


@pytest.fixture(scope="module")
def plain(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of one process without a launcher, by precision."""
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in LOSSES}
    for dtype, out in folders.items():
        whole = command(tiny_target_dir, out, dtype, HEADS[dtype], parts=1)
        done = finished([sys.executable, *whole], seconds=PATIENCE)
        assert done.returncode == 0, done.stdout
    return folders


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(zero, marks=pytest.mark.long) for zero in ("zero2", "zero3"))]
)
def test_every_head_learns_the_same_under_every_launcher(
    config: str, dtype: str, plain: dict[str, Path], tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Losses, validation and weights of each; ranks hold the same bits; in bf16 a killed rank costs nothing, too.

    In fp32 three processes read six parts of a step of four texts, of which two are empty.
    """
    names = tuple(name for name in HEADS[dtype] if (name, config) != ("own", "zero3"))
    if dtype == "float32":
        asked = launched(config, *command(tiny_target_dir, tmp_path, dtype, names), processes=3)
        done = finished(asked, seconds=PATIENCE)
        assert done.returncode == 0, done.stdout
        assert not [line for line in done.stdout.splitlines() if "Warning" in line]
    else:
        done = finished(
            launched(config, *command(tiny_target_dir, tmp_path, dtype, names, "kill")),
            seconds=PATIENCE,
        )
        assert done.returncode != 0 and not (tmp_path / "eagle3/last").exists(), done.stdout
        done = finished(
            launched(config, *command(tiny_target_dir, tmp_path, dtype, names[-1:])),
            seconds=PATIENCE,
        )
        assert done.returncode == 0 and "going on after step" in done.stdout, done.stdout
    for name in names:
        compare(tmp_path / name, plain[dtype] / name, dtype)
        if config != "zero3":  # of whose weights there is one copy, split
            first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
            assert apart(first, second) == 0 == apart(first, weights(tmp_path / name))


def compare(launched_run: Path, plain_run: Path, dtype: str) -> None:
    """The same rows and the same weights, up to what sums in another order change."""
    ours, true, tolerance = rows(launched_run), rows(plain_run), LOSSES[dtype]
    assert [row.keys() for row in ours] == [row.keys() for row in true] and len(true) == 4
    for row, expected in zip(ours, true, strict=True):
        assert row.get("total", 0) == pytest.approx(expected.get("total", 0), rel=tolerance)
        assert loss_of(row) == pytest.approx(loss_of(expected), rel=tolerance)
    mine, theirs = weights(launched_run), weights(plain_run)
    assert all(tensor.dtype in (torch.float32, torch.int64, torch.bool) for tensor in mine.values())
    moved = [(mine[name].double() - theirs[name].double()).abs().mean() for name in mine]
    assert max(moved) < WEIGHTS[dtype]


def loss_of(row: dict[str, Any]) -> float:
    """The held-out cross-entropy, where a row has one."""
    return float(row.get("validation", {}).get("cross_entropy", 0))


def test_own_samples_are_refused_under_zero3(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Where each process would wait for the others' weights, for as many tokens as it says itself."""
    done = finished(
        launched("zero3", *command(tiny_target_dir, tmp_path, "float32", ("own",))),
        seconds=PATIENCE,
    )
    assert (
        done.returncode != 0
        and "error: drafter.samples is own, which needs all weights" in done.stdout
    )
