"""Heads made by `speculators` and `nvidia-modelopt`, imported: are the logits theirs?

    python bench/foreign_logits.py --speculators PYTHON --modelopt PYTHON

Each PYTHON is the interpreter of an environment that holds that package. It writes a random head the way its project
saves one, and its logits on a random text for several steps of the draft, each of which reads the state of the last.
"""

# T tokens, H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import made_on
from bench.rivals.foreign import Asked
from eagle import Target
from eagle.data.examples import Example, collate
from eagle.formats.foreign import imported, inspect, read_head
from eagle.log import script

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/foreign_logits.json"
STEPS, LENGTH, SAID = 4, 96, 160
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
HEADS: dict[str, list[tuple[str, bool, dict[str, bool]]]] = {  # of each rival: what, with a draft vocabulary, switches
    "speculators": [
        ("draft vocabulary", True, {}),
        ("full vocabulary", False, {}),
        ("norm_before_residual", True, {"norm_before_residual": True}),
        ("EAGLE-3.1", True, {"fc_norm": True, "norm_output": True}),
    ],
    "modelopt": [
        ("draft vocabulary", True, {}),
        ("full vocabulary", False, {}),
        ("as exported by default", True, {"as_exported": True, "input_layernorm": True}),
        ("state normed twice", True, {"input_layernorm": True}),
    ],
}
# ModelOpt's training puts the state through `input_layernorm` and `hidden_norm`, engines through the latter alone
EXPLAINED = "state normed twice"


def prepared(folder: Path) -> None:
    """A random target, a random text, and the tokens that a head with a draft vocabulary may say."""
    torch.manual_seed(1)
    LlamaForCausalLM(SHAPE).save_pretrained(folder / "target")
    tokens = torch.randint(SHAPE.vocab_size, (LENGTH,))
    features = torch.randn(LENGTH, 3 * SHAPE.hidden_size)
    some = torch.randperm(SHAPE.vocab_size)[:SAID].sort().values
    for name, drafts in (("some", some), ("all", torch.arange(SHAPE.vocab_size))):
        save_file({"tokens": tokens, "features": features, "drafts": drafts}, folder / name)


def made(python: str, rival: str, asked: Asked) -> dict[str, str]:
    """Have a rival write its head and logits; the versions of what it used."""
    command = [python, "-m", f"bench.rivals.{rival}_head", json.dumps(asdict(asked))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ValueError(f"{rival} made no head:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def ours(head: Any, target: Target, inputs: Path) -> list[Tensor]:
    """[T - 2, D] of each step: slot i reads the features of token i, and in step s token i + 1 + s."""
    held = load_file(inputs)
    text = Example(held["tokens"], torch.ones(LENGTH, dtype=torch.bool), held["features"].unflatten(1, (3, -1)))
    states = head.unroll(collate([text], head.taps), target.head, STEPS).states
    return [head.logits(state, target.head) for state in states]


def compared(folder: Path, python: str, rival: str, switches: dict[str, bool], inputs: Path) -> dict[str, Any]:
    """The largest difference of any logit in each step, and what was imported."""
    asked = Asked(str(folder / "target"), str(inputs), str(folder / "head"), STEPS, switches=switches)
    versions, target = made(python, rival, asked), Target.load(folder / "target", dtype=torch.float32)
    print(imported(asked.out, folder / "out", asked.target))  # what it writes is what is asked below
    found, true = ours(read_head(folder / "out"), target, inputs), load_file(f"{asked.out}.logits")
    differences = [
        # beyond the text there is no token to read
        float((own[: LENGTH - 2 - step] - true[str(step)][: LENGTH - 2 - step]).abs().max())
        for step, own in enumerate(found)
    ]
    spread = float(torch.stack([one.std() for one in found]).mean())
    fatal = [str(one) for one in inspect(asked.out, asked.target).findings if one.fatal]
    return {"differences": differences, "spread_of_logits": spread, "fatal_findings": fatal, "versions": versions}


def main(argv: list[str]) -> None:
    """Compare all heads and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators")
    parser.add_argument("--modelopt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for rival, heads in HEADS.items():
        if (python := getattr(args, rival)) is None:
            continue
        for what, some, switches in heads:
            with TemporaryDirectory() as made_here:
                folder = Path(made_here)
                prepared(folder)
                found = compared(folder, python, rival, switches, folder / ("some" if some else "all"))
            results.setdefault(rival, {"versions": found.pop("versions")})[what] = found
            print(rival, what, found)
    bad = [what for rival in results.values() for what, found in rival.items() if worst(found) > BOUND]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(made_on(bound=BOUND, steps=STEPS, tokens=LENGTH, heads=results), indent=2) + "\n")
    if left := [what for what in bad if what != EXPLAINED]:
        raise SystemExit(f"further apart than {BOUND}: {left}")


def worst(found: dict[str, Any]) -> float:
    """The largest difference of any step."""
    return max(found.get("differences", [0.0]))


if __name__ == "__main__":
    script(main)
