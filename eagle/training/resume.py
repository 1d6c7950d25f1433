"""Checkpoints of a run: written to a temporary folder, marked complete with checksums, then renamed.

And the identity of a run, which one that goes on must share.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from eagle.core.drafter import TrainableDrafter
from eagle.data.identity import differences
from eagle.disk import DiskError, apply_umask, sha256, write_whole
from eagle.drafters import DRAFTERS
from eagle.drafters.outside import describe_code
from eagle.recipe import Recipe, TrainSection

MARK = "complete.json"  # marks a checkpoint as complete: the checksums of its files, and the state of the run
# The file with all weights, which only a checkpoint without DeepSpeed has: any number of processes can load it.
WHOLE = "model.safetensors"
MAKE_ROOM = "Make room on the disk, and give the same command again"
# what torch, safetensors and this project raise when they write to a full disk
DISK_FAULTS = (
    OSError,
    RuntimeError,
    SafetensorError,
    DiskError,
)


# training settings that may change between a run and its continuation
FREE = {
    "out",
    "stem",
    "wandb",
    "keep",
    "choose",
    "patience",
    "checkpoint_every",
    "validate_every",
    "decode",
}
FREE |= {"processes", "shard_head", "compile", "log_with", "project"}


def decisive_settings(train: dict[str, Any]) -> dict[str, Any]:
    """Return the training settings that decide what a head becomes, so that a resumed run must have the same.

    `train` is the recipe's section of that name.
    """
    unused = set(FREE)
    # only the schedule wsd reads it
    if train["schedule"] != "wsd":
        unused.add("decay_share")
    # checkpoints of earlier releases do not have this key
    if not train["on_policy"]:
        unused.add("on_policy")
    return {key: value for key, value in train.items() if key not in unused}


def run_identity(recipe: Recipe, features: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return the identity of a run: all settings and data that decide its result. A run that resumes it has the same.

    Args:
        recipe: The recipe of the run.
        features: The identity of the features: all that decides them, as data, target and taps.
        processes: The number of processes.
    """
    values = recipe.model_dump(mode="json")
    identity = {
        "processes": processes,
        "features": features,
        "drafter": values["drafter"],
        "train": decisive_settings(values["train"]),
    }
    method = DRAFTERS.find(recipe.drafter.kind)
    # a method that the user has written is identified by its code
    code = describe_code(method) if method is not None else None
    if code is not None:
        identity["code"] = code
    return identity


class Checkpoints:
    """The checkpoint folders `step-N` of a run, of which the newest `keep` stay; all machines must share `folder`."""

    def __init__(self, accelerator: Accelerator, folder: Path, keep: int) -> None:
        """Take the folder of a run, in which checkpoints are written and found.

        Args:
            accelerator: It saves and loads what it has prepared: head, optimizer and random states.
            folder: Where the folders `step-N` lie.
            keep: How many checkpoints stay on the disk.
        """
        self.accelerator = accelerator
        self.folder = folder
        self.keep = keep

    def write(self, step: int, state: dict[str, Any]) -> str | None:
        """Write a checkpoint: all that the accelerator prepared (head, optimizer), and `state`.

        All processes must call it together. They agree after each of its three stages on whether the disk failed.

        Args:
            step: The number of steps done, which names the folder.
            state: What else a resumed run needs; it must fit in JSON.

        Returns:
            None, or the message of a disk fault, after which the unfinished checkpoint is removed.
        """
        temporary = self.folder / f"step-{step}.part"
        is_main = self.accelerator.is_main_process

        # the stages run on every process; only the main one makes, completes and removes folders
        def begin() -> None:
            """Make the temporary folder of the checkpoint, if the disk has room."""
            if is_main:
                # an earlier process was ended while it wrote these
                for torn in self.folder.glob("*.part"):
                    shutil.rmtree(torn)
                self._check_room()
                temporary.mkdir(parents=True)

        def save() -> None:
            """Write head, optimizer and random states into the temporary folder."""
            try:
                self.accelerator.save_state(str(temporary))
            except DISK_FAULTS as error:
                # the other ranks wait within DeepSpeed's save for this one, so the run cannot go on
                if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                    raise ValueError(
                        f"no checkpoint in {temporary}: {error}. {MAKE_ROOM}"
                    ) from error
                raise

        def complete() -> None:
            """Mark the checkpoint complete with checksums, and give it its final name."""
            if is_main:
                self._complete(temporary, step, state)

        # `or`: a stage is run only if no process failed in the one before
        faults = _run_on_all(begin) or _run_on_all(save) or _run_on_all(complete)
        if not faults:
            return None
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        return faults[0]

    def _check_room(self) -> None:
        """Raise a DiskError if the disk has no space for another checkpoint of the newest one's size.

        Before the first checkpoint the size is not known, and nothing is checked.
        """
        steps = self._steps()
        if not steps:
            return
        files = [path for path in (self.folder / f"step-{steps[0]}").rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise DiskError(
                f"{self.folder} has room for {free:,} bytes, and a checkpoint takes {size:,}"
            )

    def _complete(self, temporary: Path, step: int, state: dict[str, Any]) -> None:
        """Flush a checkpoint's files, mark it complete, rename it into place and remove all older ones but `keep`.

        A crash in between leaves no checkpoint that looks complete.
        """
        apply_umask(temporary)
        # the size and the checksum of each file
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                files[str(path.relative_to(temporary))] = [path.stat().st_size, sha256(path)]
        # the mark is written last, so that a checkpoint without it is known to be incomplete
        write_whole(
            temporary / MARK, [json.dumps({"files": files, "state": state}, indent=1).encode()]
        )
        final = self.folder / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for older in self._steps()[self.keep :]:
            shutil.rmtree(self.folder / f"step-{older}")

    def load(self, run: dict[str, Any], apart_from: Collection[str] = ()) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into what the accelerator has prepared (head, optimizer).

        Args:
            run: The identity of this run, which the checkpoint's must equal.
            apart_from: Training settings that may differ, without their prefix "train.".

        Returns:
            The state that was written with it, or None without a checkpoint.
        """
        newest = [self.newest() if self.accelerator.is_main_process else None]
        # one process verifies and chooses, so that all load the same checkpoint
        broadcast_object_list(newest)
        if newest[0] is None:
            return None
        path, state = newest[0]
        # the checkpoint's identity went through JSON, which turns tuples into lists: do the same to compare
        run = json.loads(json.dumps(run))
        self._check_launcher(path, state["run"]["processes"], run["processes"])
        # _check_launcher has compared the numbers of processes, which may differ without DeepSpeed
        old_run = {**state["run"], "processes": run["processes"]}
        changes = []
        for name, old, new in differences(old_run, run):
            if name.removeprefix("train.") not in apart_from:
                changes.append(f"{name} = {old!r}, this one has {new!r}")
        if changes:
            raise ValueError(
                f"{self.folder.parent} holds a run with {'; '.join(changes)}: continue with what it had, give another "
                "train.out, or remove it"
            )
        self.accelerator.load_state(str(path))
        return state

    def _check_launcher(self, path: Path, old: int, new: int) -> None:
        """Refuse another launcher or number of processes if either run uses DeepSpeed.

        Args:
            path: The checkpoint.
            old: The number of processes that wrote it.
            new: The number of processes of this run.
        """
        # DeepSpeed writes a file of moments for each process, and only as many processes can read them
        was_split = not (path / WHOLE).is_file()
        is_split = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if was_split != is_split or (was_split and old != new):
            raise ValueError(
                f"{path} was written by {_describe_launcher(was_split, old)}, this is "
                f"{_describe_launcher(is_split, new)}: DeepSpeed reads its own checkpoints alone, on as "
                f"many processes. Launch as before, or train.init={self.folder.parent / 'last'} in another train.out"
            )

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest complete checkpoint and its state, or None. Damaged ones are reported and passed over."""
        for step in self._steps():
            path = self.folder / f"step-{step}"
            fault, state = _read_state(path)
            if fault is None:
                return path, state
            self.accelerator.print(f"{path} is passed over: {fault}", flush=True)
        return None

    def describe_resume(self) -> str:
        """Return a sentence naming the step from which the same command would continue the run."""
        steps = self._steps()
        if steps:
            return f"the same command goes on from step {steps[0]}"
        return (
            "the same command starts from the beginning: train.checkpoint_every says how often a checkpoint is saved, "
            "once an epoch by default"
        )

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoint folders, complete or damaged, the newest first."""
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def load_stem(
    accelerator: Accelerator,
    head: TrainableDrafter,
    settings: TrainSection,
    steps: int,
    run: dict[str, Any],
) -> dict[str, Any]:
    """Load the checkpoint that the shorter run `train.stem` kept of the step before its learning rate fell.

    This run then goes on from there, as if it had trained those steps itself.

    Args:
        accelerator: It has prepared the head and its optimizer, into which the checkpoint is loaded.
        head: The head that trains.
        settings: Of this run.
        steps: The steps before this run's learning rate falls.
        run: The identity of this run, which the shorter one must share but for its length.

    Returns:
        The state that was written with the checkpoint.
    """
    if head.follows_progress:
        raise ValueError(
            "train.stem: this head's loss follows the progress of a run, expected a run from the beginning"
        )
    if settings.schedule != "wsd" or 0 < settings.warmup < 1:
        raise ValueError(
            f"train.stem with schedule {settings.schedule} and warmup {settings.warmup:g}, expected wsd and a number "
            "of steps: else the steps that both runs share have other learning rates"
        )
    stem = Checkpoints(accelerator, Path(settings.stem or "") / "stem", keep=1)
    state = stem.load(run, apart_from=("epochs", "max_steps"))
    if state is None or state["step"] > steps:
        stem_steps = "no step" if state is None else f"{state['step']} steps"
        raise ValueError(
            f"train.stem: {settings.stem} holds {stem_steps} before its rate fell, expected a run with "
            f"train.schedule=wsd and at most the {steps} steps before this one's rate falls"
        )
    return state


def _describe_launcher(deepspeed: bool, processes: int) -> str:
    """Return in words how a run was launched, for a message."""
    launcher = "DeepSpeed" if deepspeed else "DDP"
    if processes > 1:
        return f"{launcher} on {processes} processes"
    return f"{launcher} on {processes} process"


def _run_on_all(work: Callable[[], None]) -> list[str]:
    """Run `work` on this process, and return the disk faults of all processes; all must call it together.

    So every process learns that another failed, and none waits for it. A disk fault is an error of a full or broken
    disk. Each stage of writing a checkpoint is such work.
    """
    fault = ""
    try:
        work()
    except DISK_FAULTS as error:
        fault = str(error) or type(error).__name__
    return [fault for fault in gather_object([fault]) if fault]


def _read_state(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return a checkpoint's fault, or None if all checksums are right, and its state ({} with a fault).

    `path` is the checkpoint's folder. The fault is a sentence for the log.
    """
    try:
        # the mark is the last file that is written: {"files": name -> [size, checksum], "state": ..}
        mark: dict[str, Any] = json.loads((path / MARK).read_text())
        state: dict[str, Any] = mark["state"]
        files = {name: (size, digest) for name, (size, digest) in mark["files"].items()}
        if not state.keys() >= {"step", "best", "skipped", "run"}:
            raise ValueError(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MARK} is missing or damaged", {}
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing", {}
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes", {}
        if sha256(file) != digest:
            return f"the bytes of {name} are not those that were written", {}
    return None, state
