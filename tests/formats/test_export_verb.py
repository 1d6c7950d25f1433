"""`eagle export` writes what the target's files hold, whatever machine it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle.__main__ import main
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_target(folder: Path, dtype: torch.dtype) -> Any:
    """A random target on the disk; its model."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    model.save_pretrained(folder)
    return model


def write_head(folder: Path, target: Path, **settings: Any) -> None:
    """A head for it that nobody has trained."""
    loaded = Target.load(target, dtype="float32")
    known = settings_of({"kind": "eagle3", **settings}, "test")
    head = DRAFTERS["eagle3"].for_target(known, loaded.config, loaded.head, [torch.arange(40)])
    save_head(folder, head, f"target: {{path: {target}}}\n", {})


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fastest", [torch.float32, torch.bfloat16])
def test_an_exported_embedding_is_that_of_the_checkpoint(
    stored: torch.dtype, fastest: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, also where the other precision is the faster one."""
    model = write_target(tmp_path / "target", stored)
    write_head(tmp_path / "head", tmp_path / "target", taps=(2, 4, 5))
    monkeypatch.setattr("eagle.target.target.fastest_dtype", lambda device: fastest)
    target, out = str(tmp_path / "target"), str(tmp_path / "out")
    main(["export", str(tmp_path / "head"), "--target", target, "--to", "eagle", out])
    written = load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, model.get_input_embeddings().weight.float())
