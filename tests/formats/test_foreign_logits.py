"""Random heads made by `speculators` and `nvidia-modelopt`: imported, they have the logits that they have there."""

# T tokens, H width, D draft vocabulary size

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.core.examples import Example, collate
from eagle.formats.reading.foreign import import_head, read_head
from tests.formats.rivals.random_head import HeadRequest

ROOT = Path(__file__).parents[2]
STEPS, LENGTH, DRAFT_VOCAB = 4, 96, 160
BOUND = 1e-5
SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=10000.0,
)
HEADS: list[
    tuple[str, str, bool, dict[str, bool]]
] = [  # rival, what, whether with a draft vocabulary, switches
    ("speculators", "draft vocabulary", True, {}),
    ("speculators", "full vocabulary", False, {}),
    ("speculators", "norm_before_residual", True, {"norm_before_residual": True}),
    ("speculators", "EAGLE-3.1", True, {"fc_norm": True, "norm_output": True}),
    ("modelopt", "draft vocabulary", True, {}),
    ("modelopt", "full vocabulary", False, {}),
    ("modelopt", "as exported by default", True, {"as_exported": True, "input_layernorm": True}),
    ("modelopt", "state normed twice", True, {"input_layernorm": True}),
]
# ModelOpt's training puts the state through `input_layernorm` and `hidden_norm`, engines through the latter alone
DIFFERENT = "state normed twice"


def write_target_and_inputs(folder: Path, draft_vocab: bool) -> None:
    """A random target, a random text with features, and the target ids of the draft vocabulary."""
    torch.manual_seed(1)
    LlamaForCausalLM(SHAPE).save_pretrained(folder / "target")
    tokens = torch.randint(SHAPE.vocab_size, (LENGTH,))
    features = torch.randn(LENGTH, 3 * SHAPE.hidden_size)
    some = torch.randperm(SHAPE.vocab_size)[:DRAFT_VOCAB].sort().values
    drafts = some if draft_vocab else torch.arange(SHAPE.vocab_size)
    save_file({"tokens": tokens, "features": features, "drafts": drafts}, folder / "inputs")


def make_head(python: str, rival: str, request: HeadRequest) -> None:
    """Have a rival write its head and logits."""
    command = [python, "-m", f"tests.formats.rivals.{rival}_head", json.dumps(asdict(request))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{rival} made no head:\n{done.stderr[-3000:]}"


@torch.no_grad()
def largest_difference(folder: Path) -> float:
    """The largest difference of any logit [D] in any step; slot i of step s reads token i + 1 + s."""
    head: Any = read_head(folder / "imported")
    target = Target.load(folder / "target", dtype=torch.float32)
    inputs, theirs = load_file(folder / "inputs"), load_file(folder / "head.logits")
    text = Example(
        inputs["tokens"],
        torch.ones(LENGTH, dtype=torch.bool),
        inputs["features"].unflatten(1, (3, -1)),
    )
    states = head.unroll(collate([text], head.taps), target.head, STEPS).states
    differences = []
    for step, state in enumerate(states):
        end = LENGTH - 2 - step  # beyond the text there is no token to read
        ours = head.logits(state, target.head)
        differences.append(float((ours[:end] - theirs[str(step)][:end]).abs().max()))
    return max(differences)


@pytest.mark.engine
@pytest.mark.parametrize(("rival", "what", "draft_vocab", "switches"), HEADS)
def test_logits_are_those_of_the_project_that_made_the_head(
    rival: str, what: str, draft_vocab: bool, switches: dict[str, bool], tmp_path: Path
) -> None:
    """In every one of four steps, each of which reads the state of the last."""
    python = os.environ.get(f"EAGLE_{rival.upper()}_PYTHON")
    if python is None:
        pytest.skip(
            f"no {rival}: set EAGLE_{rival.upper()}_PYTHON to the python of an environment that holds it"
        )
    write_target_and_inputs(tmp_path, draft_vocab)
    target, out = str(tmp_path / "target"), str(tmp_path / "head")
    make_head(python, rival, HeadRequest(target, str(tmp_path / "inputs"), out, STEPS, switches))
    import_head(out, tmp_path / "imported", target)
    assert (largest_difference(tmp_path) < BOUND) == (what != DIFFERENT)
