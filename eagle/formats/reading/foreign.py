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
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.fit import check_fit
from eagle.formats.networks.level_readers import READERS
from eagle.formats.networks.norm_output import settle_norm_output
from eagle.formats.reading.files import folder_at, read_json, weight_files
from eagle.formats.reading.foreign_head import convert_head
from eagle.formats.reading.foreign_levels import convert_levels, lint_levels, read_levels
from eagle.formats.reading.head_folder import OWN, UNKNOWN, Finding, HeadFolder
from eagle.formats.reading.kinds import kind_by_config
from eagle.formats.reading.lint import lint
from eagle.formats.reading.recognise import read_folder
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
    path, target_files = folder_at(folder), _read_target(target)
    try:
        head = _read(path, target_files)
    except ValueError as error:
        kind = _kind_of_unreadable(path)
        return Inspection(str(folder), kind, UNKNOWN, {}, (Finding(str(error), fix="Copy or export it again"),))
    findings = lint_levels(head, target_files) if head.guesses_levels else lint(head, target_files)
    if _has_own_network(head):
        try:
            _load_own(head.path, target)
        except ValueError as error:
            findings = [Finding(str(error), fix="Copy it again, or name its target"), *findings]
    return Inspection(
        str(folder), describe_kind(head), head.layout, list_facts(head), tuple(findings), tuple(head.notes)
    )


def _read(path: Path, target: TargetFiles | None) -> HeadFolder:
    """Read and recognise a folder."""
    head = read_folder(path)
    if head.guesses_levels:
        read_levels(head, target)
    return head


def _convert(
    head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None
) -> tuple[TrainableDrafter, list[str]]:
    """The head as one of this project, with notes on all that was assumed or left out."""
    if head.guesses_levels and taps not in (None, (-1,)) and not head.problems:
        raise ValueError(f"taps are {taps}, but such heads read (-1,): leave them out")
    return convert_levels(head, target) if head.guesses_levels else convert_head(head, target, taps)


def read_head(folder: str | Path, target: str | None = None, taps: tuple[int, ...] | None = None) -> TrainableDrafter:
    """The head of a checkpoint; ValueError with all that is missing, unknown or without counterpart here."""
    stored = read_folder(folder_at(folder))
    if _has_own_network(stored):
        return _load_own(stored.path, target)
    target_files = _read_target(target)
    return _convert(_read(stored.path, target_files), target_files, taps)[0]


def _has_own_network(head: HeadFolder) -> bool:
    """Whether it is a head of this project that no layout of EAGLE's describes: it is read as it was saved."""
    return head.layout == OWN and head.network is None


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
        source, target_files = folder_at(folder), _read_target(target)
        _check_empty(out, source)
        head = _read(source, target_files)
        if head.layout == OWN:
            raise ValueError(f"{folder} is a head of this project already: copy it")
        if not head.problems and not head.guesses_levels:
            settle_norm_output(head, norm_output)
        drafter, notes = _convert(head, target_files, taps)
        weights = fingerprint([source / name for name in weight_files(source)])
        provenance = {
            "eagle": __version__,
            "imported": {"layout": head.layout, "weights": weights, "notes": notes},
        }
        verifier = head.keys.section("speculators_config").section("verifier").text("name_or_path")
        verifier = verifier or head.keys.text("base_model_name_or_path")
        recipe = {
            "target": {"path": target or verifier or "unknown"},
            "data": {"train": "unknown: the head was imported"},
            "drafter": drafter.settings.model_dump(mode="json"),
            "train": {"out": Path(out).name, "imported_from": head.layout},
        }
        save_head(out, drafter, yaml.safe_dump(recipe, sort_keys=False), provenance)
    title = f"{folder}: {describe_kind(head)}, {head.layout}; every tensor was used or is named here"
    return "\n".join([title, *notes, f"{out} is a head of this project"])


def _read_target(path: str | None) -> TargetFiles | None:
    return None if path is None else TargetFiles.read(path)


def _check_empty(out: str | Path, source: Path) -> None:
    """Refuse an output folder that is not empty, or that overlaps its source."""
    folder = Path(out)
    aside = folder.with_name(folder.name + ".part")
    for path in (folder, aside):
        if path.is_symlink() or (path.exists() and (path is aside or not path.is_dir() or any(path.iterdir()))):
            raise ValueError(f"{path} is there already: name a new folder, or take it away")
    real = folder.resolve()
    if real.is_relative_to(source) or source.is_relative_to(real):
        raise ValueError(f"{out} lies in {source}, or around it: name another folder for the head")


def _kind_of_unreadable(path: Path) -> str:
    """The kind that a folder's config states, if it can be read."""
    try:
        kind = kind_by_config(read_json(path, "config.json"))
    except ValueError:
        kind = ""
    return f"unreadable, by its config {kind}" if kind else "unreadable"


def describe_kind(head: HeadFolder) -> str:
    """The checkpoint's method, or its other kind."""
    if head.network is None:
        return head.kind
    if not head.is_fused:
        return "EAGLE-1 (or EAGLE-2, HASS: the same network)"
    return "EAGLE-3.1" if head.switches["fc_norm"] or head.switches["norm_output"] else "EAGLE-3"


def list_facts(head: HeadFolder) -> dict[str, Any]:
    """The facts of a checkpoint that `inspect` shows."""
    entries, shape = head.tensors.stored.values(), head.shape
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    count = sum(math.prod(entry.shape) for entry in entries if entry.dtype.is_floating_point)
    facts: dict[str, Any] = {
        "layout": head.layout,
        "tensors": f"{len(entries)}, {count:,} parameters, {', '.join(dtypes)}",
    }
    if head.guesses_levels:
        facts |= {**head.settings, **READERS[head.kind].list_facts(head)}
        return facts | {"width": shape["hidden_size"], "vocabulary": shape["vocab_size"]}
    if not shape:
        return facts
    rope = shape["rope_parameters"]
    facts |= {
        "width": f"{shape['hidden_size']}, MLP {shape['intermediate_size']}",
        "heads": f"{shape['num_attention_heads']}, {shape['num_key_value_heads']} of keys, {shape['head_dim']} wide",
        "rotary": f"theta {rope['rope_theta']:g}, {rope['rope_type']}",
        "vocabulary": f"{shape['vocab_size']}, of which it says {head.draft_vocab_size}",
    }
    if not head.is_fused:
        bias = "yes" if "fc.bias" in head.names else "no"
        return {**facts, "reads": "the state behind the final norm", "bias of fc": bias}
    facts["reads"] = "layers that are not named"
    if inputs := head.inputs or head.inputs_by_outputs:
        outputs = tuple(layer - 1 for layer in inputs)
        facts["reads"] = f"inputs of layers {inputs}, which are outputs of {outputs}"
    facts["switches"] = ", ".join(name for name, is_on in head.switches.items() if is_on) or "none"
    return facts


def _show_table(facts: dict[str, Any]) -> str:
    """Format a table without lines."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
