"""The limit of an unrolled step is what a rendering does that leaves out all it can; the page shows the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from bench.rivals.serve import Work
from bench.sides import ROOT, Side, measure
from bench.train_cost import Sizes, anchors, eagle3_flops
from bench.train_report import (
    eagle3_goals,
    eagle3_memory_table,
    eagle3_table,
    machines_table,
    of_limit,
    ratio,
    smaller,
)
from bench.train_speed import EAGLE3_HEAD, answers, full

SHAPE = Sizes(vocab=11, width=8, mlp=12, heads=4, key_heads=2, head_width=3)
MASKS = ["0011111111", "0010011101100", "1100000111100"]


def counted(mask: str, steps: int, *, head_trained: bool) -> int:
    """Operations of a loop over single slots that computes a thing when it is first asked for."""
    vocab, width, mlp, heads, key_heads, head_width = SHAPE
    asks, keys = heads * head_width, key_heads * head_width
    supervised = [mark == "1" for mark in mask]

    def made(*size: int) -> Tensor:
        return torch.randn(*size, requires_grad=True)

    fc, head = made(3 * width, width), made(width, vocab).requires_grad_(head_trained)
    by_token, by_state = ([made(width, size) for size in (asks, keys, keys)] for _ in range(2))
    output, (up, gate), down = made(asks, width), (made(width, mlp), made(width, mlp)), made(mlp, width)
    tokens, features, true = torch.randn(len(mask), width), torch.randn(len(mask), 3 * width), torch.randn(width, vocab)

    @cache
    def of_token(place: int, kind: int) -> Tensor:
        return tokens[place : place + 1] @ by_token[kind]

    @cache
    def state(slot: int, step: int) -> Tensor:
        """What a step reads: the target's features, or the step before."""
        return features[slot : slot + 1] @ fc if step == 0 else block(slot, step - 1)

    @cache
    def key_and_value(slot: int, step: int) -> list[Tensor]:
        parts = [of_token(slot + 1 + step, kind) + state(slot, step) @ by_state[kind] for kind in (1, 2)]
        return [part.view(key_heads, 1, head_width).repeat_interleave(heads // key_heads, 0) for part in parts]

    @cache
    def block(slot: int, step: int) -> Tensor:
        query = of_token(slot + 1 + step, 0) + state(slot, step) @ by_state[0]
        seen = [key_and_value(past, 0) for past in range(slot + 1)]
        seen += [key_and_value(slot, own) for own in range(1, step + 1)]
        key, value = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
        law = (query.view(heads, 1, head_width) @ key.transpose(1, 2)).softmax(-1)
        x = state(slot, step) + (law @ value).view(1, -1) @ output
        return x + (F.silu(x @ gate) * (x @ up)) @ down

    @cache
    def teacher(place: int) -> Tensor:
        return (tokens[place : place + 1] @ true).softmax(-1)

    with FlopCounterMode(display=False) as counter:
        loss = torch.zeros(())
        for slot in range(len(mask) - 2):
            for step in range(steps):
                if all(supervised[slot + 2 : slot + 3 + step]) and slot + 2 + step < len(mask):
                    loss = loss - (teacher(slot + 1 + step) * (block(slot, step) @ head).log_softmax(-1)).sum()
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("head_trained", [False, True])
def test_necessary_operations_are_those_of_a_lazy_loop(mask: str, steps: int, head_trained: bool) -> None:
    """Forward and backward, counted by torch at every matrix product."""
    supervised = [place > 1 and mark == "1" for place, mark in enumerate(mask)]
    assert eagle3_flops(SHAPE, supervised, steps, head_trained) == counted(mask, steps, head_trained=head_trained)


def test_anchors_are_the_slots_whose_drafts_are_supervised_all_the_way() -> None:
    """Slot i counts in step s if tokens i + 2 to i + 2 + s are supervised; the first two tokens are nobody's."""
    supervised = [mark == "1" for mark in "1101110010111"]
    pairs = {
        (slot, step)
        for slot in range(len(supervised) - 2)
        for step in range(4)
        if slot + 2 + step < len(supervised) and all(supervised[slot + 2 : slot + 3 + step])
    }
    assert {(slot, step) for slot, count in anchors(supervised, 4) for step in range(count)} == pairs


@pytest.mark.parametrize(("length", "supervised"), [(256, 0.75), (1024, 0.72), (2048, 1.0)])
def test_answers_make_the_share_that_is_asked_for(length: int, supervised: float) -> None:
    """To a token in each answer, and they end with the text: nothing is cut off."""
    spans = answers(length, supervised)
    assert sum(stop - start for start, stop in spans) == pytest.approx(supervised * length, abs=len(spans))
    assert spans[-1][1] == length


def test_a_row_is_judged_by_the_rival_nearest_to_it() -> None:
    """Each rival beside ours with the same tensors; goals hold for fp32 alone."""
    row = {"dtype": "fp32", "length": 1024, "steps": 7, "all": True}
    row |= {"speculators": 10, "ours_frozen": 25, "limit_frozen": 40, "speculators_mb": 100, "ours_frozen_mb": 20}
    row |= {"modelopt": 8, "ours_trained": 24, "limit_trained": 30, "modelopt_mb": 200, "ours_trained_mb": 30}
    assert (ratio(row), of_limit(row), smaller(row)) == (2.5, 0.625, 0.2)
    assert eagle3_goals(row) == {"ratio": 2.1, "of_limit": 0.7, "memory": 0.35}
    assert eagle3_goals({**row, "all": False}) == {"ratio": 2.7}
    assert eagle3_goals({**row, "dtype": "bf16"}) == {}


@pytest.mark.parametrize("show", [eagle3_table, eagle3_memory_table])
def test_the_page_shows_the_result_file(show: Callable[[Any], str]) -> None:
    """What stands in the documents is what the benchmark prints for the committed results."""
    results = json.loads((ROOT / "docs/results/unroll_speed.json").read_text())
    assert show(results) in (ROOT / "docs/measurements/training-speed.md").read_text()


def test_the_short_tables_show_the_result_files() -> None:
    """Every row of the short tables of docs/benchmarks.md is a row of a result file."""
    eagle1, eagle3 = (
        json.loads((ROOT / f"docs/results/{name}_speed.json").read_text())["rows"] for name in ("train", "unroll")
    )
    shown = [
        f"| {row['dtype']} | {row['vocab']:,} | {row['ratio']:.2f} | {row['ours_mb'] / row['published_mb']:.2f} of it |"
        for row in eagle1
        if row["texts"] == "real" and row["length"] == 1024
    ] + [
        f"| {row['dtype']} | {row['length']:,} | 7 | {ratio(row):.2f} | {smaller(row):.2f} of it |"
        for row in eagle3
        if row["all"] and row["steps"] == 7 and row["length"] in (256, 2048)
    ]
    lines = (ROOT / "docs/benchmarks.md").read_text().splitlines()
    assert shown == [line for line in lines if line.endswith(" of it |")]


def test_the_page_shows_every_machine() -> None:
    """Ratios of one machine are of that machine: all that have a result file stand side by side."""
    files = sorted((ROOT / "docs/results").glob("train_speed*.json"))
    every = machines_table(json.loads(file.read_text()) for file in files)
    assert every in (ROOT / "docs/measurements/training-speed.md").read_text()
    assert len(every.splitlines()) == 2 + len(files)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Two EAGLE-3 steps on a short text, all of it supervised."""
    LlamaForCausalLM(EAGLE3_HEAD.target_config(8192)).save_pretrained(tmp_path / "target")
    return Work(str(tmp_path / "target"), EAGLE3_HEAD.vocab, [[(64, answers(64, 1))]], "fp32", 2, True)


@pytest.mark.slow
def test_our_side_makes_steps_and_measures_its_memory(work: Work) -> None:
    """A process answers with seconds and megabytes, and what it trains is what the rivals train."""
    with Side("ours_trained", sys.executable, "eagle_step", work) as side:
        assert side.trained == 1577984
        assert side.ask("pass") > 0
        assert 0 < side.ask("memory") < 1000


@pytest.mark.slow
def test_a_side_that_fails_says_why(work: Work) -> None:
    """What it printed before it stopped is in the error."""
    with pytest.raises(ValueError, match=r"ours_trained stopped with code 1(.|\n)*nowhere"):
        Side("ours_trained", sys.executable, "eagle_step", replace(work, target="/nowhere"))


@pytest.mark.slow
@pytest.mark.long
def test_both_eagle1_steps_are_measured(tmp_path: Path) -> None:
    """Both train the same weights, and a pass is over all batches."""
    sizes = Sizes(97, 64, 176, 4, 2, 16)
    sizes.target_config(97).save_pretrained(tmp_path)
    row = measure("eagle1", Work(str(tmp_path), 97, [[full(64), full(32)], [full(48)]], "bf16"), sizes, {}, 1)
    assert row.keys() == {f"{side}{suffix}" for side in ("ours", "published") for suffix in ("", "_best", "_mb")} | {
        *("peak", "samples")
    }
    assert min(row[name] for name in row if not name.endswith("_mb")) > 0
