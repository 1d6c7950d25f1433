"""Held-out prompts that are decoded in training: what is counted, which head is kept, and when a run ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import equal, rows, run

from eagle import Budget, Target, generate, load_drafter
from eagle.core.tree import PUBLISHED_TREE
from eagle.core.verify import Sampling
from eagle.drafters.parts.validation import add_sums
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


class Scripted:
    """Says of each validation what a test wants: three prompts, one of which accepts one token more."""

    def __init__(self, *taus: int) -> None:
        self.taus = iter(taus)

    def decode(self, *_: Any) -> Counts:
        """Return tokens and cycles of each prompt, ten cycles each."""
        tokens = 10 * next(self.taus)
        return {"tree_tau": [[tokens, 10], [tokens, 10], [tokens + 10, 10]]}

    # as in a real run
    compare = HeldOut.compare


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets a run decode acceptance lengths of a test's own."""

    def use(*taus: int) -> None:
        scripted = Scripted(*taus)
        monkeypatch.setattr(train_eagle, "open_decoding", lambda *_: scripted)

    return use


def step_of(out: Path, name: str) -> int:
    """Return the step at which a head was saved."""
    step: int = json.loads((out / name / "provenance.json").read_text())["step"]
    return step


def validations(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's validations."""
    return [row for row in rows(out) if "validation" in row]


@pytest.mark.slow
def test_decoded_figures_are_those_of_each_prompt_alone(
    command: list[str],
    tmp_path: Path,
    tiny_target: Target,
) -> None:
    """The metrics' figures, against the saved head decoding the same prompts one by one; prompts end before answers."""
    asked = ("train.validation=0.5", "train.decode=3", "eval.temperatures=[1.0]")
    out = run(command, tmp_path / "run", *asked)
    recipe = train_eagle.Recipe.load(command[0], [*command[1:], *asked])
    settings = train_eagle.settings_of(recipe.drafter.model_dump(), "")
    _, features = train_eagle.open_features(recipe, settings, list)
    supervised = [int(features.mask(i)[2:].sum()) for i in range(len(features))]
    # the same plan as the run's says which conversations are held out
    plan = Plan(supervised, recipe.train)
    assert len(plan.validation) == 12

    prompts = []

    # three of twelve, evenly spaced
    for example in features.read(plan.validation[::4]):
        prompt = prompt_of(tiny_target, example)
        assert not example.loss_mask[: len(prompt)].any()
        # the prompt ends where the first answer begins
        assert example.loss_mask[len(prompt)]
        prompts.append(prompt)

    head = load_drafter(out / "last", tiny_target)
    figures = validations(out)[-1]["validation"]
    options: dict[str, Any] = {
        "budget": Budget.fixed(PUBLISHED_TREE),
        "max_new_tokens": recipe.eval.max_new_tokens,
    }

    for temperature, suffix in ((0.0, ""), (1.0, "_at_1")):
        cycles = []
        for number, prompt in enumerate(prompts):
            # each prompt has noise of its own
            sampling = Sampling(temperature, request=number)
            trace = generate(
                tiny_target,
                head,
                prompt,
                sampling=sampling,
                **options,
            )
            cycles += trace.cycles
        tau = sum(cycle.committed for cycle in cycles) / len(cycles)
        assert figures[f"decoded_tree_tau{suffix}"] == pytest.approx(tau)


def test_prompts_need_conversations_that_are_held_out(command: list[str], tmp_path: Path) -> None:
    """Else nothing would be decoded, and nobody would know."""
    with pytest.raises(ValueError, match=r"train\.decode is 3 and train\.validation is 0"):
        run(command, tmp_path / "run", "train.decode=3")


@pytest.mark.slow
def test_the_head_that_accepts_most_is_kept(
    command: list[str],
    script: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not the one that was predicted to; a later one as good does not replace it, and the log compares the two."""
    # tau of each validation, to which the third prompt adds a third
    script(1, 3, 2, 3)
    out = run(command, tmp_path / "run", *EVERY, "train.max_steps=4")

    assert step_of(out, "head") == 2
    assert step_of(out, "last") == 4

    printed = capsys.readouterr().out

    assert "step 2: τ 3.33 on 3 held-out prompts, the best so far" in printed
    assert "step 3: τ 2.33 on 3 held-out prompts, 1.00 (1.00 to 1.00) below that of" in printed

    script(1, 3, 2, 3)
    last = run(
        command,
        tmp_path / "last",
        *EVERY,
        "train.max_steps=4",
        "train.choose=last",
    )

    assert step_of(last, "head") == 4
    assert equal(last, out)


def test_a_warm_start_prints_its_gain(
    command: list[str],
    script: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The head of `train.init` is decoded before the first step, once, and compared with the one that is kept."""
    script(2)
    first = run(command, tmp_path / "first", "train.validation=0.2", "train.max_steps=1")

    assert "train.init" not in capsys.readouterr().out

    before = "before training: τ 1.33 on 3 held-out prompts, by the head of train.init"
    gain = "from the head of train.init to step 2: τ 1.33 -> 3.33 (+2.00, "
    asked = (*EVERY, f"train.init={first / 'head'}", "train.max_steps=2")
    script(1, 2, 3)
    out = run(command, tmp_path / "whole", *asked)
    printed = capsys.readouterr().out

    assert printed.index(before) < printed.index("step 1: τ 2.33")
    assert printed.count(gain) == 1

    # a run that goes on knows what the first head was worth
    script(3)
    (out / "checkpoints/step-2/complete.json").unlink()
    run(command, out, *asked)
    printed = capsys.readouterr().out

    assert before not in printed
    assert gain in printed

    script(3, 2, 2)
    run(command, tmp_path / "worse", *asked)

    assert "no sure gain: keep the old head" in capsys.readouterr().out


def test_patience_ends_a_run(
    command: list[str],
    script: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After two validations in a row without a better head; the same command then has nothing to do."""
    asked = (*EVERY, "train.max_steps=8", "train.patience=2")
    # 3 is the best; neither 3 nor 2 is better, and 9 is never reached
    script(2, 1, 3, 3, 2, 9)
    out = run(command, tmp_path / "run", *asked)

    assert step_of(out, "head") == 3
    assert step_of(out, "last") == 5
    assert "the run ends: 2 validations brought no better head" in capsys.readouterr().out

    run(command, out, *asked)

    assert "holds this run, complete" in capsys.readouterr().out
    assert step_of(out, "last") == 5
    assert [row["step"] for row in validations(out)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_choice_outlives_a_stop(
    command: list[str],
    script: Callable[..., None],
    tmp_path: Path,
) -> None:
    """A run that goes on after step 3 counts on from there: the best stays, and patience ends at the same step."""
    asked = (*EVERY, "train.max_steps=8", "train.patience=3")
    script(1, 4, 2, 3, 2)
    whole = run(command, tmp_path / "whole", *asked)
    script(1, 4, 2)
    # impatience stops this run after step 3
    half = run(command, tmp_path / "half", *asked, "train.patience=1")

    assert step_of(half, "last") == 3

    # what the whole run is told of steps 4 and 5
    script(3, 2)
    run(command, half, *asked)

    assert step_of(half, "last") == 5
    assert equal(half, whole)
    assert equal(half, whole, "head")


def test_what_is_decoded_and_what_is_predicted_are_not_compared() -> None:
    """A run that begins to decode in the middle takes the first decoded head, whatever was predicted before."""
    decoded: Counts = {"tree_tau": [[20, 10]]}
    choice = Choice()

    assert choice.add(1, {}, {"tree/tau": 5.0})
    assert not choice.add(2, {}, {"tree/tau": 4.0})
    assert choice.add(3, decoded, {"tree/tau": 4.0, "cross_entropy": 1.5})
    assert choice.score == 2
    # the predicted 9 counts no more
    assert not choice.add(4, decoded, {"tree/tau": 9.0})
    assert choice.stale == 1
    assert Choice.parse(json.loads(json.dumps(asdict(choice)))) == choice
    # checkpoints of earlier releases hold the score alone
    assert Choice.parse(9.0).score == 9.0


@pytest.mark.parametrize("live", [True, False])
def test_decoding_is_on_where_the_target_is_loaded(
    live: bool,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Features that are computed in training need the target; stored ones do not, and the log says what is missed."""
    asked = ["train.validation=0.2", "train.max_steps=2", "eval.max_new_tokens=8"]
    asked += ["features.store=null"] if live else []
    out = run(command, tmp_path / "run", *asked)
    assert ("decoded_tree_tau" in validations(out)[-1]["validation"]) == live
    printed = capsys.readouterr().out
    assert ("held-out prompts are not decoded" in printed) != live
    # what is not decoded is predicted, and the line names chain and tree
    predicted = rf"step 2: predicted τ \d\.\d\d with a chain of 4, \d\.\d\d with a tree of {len(PUBLISHED_TREE)}"
    assert bool(re.search(predicted, printed)) != live


@pytest.mark.parametrize("override", ["train.validation=0", "train.decode=0"])
def test_nothing_is_decoded_where_nothing_is_held_out(
    override: str,
    command: list[str],
    tiny_target: Target,
) -> None:
    """Nor where it is turned off."""
    changes = [*command[1:], "train.validation=0.2", override]
    assert open_decoding(train_eagle.Recipe.load(command[0], changes), tiny_target) is None


def test_sums_outlast_a_batch_without_supervised_slots() -> None:
    """Its sums are empty, and so are those of a process without a share."""
    sums = {"slots": torch.tensor(3.0)}
    assert add_sums(sums, {}) == sums
    assert add_sums({}, sums) == sums
    assert add_sums(sums, sums) == {"slots": torch.tensor(6.0)}
    assert add_sums({}, {}) == {}
