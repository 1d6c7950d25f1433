"""Random heads of Medusa, Hydra, MLP speculators and ModelOpt by their own code: the same logits here, and back."""

# T tokens, H hidden, V vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle.core.examples import Example, collate
from eagle.formats.export import export
from eagle.formats.reading.foreign import import_head, read_head
from tests.formats.rival_heads import (
    BOUND,
    VOCAB_SIZE,
    find_python,
    largest_difference,
    load_target,
    run_rival,
    write_target,
)

LENGTH = 64
LEVELS = 5  # which Medusa's loader makes whatever a config says
SCRIPTS = {
    "medusa": "medusa_head",
    "hydra": "hydra_head",
    "speculator": "speculator_head",
    "modelopt": "modelopt_medusa",
}
# by which a head goes back to its authors; ModelOpt reads none
EXPORTERS = {"medusa": "medusa", "hydra": "hydra", "speculator": "fms"}
HEADS: list[tuple[str, dict[str, bool]]] = [
    ("medusa", {}),
    ("medusa", {"two_layers": True}),
    ("medusa", {"version2": True}),
    ("hydra", {}),
    ("hydra", {"four_layers": True}),
    ("hydra", {"prefix": True, "four_layers": True}),
    ("speculator", {}),
    ("speculator", {"tied": True, "scaled": True}),
    ("modelopt", {}),
    ("modelopt", {"two_layers": True}),
]


def write_inputs(folder: Path) -> None:
    """Write a random target, and a random text with its states after the final norm."""
    model = write_target(folder, layers=3)
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,))
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0].contiguous()
    vocab_size = torch.tensor(VOCAB_SIZE)
    save_file({"tokens": tokens, "hidden": hidden, "vocab_size": vocab_size}, folder / "inputs")


@torch.no_grad()
def compute_logits(head: Any, folder: Path) -> list[Tensor]:
    """Return [T, V] of every level; a slot reads the state of its position."""
    inputs = load_file(folder / "inputs")
    # a slot before these is no anchor of a draft
    supervised = torch.arange(LENGTH) >= 2
    text = Example(inputs["tokens"], supervised, inputs["hidden"][:, None])
    batch = collate([text], head.taps)
    levels = head.eval().draft_levels(batch, load_target(folder).head, LEVELS)
    return [logits(states) for states, logits in levels]


def list_differences(ours: list[Tensor], theirs: dict[str, Tensor]) -> list[float]:
    """Return the largest difference of each level, at slots that all levels have tokens for."""
    end = LENGTH - LEVELS - 1
    differences = []
    for level, logits in enumerate(ours):
        differences.append(largest_difference(logits[:end], theirs[str(level)][:end]))
    return differences


@pytest.mark.engine
@pytest.mark.parametrize(("rival", "switches"), HEADS, ids=str)
def test_logits_are_those_of_the_code_that_published_the_method(
    rival: str,
    switches: dict[str, bool],
    tmp_path: Path,
) -> None:
    """Of a head that it made, imported here; and of our export of that, which its own loader reads."""
    find_python(rival)
    write_inputs(tmp_path)
    (tmp_path / "head").mkdir()
    script = SCRIPTS[rival]
    theirs = run_rival(rival, script, tmp_path, steps=LEVELS, switches=switches)
    import_head(tmp_path / "head", tmp_path / "ours", str(tmp_path / "target"))
    # the head that they made, with our code
    head: Any = read_head(tmp_path / "ours")
    ours = compute_logits(head, tmp_path)
    differences = list_differences(ours, theirs)
    again = []
    if rival in EXPORTERS:
        target = load_target(tmp_path)
        export(
            head.bind(target.head),
            target.config,
            EXPORTERS[rival],
            tmp_path / "export",
        )
        # and the same weights back in their loader
        load = {**switches, "load": True}
        loaded = run_rival(
            rival,
            script,
            tmp_path,
            steps=LEVELS,
            switches=load,
            out="export",
        )
        again = list_differences(ours, loaded)
    spread = float(theirs["0"].std())
    row = {"differences": differences, "again": again, "std": spread}
    print(json.dumps({"rival": rival, "switches": switches, **row}))

    assert max(differences + again) < BOUND < spread
