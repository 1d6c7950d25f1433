"""What several processes learn is what one learns, its head whole or sharded, and whoever goes on with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
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
from tests.registry import BY_DEFAULT

STEPS, KEPT = 6, 3
TOLERANCE = 1e-6  # of weights of size 0.1 to 1, after steps of 1e-3: sums taken in another order
SHORT = f"train.max_steps={STEPS}"
SAVED = ("train.checkpoint_every=3", "train.keep=9", "train.validate_every=3")
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3", "steps": 7, "draft_vocab": 48, "fc_norm": True},
    "draft_model": {"kind": "draft_model", "layers": 1},
}
FURTHER: dict[str, dict[str, Any]] = {
    **{name: {"kind": name} for name in BY_DEFAULT},
    "paced": {
        "kind": "dflash",
        "blocks": 1,
        "slots": 4,
        "anchors": 6,
        "loss": "tokens",
        "d_pace": True,
    },
    "prefixed": {"kind": "hydra", "layers": 2, "prefix": True, "regression": 0.1},
    "drawn": {"kind": "blockwise", "drawn": True, "loss": "tokens"},
    "tied": {"kind": "mlp_speculator", "tie_weights": True, "scale_input": True},
}
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name != "eagle1" else name for name in HEADS]


def run_ranks(count: int, out: Path, name: str, *overrides: str, fault: str = "") -> list[str]:
    """A run of `count` processes; each leaves its head and the conversations that it read."""

    def work(rank: int) -> None:
        plant(fault)
        head, features = train_made(out, (HEADS | FURTHER)[name], SHORT, *SAVED, *overrides)
        state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        torch.save((state, features.reads), out / f"rank-{rank}.pt")

    return on_ranks(count, work, out.with_name(out.name + "-prints"), launched=count > 1)


def plant(fault: str) -> None:
    """Break what a test must see broken."""
    if fault == "mean":  # of parts instead of tokens
        Plan.weights = lambda self, number, parts: [1 / len(parts)] * len(parts)  # type: ignore[method-assign]
    if fault == "part":  # the last process reads that of another
        whole, last = Plan.parts, int(os.environ["RANK"]) == 1
        Plan.parts = lambda *asked: whole(*asked)[:: -1 if last else 1]  # type: ignore[method-assign]
    if fault == "nan":  # in the features of a conversation of the second step
        draw, bad = MadeFeatures._draw, made_plan().step(1)[0]

        def spoilt(features: MadeFeatures, index: int) -> Example:
            example = draw(features, index)
            return (
                replace(example, features=example.features * float("nan"))
                if index == bad
                else example
            )

        MadeFeatures._draw = spoilt  # type: ignore[method-assign]
    if fault == "moments":  # of one process go to another
        split = sharding._split_like
        swapped = sharding._split_moments

        def swap(optimizer: torch.optim.Optimizer) -> None:
            sharding._split_like = lambda whole, weight: split(
                whole.roll(len(whole) // 2, 0), weight
            )
            swapped(optimizer)
            sharding._split_like = split

        sharding._split_moments = swap


def reads_of(out: Path, ranks: int) -> list[list[int]]:
    """The conversations of each step, by all processes; what is read twice within a step counts once."""
    held_out = set(made_plan().validation)
    reads = [torch.load(out / f"rank-{rank}.pt")[1] for rank in range(ranks)]
    learned = [[places for places in rank if not held_out & {*places}] for rank in reads]
    return [
        sorted({place for places in step for place in places})
        for step in zip(*learned, strict=True)
    ]


def made_plan() -> Plan:
    """The plan of these runs, by what is supervised in their conversations."""
    slots = [length - length // 2 for length in LENGTHS]
    return Plan(slots, TrainSection(out="nowhere", validation=0.1, max_steps=STEPS, epochs=12))


def continued(whole: Path, out: Path) -> Path:
    """A copy of a run as it was at its checkpoint of half the steps."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / f"checkpoints/step-{STEPS}")
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one process, each made when it is first asked for."""
    folder = tmp_path_factory.mktemp("alone")

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            run_ranks(1, folder / name, name)
            self[name] = folder / name
            return self[name]

    return Runs()


def check_same(out: Path, other: Path, ranks: int, tolerance: float = TOLERANCE) -> None:
    """Weights, metrics and what is saved, of two runs; all processes hold the same."""
    assert apart(weights(out), weights(other)) < tolerance
    for row, expected in zip(rows(out), rows(other), strict=True):
        assert row.get("total", 0) == pytest.approx(expected.get("total", 0), rel=1e-5)
        assert row.get("gradient_norm", 0) == pytest.approx(
            expected.get("gradient_norm", 0), rel=1e-4
        )
        assert row.get("validation", {}) == pytest.approx(expected.get("validation", {}), rel=1e-4)
    for rank in range(ranks):
        assert apart(torch.load(out / f"rank-{rank}.pt")[0], weights(out)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("ranks", "shard"),
    [
        (2, "true"),
        pytest.param(4, "true", marks=pytest.mark.slow),
        pytest.param(4, "false", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_processes_is_one(
    ranks: int, shard: str, name: str, alone: dict[str, Path], tmp_path: Path
) -> None:
    """Its head whole on each, or sharded: losses, norms, validation, weights, what is read; the head can be loaded."""
    out = tmp_path / "run"
    prints = run_ranks(ranks, out, name, f"train.shard_head={shard}")
    assert not [line for text in prints for line in text.splitlines() if "Warning" in line]
    check_same(out, alone[name], ranks)
    expected = [sorted(made_plan().step(number)) for number in range(STEPS)]
    assert reads_of(out, ranks) == expected == reads_of(alone[name], 1)
    load_head(out / "head")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "paced"))
        for name in ("eagle1", *FURTHER)
    ],
)
def test_means_of_texts_are_the_same_on_any_number_of_processes(name: str, tmp_path: Path) -> None:
    """Also of heads that divide by something of their own; two texts in a part would not be."""
    run_ranks(1, tmp_path / "one", name, "train.mean_over=texts", "train.accumulation=4")
    run_ranks(2, tmp_path / "two", name, "train.mean_over=texts", "train.accumulation=2")
    check_same(tmp_path / "two", tmp_path / "one", 2)
    run_ranks(1, tmp_path / "step", name, "train.accumulation=4")
    assert apart(weights(tmp_path / "step"), weights(tmp_path / "one")) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, "false"), (1, "false")),
        ((2, "false"), (4, "true")),
        pytest.param((4, "true"), (2, "false"), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_processes_goes_on(
    first: tuple[int, str], then: tuple[int, str], name: str, alone: dict[str, Path], tmp_path: Path
) -> None:
    """After a checkpoint, sharded or not: the conversations and the weights of a run that was never stopped."""
    (ranks, shard), (others, sharded_then) = first, then
    run_ranks(ranks, tmp_path / "whole", name, f"train.shard_head={shard}")
    out = continued(tmp_path / "whole", tmp_path / "run")
    said = run_ranks(others, out, name, f"train.shard_head={sharded_then}")
    assert f"going on after step {KEPT} of {STEPS}" in said[0]
    check_same(out, alone[name], others)
    assert reads_of(out, others) == [
        sorted(made_plan().step(number)) for number in range(KEPT, STEPS)
    ]
    assert (out / f"checkpoints/step-{STEPS}" / WHOLE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("hydra", "falcon", "paced")))
        for name in FURTHER
    ],
)
def test_further_heads_learn_the_same(name: str, alone: dict[str, Path], tmp_path: Path) -> None:
    """On two processes with the head whole; those go on as four that share it."""
    few = (
        10 * TOLERANCE
    )  # a weight whose gradient is almost nothing is moved by the sums' rounding, as Adam scales it
    run_ranks(2, tmp_path / "whole", name)
    check_same(tmp_path / "whole", alone[name], 2, few)
    out = continued(tmp_path / "whole", tmp_path / "run")
    run_ranks(4, out, name, "train.shard_head=true")
    check_same(out, alone[name], 4, few)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["mean", "part"])
def test_a_planted_fault_is_seen(fault: str, alone: dict[str, Path], tmp_path: Path) -> None:
    """A mean over parts instead of tokens, and a process that reads another's part: other weights by far."""
    run_ranks(2, tmp_path / "run", "eagle1", fault=fault)
    assert apart(weights(tmp_path / "run"), weights(alone["eagle1"])) > 100 * TOLERANCE


@pytest.mark.slow
def test_moments_of_another_process_are_seen(alone: dict[str, Path], tmp_path: Path) -> None:
    """Parts of the moments that are swapped when a checkpoint is read."""
    out = continued(alone["eagle1"], tmp_path / "run")
    run_ranks(2, out, "eagle1", "train.shard_head=true", fault="moments")
    assert apart(weights(out), weights(alone["eagle1"])) > 100 * TOLERANCE


@pytest.mark.slow
def test_a_sharded_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """On all processes, as one process skips it."""
    for count in (1, 2):
        run_ranks(count, tmp_path / str(count), "eagle1", "train.shard_head=true", fault="nan")
        assert [row["skipped"] for row in rows(tmp_path / str(count)) if "skipped" in row] == [[1]]
    check_same(tmp_path / "2", tmp_path / "1", 2)


@pytest.mark.slow
def test_a_sharded_head_is_clipped_by_value_and_trained_in_bf16(tmp_path: Path) -> None:
    """Each as without sharding; in parts, too."""
    for number, asked in enumerate(
        (["train.clip_by=value", "train.clip=1e-3"], ["train.dtype=bfloat16"])
    ):
        for name, shard in (("whole", "false"), ("sharded", "true")):
            run_ranks(
                2,
                tmp_path / f"{name}{number}",
                "eagle1",
                *asked,
                "train.accumulation=2",
                f"train.shard_head={shard}",
            )
        check_same(tmp_path / f"sharded{number}", tmp_path / f"whole{number}", 2)


@pytest.mark.slow
def test_a_process_more_needs_no_random_state(alone: dict[str, Path], tmp_path: Path) -> None:
    """Of processes that were not there when it was written, and of those that were: steps seed what they draw."""
    out = continued(alone["eagle1"], tmp_path / "run")
    for states in (out / f"checkpoints/step-{KEPT}").glob("random_states_*"):
        assert states.name == "random_states_0.pkl"
    run_ranks(2, out, "eagle1")
    check_same(out, alone["eagle1"], 2)


@pytest.mark.parametrize("slots", [0, 1, 4, 9])
def test_fewer_slots_than_steps(slots: int) -> None:
    """A process may hold one short conversation: row r of step s is the state s rows before, or zero."""
    states: Sequence[torch.Tensor] = [torch.randn(slots, 2) for _ in range(7)]
    expected = torch.zeros(7, slots, 2)
    for step in range(7):
        for row in range(step, slots):
            expected[step, row] = states[step][row - step]
    assert torch.equal(align_steps(states), expected)
