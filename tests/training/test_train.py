"""The loop, against a naive one; runs in two halves, warm starts, and what is left on the disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trained import apart, equal, prepared, rows, run, weights

from eagle import Target
from eagle.core.examples import Batch, collate
from eagle.data.store import FeatureStore
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head
from eagle.recipe import Recipe


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps without an interruption; validated and saved twice."""
    return run(
        command,
        tmp_path_factory.mktemp("whole") / "run",
        "train.validation=0.2",
        "train.checkpoint_every=3",
    )


def naive(
    command: list[str], target: Target, steps: list[list[int]], left_out: int = -1
) -> dict[str, torch.Tensor]:
    """The loop as a textbook writes it: one batch a step, autograd's own clipping, an AdamW that is not fused."""
    recipe = Recipe.load(command[0], command[1:])
    store, asked = FeatureStore(str(recipe.features.store)), recipe.train
    settings = settings_of(recipe.drafter.model_dump(), "test")
    torch.manual_seed(asked.seed)
    head = DRAFTERS[settings.kind].for_target(settings, target.config).train()
    optimizer = torch.optim.AdamW(
        head.parameters(), asked.lr, asked.betas, weight_decay=0.0, foreach=False
    )
    for number, places in enumerate(steps):
        warm = 0.05 * len(steps)
        rate = (
            (number + 1) / warm
            if number + 1 < warm
            else min((len(steps) - number) / (len(steps) - warm), 1)
        )
        optimizer.param_groups[0]["lr"] = asked.lr * rate
        seeds = [number // 6 * 1_000_000_007 + place for place in places]
        optimizer.zero_grad()
        if asked.mean_over == "texts":
            for example, seed in zip(store.read(places), seeds, strict=True):
                alone = head(collate([example], store.taps, [seed]), target.head)
                (alone["total"] / len(places)).backward()
        else:
            batch = collate(store.read(places), store.taps, seeds)
            tokens = sum(len(example.tokens) for example in store.read(places))
            share = float(batch.loss_mask.sum()) / tokens if asked.mean_over == "all" else 1.0
            (head(batch, target.head)["total"] * share).backward()
        norm = math.sqrt(
            sum(float(weight.grad.double().pow(2).sum()) for weight in head.parameters())
        )
        for weight in head.parameters():
            weight.grad *= min(1.0, asked.clip / norm)
        if number != left_out:
            optimizer.step()
    return head.state_dict()


def orders(seed: int = 0) -> list[list[int]]:
    """Two epochs of 24 conversations in steps of four, drawn as the plan draws them."""
    drawn = [
        torch.randperm(24, generator=torch.Generator().manual_seed(seed * 1_000_003 + 1 + e))
        for e in (0, 1)
    ]
    return torch.stack(drawn).reshape(12, 4).tolist()


def same(trained: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """But for rounding, by which AdamW moves a weight with gradients of about its epsilon: here a tenth of a step."""
    distances = torch.cat(
        [(trained[name] - weight).abs().flatten() for name, weight in expected.items()]
    )
    return bool(distances.mean() < 1e-8 and distances.max() < 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_the_loop_is_the_naive_one(
    accumulation: int, command: list[str], tiny_target: Target, tmp_path: Path
) -> None:
    """Parts of a step add up to it, a part that repeats an example too; in another order the weights differ."""
    trained = weights(run(command, tmp_path / "run", f"train.accumulation={accumulation}"))
    assert same(trained, naive(command, tiny_target, orders()))
    assert apart(trained, naive(command, tiny_target, orders(1))) > 1e-3


@pytest.mark.quick("all-1")
@pytest.mark.parametrize(
    ("mean_over", "accumulation"), [("all", 1), ("all", 3), ("texts", 4), ("texts", 6)]
)
def test_losses_are_divided_as_asked(
    mean_over: str, accumulation: int, command: list[str], tiny_target: Target, tmp_path: Path
) -> None:
    """By all tokens of a step, in any parts, or by those of each text; each is another head."""
    asked = [f"train.mean_over={mean_over}", f"train.accumulation={accumulation}"]
    trained = weights(run(command, tmp_path / "run", *asked))
    assert same(trained, naive([*command, *asked], tiny_target, orders()))
    assert apart(trained, naive(command, tiny_target, orders())) > 1e-4
    with pytest.raises(
        ValueError, match=r"4 texts of a step lie in 1 parts: give train\.accumulation=4"
    ):
        run(command, tmp_path / "other", "train.mean_over=texts")


def test_clipping_by_value_and_bare_means(command: list[str], tmp_path: Path) -> None:
    """As published: other weights, and each is a run."""
    runs = [
        (),
        ("train.clip_by=value",),
        ("train.gate=read",),
        ("train.schedule=cosine",),
        ("train.weight_decay=1",),
    ]
    left = [
        weights(run(command, tmp_path / str(i), "train.max_steps=4", *extra))
        for i, extra in enumerate(runs)
    ]
    assert all(apart(left[0], other) > 1e-6 for other in left[1:])


@pytest.mark.slow
def test_two_halves_are_the_whole(whole: Path, command: list[str], tmp_path: Path) -> None:
    """A run that is stopped after any checkpoint and gone on with leaves the same bytes, and each row once."""
    asked = ["train.validation=0.2", "train.checkpoint_every=3", "train.keep=9"]
    out = run(command, tmp_path / "run", *asked)
    for step in (6, 3):
        for later in (out / "checkpoints").glob("step-*"):
            if int(later.name[5:]) > step:
                (later / "complete.json").unlink()
        with (out / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 11, "total"')  # torn by a kill
        run(command, out, *asked)
        assert equal(out, whole) and equal(out, whole, "head")
        assert rows(out) == rows(whole)
    (out / "last").rename(tmp_path / "seen")
    run(command, out, *asked)
    assert not (out / "last").exists()  # a complete run is left alone


def test_what_follows_the_runs_progress_goes_on_where_it_was(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is trained otherwise as the run proceeds: two halves are the whole, to the byte."""
    shares: list[float] = []
    forward = DRAFTERS["falcon"].forward

    def kept(self: Any, batch: Batch, frozen: Any) -> Any:
        shares.append(batch.progress)
        return forward(self, batch, frozen)

    monkeypatch.setattr(DRAFTERS["falcon"], "forward", kept)
    asked = [
        "drafter={kind: falcon}",
        "train.max_steps=4",
        "train.checkpoint_every=2",
        "train.keep=9",
    ]
    whole = run(command, tmp_path / "whole", *asked)
    shutil.copytree(whole, tmp_path / "half")
    (tmp_path / "half/checkpoints/step-4/complete.json").unlink()
    shutil.rmtree(tmp_path / "half/last")
    assert equal(run(command, tmp_path / "half", *asked), whole)
    assert shares == [0, 0.25, 0.5, 0.75, 0.5, 0.75]


def test_metrics_tell_every_loss_and_validation(whole: Path) -> None:
    """The steps rise, the loss falls, validations stand between them."""
    lines = rows(whole)
    losses = [line["total"] for line in lines if "total" in line]
    assert [line["step"] for line in lines if "total" in line] == [2, 4, 5, 8, 9] and losses[
        -1
    ] < losses[0]
    validations = [line["validation"] for line in lines if "validation" in line]
    assert (
        len(validations) == 2
        and validations[0].keys() == validations[1].keys()
        and validations[1]["tree/tau"] >= 1
    )
    assert all(1 <= line["chain/tau"] <= 5 for line in validations)


def test_the_best_and_the_last_are_kept(whole: Path) -> None:
    """The best is that of the highest score; each says the recipe and what made it."""
    scores = {
        line["step"] + 1: line["validation"]["tree/tau"]
        for line in rows(whole)
        if "validation" in line
    }
    made = {
        name: json.loads((whole / name / "provenance.json").read_text())
        for name in ("head", "last")
    }
    assert made["last"]["step"] == max(scores) and scores[made["head"]["step"]] == max(
        scores.values()
    )
    assert made["last"]["skipped_steps"] == 0 and made["last"]["validation"]
    assert Recipe.load(whole / "last/recipe.yaml").train.dtype == "float32"
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {
        "step-9",
        "step-10",
    }  # train.keep


def test_the_best_score_outlives_a_stop(whole: Path, command: list[str], tmp_path: Path) -> None:
    """A continuation that does worse than what came before it leaves the best head alone."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "checkpoints/step-10/complete.json").unlink()
    (out / "head").rename(tmp_path / "seen")
    mark = out / "checkpoints/step-9/complete.json"
    known = json.loads(mark.read_text())
    first = next(line["validation"] for line in rows(whole) if "validation" in line)
    assert known["state"]["best"]["score"] == first["tree/tau"]
    known["state"]["best"] = 9.0  # as earlier releases wrote it
    mark.write_text(json.dumps(known))
    run(command, out, "train.validation=0.2", "train.checkpoint_every=3")
    assert not (out / "head").exists() and equal(out, whole)


def test_validation_has_one_gate(whole: Path, command: list[str], tmp_path: Path) -> None:
    """Whatever slots a run learns from, the same weights are judged alike."""
    asked = [
        f"train.init={whole / 'last'}",
        "train.lr=1e-30",
        "train.max_steps=1",
        "train.validation=0.2",
    ]
    lines = [
        rows(run(command, tmp_path / gate, *asked, f"train.gate={gate}"))
        for gate in ("predicted", "read")
    ]
    assert lines[0][-1]["validation"] == lines[1][-1]["validation"] and lines[0][0] != lines[1][0]


def test_a_warm_start_begins_where_it_was_given(
    whole: Path, command: list[str], tmp_path: Path
) -> None:
    """With a rate of nothing, the head that comes out is the one that went in."""
    out = run(
        command,
        tmp_path / "run",
        f"train.init={whole / 'last'}",
        "train.lr=1e-30",
        "train.max_steps=2",
    )
    assert apart(weights(out), weights(whole)) == 0


@pytest.mark.parametrize(
    ("damage", "override", "named"),
    [
        (lambda held: held.pop("fc.weight"), "", r"missing tensors \['fc.weight'\]"),
        (lambda held: held.update(extra=torch.zeros(1)), "", r"unknown \['extra'\]"),
        (lambda held: None, "drafter.intermediate_size=96", "intermediate_size: .* needed 96"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    damage: object, override: str, named: str, whole: Path, command: list[str], tmp_path: Path
) -> None:
    """A tensor too few, one too many, another size."""
    given = tmp_path / "given"
    given.mkdir()
    held = weights(whole)
    damage(held)  # type: ignore[operator]
    (given / "config.json").write_bytes((whole / "last/config.json").read_bytes())
    save_file(held, given / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        run(command, tmp_path / "run", f"train.init={given}", *([override] if override else []))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.lr=2e-3", "train.lr = 0.001, this one has 0.002"),
        ("train.seed=1", "train.seed"),
        ("drafter.noise=0.2", "drafter.noise"),
        ("train.max_steps=11", "train.max_steps"),
        (
            "train.clip=0.2 drafter.noise=0.2",
            r"drafter\.noise = None, this one has 0\.2; train\.clip",
        ),
    ],
)
def test_another_run_is_not_continued(
    override: str, named: str, whole: Path, command: list[str]
) -> None:
    """A folder belongs to the run that began in it; a place of its own is always free."""
    with pytest.raises(ValueError, match=rf"holds a run with {named}.*another train\.out"):
        run(command, whole, "train.validation=0.2", "train.checkpoint_every=3", *override.split())


def test_a_folder_may_move_and_watching_may_change(
    whole: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a run lies, and how often it is looked at, are no part of it."""
    shutil.copytree(whole, tmp_path / "moved")
    run(
        command,
        tmp_path / "moved",
        "train.validation=0.2",
        "train.checkpoint_every=5",
        "train.keep=1",
    )
    assert "complete" in capsys.readouterr().out
    assert load_head(tmp_path / "moved/head").settings.kind == "eagle1"
