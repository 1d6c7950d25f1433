"""Have other projects make heads, each in an environment of its own, for a random target."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from tests.formats.rivals.random_head import HeadRequest

ROOT = Path(__file__).parents[2]
# in fp32, with logits that differ by one
BOUND = 1e-5
WIDTH = 64
VOCAB_SIZE = 512


def find_python(rival: str) -> str:
    """Return the Python of an environment that holds a rival, and skip the test where none is named."""
    name = f"EAGLE_{rival.upper()}_PYTHON"
    if name not in os.environ:
        pytest.skip(f"no {rival}: set {name} to the python of an environment that holds it")
    return os.environ[name]


def write_target(folder: Path, layers: int = 8, **changes: Any) -> LlamaForCausalLM:
    """Save a random target as `target` in a folder, and return it."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=176,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        **changes,
    )
    # the target and what follows are the same in every run
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    return model


def load_target(folder: Path) -> Target:
    """Return that target."""
    return Target.load(folder / "target", dtype=torch.float32)


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of any two logits."""
    return float((ours - theirs).abs().max())


def run_rival(
    rival: str,
    script: str,
    folder: Path,
    steps: int,
    switches: dict[str, Any],
    out: str = "head",
) -> dict[str, Tensor]:
    """Return the logits of a head that a script of `rivals` makes in a folder, or loads from it."""
    request = HeadRequest(
        target=str(folder / "target"),
        inputs=str(folder / "inputs"),
        out=str(folder / out),
        steps=steps,
        switches=switches,
    )
    command = [find_python(rival), "-m", f"tests.formats.rivals.{script}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # a checkout, where a rival is no package
    source = os.environ.get(f"EAGLE_{rival.upper()}_SOURCE")
    if source:
        env["PYTHONPATH"] = source
    # no rival can be imported beside this project: their dependencies differ
    done = subprocess.run(
        [*command, json.dumps(asdict(request))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{rival} failed:\n{done.stderr[-3000:]}"
    return load_file(f"{request.out}.logits")
