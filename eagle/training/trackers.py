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
# of hyper-parameters: one adds them each time, one refuses changes
TOLD_ONCE = (
    "tensorboard",
    "mlflow",
)
TAKE_TEXT = ("tensorboard",)
# folders within a run's, for trackers that need one
BESIDE = {
    "tensorboard": "tensorboard",
    "set_write_offset": ".",
}


def check_trackers(settings: TrainSection) -> None:
    """Refuse trackers that accelerate does not know, or whose package is not installed."""
    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in get_available_trackers()}
    for name in settings.trackers:
        if name not in known:
            plain = [other for other in known if other not in OFFERED]
            raise ValueError(
                f"train.log_with names {name!r}{nearest(name, known)}: expected some of {', '.join(OFFERED)}, or of "
                f"those that are used as accelerate leaves them, {', '.join(plain)}"
            )
        if name not in installed:
            raise ValueError(
                f"train.log_with names {name}, which is not installed here: `pip install {name}`, or leave it out; "
                "metrics.jsonl is written anyway"
            )


class PatientWandb(WandBTracker):
    """A run in wandb, or on the disk for `wandb sync` without a key or a network: training never waits for it."""

    def start(self) -> None:
        """Begin the run, or go on with it."""
        import wandb

        if "finish_timeout" not in wandb.Settings.model_fields:
            # else a lost network holds a run up
            raise ValueError(
                f"wandb is {wandb.__version__}, expected 0.27 or newer: `pip install -U wandb`."
            )
        settings = wandb.Settings(
            init_timeout=WANDB_SECONDS,
            finish_timeout=WANDB_SECONDS,
            login_timeout=WANDB_SECONDS,
            silent=True,
        )
        options: dict[str, Any] = {
            "project": self.run_name,
            **self.init_kwargs,
            "settings": settings,
        }
        try:
            self.run = wandb.init(**options)
        except wandb.Error as error:
            # UsageError without a key, CommError without a network
            where = f"{self.init_kwargs['dir']}/wandb"
            print(
                f"wandb is not reached ({error}): the run is kept in {where}, send it later with `wandb sync`"
            )
            options["resume"] = None
            self.run = wandb.init(**options, mode="offline")

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


class RunKeeper(NamedTuple):
    """How a tracker's run is begun under a name, known by an id, gone on with, and given a file."""

    begin: Callable[[str], dict[str, Any]]
    id_of: Callable[[Any], str]
    go_on: Callable[[str], dict[str, Any]]
    send: Callable[[Any, Path], Any]


KEEPERS = {
    "wandb": RunKeeper(
        lambda name: {"name": name},
        lambda tracker: tracker.run.id,
        lambda run: {"id": run, "resume": "allow"},
        lambda tracker, path: tracker.send(path),
    ),
    "mlflow": RunKeeper(
        lambda name: {"run_name": name},
        lambda tracker: tracker.active_run.info.run_id,
        lambda run: {"run_id": run},
        lambda tracker, path: tracker.log_artifact(str(path)),
    ),
    "trackio": RunKeeper(
        lambda name: {
            "name": f"{name}-{secrets.token_hex(3)}"
        },  # by which alone a run is found again
        lambda tracker: tracker.run.name,
        lambda run: {"name": run, "resume": "allow"},
        lambda tracker, path: tracker.run.log_artifact(str(path), type="report"),
    ),
    "comet_ml": RunKeeper(
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
        self.ids: dict[str, str] = {}
        note = self.folder / NOTE
        if before != 0 and note.is_file():
            self.ids = json.loads(note.read_text())
        self.continued = set(self.ids)
        self.running: list[GeneralTracker] = []
        for name, project in recipe.train.trackers.items():
            # the others know no run that has ended
            if self.is_training or name in KEEPERS or name in TAKE_TEXT:
                self._begin(name, project, before)
        if self.ids:
            write_text(note, json.dumps(self.ids, indent=1) + "\n")

    def _begin(self, name: str, project: str, before: int | None) -> None:
        """Begin a tracker's run, or go on with the one that is noted."""
        tracker = self._make(name, project, before)
        try:
            tracker.start()
            if name == "comet_ml":
                # its start takes no name
                tracker.tracker.set_name(name_run(self.folder))
            if name not in self.continued or name not in TOLD_ONCE:
                tracker.store_init_configuration(self.config)
        except Exception as error:
            # every tracker raises errors of its own
            mend = f"`pip install {name}`" if isinstance(error, ImportError) else "Mend that"
            fault = (
                f"train.log_with: {name} begins no run: {first_line(error)} {mend}, or leave it out"
            )
            if self.is_training:
                raise ValueError(fault) from error
            print(fault)
            return
        self.running.append(tracker)
        self.ids[name] = KEEPERS[name].id_of(tracker) if name in KEEPERS else ""

    def _make(self, name: str, project: str, before: int | None) -> GeneralTracker:
        """Return a tracker that has not begun yet."""
        if name in BESIDE:
            options = {}
            if name == "tensorboard" and before is not None:
                # TensorBoard passes over what earlier starts of this run wrote of the steps to come
                options["purge_step"] = before
            return LOGGER_TYPE_TO_CLASS[name](BESIDE[name], str(self.folder), **options)
        run: dict[str, Any] = {"dir": str(self.folder)} if name == "wandb" else {}
        keeper = KEEPERS.get(name)
        if keeper is not None and name in self.ids:
            run |= keeper.go_on(self.ids[name])
        elif keeper is not None:
            run |= keeper.begin(name_run(self.folder))
        return OWN.get(name, LOGGER_TYPE_TO_CLASS[name])(project, **run)

    def log(self, row: Mapping[str, Any], *, is_known: bool = False) -> None:
        """Log the numbers of a row; one that `is_known` was logged before the run went on."""
        values = dict(flatten(row))
        step = values.pop("step", None)
        if not values:
            return
        for tracker in list(self.running):
            # a run that goes on keeps all that it was told, and no step may stand there twice
            remembers = tracker.name in self.continued and tracker.name in KEEPERS
            if not (is_known and remembers):
                self._try(tracker, lambda tracker: tracker.log(values, step=step))

    def send(self, paths: Sequence[Path], text: str) -> None:
        """Log files as artefacts; trackers that keep no files get the text."""
        for tracker in list(self.running):
            keeper = KEEPERS.get(tracker.name)
            if keeper is not None:
                self._try(tracker, partial(_send_all, keeper, paths))
            elif tracker.name in TAKE_TEXT:
                self._try(tracker, lambda tracker: tracker.log({"report": text}))

    def finish(self) -> None:
        """End the runs."""
        for tracker in list(self.running):
            self._try(tracker, lambda tracker: tracker.finish())

    def _try(self, tracker: GeneralTracker, work: Callable[[Any], object]) -> None:
        """Do something with a tracker; one that fails is left, and what it would get stays in the run's folder."""
        try:
            work(tracker)
        except Exception as error:
            # a network that went away, a full disk: every tracker raises errors of its own
            self.running.remove(tracker)
            print(
                f"{tracker.name} takes nothing more: {first_line(error)} All of it is in {self.folder}"
            )


class TrackedMetrics(Metrics):
    """The metrics of a training run as JSON lines, and in the trackers of its recipe."""

    def __init__(self, recipe: Recipe, *, before: int) -> None:
        super().__init__(Path(recipe.train.out) / "metrics.jsonl", before=before)
        # rows that an earlier start wrote of the steps to come, which trackers were told
        self.known = {_kind(_parse(line)) for line in self.dropped} if before else set()
        self.trackers = Trackers(recipe, before=before)

    def write(self, **row: Any) -> None:
        """Append a row, and log it."""
        super().write(**row)
        is_known = _kind(row) in self.known
        step = row.pop("step")
        named = row if "validation" in row else {"train": row}
        self.trackers.log({"step": step, **named}, is_known=is_known)

    def close(self) -> None:
        """Close the file, and end the runs."""
        super().close()
        self.trackers.finish()


def _send_all(keeper: RunKeeper, paths: Sequence[Path], tracker: GeneralTracker) -> None:
    for path in paths:
        keeper.send(tracker, path)


def name_run(folder: Path) -> str:
    """Return the name of a run in a tracker: the last two folders of its path, without `runs`."""
    names = [name for name in folder.parts[-2:] if name not in ("runs", "/", ".", "..")]
    return "/".join(names) or folder.resolve().name


def flatten(
    values: Mapping[str, Any], join: str = "/", prefix: str = "", *, texts: bool = False
) -> Iterable[tuple[str, Any]]:
    """Yield the numbers of nested values by joined names that every tracker takes.

    Args:
        values: What is flattened. What is null is left out.
        join: Stands between a name and the names in it.
        prefix: Stands before every name.
        texts: Whether texts are yielded too, and lists as texts. A list is else its length.
    """
    for key, value in values.items():
        name = prefix + re.sub(r"[^\w.\- /]", "-", str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, join, name + join, texts=texts)
        elif texts and isinstance(value, str):
            yield name, value
        elif texts and isinstance(value, (list, dict)):
            yield name, json.dumps(value)
        elif isinstance(value, list):
            yield name, len(value)
        elif isinstance(value, (int, float)) and (texts or isfinite(value)):
            yield name, value


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        # a torn line
        return {}
    return row if isinstance(row, dict) else {}


def _kind(row: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """Return what a row is known by: of a step there may be one of training and one of validation."""
    return row.get("step"), frozenset(row)
