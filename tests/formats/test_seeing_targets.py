"""Heads for targets that see: export folders are those of a head for the language model inside, and are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Target, load_drafter
from eagle.__main__ import main
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.formats.export import export
from tests.vision_families import VISION_FAMILIES, build

HEADS: dict[str, dict[str, Any]] = {"eagle1": {"fc_bias": False}, "eagle3": {}}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.quick("qwen2_5_vl-eagle3", "gemma3-eagle1", "gemma3-eagle3")
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_folder_for_vllm_has_the_text_models_sizes(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of eyes or of positions in three directions; it is found right, and imported as the head that it was."""
    build(name).save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target", dtype="float32", images=True)
    torch.manual_seed(0)
    settings = settings_of({"kind": kind, **HEADS[kind]}, "test")
    head: Any = DRAFTERS[kind].for_target(settings, target.config, target.head, [torch.arange(96)])
    save_head(tmp_path / "head", head, "", {})
    out = tmp_path / "vllm"
    export(head.bind(target.head), target.config, "vllm", out, tmp_path / "head")
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in SIZES} == SIZES
    assert config["rope_scaling"] is None and not [
        key for key in config if "vision" in key or "image" in key
    ]
    main(["inspect", str(out), "--target", str(tmp_path / "target")])
    assert "FATAL" not in capsys.readouterr().out
    main(["import", str(out), str(tmp_path / "again"), "--target", str(tmp_path / "target")])
    again: Any = load_drafter(tmp_path / "again", target)
    tensors = again.state_dict()
    for key, tensor in head.state_dict().items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-6, atol=1e-9)
