"""Trackers, read back from what they wrote: wandb's own file, TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from accelerate.tracking import TensorBoardTracker
from comparisons import small_comparison, written
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trained import RECIPE, ROOT, equal, finished, launched, prepared, rows, run
from wandb.proto.wandb_internal_pb2 import Record

from eagle.recipe import Recipe, TrainSection
from eagle.training import trackers as module
from eagle.training.trackers import Trackers, check_trackers, flatten, name_run
from eagle.training.train import _Run
from eval.compare import main as compare
from eval.measure import log_measurement
from recipes.train_medusa2 import main as train_jointly

EVERY = (
    "train.checkpoint_every=4",
    "train.validate_every=2",
    "train.validation=0.1",
    "train.epochs=2",
)
BLOCK, FULL, FIRST, LAST = 32768, 1, 2, 4  # of LevelDB's logs
BOTH = "train.log_with=wandb,tensorboard"


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a network or a home."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def wandb_records(out: Path) -> Iterator[Record]:
    """All that wandb has written of a run, start by start."""
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        whole = b""
        for kind, data in log_pieces(path.read_bytes()):
            whole = data if kind in (FULL, FIRST) else whole + data
            if kind in (FULL, LAST):
                yield Record.FromString(whole)


def set_aside(out: Path) -> None:
    """Give wandb's folder of a run's first start another name: it names folders by the second in which it starts."""
    (folder,) = out.glob("wandb/offline-run-*")
    folder.rename(folder.with_name(f"offline-run-0-{folder.name}"))


def log_pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and bytes of every piece of a file in LevelDB's log format, with wandb's head of seven bytes.

    wandb reads its files in a program of its own, and has no reader for Python any more.
    """
    assert data[:4] == b":W&B"
    at = 7
    while at < len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a piece's head
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        yield kind, data[at + 7 : at + 7 + length]
        at += 7 + length


def in_wandb(out: Path) -> list[dict[str, Any]]:
    """The rows of a run in wandb's file, with their steps."""
    found = []
    for record in wandb_records(out):
        if record.HasField("history"):
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            found.append({"_step": record.history.step.num, **items})
    return found


def in_tensorboard(out: Path) -> dict[str, dict[int, float]]:
    """Value by step of every scalar, by its name; what was purged is not there."""
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == len({*steps}), (tag, steps)
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


def expected(out: Path) -> dict[tuple[int, str], float]:
    """The numbers of metrics.jsonl, as they should stand in a tracker."""
    numbers: dict[tuple[int, str], float] = {}
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        step = row.pop("step")
        values = row if "validation" in row else {"train": row}
        numbers |= {(step, name): value for name, value in flatten(values)}
    return numbers


def check_both(out: Path) -> None:
    """Every number of metrics.jsonl stands in both trackers, once, and nothing else does."""
    wanted = expected(out)
    assert len({step for step, _ in wanted}) > 2 and {
        name.partition("/")[0] for _, name in wanted
    } == {
        "train",
        "validation",
    }
    logged: Counter[tuple[int, str]] = Counter()
    for row in in_wandb(out):
        for name, value in row.items():
            if not name.startswith("_"):
                logged[row["_step"], name] += 1
                assert (
                    "per_second" in name or "memory" in name or value == wanted[row["_step"], name]
                ), (row, name)
    assert logged == dict.fromkeys(wanted, 1)
    scalars = {
        (step, name): value
        for name, line in in_tensorboard(out).items()
        for step, value in line.items()
    }
    assert scalars.keys() == wanted.keys()
    for key, value in wanted.items():
        assert math.isclose(scalars[key], value, rel_tol=1e-6), key


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without trackers."""
    return run(command, tmp_path_factory.mktemp("whole") / "run", *EVERY)


@pytest.mark.slow
def test_every_row_is_in_both_trackers(whole: Path, command: list[str], tmp_path: Path) -> None:
    """With the recipe as flat hyper-parameters, under the run's name; training itself is not touched."""
    out = run(command, tmp_path / "runs/mine", *EVERY, BOTH, "train.project=heads")
    check_both(out)
    assert equal(out, whole) and rows(out) == rows(whole)
    (started,) = (record.run for record in wandb_records(out) if record.HasField("run"))
    assert (started.project, started.display_name) == ("heads", "mine")
    config = {item.key: item.value_json for rec in wandb_records(out) for item in rec.config.update}
    assert json.loads(config["train.lr"]) == 1e-3 and json.loads(config["drafter.kind"]) == "eagle1"
    (hyper,) = out.glob("tensorboard/*/hparams.yml")
    assert "train.lr: 0.001" in hyper.read_text()


@pytest.fixture
def gone_on(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Path]:
    """Trains a run that ends two steps behind a checkpoint, with rows of those steps, and goes on from there."""

    def go_on() -> Path:
        with monkeypatch.context() as planted:
            step, advance = iter(range(100)), _Run._advance

            def stop(self: _Run, *args: Any) -> None:
                if next(step) == 6:
                    raise KeyError("planted")
                advance(self, *args)

            planted.setattr(_Run, "_advance", stop)
            with pytest.raises(KeyError, match="planted"):
                run(command, tmp_path / "run", *EVERY, BOTH)
        wandb.finish()  # as the end of a process does
        set_aside(tmp_path / "run")
        return run(command, tmp_path / "run", *EVERY, BOTH)

    return go_on


def test_a_run_that_goes_on_is_one_run(gone_on: Callable[[], Path], whole: Path) -> None:
    """Under one id, without a step twice, though each start of wandb writes a file of its own."""
    out = gone_on()
    assert equal(out, whole) and rows(out) == rows(whole)
    check_both(out)
    started = [record.run for record in wandb_records(out) if record.HasField("run")]
    ids = {record.run_id for record in started}
    assert len(list(out.glob("wandb/offline-run-*"))) == 2 and len(ids) == 1
    assert json.loads((out / "trackers.json").read_text()) == {
        "wandb": ids.pop(),
        "tensorboard": "",
    }
    assert len(list(out.glob("tensorboard/*/hparams.yml"))) == 1


@pytest.mark.slow
def test_rows_that_are_told_twice_are_seen(
    gone_on: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: wandb is told again what it knows, TensorBoard of a later step."""
    kind, make = module._kind, Trackers._make
    with monkeypatch.context() as planted:
        planted.setattr(module, "_kind", lambda row: object())
        planted.setattr(
            Trackers, "_make", lambda self, name, project, before: make(self, name, project, None)
        )
        out = gone_on()
    assert module._kind is kind
    with pytest.raises(AssertionError):
        check_both(out)
    with pytest.raises(AssertionError, match="train/"):
        in_tensorboard(out)


def test_a_run_that_begins_anew_is_another_run(command: list[str], tmp_path: Path) -> None:
    """Where nothing was kept, as after a change of mind before the first checkpoint."""
    few = ("train.max_steps=2", "train.validation=0", BOTH)
    run(command, tmp_path / "run", *few)
    before = json.loads((tmp_path / "run/trackers.json").read_text())
    shutil.rmtree(tmp_path / "run/checkpoints")
    out = run(command, tmp_path / "run", *few, "train.lr=1e-4")
    assert json.loads((out / "trackers.json").read_text())["wandb"] != before["wandb"]
    assert in_tensorboard(out)["train/lr"].keys() == {1}


@pytest.mark.slow
def test_what_is_measured_joins_the_run(command: list[str], tmp_path: Path) -> None:
    """With its page as an artefact of wandb, and its table as a text of TensorBoard, which keeps no files."""
    out = run(command, tmp_path / "run", *EVERY, BOTH)
    set_aside(out)
    shutil.copy(ROOT / "docs/results/tiny_eagle1.jsonl", out / "results.jsonl")
    recipe = Recipe.load(command[0], [*command[1:], f"train.out={out}", BOTH])
    log_measurement(recipe, out / "results.jsonl", "| a table |")
    records = list(wandb_records(out))
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
    (page, results) = [record.artifact for record in records if record.HasField("artifact")]
    assert page.name.endswith("-report") and results.name.endswith("-results")
    assert [entry.path for entry in page.manifest.contents] == ["report.html"]
    last = {name: value for row in in_wandb(out)[-3:] for name, value in row.items()}
    taus = {
        name: value
        for name, value in last.items()
        if name.startswith("measured/") and name.endswith("/tau")
    }
    assert taus and all(value >= 1 for value in taus.values())
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    (text,) = events.Tensors("report/text_summary")
    assert text.tensor_proto.string_val == [b"| a table |"]


def test_a_tracker_that_fails_ends_no_run(
    command: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows are in metrics.jsonl; at the start it is refused, while nothing is lost."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the server went away\nand more")

    with monkeypatch.context() as planted:
        planted.setattr(TensorBoardTracker, "log", fail)
        out = run(command, tmp_path / "run", *EVERY, "train.log_with=[tensorboard]")
    assert equal(out, whole) and rows(out) == rows(whole)
    said = capsys.readouterr().out
    assert (
        said.count(f"tensorboard takes nothing more: the server went away. All of it is in {out}")
        == 1
    )
    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    with pytest.raises(
        ValueError,
        match=r"log_with: tensorboard begins no run: the server went away\. Mend that, or",
    ):
        run(command, tmp_path / "other", *EVERY, "train.log_with=[tensorboard]")


def test_an_old_wandb_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence: before 0.27 the end of a run has no limit, and would wait for a lost network."""
    fields = {
        name: field
        for name, field in wandb.Settings.model_fields.items()
        if name != "finish_timeout"
    }
    monkeypatch.setattr(wandb, "Settings", SimpleNamespace(model_fields=fields))
    with pytest.raises(
        ValueError, match=r"wandb is [\d.]+, expected 0\.27 or newer: `pip install -U wandb`"
    ):
        run(command, tmp_path / "run", *EVERY, "train.log_with=[wandb]")


def test_trackio_is_told_every_step(tmp_path: Path) -> None:
    """By the step of a row; nothing else is asked of the tracker."""
    trackers, told = Trackers(Recipe.load(RECIPE, [f"train.out={tmp_path}"])), []
    tracker: Any = trackers._make("trackio", "heads", 0)
    tracker.run = SimpleNamespace(log=lambda values, step: told.append((values, step)))
    trackers.running = [tracker]
    trackers.log({"step": 7, "train": {"total": 0.5}})
    assert told == [({"train/total": 0.5}, 7)]


def settings(*overrides: str) -> TrainSection:
    """The training section of the tiny recipe."""
    return Recipe.load(RECIPE, overrides).train


def test_trackers_that_are_not_there_are_refused(command: list[str], tmp_path: Path) -> None:
    """By name, with what to install; by the check of a recipe, too."""
    with pytest.raises(
        ValueError,
        match=r"names 'tensorbord'; did you mean tensorboard\?: expected some of wandb, tens",
    ):
        check_trackers(settings("train.log_with=[tensorbord]"))
    with pytest.raises(
        ValueError, match=r"names comet_ml, which is not installed here: `pip install comet_ml`"
    ):
        check_trackers(settings("train.log_with=[comet]"))
    for more in ((), ("--check",)):
        with pytest.raises(ValueError, match="names dvclive, which is not installed"):
            run(command, tmp_path / "run", "train.log_with=dvclive", *more)
    assert not (tmp_path / "run").exists()


def test_names_are_as_users_write_them() -> None:
    """Lists, commas, comet; the older key is wandb with its own project."""
    assert settings("train.log_with=wandb, Comet").trackers == {
        "wandb": "eagle",
        "comet_ml": "eagle",
    }
    assert settings("train.log_with=[mlflow]", "train.project=a").trackers == {"mlflow": "a"}
    assert settings("train.wandb=b", "train.log_with=tensorboard").trackers == {
        "tensorboard": "eagle",
        "wandb": "b",
    }
    assert settings("train.log_with=null").trackers == settings().trackers == {}
    with pytest.raises(ValueError, match=r"train\.log_with"):
        settings("train.log_with=3")


def test_runs_are_named_by_their_folders() -> None:
    """As they lie below `runs`; arms of a comparison by the arm."""
    assert (
        name_run(Path("runs/tiny/eagle1")) == "tiny/eagle1"
        and name_run(Path("runs/mine")) == "mine"
    )
    assert name_run(Path("runs/compare/tiny/runs/wide-0-12345678")) == "wide-0-12345678"


def test_values_are_flat() -> None:
    """Numbers, and texts where asked; what is no number is left out, as is what has no value."""
    row = {"a": 1, "b": {"c=d": 2.5, "e": float("nan")}, "f": [1, 2], "g": "text", "h": None}
    assert dict(flatten(row)) == {"a": 1, "b/c-d": 2.5, "f": 2}
    assert dict(flatten(row, ".", texts=True))["f"] == "[1, 2]"


@pytest.mark.slow
def test_two_processes_log_once(command: list[str], tmp_path: Path) -> None:
    """The first alone, each number as metrics.jsonl has it."""
    script = str(ROOT / "recipes/train_eagle.py")
    done = finished(
        launched("ddp", script, *command, *EVERY, BOTH, f"train.out={tmp_path / 'run'}")
    )
    assert done.returncode == 0, done.stdout
    check_both(tmp_path / "run")
    assert len(list(tmp_path.glob("run/wandb/offline-run-*"))) == 1
    assert len(list(tmp_path.glob("run/tensorboard/events.*"))) == 1


@pytest.mark.slow
def test_every_arm_of_a_comparison_is_a_run(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Named by the arm; what is compared is a run beside them, with the table."""
    values = small_comparison(tiny_target_dir, tmp_path)
    values["recipe"]["train"]["log_with"] = ["wandb", "tensorboard"]
    compare(
        [
            written(
                values,
                tmp_path,
                seeds=[0],
                arms={"wide one": {"tokens": 150}, "more": {"tokens": 200}},
            )
        ]
    )
    runs = {}
    for out in (*(tmp_path / "out/runs").iterdir(), tmp_path / "out"):
        (started,) = (record.run for record in wandb_records(out) if record.HasField("run"))
        runs[started.display_name.rpartition("-")[0]] = out
    assert {name for name in runs if name} == {"wide-one-0", "more-0"}
    for name in ("wide-one-0", "more-0"):
        assert in_tensorboard(runs[name])["train/total"]
    names = [
        record.artifact.name
        for record in wandb_records(tmp_path / "out")
        if record.HasField("artifact")
    ]
    assert [name.partition("-")[2] for name in names] == ["comparison", "comparison"]


@pytest.mark.slow
def test_a_target_that_trains_with_its_heads_is_tracked(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """By the same key."""
    recipe = str(ROOT / "recipes/tiny/medusa2.yaml")
    where = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
    ]
    few = [
        "data.limit=24",
        "data.max_length=96",
        "train.max_steps=3",
        "train.validate_every=1",
        BOTH,
    ]
    exact = [
        "target.dtype=float32",
        "train.dtype=float32",
        "train.init=null",
        "train.validation=0.2",
        "regenerate=null",
    ]
    train_jointly([recipe, *where, *few, *exact, f"train.out={tmp_path / 'run'}"])
    check_both(tmp_path / "run")
