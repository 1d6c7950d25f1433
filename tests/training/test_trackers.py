"""Trackers, read back from what they wrote: wandb's own file, TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker
from comparisons import small_comparison, written
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trained import RECIPE, ROOT, equal, finished, launched, rows, run
from wandb.proto.wandb_internal_pb2 import Record

from eagle.recipe import Recipe, TrainSection
from eagle.training import trackers as module
from eagle.training.trackers import LOG_FOLDERS, Trackers, check_trackers, flatten, name_run
from eagle.training.train import Run
from eval.compare import main as compare
from eval.measure import log_measurement
from recipes.train_medusa2 import main as train_jointly

EVERY = (
    "train.checkpoint_every=4",
    "train.validate_every=2",
    "train.validation=0.1",
    "train.epochs=2",
)
BOTH = "train.log_with=wandb,tensorboard"
# of LevelDB's logs: the size of a block, and kinds of pieces
BLOCK = 32768
FULL, FIRST, LAST = 1, 2, 4


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep wandb off the network and out of the home folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def read_log(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and bytes of every piece of a file in LevelDB's log format, with wandb's head of seven bytes.

    wandb reads its files in a program of its own, and has no reader for Python any more.
    """
    assert data[:4] == b":W&B"

    offset = 7

    while offset < len(data):
        room = BLOCK - offset % BLOCK
        if room < 7:  # too little for a piece's head
            offset += room
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, offset)
        yield kind, data[offset + 7 : offset + 7 + length]
        offset += 7 + length


def read_wandb(out: Path, field: str) -> list[Any]:
    """Return this field of all records that wandb has written of a run, start by start."""
    found = []

    # each start of a run writes a file of its own
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        whole = b""
        for kind, data in read_log(path.read_bytes()):
            whole = data if kind in (FULL, FIRST) else whole + data
            if kind in (FULL, LAST):
                record = Record.FromString(whole)
                if record.HasField(field):
                    found.append(getattr(record, field))

    return found


def read_history(out: Path) -> Iterator[tuple[tuple[int, str], float]]:
    """Yield ((step, name), value) of all that stands in wandb's file, but for wandb's own names."""
    for history in read_wandb(out, "history"):
        for item in history.item:
            # wandb splits some names at their slashes
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                yield (history.step.num, name), json.loads(item.value_json)


def read_tensorboard(out: Path) -> dict[tuple[int, str], float]:
    """Return the value of every scalar by step and name; what was purged is not there."""
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}

    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            # no step may stand there twice
            assert (event.step, tag) not in found
            found[event.step, tag] = event.value

    return found


def read_metrics(out: Path) -> dict[tuple[int, str], float]:
    """Return the numbers of metrics.jsonl, as they should stand in a tracker."""
    numbers: dict[tuple[int, str], float] = {}

    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in flatten(row if "validation" in row else {"train": row}):
            numbers[step, name] = value

    return numbers


def check_both(out: Path) -> None:
    """Check that every number of metrics.jsonl stands in both trackers, once, and nothing else does."""
    expected = read_metrics(out)
    assert len({step for step, _ in expected}) > 2
    # the run has rows of both kinds
    assert {name.partition("/")[0] for _, name in expected} == {"train", "validation"}

    history = list(read_history(out))
    assert Counter(key for key, _ in history) == dict.fromkeys(expected, 1)

    for (step, name), value in history:
        # speeds are measured twice
        if "per_second" not in name and "memory" not in name:
            assert value == expected[step, name]

    scalars = read_tensorboard(out)
    assert scalars.keys() == expected.keys()

    for key, value in expected.items():
        assert math.isclose(scalars[key], value, rel_tol=1e-6), key


def set_aside(out: Path) -> None:
    """Rename wandb's folder of a run's first start: it names folders by the second in which it starts."""
    (folder,) = out.glob("wandb/offline-run-*")
    folder.rename(folder.with_name(f"offline-run-0-{folder.name}"))


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run without trackers."""
    return run(command, tmp_path_factory.mktemp("whole") / "run", *EVERY)


@pytest.mark.slow
def test_every_row_is_in_both_trackers(whole: Path, command: list[str], tmp_path: Path) -> None:
    """With the recipe as flat hyper-parameters, under the run's name; training itself is not touched."""
    out = run(command, tmp_path / "runs/mine", *EVERY, BOTH, "train.project=heads")
    check_both(out)

    assert equal(out, whole)
    assert rows(out) == rows(whole)

    (started,) = read_wandb(out, "run")

    assert started.project == "heads"
    assert started.display_name == "mine"

    config = {}

    for update in read_wandb(out, "config"):
        config |= {item.key: json.loads(item.value_json) for item in update.update}

    assert config["train.lr"] == 1e-3
    assert config["drafter.kind"] == "eagle1"

    # TensorBoard keeps a recipe in a file beside its events
    (hyper,) = out.glob("tensorboard/*/hparams.yml")

    assert "train.lr: 0.001" in hyper.read_text()


def test_joint_training_is_tracked_too(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Every row of a target that is trained with its heads."""
    pytest.importorskip("peft", reason="peft is not installed")
    command = [
        str(ROOT / "recipes/tiny/medusa2.yaml"),
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
        "target.dtype=float32",
        "data.limit=8",
        "data.max_length=64",
        "regenerate=null",
        "train.init=null",
        "train.dtype=float32",
        "train.epochs=1",
        "train.validation=0.2",
        "train.checkpoint_every=1",
        "train.log_with=tensorboard",
    ]
    train_jointly([*command, f"train.out={tmp_path / 'run'}"])
    expected = read_metrics(tmp_path / "run")
    assert {name.partition("/")[0] for _, name in expected} == {"train", "validation"}
    assert read_tensorboard(tmp_path / "run").keys() == expected.keys()


@pytest.fixture
def train_twice(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], Path]:
    """Return a function that trains a run which fails two steps after a checkpoint, and goes on from there."""

    def train() -> Path:
        steps = iter(range(100))
        advance = Run._advance

        def fail(self: Run, *args: Any) -> None:
            if next(steps) == 6:
                raise KeyError("planted")
            advance(self, *args)

        with monkeypatch.context() as patch, pytest.raises(KeyError, match="planted"):
            patch.setattr(Run, "_advance", fail)
            run(command, tmp_path / "run", *EVERY, BOTH)

        wandb.finish()  # as the end of a process does
        set_aside(tmp_path / "run")
        return run(command, tmp_path / "run", *EVERY, BOTH)

    return train


def test_a_run_that_goes_on_is_one_run(train_twice: Callable[[], Path], whole: Path) -> None:
    """Under one id, without a step twice, though each start of wandb writes a file of its own."""
    out = train_twice()

    assert equal(out, whole)
    assert rows(out) == rows(whole)

    check_both(out)

    assert len(list(out.glob("wandb/offline-run-*"))) == 2

    (run_id,) = {started.run_id for started in read_wandb(out, "run")}
    known = json.loads((out / "trackers.json").read_text())

    assert known == {"wandb": run_id, "tensorboard": ""}
    assert len(list(out.glob("tensorboard/*/hparams.yml"))) == 1


@pytest.mark.slow
def test_rows_that_are_told_twice_are_seen(
    train_twice: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: wandb is told again what it knows, TensorBoard of a later step."""
    make = Trackers._make

    def make_forgetful(self: Trackers, name: str, project: str, step: Any) -> Any:
        return make(self, name, project, None)

    with monkeypatch.context() as patch:
        # no row is known from before
        patch.setattr(module, "_row_key", lambda row: object())
        patch.setattr(Trackers, "_make", make_forgetful)
        out = train_twice()

    with pytest.raises(AssertionError):
        check_both(out)
    with pytest.raises(AssertionError):
        read_tensorboard(out)


def test_a_run_that_begins_again_is_another_run(command: list[str], tmp_path: Path) -> None:
    """Where nothing was kept, as after a change of mind before the first checkpoint."""
    few = ("train.max_steps=2", "train.validation=0", BOTH)
    out = run(command, tmp_path / "run", *few)
    before = json.loads((out / "trackers.json").read_text())
    shutil.rmtree(out / "checkpoints")
    run(command, out, *few, "train.lr=1e-4")

    assert json.loads((out / "trackers.json").read_text())["wandb"] != before["wandb"]

    steps = [step for step, name in read_tensorboard(out) if name == "train/lr"]

    assert steps == [1]


@pytest.mark.slow
def test_what_is_measured_joins_the_run(command: list[str], tmp_path: Path) -> None:
    """With its page as an artefact of wandb, and its table as a text of TensorBoard, which keeps no files."""
    out = run(command, tmp_path / "run", *EVERY, BOTH)
    set_aside(out)
    shutil.copy(ROOT / "docs/results/tiny_eagle1.jsonl", out / "results.jsonl")
    recipe = Recipe.load(command[0], [*command[1:], f"train.out={out}", BOTH])
    log_measurement(recipe, out / "results.jsonl", "| a table |")

    assert len({started.run_id for started in read_wandb(out, "run")}) == 1

    # wandb's own process may write a little after the run was finished here
    for _ in range(100):
        artifacts = read_wandb(out, "artifact")
        if len(artifacts) == 2:
            break
        time.sleep(0.1)
    page, results = artifacts

    assert page.name.endswith("-report")
    assert results.name.endswith("-results")
    # the page is one file
    assert [entry.path for entry in page.manifest.contents] == ["report.html"]

    history = dict(read_history(out))
    taus = [
        value
        for (_, name), value in history.items()
        if name.startswith("measured/") and name.endswith("/tau")
    ]

    assert taus
    assert min(taus) >= 1

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

    asked = (*EVERY, "train.log_with=[tensorboard]")

    with monkeypatch.context() as patch:
        # in the middle of a run
        patch.setattr(TensorBoardTracker, "log", fail)
        out = run(command, tmp_path / "run", *asked)

    assert equal(out, whole)
    assert rows(out) == rows(whole)

    printed = capsys.readouterr().out

    assert printed.count("tensorboard takes nothing more: the server went away. All of it") == 1

    # when it begins
    monkeypatch.setattr(TensorBoardTracker, "start", fail)

    with pytest.raises(ValueError, match="tensorboard begins no run: the server went away"):
        run(command, tmp_path / "other", *asked)


def test_an_old_wandb_is_refused(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 0.27 the end of a run has no limit, and would wait for a lost network."""
    fields = dict(wandb.Settings.model_fields)
    # the setting came with 0.27
    del fields["finish_timeout"]
    monkeypatch.setattr(wandb, "Settings", SimpleNamespace(model_fields=fields))
    with pytest.raises(ValueError, match=r"expected 0\.27 or newer"):
        run(command, tmp_path / "run", *EVERY, "train.log_with=[wandb]")


def test_trackio_is_told_every_step(tmp_path: Path) -> None:
    """By the step of a row; nothing else is asked of the tracker."""
    trackers = Trackers(Recipe.load(RECIPE, [f"train.out={tmp_path}"]))
    told: list[Any] = []
    tracker: Any = trackers._make("trackio", "heads", 0)
    # trackio is not installed here
    tracker.run = SimpleNamespace(log=lambda values, step: told.append((values, step)))
    trackers.running = [tracker]
    trackers.log({"step": 7, "train": {"total": 0.5}})

    assert told == [({"train/total": 0.5}, 7)]


def parse(*overrides: str) -> TrainSection:
    """Return the training section of the tiny recipe."""
    return Recipe.load(RECIPE, overrides).train


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorbord", "did you mean tensorboard"), ("comet", "`pip install comet_ml`")],
)
def test_trackers_that_are_not_there_are_refused(name: str, message: str) -> None:
    """By name, with what to install."""
    with pytest.raises(ValueError, match=message):
        check_trackers(parse(f"train.log_with=[{name}]"))


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_a_run_with_a_missing_tracker_never_begins(
    more: list[str],
    command: list[str],
    tmp_path: Path,
) -> None:
    """The check of a recipe says so, too."""
    with pytest.raises(ValueError, match="names dvclive, which is not installed"):
        run(command, tmp_path / "run", "train.log_with=dvclive", *more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.log_with=wandb, Comet"], {"wandb": "eagle", "comet_ml": "eagle"}),
        (["train.log_with=[mlflow]", "train.project=a"], {"mlflow": "a"}),
        # the older key is wandb with its own project
        (
            ["train.wandb=b", "train.log_with=tensorboard"],
            {"tensorboard": "eagle", "wandb": "b"},
        ),
        (["train.log_with=null"], {}),
    ],
)
def test_names_are_as_users_write_them(overrides: list[str], expected: dict[str, str]) -> None:
    """Lists, commas, capitals."""
    assert parse(*overrides).trackers == expected


def test_runs_are_named_by_their_folders() -> None:
    """As they lie below `runs`; arms of a comparison by the arm."""
    assert name_run(Path("runs/tiny/eagle1")) == "tiny/eagle1"
    assert name_run(Path("runs/compare/tiny/runs/wide-0-12345678")) == "wide-0-12345678"


def test_values_are_flat() -> None:
    """Numbers, and texts where asked; what is no number is left out, as is what has no value."""
    row = {
        "a": 1,
        "b": {"c=d": 2.5, "e": float("nan")},
        "f": [1, 2],
        "g": "text",
        "h": None,
    }
    assert dict(flatten(row)) == {"a": 1, "b/c-d": 2.5, "f": 2}
    assert dict(flatten(row, ".", texts=True))["f"] == "[1, 2]"


@pytest.mark.slow
def test_two_processes_log_once(command: list[str], tmp_path: Path) -> None:
    """The first alone, each number as metrics.jsonl has it."""
    out = tmp_path / "run"
    script = str(ROOT / "recipes/train_eagle.py")
    done = finished(launched("ddp", script, *command, *EVERY, BOTH, f"train.out={out}"))

    assert done.returncode == 0, done.stdout

    check_both(out)

    assert len(list(out.glob("wandb/offline-run-*"))) == 1
    assert len(list(out.glob("tensorboard/events.*"))) == 1


@pytest.mark.slow
def test_every_arm_of_a_comparison_is_a_run(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Named by the arm; what is compared is a run beside them, with the table."""
    values = small_comparison(tiny_target_dir, tmp_path)
    values["recipe"]["train"]["log_with"] = ["wandb", "tensorboard"]
    arms = {"wide one": {"tokens": 150}, "more": {"tokens": 200}}
    compare([written(values, tmp_path, seeds=[0], arms=arms)])
    names = set()

    for out in (tmp_path / "out/runs").iterdir():
        (started,) = read_wandb(out, "run")
        # the last part is a hash
        names.add(started.display_name.rpartition("-")[0])
        assert any(name == "train/total" for _, name in read_tensorboard(out))

    assert names == {"wide-one-0", "more-0"}

    kinds = [each.name.partition("-")[2] for each in read_wandb(tmp_path / "out", "artifact")]

    assert kinds == ["comparison", "comparison"]


def test_folders_are_for_trackers_that_accelerate_knows() -> None:
    """A misspelt name would send a tracker's files somewhere else without a word."""
    assert LOG_FOLDERS.keys() <= {str(name) for name in LOGGER_TYPE_TO_CLASS}
