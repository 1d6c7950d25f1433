"""Random heads of DFlash, DSpark, XPress and P-EAGLE by the code of `speculators`: the same logits here."""

# E guesses, S slots, T tokens, V vocabulary

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
from eagle.formats.reading.foreign import read_head
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

RIVAL = "speculators"
SCRIPT = "speculators_blocks"
LENGTH = 96
SLOTS = 6
BLOCKS = 2
TAPS = (2, 4, 6)
BLOCK = {"slots": SLOTS, "blocks": BLOCKS}
# small tables, so that their products with states are not small
DFLASH2 = {**BLOCK, "sample_from_anchor": False, "selector_rank": 12, "selector_top_k": 7}
DSPARK = {**BLOCK, "sample_from_anchor": True, "markov": "vanilla"}
# the depths that a head is read with, whatever it was trained for
PEAGLE = {"depths": 8, "blocks": BLOCKS}
# method, their switches, our settings
HEADS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dflash", {"sample_from_anchor": False}, {**BLOCK, "sample_from_anchor": False}),
    ("dflash", {"sample_from_anchor": True}, {**BLOCK, "sample_from_anchor": True}),
    ("dflash2", {"selector_rank": 12, "selector_top_k": 7}, DFLASH2),
    (
        "dflash2",
        {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 7},
        {**DFLASH2, "conv_kernel_size": 3, "conv_group_size": 8},
    ),
    ("dspark", {}, DSPARK),
    ("dspark", {"markov_head_type": "gated"}, {**DSPARK, "markov": "gated"}),
    ("dspark", {"markov_head_type": "rnn"}, {**DSPARK, "markov": "rnn"}),
    (
        "xpress",
        {"xpress_rank": 8, "xpress_mlp_ratio": 3},
        {**BLOCK, "sample_from_anchor": False, "rank": 8, "mlp_ratio": 3, "passes": 6},
    ),
    (
        "xpress",
        {"xpress_rank": 8, "num_jacobi_passes": 4, "sample_from_anchor": True},
        {**BLOCK, "sample_from_anchor": True, "rank": 8, "passes": 4},
    ),
    ("peagle", {}, PEAGLE),
    ("peagle", {"norm_before_residual": True}, {**PEAGLE, "norm_before_residual": True}),
    ("peagle", {"fc_norm": True}, {**PEAGLE, "fc_norm": True}),
]


def write_inputs(folder: Path) -> None:
    """Write a random target, a random text with features, and where blocks are guessed."""
    # a range that makes logits differ by about one
    write_target(folder, initializer_range=0.1)
    inputs = {
        # the last token is the mask
        "tokens": torch.randint(VOCAB_SIZE - 1, (LENGTH,)),
        "features": torch.randn(LENGTH, len(TAPS), WIDTH),
        # at the beginning, beside one another, and where a block just ends in the text
        "anchors": torch.tensor([1, 2, 5, 30, 31, 60, LENGTH - SLOTS - 1]),
        "taps": torch.tensor(TAPS),
    }
    save_file(inputs, folder / "inputs")


@torch.no_grad()
def compute_logits(head: Any, folder: Path) -> tuple[Tensor, Tensor]:
    """Return [levels, S, V] at all slots, by the same weights, and the logits that the states alone have."""
    inputs = load_file(folder / "inputs")
    text = Example(inputs["tokens"], torch.arange(LENGTH) >= 2, inputs["features"])
    batch = collate([text], head.taps)
    target_head = load_target(folder).head
    levels = head.eval().draft_levels(batch, target_head, SLOTS)
    chosen = torch.stack([logits(states) for states, logits in levels])
    return chosen, torch.stack([target_head.logits(states[:, :WIDTH]) for states, _ in levels])


def compare_candidates(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs [E, V] among the candidates of both sides; other tokens cannot be drafted there."""
    is_candidate = theirs > -100
    laws = []
    for logits in (ours, theirs):
        log_probs = logits.masked_fill(~is_candidate, -100).log_softmax(-1)
        laws.append(log_probs.where(is_candidate, 0))
    return laws[0], laws[1]


def compare_plain(ours: Tensor, theirs: dict[str, Tensor], has_slot: Tensor) -> list[float]:
    """Return the difference of the logits before DFlash2's selector; nothing for other methods."""
    if "slot_logits" not in theirs:
        return []
    return [largest_difference(ours, theirs["slot_logits"][has_slot])]


@pytest.mark.engine
@pytest.mark.parametrize(("kind", "switches", "settings"), HEADS, ids=str)
def test_logits_are_those_of_speculators(
    kind: str,
    switches: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Of every level, after anchors at the beginning of a text, beside one another and at its end."""
    find_python(RIVAL)
    write_inputs(tmp_path)
    asked = {"kind": kind, "blocks": BLOCKS, **switches}
    theirs = run_rival(RIVAL, SCRIPT, tmp_path, steps=SLOTS, switches=asked)
    head: Any = read_head(tmp_path / "head", str(tmp_path / "target"))
    expected = {"kind": kind, "taps": TAPS, **settings}

    assert {name: getattr(head.settings, name) for name in expected} == expected

    ours, plain = compute_logits(head, tmp_path)
    # the text's last token has none after it
    has_slot = theirs["slots"] < ours.shape[1]
    levels = theirs["levels"][has_slot]
    slots = theirs["slots"][has_slot]
    logits = theirs["logits"][has_slot]
    found = ours[levels, slots]
    if kind == "dflash2":
        found, logits = compare_candidates(found, logits)
    # [E] the largest difference of each guess
    apart = (found - logits).abs().amax(1)
    differences = [float(apart[levels == level].max()) for level in range(len(ours))]
    differences += compare_plain(plain[levels, slots], theirs, has_slot)
    # vLLM, which reads such folders, does not know the norms of P-EAGLE's taps
    if "fc_norm" not in settings:
        target = load_target(tmp_path)
        export(head.bind(target.head), target.config, "speculators", tmp_path / "export")
        load = {**asked, "load": True}
        loaded = run_rival(RIVAL, SCRIPT, tmp_path, steps=SLOTS, switches=load, out="export")
        differences.append(largest_difference(loaded["logits"], theirs["logits"]))
    spread = float(logits.std())
    row = {"guesses": len(apart), "differences": differences, "spread_of_logits": spread}
    print(json.dumps({"method": kind, **switches, **row}))

    # nan is less than nothing
    assert all(difference < BOUND for difference in differences)
    assert spread > BOUND
