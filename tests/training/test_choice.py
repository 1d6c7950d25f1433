"""Held-out prompts that are decoded in training: what is counted, which head is kept, and when a run ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from trained import equal, prepared, rows, run

from eagle import Budget, Target, generate, load_drafter
from eagle.core.drafter import TrainableDrafter
from eagle.core.tree import PUBLISHED_TREE
from eagle.core.verify import Sampling
from eagle.training.choice import Choice, Counts
from eagle.training.train import Plan
from recipes import train_eagle
from recipes.held_out import HeldOut, open_decoding, prompt_of

EVERY = (
    "train.validation=0.2",
    "train.checkpoint_every=1",
    "train.validate_every=1",
    "train.keep=20",
)


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"))


class Scripted:
    """Says of each validation what a test wants: all prompts accept so much."""

    def __init__(self, taus: Sequence[int]) -> None:
        self.taus, self.asked = taus, 0

    def decode(self, head: TrainableDrafter, features: Any, held_out: Sequence[int]) -> Counts:
        """Ten cycles of three prompts, one of which accepts one token more."""
        tau = self.taus[self.asked]
        self.asked += 1
        return {"tree_tau": [[10 * tau, 10]] * 2 + [[10 * tau + 10, 10]]}

    def compare(self, first: Counts, second: Counts) -> tuple[float, float, float]:
        """As in a real run."""
        return HeldOut.compare(self, first, second)  # type: ignore[arg-type]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    """Lets a run decode what a test says."""

    def use(*taus: int) -> Scripted:
        scripted = Scripted(taus)
        monkeypatch.setattr(train_eagle, "open_decoding", lambda *_: scripted)
        return scripted

    return use


def step_of(out: Path, name: str) -> int:
    """The step at which a head was saved."""
    step: int = json.loads((out / name / "provenance.json").read_text())["step"]
    return step


@pytest.mark.slow
def test_decoded_figures_are_those_of_each_prompt_alone(
    command: list[str], tmp_path: Path, tiny_target_dir: Path
) -> None:
    """The metrics' figures, against the saved head decoding the same prompts one by one; prompts end before answers."""
    out = run(
        command,
        tmp_path / "run",
        "train.validation=0.5",
        "train.decode=3",
        "eval.temperatures=[1.0]",
    )
    target = Target.load(tiny_target_dir / "target", dtype="float32")
    recipe = train_eagle.Recipe.load(command[0], [*command[1:], "train.validation=0.5"])
    _, features = train_eagle.open_features(
        recipe, train_eagle.settings_of(recipe.drafter.model_dump(), ""), list
    )
    plan = Plan(
        [int(features.mask(index)[2:].sum()) for index in range(len(features))], recipe.train
    )
    assert len(plan.validation) == 12
    examples = features.read(plan.validation[::4])
    prompts = [prompt_of(target, example) for example in examples]
    for example, prompt in zip(examples, prompts, strict=True):
        assert not example.loss_mask[: len(prompt)].any() and example.loss_mask[len(prompt)]
    head, last = (
        load_drafter(out / "last", target),
        [row for row in rows(out) if "validation" in row][-1]["validation"],
    )
    options: dict[str, Any] = {
        "budget": Budget.fixed(PUBLISHED_TREE),
        "max_new_tokens": recipe.eval.max_new_tokens,
    }
    for temperature, at in ((0.0, ""), (1.0, "_at_1")):
        cycles = []
        for number, prompt in enumerate(prompts):
            trace = generate(
                target, head, prompt, sampling=Sampling(temperature, request=number), **options
            )
            cycles += trace.cycles
        tau = sum(cycle.committed for cycle in cycles) / len(cycles)
        assert last[f"decoded_tree_tau{at}"] == pytest.approx(tau)


def test_prompts_need_conversations_that_are_held_out(command: list[str], tmp_path: Path) -> None:
    """Else nothing would be decoded, and nobody would know."""
    with pytest.raises(ValueError, match=r"train\.decode is 3 and train\.validation is 0"):
        run(command, tmp_path / "run", "train.decode=3")


@pytest.mark.slow
def test_the_head_that_accepts_most_is_kept(
    command: list[str],
    script: Callable[..., Scripted],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not the one that was predicted to; a later one as good does not replace it, and the log compares the two."""
    script(1, 3, 2, 3)
    out = run(command, tmp_path / "run", *EVERY, "train.max_steps=4")
    assert step_of(out, "head") == 2 and step_of(out, "last") == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines[1].startswith(
        "step 2: τ 3.33 on 3 held-out prompts, the best so far; decoding took "
    )
    assert lines[2].startswith(
        "step 3: τ 2.33 on 3 held-out prompts, 1.00 (1.00 to 1.00) below that of step 2"
    )
    assert "% of the time" in lines[2]
    script(1, 3, 2, 3)
    last = run(command, tmp_path / "last", *EVERY, "train.max_steps=4", "train.choose=last")
    assert step_of(last, "head") == 4 and equal(last, out)


def test_a_warm_start_prints_its_gain(
    command: list[str],
    script: Callable[..., Scripted],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The head of `train.init` is decoded before the first step, once, and compared with the one that is kept."""
    script(2)
    first = run(command, tmp_path / "first", "train.validation=0.2", "train.max_steps=1")
    assert "train.init" not in capsys.readouterr().out
    asked = (*EVERY, f"train.init={first / 'head'}", "train.max_steps=2")
    script(1, 2, 3)
    whole = run(command, tmp_path / "whole", *asked)
    lines = capsys.readouterr().out.splitlines()
    before, gain = (
        "before training: τ 1.33 on 3 held-out prompts, by the head of train.init",
        "1.33 -> 3.33 (+2.00, ",
    )
    assert lines.index(before) < next(
        number for number, line in enumerate(lines) if line.startswith("step 1: τ 2.33")
    )
    assert (
        sum(line.startswith(f"from the head of train.init to step 2: τ {gain}") for line in lines)
        == 1
    )
    script(3)
    (whole / "checkpoints/step-2/complete.json").unlink()
    run(command, whole, *asked)
    lines = capsys.readouterr().out.splitlines()
    assert before not in lines and any(gain in line for line in lines)
    script(3, 2, 2)
    run(command, tmp_path / "worse", *asked)
    assert (
        "τ 3.33 -> 2.33 (-1.00, -1.00 to -1.00), no sure gain: keep the old head"
        in capsys.readouterr().out
    )


def test_patience_ends_a_run(
    command: list[str],
    script: Callable[..., Scripted],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After two validations in a row without a better head; the same command then has nothing to do."""
    asked = ("train.max_steps=8", "train.patience=2")
    script(2, 1, 3, 3, 2, 9)
    out = run(command, tmp_path / "run", *EVERY, *asked)
    assert step_of(out, "head") == 3 and step_of(out, "last") == 5
    assert "the run ends: 2 validations brought no better head" in capsys.readouterr().out
    run(command, out, *EVERY, *asked)
    assert "holds this run, complete" in capsys.readouterr().out and step_of(out, "last") == 5
    assert [row["step"] for row in rows(out) if "validation" in row] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_choice_outlives_a_stop(
    command: list[str], script: Callable[..., Scripted], tmp_path: Path
) -> None:
    """A run that goes on after step 3 counts on from there: the best stays, and patience ends at the same step."""
    asked = (*EVERY, "train.max_steps=8", "train.patience=3")
    script(1, 4, 2, 3, 2)
    whole = run(command, tmp_path / "whole", *asked)
    script(1, 4, 2)
    half = run(command, tmp_path / "half", *asked, "train.patience=1")
    assert step_of(half, "last") == 3
    script(3, 2)
    run(command, half, *asked)
    assert equal(half, whole) and step_of(half, "last") == 5 and equal(half, whole, "head")
    kept = [
        json.loads((out / "checkpoints/step-5/complete.json").read_text()) for out in (half, whole)
    ]
    assert kept[0]["state"]["best"] == kept[1]["state"]["best"]


def test_what_is_decoded_and_what_is_predicted_are_not_compared() -> None:
    """A run that begins to decode in the middle takes the first decoded head, whatever was predicted before."""
    choice = Choice()
    assert choice.add(1, {}, {"tree/tau": 5.0})
    assert not choice.add(2, {}, {"tree/tau": 4.0})
    assert (
        choice.add(3, {"tree_tau": [[20, 10]]}, {"tree/tau": 4.0, "cross_entropy": 1.5})
        and choice.score == 2
    )
    assert not choice.add(4, {"tree_tau": [[20, 10]]}, {"tree/tau": 9.0}) and choice.stale == 1
    assert Choice.parse(json.loads(json.dumps(asdict(choice)))) == choice


@pytest.mark.parametrize("store", ["null", "kept"])
def test_decoding_is_on_where_the_target_is_loaded(
    store: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features that are computed in training need the target; stored ones do not, and the log says what is missed."""
    asked = ["features.store=null"] if store == "null" else []
    out = run(
        command,
        tmp_path / "run",
        *asked,
        "train.validation=0.2",
        "train.max_steps=2",
        "eval.max_new_tokens=8",
    )
    figures = [row["validation"] for row in rows(out) if "validation" in row][-1]
    printed = capsys.readouterr().out
    assert ("decoded_tree_tau" in figures) == (store == "null")
    assert ("held-out prompts are not decoded" in printed) == (store == "kept")


def test_nothing_is_decoded_where_nothing_is_held_out(
    command: list[str], tiny_target: Target
) -> None:
    """Nor where it is turned off."""
    for override in ("train.validation=0", "train.decode=0"):
        recipe = train_eagle.Recipe.load(
            command[0], [*command[1:], "train.validation=0.2", override]
        )
        assert open_decoding(recipe, tiny_target) is None
