"""Heads written by other tools: identify them, find their faults, and convert them to heads of this project."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from eagle import __version__
from eagle.core.drafter import TrainableDrafter
from eagle.data.identity import fingerprint
from eagle.disk import lock_path
from eagle.drafters.outside import UntrustedCode
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.layout import check_fit
from eagle.formats.networks.eagle3_heads import NEXT_STEP
from eagle.formats.reading.files import read_json
from eagle.formats.reading.folder_paths import check_empty, folder_at
from eagle.formats.reading.head_folder import OWN, UNKNOWN, Finding, HeadFolder
from eagle.formats.reading.lint import lint
from eagle.formats.reading.recognise import kind_by_config, read_folder
from eagle.formats.reading.target_files import TargetFiles

__all__ = ["Finding", "Inspection", "import_head", "inspect", "read_head"]


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's kind and faults."""

    folder: str
    kind: str  # the method, or what else it is
    layout: str
    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def fatal(self) -> bool:
        """Whether any fault would cost acceptance or prevent loading."""
        return any(finding.fatal for finding in self.findings)

    def __str__(self) -> str:
        parts = [f"{self.folder}: {self.kind}", _show_table(self.facts)]
        parts += [f"by default: {note}" for note in self.notes]
        parts += [str(finding) for finding in self.findings] or ["nothing is wrong with it that can be seen from here"]
        return "\n".join(part for part in parts if part)


def inspect(folder: str | Path, target: str | None = None) -> Inspection:
    """Identify a checkpoint and list its faults; a broken one is described as far as it can be read."""
    path, target_files = folder_at(folder), None if target is None else TargetFiles.read(target)
    try:
        head, network = read_folder(path)
        network.match(head, target_files)
    except ValueError as error:
        kind = _kind_of_unreadable(path)
        return Inspection(str(folder), kind, UNKNOWN, {}, (Finding(str(error), fix="Copy or export it again"),))
    findings = lint(head, network, target_files)
    if head.layout == OWN:
        try:
            _load_own(head.path, target)
        except UntrustedCode as error:  # no fault of the head, of which the files alone were looked at
            findings = [Finding(f"the head was not loaded: {error}", fatal=False), *findings]
        except ValueError as error:
            findings = [Finding(str(error), fix="Copy it again, or name its target"), *findings]
    facts = {**list_facts(head), **network.list_facts(head)}
    return Inspection(str(folder), network.describe(head), head.layout, facts, tuple(findings), tuple(head.notes))


def read_head(folder: str | Path, target: str | None = None, taps: tuple[int, ...] | None = None) -> TrainableDrafter:
    """The head of a checkpoint; ValueError with all that is missing, unknown or without counterpart here."""
    head, network = read_folder(folder_at(folder))
    if head.layout == OWN:
        return _load_own(head.path, target)
    target_files = None if target is None else TargetFiles.read(target)
    network.match(head, target_files)
    return network.convert(head, target_files, taps, NEXT_STEP)[0]


def _load_own(path: Path, target: str | None) -> TrainableDrafter:
    """A head of this project; ValueError if its files do not fit each other, or the target whose states it reads."""
    head = load_head(path)
    if target is None or not head.taps:
        return head
    try:
        config = TargetFiles.read(target).config
    except (OSError, ValueError):  # whoever loads the target says what is wrong with it
        return head
    check_fit(head, SimpleNamespace(**config), str(path))
    return head


def import_head(
    folder: str | Path,
    out: str | Path,
    target: str | None = None,
    taps: tuple[int, ...] | None = None,
    norm_output: str | None = None,
) -> str:
    """Write a checkpoint as a head of this project; returns notes on all that was used, left out or assumed."""
    with lock_path(out):
        source = folder_at(folder)
        check_empty(out, source)
        target_files = None if target is None else TargetFiles.read(target)
        head, network = read_folder(source)
        if head.layout == OWN:
            raise ValueError(f"{folder} is a head of this project already: copy it")
        network.match(head, target_files)
        drafter, notes = network.convert(head, target_files, taps, norm_output)
        imported = {"layout": head.layout, "weights": fingerprint(head.tensors.files), "notes": notes}
        verifier = head.keys.section("speculators_config").section("verifier").read("name_or_path")
        verifier = verifier or head.keys.read("base_model_name_or_path")
        recipe = {
            "target": {"path": target or verifier or "unknown"},
            "data": {"train": "unknown: the head was imported"},
            "drafter": drafter.settings.model_dump(mode="json"),
            "train": {"out": Path(out).name, "imported_from": head.layout},
        }
        save_head(out, drafter, yaml.safe_dump(recipe, sort_keys=False), {"eagle": __version__, "imported": imported})
    title = f"{folder}: {head.kind}, {head.layout}; every tensor was used or is named here"
    return "\n".join([title, *notes, f"{out} is a head of this project"])


def _kind_of_unreadable(path: Path) -> str:
    """The kind that a folder's config states, if it can be read."""
    try:
        kind = kind_by_config(read_json(path, "config.json"))
    except ValueError:
        kind = ""
    return f"unreadable, by its config {kind}" if kind else "unreadable"


def list_facts(head: HeadFolder) -> dict[str, Any]:
    """The facts of any checkpoint that `inspect` shows."""
    entries = head.tensors.stored.values()
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    count = sum(math.prod(entry.shape) for entry in entries if entry.dtype.is_floating_point)
    return {"layout": head.layout, "tensors": f"{len(entries)}, {count:,} parameters, {', '.join(dtypes)}"}


def _show_table(facts: dict[str, Any]) -> str:
    """Format a table without lines."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
