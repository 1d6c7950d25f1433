"""The command that trains a target with its heads: stopped, on two processes, and the new target that it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import ROOT, apart, equal, finished, launched, rows, weights

from data_prep.read_once import read_examples
from eagle import Sampling, Target, load_drafter
from eagle.recipe import Recipe
from eagle.target.loading import load_model
from eagle.training.plan import Plan
from eval.load_run import load_target
from recipes.train_medusa2 import main as train
from tests.families import own_answer
from tests.target.decoded import decode

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def joint(tiny_target_dir: Path) -> list[str]:
    """Return a recipe of six steps of four short conversations, in fp32, with rates at which they tell."""
    return [
        str(ROOT / "recipes/tiny/medusa2.yaml"),
        f"target.path={tiny_target_dir / 'target'}",
        "target.dtype=float32",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
        "data.limit=30",
        "data.max_length=96",
        "train.dtype=float32",
        "train.init=null",
        "train.epochs=1",
        "train.lr=1e-2",
        "train.validation=0.2",
        "train.checkpoint_every=3",
        "joint.dropout=0",
        "regenerate=null",
    ]


@pytest.fixture(scope="module")
def made(joint: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the command leaves."""
    out = tmp_path_factory.mktemp("joint") / "run"
    train([*joint, f"train.out={out}"])
    return out


def test_a_run_that_goes_on_ends_in_the_same_bytes(
    joint: list[str], made: Path, tmp_path: Path
) -> None:
    """From its checkpoint in the middle: metrics, heads and target."""
    out = tmp_path / "run"
    shutil.copytree(made, out)
    # the checkpoint in the middle is the newest now
    shutil.rmtree(out / "checkpoints/step-6")
    train([*joint, f"train.out={out}"])
    assert len(rows(made)) == 3
    assert rows(out) == rows(made)

    for name in ("head", "target"):
        assert equal(out, made, name)


def test_two_processes_are_one_on_the_same_steps(
    joint: list[str], made: Path, tmp_path: Path
) -> None:
    """Heads, target and KL agree."""
    out = tmp_path / "run"
    script = str(ROOT / "recipes/train_medusa2.py")
    done = finished(launched("ddp", script, *joint, f"train.out={out}"))

    assert done.returncode == 0, done.stdout

    for name in ("head", "target"):
        assert apart(weights(out, name), weights(made, name)) < 5e-5

    kl = rows(made)[-1]["validation"]["kl"]

    assert rows(out)[-1]["validation"]["kl"] == pytest.approx(kl, rel=1e-3)


def test_the_new_target_is_decoded_without_loss(made: Path) -> None:
    """Drafts change neither the untouched new model's greedy answer nor a sampled one."""
    target = Target.load(made / "target", dtype="float32")
    # transformers' own model of the same folder
    untouched = load_model(made / "target", torch.float32).eval()
    head = load_drafter(made / "head", target)
    prompt = target.chat("What does copy do?")

    assert decode(target, head, prompt, 40) == own_answer(untouched, prompt, 40)

    none = load_drafter("none", target)
    sampled = [decode(target, each, prompt, 40, sampling=Sampling(1.0)) for each in (head, none)]

    assert sampled[0] == sampled[1]


@torch.no_grad()
def read_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return [T, V], a model's log-probs after each token, in fp64."""
    return model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)


def test_the_new_target_says_how_far_it_is_from_the_old(joint: list[str], made: Path) -> None:
    """The KL is that of both models' logits, token by token, over the held-out conversations."""
    recipe = Recipe.load(joint[0], [*joint[1:], f"train.out={made}"])
    old = load_model(recipe.target.path, torch.float32).eval()
    new = load_model(made / "target", torch.float32).eval()
    examples = read_examples(recipe)
    # says which conversations are held out
    plan = Plan([int(example.loss_mask[2:].sum()) for example in examples], recipe.train)
    divergences = []

    for index in plan.validation:
        example = examples[index]
        p = read_log_probs(old, example.tokens)
        q = read_log_probs(new, example.tokens)
        by_position = (p.exp() * (p - q)).sum(-1)
        # position i predicts token i + 1; the first two tokens are nobody's
        divergences.append(by_position[1:-1][example.loss_mask[2:]])

    expected = torch.cat(divergences).mean().item()

    assert expected > 0

    provenance = json.loads((made / "target/provenance.json").read_text())

    assert provenance["kl_from_the_old_target"] == pytest.approx(expected, rel=1e-3)
    assert provenance["made_from"]["path"] == recipe.target.path
    assert json.loads((made / "head/provenance.json").read_text()) == provenance


def test_the_heads_recipe_names_the_new_target(joint: list[str], made: Path) -> None:
    """So that nobody measures them on the old one, which the recipe of the run is refused for."""
    served = Recipe.load(made / "head/recipe.yaml")
    assert served.target.path == str(made / "target")
    # the new target's heads are ordinary ones
    assert served.joint is None
    with pytest.raises(ValueError, match="makes a new target of"):
        load_target(Recipe.load(joint[0], joint[1:]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.shard_head=true", "train.shard_head is for heads alone"),
        ("train.decode=2", "train.decode is for heads alone"),
        ("train.stem=runs/other", "train.stem is for heads alone"),
        ("train.mean_over=texts", "train.mean_over is for heads alone"),
        ("train.on_policy={}", "train.on_policy is for heads alone"),
        ("features.shard_target=true", "whole on every process"),
        ("joint.rnak=3", "did you mean rank"),
        ("joint=null", "has no section `joint`"),
    ],
)
def test_what_it_does_not_do_is_refused(
    override: str, message: str, joint: list[str], tmp_path: Path
) -> None:
    """With a sentence, before anything is trained."""
    with pytest.raises(ValueError, match=message):
        train([*joint, f"train.out={tmp_path / 'run'}", override])
