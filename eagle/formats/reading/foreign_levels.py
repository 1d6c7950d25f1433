"""Read heads of other tools that guess several tokens from one state, and convert them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.formats.engines.vllm import VLLM
from eagle.formats.networks.level_reader import OUTPUT, LevelReader
from eagle.formats.networks.level_readers import READERS
from eagle.formats.reading.head_folder import Finding, HeadFolder
from eagle.formats.reading.lint import check_masked, strike
from eagle.formats.reading.target_files import TargetFiles, count_differing_rows


def read_levels(head: HeadFolder, target: TargetFiles | None) -> None:
    """Match each tensor and key of a recognised head; obstacles to an import become problems."""
    reader = READERS[head.kind]
    copies = _name_tensors(head, reader)
    head.settings = reader.read_settings(head, target)
    for name in sorted(head.names.keys() & reader.borrowed.keys()):
        _compare_borrowed(head, name, reader.borrowed[name], target)
    for theirs, ours in copies.items():
        if not torch.equal(head.tensors.load(theirs).float(), head.load(ours).float()):  # float8 is compared by nobody
            head.problem(f"{theirs} differs from {head.names[ours]}, and both are {ours} here", "Keep the right one")
    if copies:
        head.notes.append(f"{_list_some(list(copies))} are left out: they are what other levels have too")
    if target and (target.width, target.vocab_size) != (head.shape["hidden_size"], head.shape["vocab_size"]):
        ours = f"{head.shape['hidden_size']} wide with {head.shape['vocab_size']} tokens"
        theirs = f"{target.width} wide with {target.vocab_size}"
        head.problem(f"the head is for a target {ours}, {target.path} is {theirs}", "Name the right target")
    layers = reader.target_layers(head)
    if target and layers not in (None, target.layers):
        what = f"the head is for a target of {layers} layers, {target.path} has {target.layers}"
        head.problem(what, "Name the right target")
    _check_tensors(head, reader, target)
    head.problems += [Finding(f"config.json: {wrong}", fix="Correct it") for wrong in dict.fromkeys(head.keys.wrong)]
    sections = {id(section): section for section in (head.keys, head.block, head.nested)}.values()
    head.unknown_keys = [name for section in sections for name in section.left()]


def _name_tensors(head: HeadFolder, reader: LevelReader) -> dict[str, str]:
    """This project's name of each tensor, and the duplicates by name."""
    head.names, copies, others = {}, dict[str, str](), dict[str, list[str]]()
    for name in sorted(head.tensors.stored):
        layout, ours = _find_name(head, reader, name)
        if ours is None:
            why = next((why for pattern, why in reader.spare.items() if re.fullmatch(pattern, name)), "")
            others.setdefault(why, []).append(name)
        elif ours in head.names:
            copies[name] = ours
        else:
            head.names[ours], head.layout = name, layout
    if unknown := others.pop("", None):
        head.problem(f"unknown tensors: {_list_some(unknown)}", "Take them out if they do not matter")
    head.notes += [f"{_list_some(names)} left out: {why}" for why, names in others.items()]
    return copies


def _find_name(head: HeadFolder, reader: LevelReader, name: str) -> tuple[str, str | None]:
    """The reader's pattern that a tensor's name fits, and this project's name."""
    for layout, names in reader.layouts.items():
        for pattern, ours in names.items():
            if found := re.fullmatch(pattern, name):
                expanded = found.expand(ours)
                return layout, expanded if expanded in reader.borrowed else reader.rename(head, name, expanded)
    if name == OUTPUT:
        return head.layout, OUTPUT
    return "", None


def _compare_borrowed(head: HeadFolder, name: str, known_as: tuple[str, ...], target: TargetFiles | None) -> None:
    """Compare the checkpoint's copies of target tensors with the target's, which a head here borrows."""
    left_out = f"{head.names[name]} is left out, heads here use the target's"
    theirs = target.matrix(known_as) if target else None
    if theirs is None:
        why = "the target has none by that name" if target else "no --target"
        head.notes.append(f"{left_out}; not compared: {why}")
        return
    stored, ours = head.names[name], head.load(name)
    if not ours.is_floating_point():
        head.problem(f"{stored} is in {ours.dtype}, expected plain weights", "Copy it again")
    elif ours.shape != theirs.shape:
        head.problem(f"{stored} is {list(ours.shape)}, the target's is {list(theirs.shape)}", "Another target?")
    elif differing := count_differing_rows(ours, theirs):
        head.problem(
            f"{stored} differs from the target's in {differing} of {len(ours)} rows", "Another target, or trained?"
        )
    else:
        head.notes.append(f"{left_out}; they are equal")


def _build(head: HeadFolder, reader: LevelReader, target: TargetFiles | None) -> TrainableDrafter:
    """A head with these settings and sizes, and uninitialised weights."""
    try:
        method: Any = DRAFTERS[reader.method_of(head)]
        drafter: TrainableDrafter = method(method.Settings(**head.settings), reader.read_shape(head, target))
    except Exception as error:  # of many kinds: pydantic checks the settings, transformers and torch the sizes
        raise ValueError(f"no head of these sizes can be made: {error!r:.300}") from None
    return drafter


def _check_tensors(head: HeadFolder, reader: LevelReader, target: TargetFiles | None) -> None:
    """Check that every expected tensor is present, in its size and a number type, and no other one."""
    if head.problems:  # which say more than sizes that do not fit
        return
    try:
        with torch.device("meta"):  # which takes no memory
            expected = {name: tuple(tensor.shape) for name, tensor in _build(head, reader, target).state_dict().items()}
    except ValueError as error:
        head.problem(str(error), "Correct config.json")
        return
    for name, ours in expected.items():
        entry, size = head.entry(name), reader.size_of(name, ours)
        if entry is None:
            if why := reader.may_lack(head, name):
                head.notes += [why] if why not in head.notes else []
            else:
                head.problem(f"{name} is missing, expected {list(size)}", "Copy it again")
        elif entry.shape != size:
            what = f"{head.names[name]} is {list(entry.shape)}, expected {list(size)}"
            head.problem(what, "Correct config.json, or copy both files again")
        elif name not in reader.whole and (not entry.dtype.is_floating_point or entry.dtype.itemsize < 2):
            head.problem(f"{head.names[name]} is in {entry.dtype}, expected plain weights", fatal=False)
    if other := sorted(head.names.keys() - expected.keys() - reader.borrowed.keys()):
        theirs = _list_some([head.names[name] for name in other])
        head.problem(f"tensors of no part of this head: {theirs}", "Correct config.json, or copy both files again")


def _list_some(names: list[str]) -> str:
    return f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def convert_levels(head: HeadFolder, target: TargetFiles | None) -> tuple[TrainableDrafter, list[str]]:
    """The head as one of this project, with notes on all that was assumed or left out."""
    head.refuse_problems()
    reader, notes = READERS[head.kind], [*head.notes]
    if head.unknown_keys:
        notes.append(f"unknown keys of config.json, not used: {', '.join(head.unknown_keys):.400}")
    drafter = _build(head, reader, target)
    weights = {name: reader.make_tensor(head, name) for name in drafter.state_dict()}
    for name, weight in weights.items():
        if not bool(weight.float().isfinite().all()):
            raise ValueError(f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint")
    if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {torch.float32}:
        notes.append(f"weights in {', '.join(sorted(map(str, dtypes)))}, held here in torch.float32, which is exact")
    drafter.load_state_dict(weights)
    return drafter, notes


def lint_levels(head: HeadFolder, target: TargetFiles | None = None) -> list[Finding]:
    """All faults of such a checkpoint, and what engines read differently."""
    findings = [*head.problems, *check_masked(head, target)]
    if head.unknown_keys:
        findings.append(Finding(f"unknown keys of config.json: {', '.join(head.unknown_keys):.400}", (), False))
    for trap, words in READERS[head.kind].list_traps(head):
        findings.append(strike(trap, fatal=trap.fatal and head.layout == VLLM.title, **words))
    for stored, entry in head.tensors.stored.items():
        if entry.dtype.is_floating_point and not stored.startswith("model."):  # of a target in the same file
            values: Tensor = head.tensors.load(stored).float()
            if count := int((~values.isfinite()).sum()):
                findings.append(Finding(f"{stored}: {count:,} of {values.numel():,} numbers are not finite"))
    return sorted(findings, key=lambda finding: not finding.fatal)
