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
from eagle.formats.networks.eagle_heads import NEXT_STEP
from eagle.formats.networks.network import Network, convert, describe_problems, match
from eagle.formats.reading.files import check_empty, folder_at, read_json
from eagle.formats.reading.head_folder import OWN, UNKNOWN, Finding, HeadFolder
from eagle.formats.reading.lint import lint
from eagle.formats.reading.recognise import kind_by_config, read_folder
from eagle.formats.reading.target_files import TargetFiles

__all__ = ["Finding", "Inspection", "import_head", "inspect", "read_head"]


@dataclass(frozen=True)
class Inspection:
    """What `eagle inspect` prints of a checkpoint: what it is, its facts and its faults."""

    folder: str
    kind: str  # the method, or what else it is
    layout: str
    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def fatal(self) -> bool:
        """Whether any fault would cost acceptance or prevent loading in an engine."""
        return any(finding.fatal for finding in self.findings)

    def __str__(self) -> str:
        """Return the text that `eagle inspect` prints.

        A line for each fact, note and fault.
        """
        # the facts' names are padded to the longest
        width = max(map(len, self.facts), default=0)
        lines = [f"{self.folder}: {self.kind}"]
        lines += [f"{name:<{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"by default: {note}" for note in self.notes]
        lines += map(str, self.findings)
        if not self.findings:
            lines.append("nothing is wrong with it that can be seen from here")
        return "\n".join(lines)


def inspect(folder: str | Path, target: str | None = None) -> Inspection:
    """Identify a checkpoint and list its faults; a broken one is described as far as it can be read.

    No code of the folder is run.

    Args:
        folder: The checkpoint.
        target: The target with which it is compared, a folder or a hub id.
    """
    path = folder_at(folder)
    # read outside of the `try`: a target that cannot be read is no fault of the checkpoint
    target_files = _read_target(target)
    try:
        head, network = read_folder(path)
        head.target = target_files
        if network is not None:
            match(network, head)
    except ValueError as error:
        finding = Finding(str(error), fix="Copy or export it again")
        return Inspection(
            str(folder), _kind_of_unreadable(path), UNKNOWN, facts={}, findings=(finding,)
        )
    findings = lint(head, network)
    if head.layout == OWN:
        findings = [*_try_own(path, target), *findings]
    kind = head.kind
    facts = _list_facts(head)
    if network is not None:
        kind = network.describe(head)
        facts |= network.list_facts(head)
    return Inspection(
        str(folder),
        kind,
        head.layout,
        facts=facts,
        findings=tuple(findings),
        notes=tuple(head.notes),
    )


def _try_own(path: Path, target: str | None) -> list[Finding]:
    """Load a head of this project, and return what prevents it as findings; none if it loads.

    Args:
        path: The head's folder.
        target: The target that it must fit, a folder or a hub id; None for any.
    """
    try:
        _load_own(path, target)
    # no fault of the head: inspection runs no code of its folder
    except UntrustedCode as error:
        return [Finding(f"the head was not loaded: {error}", fatal=False)]
    except ValueError as error:
        return [Finding(str(error), fix="Copy it again, or name its target")]
    return []


def read_head(
    folder: str | Path, target: str | None = None, taps: tuple[int, ...] | None = None
) -> TrainableDrafter:
    """Return the head of a checkpoint of any tool as one of this project, without writing anything.

    A key `norm_output` that may have two meanings is taken as most tools mean it: the next draft step reads the normed
    state. `import_head` asks the user instead.

    Args:
        folder: The checkpoint.
        target: The target, where its embedding or sizes are not in the checkpoint: a folder or a hub id.
        taps: The layers whose inputs the head reads, where its config does not tell.

    Raises:
        ValueError: with all that is missing, unknown or without a counterpart here.
    """
    head, network = read_folder(folder_at(folder))
    if head.layout == OWN:
        return _load_own(head.path, target)
    head.target = _read_target(target)
    drafter, _ = _convert(head, network, taps, norm_output=NEXT_STEP)  # without its notes
    return drafter


def _read_target(target: str | None) -> TargetFiles | None:
    """Return what the files of a target tell, a folder or a hub id; None if no target is given.

    A checkpoint is compared with it.
    """
    return None if target is None else TargetFiles.read(target)


def _convert(
    head: HeadFolder, network: Network | None, taps: tuple[int, ...] | None, norm_output: str | None
) -> tuple[TrainableDrafter, list[str]]:
    """Return a recognised head as one of this project, with notes on what was assumed or left out.

    Args:
        head: The checkpoint.
        network: Its network; None if no network was recognised, which is refused.
        taps: The layers whose inputs the head reads, where its config does not tell; None where it does.
        norm_output: What reads the normed state, "next-step" or "lm-head", where the config leaves it open.
    """
    if network is None:
        raise ValueError(describe_problems(head))
    match(network, head)
    return convert(network, head, taps, norm_output)


def _load_own(path: Path, target: str | None) -> TrainableDrafter:
    """Return a head of this project; ValueError if its files do not fit each other, or the target if one is given.

    Args:
        path: The head's folder.
        target: The target, a folder or a hub id; None for any.
    """
    head = load_head(path)
    # a head without taps reads no states, so that any target fits
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
    """Write a checkpoint as a head of this project.

    Args:
        folder: The checkpoint.
        out: The folder to write, which must not be there.
        target: The target, where its embedding or sizes are not in the checkpoint: a folder or a hub id.
        taps: The layers whose inputs the head reads, where its config does not tell.
        norm_output: What reads the normed state, by the config's `norm_output`: "next-step" or "lm-head".

    Returns:
        The text that `eagle import` prints: notes on all that was used, left out or assumed.

    Raises:
        ValueError: with all that prevents the import.
    """
    with lock_path(out):
        source = folder_at(folder)
        check_empty(out, source)
        target_files = _read_target(target)
        head, network = read_folder(source)
        if head.layout == OWN:
            raise ValueError(f"{folder} is a head of this project already: copy it")
        head.target = target_files
        drafter, notes = _convert(head, network, taps, norm_output)
        # a head of this project has a recipe and a provenance: write what is known of both
        recipe = {
            "target": {"path": target or _named_target(head) or "unknown"},
            "data": {"train": "unknown: the head was imported"},
            "drafter": drafter.settings.model_dump(mode="json"),
            "train": {"out": Path(out).name, "imported_from": head.layout},
        }
        imported = {
            "layout": head.layout,
            "weights": fingerprint(head.tensors.files),
            "notes": notes,
        }
        save_head(
            out,
            drafter,
            yaml.safe_dump(recipe, sort_keys=False),
            {"eagle": __version__, "imported": imported},
        )
    title = f"{folder}: {head.kind}, {head.layout}; every tensor was used or is named here"
    return "\n".join([title, *notes, f"{out} is a head of this project"])


def _named_target(head: HeadFolder) -> str | None:
    """Return the target that the config names, as speculators and the authors of Medusa and Hydra do; else None."""
    verifier = head.keys.section("speculators_config").section("verifier").read("name_or_path")
    return verifier or head.keys.read("base_model_name_or_path")


def _kind_of_unreadable(path: Path) -> str:
    """Return in words what a checkpoint is whose files could not all be read: by its config, if that can be read.

    Args:
        path: The checkpoint's folder.
    """
    try:
        kind = kind_by_config(read_json(path, "config.json"))
    except ValueError:
        kind = ""
    if not kind:
        return "unreadable"
    return f"unreadable, by its config {kind}"


def _list_facts(head: HeadFolder) -> dict[str, Any]:
    """Return what `eagle inspect` prints of any checkpoint: who wrote it, its number of tensors, and their dtypes.

    Facts are lines of name and value. `head` is the checkpoint while it is read.
    """
    entries = head.tensors.stored.values()
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    count = sum(math.prod(entry.shape) for entry in entries if entry.dtype.is_floating_point)
    return {
        "layout": head.layout,
        "tensors": f"{len(entries)}, {count:,} parameters, {', '.join(dtypes)}",
    }
