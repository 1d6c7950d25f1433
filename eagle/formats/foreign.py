"""Heads that other tools wrote: what they are, what is wrong with them, and the same as heads of this project."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import yaml

from eagle.core.drafter import TrainableDrafter
from eagle.data.identity import fingerprint
from eagle.disk import lock_path
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.files import folder_at, read_json, weight_files
from eagle.formats.foreign_head import Served, converted, folder_for
from eagle.formats.kinds import kind_by_config
from eagle.formats.lint import lint
from eagle.formats.norm_output import settle
from eagle.formats.recognise import read
from eagle.formats.summary import Inspection, facts, kind_of
from eagle.formats.tensors import OWN, UNKNOWN, Finding, Reading

__all__ = ["Finding", "Inspection", "imported", "inspect", "read_head"]


def inspect(folder: str | Path, target: str | None = None) -> Inspection:
    """What a checkpoint is and what is wrong with it; a broken one is described as far as it can be read."""
    found, served = folder_at(folder), None if target is None else Served.at(target)
    try:
        reading = read(found)
    except ValueError as error:
        kind = _said_kind(found)
        kind = f"unreadable, by its config {kind}" if kind else "unreadable"
        return Inspection(str(folder), kind, UNKNOWN, {}, (Finding(str(error), fix="Copy or export it again"),))
    kind = kind_of(reading)
    return Inspection(
        str(folder), kind, reading.layout, facts(reading), tuple(lint(reading, served)), tuple(reading.notes)
    )


def read_head(folder: str | Path, target: str | None = None, taps: tuple[int, ...] | None = None) -> TrainableDrafter:
    """The head of a checkpoint; ValueError with all that is missing, unknown or without counterpart here."""
    reading = read(folder_at(folder))
    if reading.layout == OWN and reading.network is None:  # of another method than EAGLE's: as it was saved
        return load_head(reading.folder)
    return converted(reading, None if target is None else Served.at(target), taps)[0]


def imported(
    folder: str | Path,
    out: str | Path,
    target: str | None = None,
    taps: tuple[int, ...] | None = None,
    norm_output: str | None = None,
) -> str:
    """Write a checkpoint as a head of this project, and say all that was taken, left out or assumed."""
    with lock_path(out):
        return _write_head(folder, out, target, taps, norm_output)


def _write_head(
    folder: str | Path, out: str | Path, target: str | None, taps: tuple[int, ...] | None, norm_output: str | None
) -> str:
    source = folder_at(folder)
    place, reading = folder_for(out, source), read(source)
    if reading.layout == OWN:
        raise ValueError(f"{folder} is a head of this project already: copy it")
    if not reading.problems:
        settle(reading, norm_output)
    head, notes = converted(reading, None if target is None else Served.at(target), taps)
    files = [source / name for name in weight_files(source)]
    made = {
        "eagle": version("eagle"),
        "imported": {"layout": reading.layout, "weights": fingerprint(files), "notes": notes},
    }
    recipe = {
        "target": {"path": target or _verifier(reading) or "unknown"},
        "data": {"train": "unknown: the head was imported"},
        "drafter": head.settings.model_dump(mode="json"),
        "train": {"out": place.name, "imported_from": reading.layout},
    }
    save_head(place, head, yaml.safe_dump(recipe, sort_keys=False), made)
    said = [f"{folder}: {kind_of(reading)}, {reading.layout}; every tensor was used or is named here", *notes]
    return "\n".join([*said, f"{out} is a head of this project"])


def _said_kind(folder: Path) -> str:
    """What the config of a folder says that it is, if it can be read."""
    try:
        return kind_by_config(read_json(folder, "config.json"))
    except ValueError:
        return ""


def _verifier(reading: Reading) -> str | None:
    """The target that a config names."""
    section = reading.keys.section("speculators_config").section("verifier")
    return section.text("name_or_path")
