"""`--check` on targets that keep a state, whose configs name no heads and no positions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.check import check
from tests.families import draw_weights
from tests.recipes.test_check import with_data

SIZES = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
    },
    "rwkv": {
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 4,
        "rescale_every": 2,
    },
}


@pytest.fixture(params=SIZES)
def stateful_dir(request: pytest.FixtureRequest, tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A random model of the type with the tokenizer and the data of the suite's own target."""
    folder = tmp_path / "stateful"
    shutil.copytree(tiny_target_dir / "data", folder / "data")
    words = AutoTokenizer.from_pretrained(tiny_target_dir / "target")
    sizes = {**SIZES[request.param], "vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **sizes))
    draw_weights(model).save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    return folder


@pytest.mark.quick("rwkv")
def test_every_stage_runs(
    stateful_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is forecast is said."""
    check(with_data(stateful_dir, tmp_path, "data.limit=40"))
    said = capsys.readouterr().out
    assert "identical" in said and "GB of memory while training" in said
