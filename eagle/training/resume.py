"""Checkpoints of a run: written aside, marked when whole, renamed; a torn one is never picked up."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from eagle.data.store import differences
from eagle.disk import apply_umask, sha256, write_whole

MARK = "complete.json"
MAKE_ROOM = "Make room on the disk, and give the same command again"
DISK_FAULTS = (OSError, RuntimeError, SafetensorError)  # as the writers of a full disk each say it


class Checkpoints:
    """The folders `step-N` of a run, of which the newest `keep` stay; several machines need a folder that all share."""

    def __init__(self, accelerator: Accelerator, folder: Path, keep: int) -> None:
        self.accelerator, self.folder, self.keep = accelerator, folder, keep

    def write(self, step: int, state: dict[str, Any]) -> str | None:
        """Write what the accelerator prepared, and `state`; or say what was wrong, and leave nothing behind."""
        aside, main = self.folder / f"step-{step}.part", self.accelerator.is_main_process

        def begin() -> None:
            if main:
                for torn in self.folder.glob("*.part"):
                    shutil.rmtree(torn)
                aside.mkdir(parents=True)

        def save() -> None:
            try:
                self.accelerator.save_state(str(aside))
            except DISK_FAULTS as error:
                if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # whose others wait within it
                    raise ValueError(f"no checkpoint in {aside}: {error}. {MAKE_ROOM}") from error
                raise

        def complete() -> None:
            if main:
                self._complete(aside, step, state)

        faults = _together(begin) or _together(save) or _together(complete)
        if main and faults:
            shutil.rmtree(aside, ignore_errors=True)
        return faults[0] if faults else None

    def _complete(self, aside: Path, step: int, state: dict[str, Any]) -> None:
        """Wait for the disk, mark the checkpoint, give it its name, and drop the oldest."""
        apply_umask(aside)
        files = {}
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(aside))] = [path.stat().st_size, sha256(path)]
        write_whole(aside / MARK, [json.dumps({"files": files, "state": state}, indent=1).encode()])
        final = self.folder / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        for older in self._steps()[self.keep :]:
            shutil.rmtree(self.folder / f"step-{older}")

    def load(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint, loaded into what is prepared; refused if another run wrote it."""
        chosen = [self.newest() if self.accelerator.is_main_process else None]
        broadcast_object_list(chosen)  # one process reads, so that all take the same
        if (found := chosen[0]) is None:
            return None
        path, state = found
        # through JSON, as the checkpoint's own went
        for name, had, now in differences(state["run"], json.loads(json.dumps(run))):
            raise ValueError(
                f"{self.folder.parent} holds a run with {name} = {had!r}, this one has {now!r}: continue with what it "
                "had, give another train.out, or remove it"
            )
        self.accelerator.load_state(str(path))
        return state

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its state; torn ones are named and passed over."""
        for step in self._steps():
            path = self.folder / f"step-{step}"
            fault, state = _looked_at(path)
            if fault is None:
                return path, state
            self.accelerator.print(f"{path} is passed over: {fault}", flush=True)
        return None

    def how_to_go_on(self) -> str:
        """From which step the same command continues a run that is stopped now."""
        if steps := self._steps():
            return f"the same command goes on from step {steps[0]}"
        return "the same command starts anew: train.checkpoint_every says how often a run is kept, else once an epoch"

    def _steps(self) -> list[int]:
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _together(work: Callable[[], None]) -> list[str]:
    """Work of every process, and what the disk refused to any: all go on, or none, and nobody waits for who failed."""
    try:
        work()
        fault = ""
    except DISK_FAULTS as error:
        fault = str(error) or type(error).__name__
    return [fault for fault in gather_object([fault]) if fault]


def _looked_at(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint, every byte read, and its state."""
    try:
        mark: dict[str, Any] = json.loads((path / MARK).read_text())
        files = {name: (size, digest) for name, (size, digest) in mark["files"].items()}
        if not mark["state"].keys() >= {"step", "best", "skipped", "run"}:
            raise ValueError(mark["state"])
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
    return None, mark["state"]
