"""Random heads of DFlash, DSpark and P-EAGLE by the code of `speculators`: the same logits here."""

# E guesses, S slots, T tokens, V vocabulary

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
from eagle.formats.reading.foreign import read_head
from tests.formats.rivals.random_head import HeadRequest

ROOT = Path(__file__).parents[2]
LENGTH, SLOTS, BLOCKS, BOUND = 96, 6, 2, 1e-5
TAPS = (2, 4, 6)
SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    initializer_range=0.1,  # logits that differ by about one
)
BLOCK = {"slots": SLOTS, "blocks": BLOCKS}
DSPARK = {**BLOCK, "sample_from_anchor": True, "markov": "vanilla"}
MASKS = {"depths": SLOTS, "blocks": BLOCKS}
HEADS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # method, their switches, our settings
    ("dflash", {"sample_from_anchor": False}, {**BLOCK, "sample_from_anchor": False}),
    ("dflash", {"sample_from_anchor": True}, {**BLOCK, "sample_from_anchor": True}),
    ("dspark", {}, DSPARK),
    ("dspark", {"markov_head_type": "gated"}, {**DSPARK, "markov": "gated"}),
    ("dspark", {"markov_head_type": "rnn"}, {**DSPARK, "markov": "rnn"}),
    ("peagle", {}, MASKS),
    ("peagle", {"norm_before_residual": True}, {**MASKS, "norm_before_residual": True}),
    ("peagle", {"fc_norm": True}, {**MASKS, "fc_norm": True}),
]


def write_target_and_inputs(folder: Path) -> None:
    """A random target, a random text with features, and where blocks are guessed."""
    torch.manual_seed(1)
    LlamaForCausalLM(SHAPE).save_pretrained(folder / "target")
    inputs = {
        "tokens": torch.randint(
            SHAPE.vocab_size - 1, (LENGTH,)
        ),  # the last stands for what is masked
        "features": torch.randn(LENGTH, len(TAPS), SHAPE.hidden_size),
        "anchors": torch.tensor([1, 2, 5, 30, 31, 60, LENGTH - SLOTS - 1]),
        "taps": torch.tensor(TAPS),
    }
    save_file(inputs, folder / "inputs")


def run_rival(
    python: str, kind: str, switches: dict[str, Any], folder: Path, out: str = "head"
) -> dict[str, Tensor]:
    """Logits [E, V] by slot and level, from a head that `speculators` makes and saves, or loads."""
    asked = {"kind": kind, "blocks": BLOCKS, **switches}
    request = HeadRequest(
        str(folder / "target"), str(folder / "inputs"), str(folder / out), SLOTS, asked
    )
    command = [python, "-m", "tests.formats.rivals.speculators_blocks", json.dumps(asdict(request))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"speculators made no head:\n{done.stderr[-3000:]}"
    return load_file(folder / f"{out}.logits")


@torch.no_grad()
def our_logits(kind: str, settings: dict[str, Any], folder: Path) -> Tensor:
    """[levels, S, V] at all slots, by the same weights."""
    inputs, target = (
        load_file(folder / "inputs"),
        Target.load(folder / "target", dtype=torch.float32),
    )
    head: Any = read_head(folder / "head", str(folder / "target"))
    found = {name: getattr(head.settings, name) for name in ("kind", "taps", *settings)}
    assert found == {
        "kind": kind,
        "taps": TAPS,
        **settings,
        **({"depths": 8} if kind == "peagle" else {}),
    }
    text = Example(inputs["tokens"], torch.arange(LENGTH) >= 2, inputs["features"])
    levels = head.eval().draft_levels(collate([text], head.taps), target.head, SLOTS)
    return torch.stack([logits(states) for states, logits in levels])


def compare(
    python: str, kind: str, switches: dict[str, Any], settings: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """The largest difference of any logit in each level, and from the head that they load; how far logits spread."""
    write_target_and_inputs(folder)
    theirs, ours = run_rival(python, kind, switches, folder), our_logits(kind, settings, folder)
    named = theirs["slots"] < ours.shape[1]  # the text's last token has none behind it
    levels, slots, logits = (theirs[name][named] for name in ("levels", "slots", "logits"))
    apart = (ours[levels, slots] - logits).abs().amax(1)
    differences = [float(apart[levels == level].max()) for level in range(len(ours))]
    if not settings.get(
        "fc_norm"
    ):  # which vLLM, that reads such folders, does not know of P-EAGLE's
        head, target = (
            read_head(folder / "head"),
            Target.load(folder / "target", dtype=torch.float32),
        )
        export(head.bind(target.head), target.config, "speculators", folder / "export")
        again = run_rival(python, kind, {**switches, "load": True}, folder, "export")
        differences.append(float((again["logits"] - theirs["logits"]).abs().max()))
    return {
        "guesses": len(apart),
        "differences": differences,
        "spread_of_logits": float(logits.std()),
    }


@pytest.mark.engine
@pytest.mark.parametrize(("kind", "switches", "settings"), HEADS, ids=lambda value: str(value))
def test_logits_are_those_of_speculators(
    kind: str, switches: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Of every level, behind anchors at the beginning of a text, beside one another and at its end."""
    python = os.environ.get("EAGLE_SPECULATORS_PYTHON")
    if python is None:
        pytest.skip(
            "no speculators: set EAGLE_SPECULATORS_PYTHON to the python of an environment that holds it"
        )
    row = compare(python, kind, switches, settings, tmp_path)
    print(json.dumps({"method": kind, **switches, **row}))
    assert max(row["differences"]) < BOUND < row["spread_of_logits"]
