"""Match a checkpoint's tensors and keys with the table of its network, and make a head of this project of it."""

# V vocabulary, H width

from __future__ import annotations

import re
from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import build_head
from eagle.formats.networks.network import OUTPUT, Network, fill_name, match_name, read_sizes
from eagle.formats.reading.head_folder import OWN, Finding, HeadFolder, name_part
from eagle.formats.reading.target_files import TargetFiles, count_differing_rows


def match_head(head: HeadFolder, network: Network, target: TargetFiles | None) -> None:
    """Match each tensor and key of a recognised head; obstacles to an import become problems."""
    if head.layout == OWN:
        _read_own(head)
    else:
        copies = _name_tensors(head, network)
        head.settings = network.read_settings(head, target)
        _compare_copies(head, copies)
    for name in sorted(head.names.keys() & network.borrowed.keys()):
        _compare_borrowed(head, network, name, target)
    layers = network.target_layers(head)
    if target and layers not in (None, target.layers):
        what = f"the head is for a target of {layers} layers, {target.path} has {target.layers}"
        head.problem(what, "Name the right target")
    _check_tensors(head, network, target)
    fix = "Correct it by the run that made the head"
    head.problems += [Finding(f"config.json: {wrong}", fix=fix) for wrong in dict.fromkeys(head.keys.wrong)]
    sections = {id(section): section for section in (head.keys, head.block, head.nested)}.values()
    head.unknown_keys = [name for section in sections for name in section.left()]


def _read_own(head: HeadFolder) -> None:
    """The settings and sizes of a head of this project, under its own names."""
    head.names = {name: name for name in head.tensors.stored}
    read_sizes(head)
    head.settings = dict(head.config["settings"])
    head.draft_vocab_size = head.block.size("draft_vocab_size") or head.shape["vocab_size"]
    taps = head.settings.get("taps")
    head.inputs = tuple(taps) if isinstance(taps, list) and all(type(tap) is int for tap in taps) else None
    head.tap_count = len(head.inputs or (1,))
    head.nested.taken |= head.nested.values.keys()
    head.block.taken |= head.block.values.keys()


# -- names ------------------------------------------------------------------------------------------------------------


def _name_tensors(head: HeadFolder, network: Network) -> dict[str, str]:
    """This project's name of each tensor; the duplicates by name."""
    head.names, copies, left_out = {}, dict[str, str](), dict[str, list[str]]()
    for name in sorted(head.tensors.stored):
        who, ours = _find_name(head, network, name)
        if ours is None:
            why = next((why for pattern, why in network.spare.items() if re.fullmatch(pattern, name)), "")
            left_out.setdefault(why, []).append(name)
        elif ours in head.names:
            copies[name] = ours
        else:
            head.names[ours] = name
            head.layout = head.layout if ours in network.borrowed else who
    _refuse_tensors(head, left_out.pop("", []))
    head.notes += [f"{_list_some(names)} left out: {why}" for why, names in left_out.items()]
    return copies


def _find_name(head: HeadFolder, network: Network, name: str) -> tuple[str, str | None]:
    """Whose spelling a tensor's name fits, and this project's name."""
    bare = _strip(name, network)
    for who, spelling in network.spellings:
        for ours, theirs in spelling.items():
            if (parts := match_name(_strip(theirs, network), bare)) is not None:
                found = fill_name(ours, parts, {})
                return who, found if found in network.borrowed else network.rename(head, name, found)
    return "", OUTPUT if name == OUTPUT and OUTPUT in network.borrowed else None


def _strip(name: str, network: Network) -> str:
    for prefix in network.prefixes:
        name = name.removeprefix(prefix)
    return name


def _refuse_tensors(head: HeadFolder, names: list[str]) -> None:
    """Record tensors that no network here has, by what they are."""
    parts: dict[str, list[str]] = {}
    for name in names:
        bare = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        parts.setdefault(name_part(bare), []).append(name)
    for part, stored in parts.items():
        if part:
            head.problem(f"{part}: {_list_some(stored)}; no head here has that", fatal=False)
        else:
            fix = "Take them out if they do not matter: nothing is left out here"
            head.problem(f"unknown tensors: {_list_some(stored)}", fix)


def _compare_copies(head: HeadFolder, copies: dict[str, str]) -> None:
    """Record tensors that stand twice and differ."""
    for theirs, ours in copies.items():
        if not torch.equal(head.tensors.load(theirs).float(), head.load(ours).float()):  # float8 is compared by nobody
            head.problem(f"{theirs} differs from {head.names[ours]}, and both are {ours} here", "Keep the right one")
    if copies:
        head.notes.append(f"{_list_some(list(copies))} are left out: they are what other levels have too")


def _compare_borrowed(head: HeadFolder, network: Network, name: str, target: TargetFiles | None) -> None:
    """Compare the checkpoint's copies of target tensors with the target's, which a head here borrows."""
    stored, known_as = head.names[name], network.borrowed[name]
    left_out = f"{stored} is left out, heads here use the target's"
    theirs = target.matrix(known_as) if target else None
    if theirs is None:
        why = "the target has none by that name" if target else "no --target"
        head.notes.append(f"{left_out}; not compared: {why}")
        return
    ours = head.load(name)
    if not ours.is_floating_point():
        head.problem(f"{stored} is in {ours.dtype}, expected plain weights", "Copy it again")
    elif ours.shape != theirs.shape:
        head.problem(f"{stored} is {list(ours.shape)}, the target's is {list(theirs.shape)}", "Another target?")
    elif differing := count_differing_rows(ours, theirs):
        if name in network.own_copies:
            head.differing[name] = (differing, len(ours))
            head.notes.append(f"{left_out}; {differing} of {len(ours)} rows DIFFER from it")
        else:
            what = f"{stored} differs from the target's in {differing} of {len(ours)} rows"
            head.problem(what, "Another target, or trained?")
    else:
        head.notes.append(f"{left_out}; they are equal")


# -- sizes ------------------------------------------------------------------------------------------------------------


def _build(head: HeadFolder, network: Network, target: TargetFiles | None) -> TrainableDrafter:
    """A head with these settings and sizes, and uninitialised weights."""
    if head.layout == OWN:
        return build_head(head.config, str(head.path / "config.json"))
    try:
        method: Any = DRAFTERS[network.method_of(head)]
        drafter: TrainableDrafter = method(method.Settings(**head.settings), network.read_shape(head, target))
    except Exception as error:  # of many kinds: pydantic checks the settings, transformers and torch the sizes
        raise ValueError(f"no head of these sizes can be made: {error!r:.300}") from None
    return drafter


def _check_tensors(head: HeadFolder, network: Network, target: TargetFiles | None) -> None:
    """Check that every expected tensor is present, in its size and a number type, and no other one."""
    if head.problems and not network.lists_all:  # which say more than sizes that do not fit
        return
    try:
        with torch.device("meta"):  # which takes no memory
            drafter = _build(head, network, target)
    except ValueError as error:
        head.problem(str(error), "Correct config.json")
        return
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    if head.layout != OWN:
        expected = {name: network.size_of(name, size) for name, size in expected.items()}
    beside = network.sizes_beside(head)
    for name, size in {**beside, **expected}.items():
        entry = head.entry(name)
        if entry is None and name not in expected:
            continue
        if entry is None:
            if why := network.may_lack(head, name):
                head.notes += [why] if why not in head.notes else []
            else:
                fix = network.remedies.get(name, "Engines may start from random numbers there: copy or export it again")
                head.problem(f"{name} is missing, expected {list(size)}", fix)
        elif entry.shape != size:
            what = f"{head.names[name]} is {list(entry.shape)}, expected {list(size)}"
            head.problem(what, "Correct config.json, or copy both files again")
        elif name in network.indices:
            if name == "d2t" and entry.dtype.is_floating_point:
                head.problem(f"d2t is in {entry.dtype}, expected whole numbers", "Export again")
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            head.problem(f"{head.names[name]} is in {entry.dtype}, expected plain weights", fatal=False)
    known = expected.keys() | network.borrowed.keys() | beside.keys()
    _refuse_tensors(head, [head.names[name] for name in sorted(head.names.keys() - known)])


def _list_some(names: list[str]) -> str:
    return f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- conversion -------------------------------------------------------------------------------------------------------


def convert_head(
    head: HeadFolder, network: Network | None, target: TargetFiles | None, taps: tuple[int, ...] | None
) -> tuple[TrainableDrafter, list[str]]:
    """The head as one of this project, with notes on all that was assumed or left out."""
    notes = [*head.notes]
    if head.unknown_keys:
        notes.append(f"unknown keys of config.json, not used: {', '.join(head.unknown_keys):.400}")
    width, vocab_size = head.shape.get("hidden_size"), head.shape.get("vocab_size")
    if head.shape and target and (target.width, target.vocab_size) != (width, vocab_size):
        ours, theirs = f"{width} wide with {vocab_size} tokens", f"{target.width} wide with {target.vocab_size}"
        head.problem(f"the head is for a target {ours}, {target.path} is {theirs}: name the right target")
    head.refuse_problems()
    assert network is not None  # or there were a problem
    network.settle(head, target, taps, notes)
    drafter = _build(head, network, target)
    weights = {name: network.make_tensor(head, name) for name in drafter.state_dict()}
    for name, weight in weights.items():
        if not bool(weight.float().isfinite().all()):
            raise ValueError(f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint")
    if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {torch.float32}:
        notes.append(f"weights in {', '.join(sorted(map(str, dtypes)))}, held here in torch.float32, which is exact")
    drafter.load_state_dict(weights)
    return drafter, notes
