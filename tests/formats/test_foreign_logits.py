"""Random heads made by `speculators` and `nvidia-modelopt`: imported, they have the logits that they have there."""

# T tokens, H hidden, D draft vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle.core.examples import Example, collate
from eagle.formats.reading.foreign import import_head, read_head
from tests.formats.rival_heads import (
    BOUND,
    VOCAB_SIZE,
    WIDTH,
    find_python,
    largest_difference,
    load_target,
    run_rival,
    write_target,
)

STEPS = 4
LENGTH = 96
DRAFT_VOCAB = 160
EAGLE31 = {"fc_norm": True, "norm_output": True}
# the default of speculators' trainer
JOINT_NORM = {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
}
AS_EXPORTED = {"as_exported": True, "input_layernorm": True}
# rival, size of the draft vocabulary, switches
HEADS: list[tuple[str, int, dict[str, bool]]] = [
    ("speculators", DRAFT_VOCAB, {}),
    ("speculators", VOCAB_SIZE, {}),
    ("speculators", DRAFT_VOCAB, {"norm_before_residual": True}),
    ("speculators", DRAFT_VOCAB, EAGLE31),
    ("speculators", DRAFT_VOCAB, JOINT_NORM),
    ("modelopt", DRAFT_VOCAB, {}),
    ("modelopt", VOCAB_SIZE, {}),
    ("modelopt", DRAFT_VOCAB, AS_EXPORTED),
    ("modelopt", DRAFT_VOCAB, {"input_layernorm": True}),
]
# ModelOpt's training puts the state through `input_layernorm` and `hidden_norm`, engines through the latter alone
DIFFERENT = {"input_layernorm": True}


def write_inputs(folder: Path, draft_vocab: int) -> None:
    """Write a random target, a random text with features, and the target ids of the draft vocabulary."""
    write_target(folder)
    inputs = {
        "tokens": torch.randint(VOCAB_SIZE, (LENGTH,)),
        # no states of the target: a head is a function of whatever it reads
        "features": torch.randn(LENGTH, 3 * WIDTH),
        "drafts": torch.randperm(VOCAB_SIZE)[:draft_vocab].sort().values,
    }
    save_file(inputs, folder / "inputs")


@torch.no_grad()
def find_largest_difference(folder: Path, theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any logit [D] in any step; slot i of step s reads token i + 1 + s."""
    head: Any = read_head(folder / "imported")
    target = load_target(folder).head
    inputs = load_file(folder / "inputs")
    # all slots are compared
    supervised = torch.ones(LENGTH, dtype=torch.bool)
    text = Example(inputs["tokens"], supervised, inputs["features"].unflatten(1, (3, -1)))
    states = head.unroll(collate([text], head.taps), target, STEPS).states
    differences = []
    for step, state in enumerate(states):
        # after the text there is no token to read
        end = LENGTH - 2 - step
        logits = head.logits(state, target)
        differences.append(largest_difference(logits[:end], theirs[str(step)][:end]))
    return max(differences)


@pytest.mark.engine
@pytest.mark.parametrize(("rival", "draft_vocab", "switches"), HEADS, ids=str)
def test_logits_are_those_of_the_project_that_made_the_head(
    rival: str,
    draft_vocab: int,
    switches: dict[str, bool],
    tmp_path: Path,
) -> None:
    """In every one of four steps, each of which reads the state of the last."""
    find_python(rival)
    write_inputs(tmp_path, draft_vocab)
    theirs = run_rival(
        rival,
        f"{rival}_head",
        tmp_path,
        steps=STEPS,
        switches=switches,
    )
    import_head(tmp_path / "head", tmp_path / "imported", str(tmp_path / "target"))
    difference = find_largest_difference(tmp_path, theirs)

    assert (difference < BOUND) == (switches != DIFFERENT)
