"""The trackers that a recipe names, through accelerate's own: a run of one name in each, with metrics and files."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from eagle.core.arguments import nearest
from eagle.disk import write_text
from eagle.log import Metrics, first_line
from eagle.recipe import Recipe, TrainSection

NOTE = "trackers.json"  # in a run's folder: the id of its run in every tracker, by which it goes on
WANDB_SECONDS = 10
OFFERED = ("wandb", "tensorboard", "mlflow", "trackio", "comet_ml")
TOLD_ONCE = ("tensorboard", "mlflow")  # of hyper-parameters: one adds them each time, one refuses changes
TAKE_TEXT = ("tensorboard",)
BESIDE = {"tensorboard": "tensorboard", "aim": "."}  # folders within a run's, for trackers that need one


def check_trackers(settings: TrainSection) -> None:
    """Refuse trackers that accelerate does not know, or whose package is not installed."""
    known, here = sorted(LOGGER_TYPE_TO_CLASS), {str(name) for name in get_available_trackers()}
    for name in settings.trackers:
        if name not in known:
            others = [other for other in known if other not in OFFERED]
            raise ValueError(
                f"train.log_with names {name!r}{nearest(name, known)}: expected some of {', '.join(OFFERED)}, or of "
                f"those that are used as accelerate leaves them, {', '.join(others)}"
            )
        if name not in here:
            raise ValueError(
                f"train.log_with names {name}, which is not installed here: `pip install {name}`, or leave it out; "
                "metrics.jsonl is written anyway"
            )


class PatientWandb(WandBTracker):
    """A run in wandb, or on the disk for `wandb sync` without a key or a network: training never waits for it."""

    def start(self) -> None:
        """Begin the run, or go on with it."""
        import wandb

        if "finish_timeout" not in wandb.Settings.model_fields:  # else a lost network holds a run up
            raise ValueError(f"wandb is {wandb.__version__}, expected 0.27 or newer: `pip install -U wandb`.")
        seconds: dict[str, Any] = dict.fromkeys(("init_timeout", "finish_timeout", "login_timeout"), WANDB_SECONDS)
        options: dict[str, Any] = {
            "project": self.run_name,
            **self.init_kwargs,
            "settings": wandb.Settings(**seconds, silent=True),
        }
        try:
            self.run = wandb.init(**options)
        except wandb.Error as error:  # no key (UsageError), no network (CommError)
            where = f"{self.init_kwargs['dir']}/wandb"
            print(f"wandb is not reached ({error}): the run is kept in {where}, send it later with `wandb sync`")
            self.run = wandb.init(**{**options, "resume": None}, mode="offline")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add hyper-parameters to the run.

        Without a network, accelerate before 1.13 would begin another run for them.
        """
        self.run.config.update(values, allow_val_change=True)

    def send(self, path: Path) -> None:
        """Log a file as an artefact; a page or a drawing is shown among the run's charts, too."""
        import wandb

        artefact = wandb.Artifact(f"{self.run.id}-{path.stem}", type="report")
        artefact.add_file(str(path))
        self.run.log_artifact(artefact)
        if path.suffix in (".html", ".svg"):
            self.run.log({path.stem: wandb.Html(path.read_text(encoding="utf-8"), inject=False)})


class SteppedTrackio(TrackioTracker):
    """A run in trackio that is told every step, which accelerate before 1.14 keeps to itself."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the numbers of a step."""
        self.run.log(values, step=step, **options)


OWN: dict[str, type[GeneralTracker]] = {"wandb": PatientWandb, "trackio": SteppedTrackio}


class Keeper(NamedTuple):
    """How a tracker's run is begun under a name, known by an id, gone on with, and given a file."""

    begin: Callable[[str], dict[str, Any]]
    id_of: Callable[[Any], str]
    go_on: Callable[[str], dict[str, Any]]
    send: Callable[[Any, Path], Any]


KEEPERS = {
    "wandb": Keeper(
        lambda name: {"name": name},
        lambda tracker: tracker.run.id,
        lambda run: {"id": run, "resume": "allow"},
        lambda tracker, path: tracker.send(path),
    ),
    "mlflow": Keeper(
        lambda name: {"run_name": name},
        lambda tracker: tracker.active_run.info.run_id,
        lambda run: {"run_id": run},
        lambda tracker, path: tracker.log_artifact(str(path)),
    ),
    "trackio": Keeper(
        lambda name: {"name": f"{name}-{secrets.token_hex(3)}"},  # by which alone a run is found again
        lambda tracker: tracker.run.name,
        lambda run: {"name": run, "resume": "allow"},
        lambda tracker, path: tracker.run.log_artifact(str(path), type="report"),
    ),
    "comet_ml": Keeper(
        lambda name: {},
        lambda tracker: tracker.writer.get_key(),
        lambda run: {"experiment_key": run},
        lambda tracker, path: tracker.writer.log_asset(str(path), file_name=path.name),
    ),
}


class Trackers:
    """A run in each of a recipe's trackers, of the main process; without any it does nothing.

    Training begins or goes on `before` a step; without it what is added belongs to the run that was logged.
    """

    def __init__(self, recipe: Recipe, *, before: int | None = None) -> None:
        self.folder = Path(recipe.train.out)
        self.config = dict(flatten(recipe.model_dump(mode="json"), ".", texts=True))
        self.is_training = before is not None
        note = self.folder / NOTE
        self.ids: dict[str, str] = json.loads(note.read_text()) if before != 0 and note.is_file() else {}
        self.continued = set(self.ids)
        self.running: list[GeneralTracker] = []
        for name, project in recipe.train.trackers.items():
            if self.is_training or name in (*KEEPERS, *TAKE_TEXT):  # others know no run that has ended
                self._begin(name, project, before)
        if self.ids:
            write_text(note, json.dumps(self.ids, indent=1) + "\n")

    def _begin(self, name: str, project: str, before: int | None) -> None:
        """Begin a tracker's run, or go on with the one that is noted."""
        tracker = self._make(name, project, before)
        try:
            tracker.start()
            if name == "comet_ml":  # whose start takes no name
                tracker.tracker.set_name(name_run(self.folder))
            if name not in self.continued or name not in TOLD_ONCE:
                tracker.store_init_configuration(self.config)
        except Exception as error:  # of as many kinds as there are trackers
            mend = f"`pip install {name}`" if isinstance(error, ImportError) else "Mend that"
            fault = f"train.log_with: {name} begins no run: {first_line(error)} {mend}, or leave it out"
            if self.is_training:
                raise ValueError(fault) from error
            print(fault)
            return
        self.running.append(tracker)
        self.ids[name] = KEEPERS[name].id_of(tracker) if name in KEEPERS else ""

    def _make(self, name: str, project: str, before: int | None) -> GeneralTracker:
        """A tracker that has not begun yet."""
        if name in BESIDE:
            # TensorBoard passes over what earlier starts of this run wrote of the steps to come
            options = {"purge_step": before} if name == "tensorboard" and before is not None else {}
            return LOGGER_TYPE_TO_CLASS[name](BESIDE[name], str(self.folder), **options)
        keeper = KEEPERS.get(name)
        where = {"dir": str(self.folder)} if name == "wandb" else {}
        if keeper is not None:
            where |= keeper.go_on(self.ids[name]) if name in self.ids else keeper.begin(name_run(self.folder))
        return OWN.get(name, LOGGER_TYPE_TO_CLASS[name])(project, **where)

    def log(self, row: Mapping[str, Any], *, is_known: bool = False) -> None:
        """Log the numbers of a row; one that `is_known` was logged before the run went on."""
        values = dict(flatten(row))
        step = values.pop("step", None)
        told = [tracker for tracker in self.running if not (is_known and self._remembers(tracker.name))]
        if values:
            self._each(lambda tracker: tracker.log(values, step=step), told)

    def _remembers(self, name: str) -> bool:
        """Whether a tracker went on with a run, of which it keeps all that it was told."""
        return name in self.continued and name in KEEPERS

    def send(self, paths: Sequence[Path], text: str) -> None:
        """Log files as artefacts; trackers that keep no files get the text."""
        for tracker in list(self.running):
            if keeper := KEEPERS.get(tracker.name):
                self._each(partial(_send_all, keeper, paths), [tracker])
            elif tracker.name in TAKE_TEXT:
                self._each(lambda one: one.log({"report": text}), [tracker])

    def _each(self, work: Callable[[Any], object], trackers: Iterable[GeneralTracker]) -> None:
        """Do something with each; a tracker that fails is left, and what it would get stays in the run's folder."""
        for tracker in trackers:
            try:
                work(tracker)
            except Exception as error:  # a network that went away, a full disk: of as many kinds as trackers
                self.running.remove(tracker)
                print(f"{tracker.name} takes nothing more: {first_line(error)} All of it is in {self.folder}")

    def finish(self) -> None:
        """End the runs."""
        self._each(lambda tracker: tracker.finish(), list(self.running))


class TrackedMetrics(Metrics):
    """The metrics of a training run as JSON lines, and in the trackers of its recipe."""

    def __init__(self, recipe: Recipe, *, before: int) -> None:
        super().__init__(Path(recipe.train.out) / "metrics.jsonl", before=before)
        self.known = {_kind(row) for row in map(_parse, self.dropped)} if before else set()
        self.trackers = Trackers(recipe, before=before)

    def write(self, **row: Any) -> None:
        """Append a row, and log it."""
        super().write(**row)
        values = {name: value for name, value in row.items() if name != "step"}
        named = values if "validation" in values else {"train": values}
        self.trackers.log({"step": row["step"], **named}, is_known=_kind(row) in self.known)

    def close(self) -> None:
        """Close the file, and end the runs."""
        super().close()
        self.trackers.finish()


def _send_all(keeper: Keeper, paths: Sequence[Path], tracker: GeneralTracker) -> None:
    for path in paths:
        keeper.send(tracker, path)


def name_run(folder: Path) -> str:
    """The name of a run in a tracker: the last two folders of its path, without `runs`."""
    parts = [part for part in folder.parts[-2:] if part not in ("runs", "/", ".", "..")]
    return "/".join(parts) or folder.resolve().name


def flatten(
    values: Mapping[str, Any], join: str = "/", prefix: str = "", *, texts: bool = False
) -> Iterable[tuple[str, Any]]:
    """The numbers of nested values, by joined names that every tracker takes, and their texts where asked.

    A list is its length among numbers, and its text among texts. What is null is left out.
    """
    for key, value in values.items():
        name = prefix + re.sub(r"[^\w.\- /]", "-", str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, join, name + join, texts=texts)
        elif texts and isinstance(value, (str, list, dict)):
            yield name, value if isinstance(value, str) else json.dumps(value)
        elif isinstance(value, list):
            yield name, len(value)
        elif isinstance(value, (int, float)) and (texts or isfinite(value)):
            yield name, value


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # a torn line
        return {}
    return row if isinstance(row, dict) else {}


def _kind(row: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """By which a row is known again: of a step there may be one of training and one of validation."""
    return row.get("step"), frozenset(row)
