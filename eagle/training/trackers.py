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

NOTE = "trackers.json"  # in a run's folder: the id of its run in every tracker, by which a resumed run finds it
WANDB_SECONDS = 10  # after which wandb gives up on the network, at its start, its login and its end
OFFERED = (
    "wandb",
    "tensorboard",
    "mlflow",
    "trackio",
    "comet_ml",
)  # the trackers that messages suggest
# These get the hyper-parameters only when their run is new: the first would add them again, the second refuses changes.
CONFIG_ONCE = (
    "tensorboard",
    "mlflow",
)
TAKE_TEXT = ("tensorboard",)  # keep no files, but show a text
# folders within the run's folder, for trackers that write into one
LOG_FOLDERS = {
    "tensorboard": "tensorboard",
    "aim": ".",
}


def check_trackers(settings: TrainSection) -> None:
    """Refuse trackers that accelerate does not know, or whose package is not installed."""
    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in get_available_trackers()}
    for name in settings.trackers:
        if name not in known:
            # accelerate knows them as well, and this project adds nothing to them
            plain = [tracker for tracker in known if tracker not in OFFERED]
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
    """A run in wandb, or without a key or a network on the disk, for `wandb sync`; training never waits for it."""

    def start(self) -> None:
        """Begin the run in wandb, or resume it; keep it on the disk if wandb cannot be reached."""
        # wandb is an optional package
        import wandb

        # older versions have no limit on the time in which a lost network would hold up the end of a run
        if "finish_timeout" not in wandb.Settings.model_fields:
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
            # wandb raises UsageError without a key and CommError without a network
            where = f"{self.init_kwargs['dir']}/wandb"
            print(
                f"wandb is not reached ({error}): the run is kept in {where}, send it later with `wandb sync`"
            )
            # wandb cannot resume a run offline
            options["resume"] = None
            self.run = wandb.init(**options, mode="offline")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add hyper-parameters to the run.

        This replaces accelerate's method, which before 1.13 begins another run for them without a network.
        """
        self.run.config.update(values, allow_val_change=True)

    def send(self, path: Path) -> None:
        """Log a file as an artefact; an HTML page or an SVG figure is shown among the run's charts, too.

        Reports are sent this way. `path` is the file.
        """
        import wandb

        artefact = wandb.Artifact(f"{self.run.id}-{path.stem}", type="report")
        artefact.add_file(str(path))
        self.run.log_artifact(artefact)
        if path.suffix in (".html", ".svg"):
            self.run.log({path.stem: wandb.Html(path.read_text(encoding="utf-8"), inject=False)})


class SteppedTrackio(TrackioTracker):
    """A run in trackio whose rows carry their step, which accelerate before 1.14 does not pass on."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the numbers of a step in trackio, together with the step."""
        self.run.log(values, step=step, **options)


# trackers that replace those of accelerate
OWN_TRACKERS: dict[str, type[GeneralTracker]] = {"wandb": PatientWandb, "trackio": SteppedTrackio}


class RunKeeper(NamedTuple):
    """How to begin a run in a tracker that can resume runs, how to resume it, and how to give it a file."""

    begin: Callable[[str], dict[str, Any]]  # from a name for the run to the tracker's arguments
    id_of: Callable[[Any], str]  # from the started tracker to the id of its run
    resume: Callable[[str], dict[str, Any]]  # from that id to the tracker's arguments
    send: Callable[[Any, Path], Any]  # log a file as an artefact


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
    """A run in each of a recipe's trackers, which only the main process opens; without trackers it does nothing."""

    def __init__(self, recipe: Recipe, *, before: int | None = None) -> None:
        """Begin or resume the run in each tracker, such as wandb or tensorboard, that the recipe names.

        Args:
            recipe: It names the trackers, and its values are logged as hyper-parameters.
            before: The step that training begins or resumes at. None where no training follows, as in `eagle measure`:
                what is logged then belongs to the run that training has logged.
        """
        self.folder = Path(recipe.train.out)
        self.config = dict(flatten(recipe.model_dump(mode="json"), ".", texts=True))
        self.is_training = before is not None
        self.ids: dict[str, str] = {}
        note = self.folder / NOTE
        # training that begins at step 0 begins new runs, even in a folder that an earlier run has noted
        if before != 0 and note.is_file():
            self.ids = json.loads(note.read_text())
        self.continued = set(self.ids)
        self.running: list[GeneralTracker] = []
        for name, project in recipe.train.trackers.items():
            # after training only these can add to a run that has ended
            if self.is_training or name in KEEPERS or name in TAKE_TEXT:
                self._begin(name, project, before)
        if self.ids:
            write_text(note, json.dumps(self.ids, indent=1) + "\n")

    def _begin(self, name: str, project: str, before: int | None) -> None:
        """Begin a tracker's run, or resume the one whose id is noted; a tracker that fails stops training at its start.

        After training a failing tracker is only reported, so that no measurement is lost.

        Args:
            name: The tracker, as accelerate names it.
            project: The project that it files the run under.
            before: The step that training begins or resumes at; None where no training follows.
        """
        tracker = self._make(name, project, before)
        try:
            tracker.start()
            # the start of Comet takes no name
            if name == "comet_ml":
                tracker.tracker.set_name(name_run(self.folder))
            if name not in self.continued or name not in CONFIG_ONCE:
                tracker.store_init_configuration(self.config)
        except Exception as error:
            # every tracker has other classes of errors
            mend = f"`pip install {name}`" if isinstance(error, ImportError) else "Mend that"
            fault = (
                f"train.log_with: {name} begins no run: {first_line(error)} {mend}, or leave it out"
            )
            if self.is_training:
                raise ValueError(fault) from error
            print(fault)
            return
        self.running.append(tracker)
        # "" notes that the tracker had a run, which it finds by itself
        self.ids[name] = KEEPERS[name].id_of(tracker) if name in KEEPERS else ""

    def _make(self, name: str, project: str, before: int | None) -> GeneralTracker:
        """Return a tracker that is not started yet, with the arguments that begin or resume its run.

        `name` is the tracker, `project` what it files the run under, and `before` the step that training begins or
        resumes at.
        """
        if name in LOG_FOLDERS:
            options = {}
            # hides the rows that an earlier start of this run wrote after its last checkpoint
            if name == "tensorboard" and before is not None:
                options["purge_step"] = before
            return LOGGER_TYPE_TO_CLASS[name](LOG_FOLDERS[name], str(self.folder), **options)
        run: dict[str, Any] = {"dir": str(self.folder)} if name == "wandb" else {}
        keeper = KEEPERS.get(name)
        if keeper is not None and name in self.ids:
            run |= keeper.resume(self.ids[name])
        elif keeper is not None:
            run |= keeper.begin(name_run(self.folder))
        return OWN_TRACKERS.get(name, LOGGER_TYPE_TO_CLASS[name])(project, **run)

    def log(self, row: Mapping[str, Any], *, was_logged: bool = False) -> None:
        """Log the numbers of a row of metrics in all trackers.

        Args:
            row: Nested values, and its "step".
            was_logged: Whether an earlier start of this run logged a row of this step, before it was resumed.
        """
        values = dict(flatten(row))
        step = values.pop("step", None)
        if not values:
            return
        for tracker in list(self.running):
            # a resumed run still has the rows of its earlier start, and no step may be in it twice
            has_row = was_logged and tracker.name in self.continued and tracker.name in KEEPERS
            if not has_row:
                self._try(tracker, lambda tracker: tracker.log(values, step=step))

    def send(self, paths: Sequence[Path], text: str) -> None:
        """Log report files as artefacts; trackers that keep no files but show texts get `text`, the same report."""
        for tracker in list(self.running):
            keeper = KEEPERS.get(tracker.name)
            if keeper is not None:
                self._try(tracker, partial(_send_all, keeper, paths))
            elif tracker.name in TAKE_TEXT:
                self._try(tracker, lambda tracker: tracker.log({"report": text}))

    def finish(self) -> None:
        """End the run in every tracker."""
        for tracker in list(self.running):
            self._try(tracker, lambda tracker: tracker.finish())

    def _try(self, tracker: GeneralTracker, work: Callable[[Any], object]) -> None:
        """Do some work with a tracker; one that fails is reported and gets no further work.

        Nothing is lost, as all that is logged is in the run's folder, too.
        """
        try:
            work(tracker)
        except Exception as error:
            # a lost network or a full disk: every tracker has other classes of errors, and none may end a run
            self.running.remove(tracker)
            print(
                f"{tracker.name} takes nothing more: {first_line(error)} All of it is in {self.folder}"
            )


class TrackedMetrics(Metrics):
    """The metrics of a training run as JSON lines, and in the trackers of its recipe."""

    def __init__(self, recipe: Recipe, *, before: int) -> None:
        """Open metrics.jsonl and the trackers for training that begins or resumes at step `before`."""
        super().__init__(Path(recipe.train.out) / "metrics.jsonl", before=before)
        # The rows that an earlier start wrote after the checkpoint. They are dropped from the file, and trackers that
        # resume have them already.
        self.logged_before = {_row_key(_parse(line)) for line in self.dropped} if before else set()
        self.trackers = Trackers(recipe, before=before)

    def write(self, **row: Any) -> None:
        """Append a row to the file, and log it in the trackers, as "train/..." or "validation/...".

        A row has its `step`, and either figures of training or one entry `validation`.
        """
        super().write(**row)
        was_logged = _row_key(row) in self.logged_before
        step = row.pop("step")
        groups = row if "validation" in row else {"train": row}
        self.trackers.log({"step": step, **groups}, was_logged=was_logged)

    def close(self) -> None:
        """Close metrics.jsonl, and end the runs in the trackers."""
        super().close()
        self.trackers.finish()


def _send_all(keeper: RunKeeper, paths: Sequence[Path], tracker: GeneralTracker) -> None:
    """Log each file as an artefact in the tracker's run; `keeper` says how this tracker takes files."""
    for path in paths:
        keeper.send(tracker, path)


def name_run(folder: Path) -> str:
    """Return the name of a run in a tracker: the last two folders of its path, without `runs`."""
    names = [name for name in folder.parts[-2:] if name not in ("runs", "/", ".", "..")]
    return "/".join(names) or folder.resolve().name


def flatten(
    values: Mapping[str, Any], join: str = "/", prefix: str = "", *, texts: bool = False
) -> Iterable[tuple[str, Any]]:
    """Yield (name, number) for the leaves of nested values, with names that every tracker accepts.

    Args:
        values: Mappings of numbers, texts, lists and mappings. Values of None are left out.
        join: The separator between the name of a mapping and the names within it.
        prefix: Put before every name.
        texts: Whether texts are yielded too, and lists as JSON. Else texts are left out, and a list is its length.
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
        # metrics must be finite; a hyper-parameter may be infinite, as `train.clip` without a limit
        elif isinstance(value, (int, float)) and (texts or isfinite(value)):
            yield name, value


def _parse(line: str) -> dict[str, Any]:
    """Return the row of a line of metrics.jsonl; {} for a line that was cut off when the run was killed.

    A resumed run finds rows in it that it will write again.
    """
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _row_key(row: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """Return the key by which equal rows of metrics are found: the step and the names of the figures.

    A step may have one row of training and one of validation.
    """
    return row.get("step"), frozenset(row)
