"""Random heads of Medusa, Hydra, MLP speculators and ModelOpt by their own code: the same logits here, and back."""

# T tokens, H width, V vocabulary

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
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.core.examples import Example, collate
from eagle.formats.export import export
from eagle.formats.reading.foreign import import_head, read_head
from tests.formats.rivals.random_head import HeadRequest

ROOT = Path(__file__).parents[2]
LENGTH, BOUND = 64, 1e-5
LEVELS = 5  # which Medusa's loader makes whatever a config says
SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=10000.0,
)
HEADS: list[tuple[str, str, dict[str, bool]]] = [  # rival, exporter, switches
    ("medusa", "medusa", {}),
    ("medusa", "medusa", {"two_layers": True}),
    ("medusa", "medusa", {"version2": True}),
    ("hydra", "hydra", {}),
    ("hydra", "hydra", {"four_layers": True}),
    ("hydra", "hydra", {"prefix": True, "four_layers": True}),
    ("speculator", "fms", {}),
    ("speculator", "fms", {"tied": True, "scaled": True}),
    ("modelopt", "", {}),
    ("modelopt", "", {"two_layers": True}),
]
SCRIPTS = {"modelopt": "modelopt_medusa"}


def write_target_and_inputs(folder: Path) -> None:
    """A random target, and a random text with its states behind the final norm."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(SHAPE)
    model.save_pretrained(folder / "target")
    tokens = torch.randint(SHAPE.vocab_size, (LENGTH,))
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0].contiguous()
    save_file(
        {"tokens": tokens, "hidden": hidden, "vocab_size": torch.tensor(SHAPE.vocab_size)},
        folder / "inputs",
    )


def run_rival(rival: str, request: HeadRequest) -> list[Tensor]:
    """[T, V] of every level, from the code of the head's authors."""
    name, source = rival.upper(), os.environ.get(f"EAGLE_{rival.upper()}_SOURCE")
    command = [
        os.environ[f"EAGLE_{name}_PYTHON"],
        "-m",
        f"tests.formats.rivals.{SCRIPTS.get(rival, f'{rival}_head')}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": source} if source else {}
    done = subprocess.run(
        [*command, json.dumps(asdict(request))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{rival} failed:\n{done.stderr[-3000:]}"
    logits = load_file(f"{request.out}.logits")
    return [logits[str(level)] for level in range(LEVELS)]


@torch.no_grad()
def our_logits(head: Any, folder: Path) -> list[Tensor]:
    """[T, V] of every level at every slot; a slot reads the state of its place."""
    inputs, target = (
        load_file(folder / "inputs"),
        Target.load(folder / "target", dtype=torch.float32),
    )
    supervised = torch.arange(LENGTH) >= 2
    text = Example(inputs["tokens"], supervised, inputs["hidden"][:, None])
    levels = head.eval().draft_levels(collate([text], head.taps), target.head, LEVELS)
    return [logits(states) for states, logits in levels]


def list_differences(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """The largest difference of any logit in each level, at slots whose text has as many tokens behind them."""
    end = LENGTH - LEVELS - 1
    return [
        float((mine[:end] - other[:end]).abs().max())
        for mine, other in zip(ours, theirs, strict=True)
    ]


def compare(
    rival: str, engine: str, switches: dict[str, bool], folder: Path
) -> tuple[list[float], list[float], float]:
    """Differences of a head that they made, of its export that they read, and how far logits spread."""
    write_target_and_inputs(folder)
    target = str(folder / "target")
    request = HeadRequest(target, str(folder / "inputs"), str(folder / "theirs"), LEVELS, switches)
    (folder / "theirs").mkdir()
    theirs = run_rival(rival, request)
    import_head(folder / "theirs", folder / "ours", target)
    head: Any = read_head(folder / "ours")
    ours = our_logits(head, folder)
    if not engine:
        return list_differences(ours, theirs), [], float(theirs[0].std())
    loaded = Target.load(target, dtype=torch.float32)
    export(head.bind(loaded.head), loaded.config, engine, folder / "export")
    again = HeadRequest(
        target, request.inputs, str(folder / "export"), LEVELS, {**switches, "load": True}
    )
    return (
        list_differences(ours, theirs),
        list_differences(ours, run_rival(rival, again)),
        float(theirs[0].std()),
    )


@pytest.mark.engine
@pytest.mark.parametrize(("rival", "engine", "switches"), HEADS, ids=lambda value: str(value))
def test_logits_are_those_of_the_code_that_published_the_method(
    rival: str, engine: str, switches: dict[str, bool], tmp_path: Path
) -> None:
    """Of a head that it made, imported here; and of our export of that, which its own loader reads."""
    if f"EAGLE_{rival.upper()}_PYTHON" not in os.environ:
        pytest.skip(
            f"no {rival}: set EAGLE_{rival.upper()}_PYTHON, and EAGLE_{rival.upper()}_SOURCE to its checkout"
        )
    differences, again, spread = compare(rival, engine, switches, tmp_path)
    print(
        json.dumps(
            {
                "rival": rival,
                "switches": switches,
                "differences": differences,
                "again": again,
                "std": spread,
            }
        )
    )
    assert max(differences + again) < BOUND < spread
