"""The loop, against a naive one; runs in two halves, warm starts, and what is left on the disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained import apart, equal, rows, run, weights

from eagle import Target
from eagle.core.examples import Batch, collate
from eagle.data.store import FeatureStore
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head
from eagle.recipe import Recipe

WHOLE = ("train.validation=0.2", "train.checkpoint_every=3")


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of ten steps without an interruption; validated and saved twice."""
    return run(command, tmp_path_factory.mktemp("whole") / "run", *WHOLE)


def naive_rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: a rise over 5% of the steps, then a straight fall."""
    # the recipe's default
    warmup = 0.05 * steps
    if step + 1 < warmup:
        return (step + 1) / warmup
    return min((steps - step) / (steps - warmup), 1)


def clip_naively(head: Any, limit: float) -> None:
    """Scale autograd's gradients so that their norm, over all weights at once, is within a limit."""
    squares = [weight.grad.double().pow(2).sum() for weight in head.parameters()]
    norm = math.sqrt(sum(squares))
    for weight in head.parameters():
        weight.grad *= min(1.0, limit / norm)


def train_naively(
    command: list[str],
    target: Target,
    steps: list[list[int]],
    left_out: int = -1,
) -> dict[str, Tensor]:
    """Return the weights after the loop as a textbook writes it, whose update of step `left_out` is skipped.

    One batch a step, autograd's own clipping, an AdamW that is not fused.
    """
    recipe = Recipe.load(command[0], command[1:])
    section = recipe.train
    store = FeatureStore(str(recipe.features.store))
    settings = settings_of(recipe.drafter.model_dump(), "test")
    torch.manual_seed(section.seed)
    head = DRAFTERS[settings.kind].for_target(settings, target.config).train()
    options: dict[str, Any] = {
        "betas": section.betas,
        "weight_decay": 0.0,
        "foreach": False,
    }
    optimizer = torch.optim.AdamW(head.parameters(), lr=section.lr, **options)

    for step, indices in enumerate(steps):
        optimizer.param_groups[0]["lr"] = section.lr * naive_rate(step, len(steps))
        # a seed for each example of an epoch of six steps
        seeds = [step // 6 * 1_000_000_007 + index for index in indices]
        examples = store.read(indices)
        optimizer.zero_grad()
        if section.mean_over == "texts":
            for example, seed in zip(examples, seeds, strict=True):
                loss = head(collate([example], store.taps, [seed]), target.head)["total"]
                (loss / len(indices)).backward()
        else:
            batch = collate(examples, store.taps, seeds)
            loss = head(batch, target.head)["total"]
            # a head's loss is a mean over supervised tokens
            if section.mean_over == "all":
                tokens = sum(len(example.tokens) for example in examples)
                loss = loss * batch.loss_mask.sum() / tokens
            loss.backward()
        clip_naively(head, section.clip)
        if step != left_out:
            optimizer.step()

    return head.state_dict()


def draw_steps(seed: int = 0) -> list[list[int]]:
    """Return two epochs of 24 conversations in steps of four, drawn as the plan draws them."""
    orders = []
    for epoch in (0, 1):
        # the plan's formula, written down here a second time
        generator = torch.Generator().manual_seed(seed * 1_000_003 + 1 + epoch)
        orders.append(torch.randperm(24, generator=generator))
    return torch.cat(orders).reshape(12, 4).tolist()


def is_same(trained: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Tell whether weights are equal but for rounding.

    AdamW moves a weight with gradients of about its epsilon by rounding: here a tenth of a step.
    """
    pairs = [(trained[name] - weight).abs().flatten() for name, weight in expected.items()]
    distances = torch.cat(pairs)
    return bool(distances.mean() < 1e-8 and distances.max() < 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_the_loop_is_the_naive_one(
    accumulation: int,
    command: list[str],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Parts of a step add up to it, a part that repeats an example too; in another order the weights differ."""
    trained = weights(run(command, tmp_path / "run", f"train.accumulation={accumulation}"))
    assert is_same(trained, train_naively(command, tiny_target, draw_steps()))
    # the comparison can fail
    assert apart(trained, train_naively(command, tiny_target, draw_steps(1))) > 1e-3


@pytest.mark.quick("all-1")
@pytest.mark.parametrize(
    ("mean_over", "accumulation"), [("all", 1), ("all", 3), ("texts", 4), ("texts", 6)]
)
def test_losses_are_divided_as_asked(
    mean_over: str,
    accumulation: int,
    command: list[str],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """By all tokens of a step, in any parts, or by those of each sequence; each is another head."""
    asked = [f"train.mean_over={mean_over}", f"train.accumulation={accumulation}"]
    trained = weights(run(command, tmp_path / "run", *asked))
    assert is_same(trained, train_naively([*command, *asked], tiny_target, draw_steps()))
    assert apart(trained, train_naively(command, tiny_target, draw_steps())) > 1e-4


def test_means_over_texts_need_a_part_for_each(command: list[str], tmp_path: Path) -> None:
    """Two texts of a part would share a divisor."""
    with pytest.raises(ValueError, match=r"give train\.accumulation=4"):
        run(command, tmp_path / "other", "train.mean_over=texts")


def test_what_follows_the_runs_progress_goes_on_where_it_was(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that is trained otherwise as the run proceeds: two halves are the whole, to the byte."""
    progress: list[float] = []
    forward = DRAFTERS["falcon"].forward

    def record(self: Any, batch: Batch, *rest: Any) -> Any:
        progress.append(batch.progress)
        return forward(self, batch, *rest)

    monkeypatch.setattr(DRAFTERS["falcon"], "forward", record)
    asked = ("drafter={kind: falcon}", "train.max_steps=4", "train.checkpoint_every=2")
    whole = run(command, tmp_path / "whole", *asked)
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    # as if it had been killed after step 2
    (half / "checkpoints/step-4/complete.json").unlink()
    shutil.rmtree(half / "last")

    assert equal(run(command, half, *asked), whole)
    assert progress == [0, 0.25, 0.5, 0.75, 0.5, 0.75]


def test_the_best_and_the_last_are_kept(whole: Path) -> None:
    """The best is that of the highest score; each says the recipe and what made it."""
    scores = {}

    for row in rows(whole):
        if "validation" in row:
            scores[row["step"] + 1] = row["validation"]["tree/tau"]

    best = json.loads((whole / "head/provenance.json").read_text())
    last = json.loads((whole / "last/provenance.json").read_text())

    assert scores[best["step"]] == max(scores.values())
    assert last["step"] == max(scores)
    assert last["skipped_steps"] == 0
    assert last["validation"]
    assert Recipe.load(whole / "last/recipe.yaml").train.dtype == "float32"

    kept = {path.name for path in (whole / "checkpoints").iterdir()}

    assert kept == {"step-9", "step-10"}  # train.keep


def test_validation_has_one_gate(whole: Path, command: list[str], tmp_path: Path) -> None:
    """Whatever positions a run learns from, the same weights are judged alike."""
    asked = (f"train.init={whole / 'last'}", "train.lr=1e-30", "train.max_steps=1", WHOLE[0])
    outs = [
        run(command, tmp_path / gate, *asked, f"train.gate={gate}")
        for gate in ("predicted", "read")
    ]
    predicted, read = (rows(out) for out in outs)

    assert predicted[0] != read[0]
    assert predicted[-1]["validation"] == read[-1]["validation"]
    # with a rate of nothing, the head that comes out is the one that went in
    assert apart(weights(outs[0]), weights(whole)) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=2e-3", "train.lr = 0.001, this one has 0.002"),
        ("train.max_steps=11", "train.max_steps"),
        ("train.clip=0.2 drafter.noise=0.2", r"drafter\.noise = None, this one has 0\.2; train\.c"),
    ],
)
def test_another_run_is_not_continued(
    override: str,
    message: str,
    whole: Path,
    command: list[str],
) -> None:
    """A folder belongs to the run that began in it."""
    with pytest.raises(ValueError, match=rf"holds a run with {message}.*another train\.out"):
        run(command, whole, *WHOLE, *override.split())


def test_a_folder_may_move_and_watching_may_change(
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a run lies, and how often it is looked at, are no part of it."""
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    # nothing is trained: the run is complete
    run(command, moved, "train.validation=0.2", "train.checkpoint_every=5", "train.keep=1")
    assert "complete" in capsys.readouterr().out
    assert load_head(moved / "head").settings.kind == "eagle1"
