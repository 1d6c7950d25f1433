"""The benchmark of heads for adapters: its rows, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import adapters
from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head


@pytest.mark.slow
@pytest.mark.long
def test_both_heads_are_measured_at_every_mark(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's head as it is, on the base and on each adapter; then both arms, for as many seconds."""
    pytest.importorskip("peft", reason="peft is not installed")
    for name, value in {"PROMPTS": 2, "NEW_TOKENS": 6}.items():
        monkeypatch.setattr(adapters, name, value)
    target, folder = tiny_target_dir / "target", tmp_path / "head"
    loaded, settings = Target.load(target, dtype="float32"), settings_of({"kind": "eagle1"}, "test")
    torch.manual_seed(0)
    save_head(folder, DRAFTERS["eagle1"].for_target(settings, loaded.config, loaded.head), "", {})
    data, out = tiny_target_dir / "data", tmp_path / "adapters.json"
    overrides = [f"target.path={target}", f"data.heldout={data / 'heldout.jsonl'}", "data.limit=12"]
    overrides += [f"regenerate.source={data / 'train.jsonl'}", f"train.out={tmp_path / 'run/head'}"]
    asked = ["--head", str(folder), "--out", str(out), "--seeds", "1", "--steps", "1", "--prompts", "2"]
    adapters.main([*overrides, *asked, "--seconds", "0.01,0.02"])
    results = json.loads(out.read_text())
    arms = [(row["adapter"], row["arm"], row["mark"]) for row in results["rows"]]
    trained = [(arm, mark) for arm in (adapters.ON, adapters.NEW) for mark in (0.01, 0.02)]
    each = [(adapters.OLD, 0.0), *trained]
    assert arms == [("none", adapters.OLD, 0.0), *((name, *row) for name in adapters.ADAPTERS for row in each)]
    assert all(row["CPU s"] >= 0 and len(row["counts"]) == 4 for row in results["rows"])
    assert adapters.adapter_table(results) in capsys.readouterr().out
    for name, change in (("capitals", str.upper), ("small", str.lower)):
        text = (tmp_path / f"run/{name}.jsonl").read_text()
        answers = [turn["value"] for line in text.splitlines() for turn in json.loads(line)["conversations"][1::2]]
        assert answers and all(answer == change(answer) for answer in answers)
