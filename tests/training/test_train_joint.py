"""The command that trains a target with its heads: stopped, on two processes, and the new target that it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from trained import ROOT, apart, equal, finished, launched, rows, weights

from data_prep.read_once import read_examples
from eagle import Sampling, Target, generate, load_drafter
from eagle.recipe import Recipe
from eagle.target.loading import load_model
from eagle.training.plan import Plan
from eval.load_run import load_target
from recipes.train_medusa2 import main as train
from tests.families import own_answer

pytest.importorskip("peft", reason="peft is not installed")
RECIPE = str(ROOT / "recipes/tiny/medusa2.yaml")
QUESTION = "What does copy do?"


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path) -> list[str]:
    """Six steps of four short conversations, in fp32, with rates at which they tell."""
    short = [
        "data.limit=30",
        "data.max_length=96",
        "train.validation=0.2",
        "train.checkpoint_every=3",
    ]
    exact = [
        "target.dtype=float32",
        "train.dtype=float32",
        "train.init=null",
        "train.epochs=1",
        "train.lr=1e-2",
    ]
    where = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
    ]
    return [RECIPE, *where, *short, *exact, "joint.dropout=0", "regenerate=null"]


@pytest.fixture(scope="module")
def made(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves."""
    out = tmp_path_factory.mktemp("joint") / "run"
    train([*command, f"train.out={out}"])
    return out


@pytest.mark.slow
def test_a_run_that_goes_on_ends_in_the_same_bytes(
    command: list[str], made: Path, tmp_path: Path
) -> None:
    """From its checkpoint in the middle: metrics, heads and target."""
    shutil.copytree(made, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-6")
    train([*command, f"train.out={tmp_path / 'run'}"])
    assert rows(tmp_path / "run") == rows(made) and len(rows(made)) == 3
    assert equal(tmp_path / "run", made, "head") and equal(tmp_path / "run", made, "target")


@pytest.mark.slow
def test_two_processes_are_one_on_the_same_steps(
    command: list[str], made: Path, tmp_path: Path
) -> None:
    """Heads, target and KL agree."""
    script = str(ROOT / "recipes/train_medusa2.py")
    done = finished(launched("ddp", script, *command, f"train.out={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stdout
    for name in ("head", "target"):
        assert apart(weights(tmp_path / "run", name), weights(made, name)) < 5e-5
    one, other = (rows(out)[-1]["validation"]["kl"] for out in (made, tmp_path / "run"))
    assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.slow
def test_the_new_target_is_decoded_without_loss_and_says_how_far_it_is_from_the_old(
    command: list[str], made: Path
) -> None:
    """Drafts do not change the untouched new model's answer; the KL is that of both models' logits, token by token."""
    target, untouched = (
        Target.load(made / "target", dtype="float32"),
        load_model(made / "target", torch.float32),
    )
    head, prompt = load_drafter(made / "head", target), target.chat(QUESTION)
    drafted = generate(target, head, prompt, max_new_tokens=40, stop=[])
    assert (
        drafted.tokens == own_answer(untouched.eval(), prompt, 40) and drafted.acceptance_length > 1
    )
    both = (head, load_drafter("none", target))
    warm = [
        generate(target, drafter, prompt, sampling=Sampling(1.0), max_new_tokens=40)
        for drafter in both
    ]
    assert warm[0].tokens == warm[1].tokens
    recipe = Recipe.load(command[0], [*command[1:], f"train.out={made}"])
    old = load_model(recipe.target.path, torch.float32).eval()
    examples = read_examples(recipe)
    plan, sums = Plan([int(example.loss_mask[2:].sum()) for example in examples], recipe.train), []
    for example in (examples[index] for index in plan.validation):
        with torch.no_grad():
            p, q = (
                model(input_ids=example.tokens[None]).logits[0].double().log_softmax(-1)
                for model in (old, untouched)
            )
        places = [place for place in range(2, len(example.tokens)) if example.loss_mask[place]]
        sums += [
            float((p[place - 1].exp() * (p[place - 1] - q[place - 1])).sum()) for place in places
        ]
    told = json.loads((made / "target/provenance.json").read_text())
    assert (
        told["kl_from_the_old_target"] == pytest.approx(sum(sums) / len(sums), rel=1e-3)
        and sum(sums) > 0
    )
    assert told["made_from"]["path"] == recipe.target.path
    assert json.loads((made / "head/provenance.json").read_text()) == told


@pytest.mark.slow
def test_the_heads_recipe_names_the_new_target(command: list[str], made: Path) -> None:
    """So that nobody measures them on the old one, which the recipe of the run is refused for."""
    served = Recipe.load(made / "head/recipe.yaml")
    assert served.target.path == str(made / "target") and served.joint is None
    with pytest.raises(ValueError, match=r"makes a new target of .*head/recipe.yaml"):
        load_target(Recipe.load(command[0], command[1:]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.shard_head=true", "train.shard_head is for heads alone"),
        ("train.decode=2", "train.decode is for heads alone"),
        ("train.stem=runs/other", "train.stem is for heads alone"),
        ("train.mean_over=texts", "train.mean_over is for heads alone"),
        ("features.shard_target=true", "whole on every process"),
        ("joint.rnak=3", "did you mean rank"),
        ("joint=null", "has no section `joint`"),
    ],
)
@pytest.mark.slow
def test_what_it_does_not_do_is_refused(
    override: str, message: str, command: list[str], tmp_path: Path
) -> None:
    """With a sentence, before anything is trained."""
    with pytest.raises(ValueError, match=message):
        train([*command, f"train.out={tmp_path / 'run'}", override])
