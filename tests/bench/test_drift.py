"""The benchmark of a head that follows a target in fine-tuning: its rows, and that each arm is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import drift
from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head


@pytest.mark.slow
@pytest.mark.long
def test_every_stage_has_its_rows(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone and refreshed after every stage, others anew at the end; the answers learned are in capitals."""
    for name, value in {
        "STAGES": 2,
        "TARGET_STEPS": 1,
        "STEPS": 1,
        "PROMPTS": 2,
        "NEW_TOKENS": 6,
        "MEASURED": 3,
    }.items():
        monkeypatch.setattr(drift, name, value)
    target, folder = tiny_target_dir / "target", tmp_path / "head"
    loaded, settings = Target.load(target, dtype="float32"), settings_of({"kind": "eagle1"}, "test")
    torch.manual_seed(0)
    save_head(folder, DRAFTERS["eagle1"].for_target(settings, loaded.config, loaded.head), "", {})
    data = tiny_target_dir / "data"
    overrides = [
        f"target.path={target}",
        f"data.heldout={data / 'heldout.jsonl'}",
        f"train.out={tmp_path / 'run/head'}",
    ]
    overrides += [f"regenerate.source={data / 'train.jsonl'}", "data.limit=12"]
    out = tmp_path / "drift.json"
    drift.main([*overrides, "--head", str(folder), "--out", str(out), "--seeds", "1"])
    found = json.loads(out.read_text())["rows"]
    arms = [(row["target's steps"], row["arm"]) for row in found]
    followed = [(steps, arm) for steps in (1, 2) for arm in ("left alone", "refreshed")]
    assert arms == [
        (0, "left alone"),
        *followed,
        *((2, arm) for arm in ("anew", "anew", "from the old head, texts alone")),
    ]
    assert all(len(row["counts"]) == 6 for row in found)
    text = (tmp_path / "run/capitals.jsonl").read_text()
    answers = [turn["value"] for line in text.splitlines() for turn in json.loads(line)["conversations"][1::2]]
    assert answers and all(answer == answer.upper() for answer in answers)
