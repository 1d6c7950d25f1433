"""What several processes learn is what one learns, its head whole or sharded, and whoever goes on with it.

`test_launchers.py` compares every method on one and on three processes; these heads stand for all in what is sharded.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import LENGTHS, MadeFeatures, on_ranks, train_made
from trained import apart, rows, weights

from eagle.core.examples import Example
from eagle.drafters.parts.objectives import align_steps
from eagle.formats.checkpoint import load_head
from eagle.recipe import TrainSection
from eagle.training import launch as sharding
from eagle.training.plan import Plan
from eagle.training.resume import WHOLE

STEPS = 6
KEPT = 3
TOLERANCE = 1e-6  # of weights of size 0.1 to 1, after steps of 1e-3: sums taken in another order
ASKED = (
    f"train.max_steps={STEPS}",
    f"train.checkpoint_every={KEPT}",
    "train.keep=9",
    f"train.validate_every={KEPT}",
)
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3", "steps": 7, "draft_vocab": 48, "fc_norm": True},
    "draft_model": {"kind": "draft_model", "layers": 1},
    # which divides by something of its own
    "paced": {
        "kind": "dflash",
        "blocks": 1,
        "slots": 4,
        "anchors": 6,
        "loss": "tokens",
        "d_pace": True,
    },
}


@cache
def make_plan() -> Plan:
    """Return the plan of these runs, by what is supervised in their conversations."""
    supervised = [length - length // 2 for length in LENGTHS]
    return Plan(supervised, TrainSection(out="nowhere", validation=0.1, max_steps=STEPS, epochs=12))


def average_parts() -> None:
    """Take a mean of parts instead of tokens."""
    Plan.weights = lambda self, number, parts: [1 / len(parts)] * len(parts)  # type: ignore[method-assign]


def read_anothers_part() -> None:
    """Let the last process read the part of the first."""
    find_parts = Plan.parts
    if int(os.environ["RANK"]) == 1:
        # of two processes, each reads the other's part
        Plan.parts = lambda *asked: find_parts(*asked)[::-1]  # type: ignore[method-assign]


def spoil_features() -> None:
    """Put NaN into the features of a conversation of the second step."""
    draw = MadeFeatures._draw
    bad = make_plan().step(1)[0]

    def draw_spoilt(features: MadeFeatures, index: int) -> Example:
        example = draw(features, index)
        factor = float("nan") if index == bad else 1
        return replace(example, features=example.features * factor)

    MadeFeatures._draw = draw_spoilt  # type: ignore[method-assign]


def swap_moments() -> None:
    """Let the moments of one process go to another."""
    split_like = sharding._split_like
    split_moments = sharding._split_moments

    def split_swapped(optimizer: torch.optim.Optimizer) -> None:
        # moments are cut along their first axis
        sharding._split_like = lambda whole, weight: split_like(
            whole.roll(len(whole) // 2, 0), weight
        )
        split_moments(optimizer)
        sharding._split_like = split_like

    sharding._split_moments = split_swapped


def run_ranks(count: int, out: Path, name: str, *overrides: str, fault: Any = None) -> list[str]:
    """Train on `count` processes; each leaves its head and the conversations that it read. Return what each printed."""

    def work(rank: int) -> None:
        if fault is not None:
            fault()
        head, features = train_made(out, HEADS[name], *ASKED, *overrides)
        state = {key: tensor.clone() for key, tensor in head.state_dict().items()}
        torch.save((state, features.reads), out / f"rank-{rank}.pt")

    return on_ranks(
        count,
        work,
        out.with_name(out.name + "-prints"),
        launched=count > 1,
    )


def read_steps(out: Path, ranks: int) -> list[list[int]]:
    """Return the conversations of each step, by all processes; what is read twice within a step counts once."""
    held_out = {*make_plan().validation}
    by_rank = []

    for rank in range(ranks):
        # a list of indices for each call
        reads = torch.load(out / f"rank-{rank}.pt")[1]
        by_rank.append([{*indices} for indices in reads if not held_out & {*indices}])

    return [sorted(set().union(*step)) for step in zip(*by_rank, strict=True)]


def copy_half(whole: Path, out: Path) -> Path:
    """Return a copy of a run as it was at its checkpoint of half the steps."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / f"checkpoints/step-{STEPS}")
    return out


class Runs(dict[str, Path]):
    """Runs of one process, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = self.folder / name
        run_ranks(1, self[name], name)
        return self[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs of one process."""
    return Runs(tmp_path_factory.mktemp("alone"))


def check_same(out: Path, other: Path, ranks: int) -> None:
    """Check that two runs have the same weights, metrics and files, and that all processes hold the same."""
    assert apart(weights(out), weights(other)) < TOLERANCE

    for row, expected in zip(rows(out), rows(other), strict=True):
        assert row.keys() == expected.keys()
        for name, tolerance in (("total", 1e-5), ("gradient_norm", 1e-4), ("validation", 1e-4)):
            if name in row:
                assert row[name] == pytest.approx(expected[name], rel=tolerance)

    for rank in range(ranks):
        assert apart(torch.load(out / f"rank-{rank}.pt")[0], weights(out)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "draft_model"])
@pytest.mark.parametrize(("ranks", "shard"), [(2, "true"), (4, "false")])
def test_any_number_of_processes_is_one(
    ranks: int,
    shard: str,
    name: str,
    alone: Runs,
    tmp_path: Path,
) -> None:
    """Its head whole on each, or sharded: losses, norms, validation, weights, what is read; the head can be loaded."""
    out = tmp_path / "run"

    # torch warns where tensors of several processes do not fit
    for printed in run_ranks(ranks, out, name, f"train.shard_head={shard}"):
        assert "Warning" not in printed

    check_same(out, alone[name], ranks)
    expected = [sorted(make_plan().step(number)) for number in range(STEPS)]
    assert read_steps(out, ranks) == expected
    assert read_steps(alone[name], 1) == expected

    load_head(out / "head")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "paced"])
def test_means_of_texts_are_the_same_on_any_number_of_processes(name: str, tmp_path: Path) -> None:
    """Also of a head that divides by something of its own; two sequences in a part would not be."""
    run_ranks(1, tmp_path / "one", name, "train.mean_over=texts", "train.accumulation=4")
    run_ranks(2, tmp_path / "two", name, "train.mean_over=texts", "train.accumulation=2")
    check_same(tmp_path / "two", tmp_path / "one", 2)
    # the mean over the step's tokens is another head
    run_ranks(1, tmp_path / "step", name, "train.accumulation=4")
    assert apart(weights(tmp_path / "step"), weights(tmp_path / "one")) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    ("first", "then"),
    [((2, "false"), (1, "false")), ((2, "false"), (4, "true")), ((4, "true"), (2, "false"))],
)
def test_any_number_of_processes_goes_on(
    first: tuple[int, str],
    then: tuple[int, str],
    name: str,
    alone: Runs,
    tmp_path: Path,
) -> None:
    """After a checkpoint, sharded or not: the conversations and the weights of a run that was never stopped."""
    # (number of processes, whether they share the head)
    run_ranks(first[0], tmp_path / "whole", name, f"train.shard_head={first[1]}")
    out = copy_half(tmp_path / "whole", tmp_path / "run")
    ranks, shard = then
    printed = run_ranks(ranks, out, name, f"train.shard_head={shard}")

    # else the run began again
    assert f"going on after step {KEPT} of {STEPS}" in printed[0]

    check_same(out, alone[name], ranks)
    expected = [sorted(make_plan().step(number)) for number in range(KEPT, STEPS)]

    assert read_steps(out, ranks) == expected
    assert (out / f"checkpoints/step-{STEPS}" / WHOLE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [average_parts, read_anothers_part])
def test_a_planted_fault_is_seen(fault: Any, alone: Runs, tmp_path: Path) -> None:
    """The comparison finds other weights by far."""
    run_ranks(2, tmp_path / "run", "eagle1", fault=fault)
    assert apart(weights(tmp_path / "run"), weights(alone["eagle1"])) > 100 * TOLERANCE


@pytest.mark.slow
def test_moments_of_another_process_are_seen(alone: Runs, tmp_path: Path) -> None:
    """Planted fault: parts of the moments are swapped when a checkpoint is read."""
    out = copy_half(alone["eagle1"], tmp_path / "run")
    run_ranks(2, out, "eagle1", "train.shard_head=true", fault=swap_moments)
    assert apart(weights(out), weights(alone["eagle1"])) > 100 * TOLERANCE


@pytest.mark.slow
def test_a_sharded_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """On all processes, as one process skips it."""
    for count in (1, 2):
        out = tmp_path / str(count)
        run_ranks(count, out, "eagle1", "train.shard_head=true", fault=spoil_features)
        assert [row["skipped"] for row in rows(out) if "skipped" in row] == [[1]]
    check_same(tmp_path / "2", tmp_path / "1", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["train.clip_by=value", "train.clip=1e-3"], ["train.dtype=bfloat16"]]
)
def test_a_sharded_head_is_clipped_by_value_and_trained_in_bf16(
    overrides: list[str], tmp_path: Path
) -> None:
    """As without sharding; in parts, too."""
    asked = [*overrides, "train.accumulation=2"]
    for shard in ("false", "true"):
        run_ranks(
            2,
            tmp_path / shard,
            "eagle1",
            *asked,
            f"train.shard_head={shard}",
        )
    check_same(tmp_path / "true", tmp_path / "false", 2)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_fewer_positions_than_steps(count: int) -> None:
    """A process may hold one short conversation: row r of step s is the state s rows before, or zero."""
    states = torch.randn(7, count, 2)
    # the oracle places one state at a time
    expected = torch.zeros(7, count, 2)

    for step in range(7):
        for row in range(step, count):
            expected[step, row] = states[step, row - step]

    assert torch.equal(align_steps([*states]), expected)
