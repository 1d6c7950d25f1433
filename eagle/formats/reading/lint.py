"""Check a checkpoint of any network for known faults, with the affected engines and the remedy."""

# D tokens that can be drafted, V vocabulary, L layers of the target

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from eagle.data.identity import target_identity
from eagle.formats.engines.registry import SERVERS
from eagle.formats.networks.layers_and_tokens import list_vocabulary
from eagle.formats.networks.network import Network
from eagle.formats.reading import traps
from eagle.formats.reading.config_keys import USUAL_THETA
from eagle.formats.reading.files import read_json
from eagle.formats.reading.folder_paths import has
from eagle.formats.reading.head_folder import MODELOPT, OWN, Finding, HeadFolder
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike
from eagle.recipe import TargetSection


def check_rotary(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check the rotary parameters."""
    rope = head.shape.get("rope_parameters")
    turns = any(".self_attn." in name for name in head.names) and (network.rotates or head.layout == OWN)
    if rope is None or not turns:
        return
    theta, kind = rope["rope_theta"], rope["rope_type"]
    if head.block.values.get("rope_theta") is None and theta != USUAL_THETA:
        yield strike(traps.ROPE_THETA_NESTED, theta=theta)
    theirs = target.rope if target else {}
    if theirs and theirs["rope_theta"] != theta:
        is_usual = theta == USUAL_THETA and head.layout != OWN
        why = "; some trainers do that on purpose" if is_usual else ""
        yield strike(traps.OTHER_THETA, fatal=not is_usual, theta=theta, theirs=theirs["rope_theta"], why=why)
    if theirs and {**rope, "rope_theta": 0} != {**theirs, "rope_theta": 0}:
        yield strike(traps.OTHER_SCALING, kind=kind, theirs=theirs["rope_type"])
    if kind != "default" and head.layout == MODELOPT:
        yield strike(traps.MODELOPT_SCALING, kind=kind)


def check_config(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check config keys that contradict the tensors, and those that nothing here knows."""
    block, config = head.block.values, head.config
    stated = block.get("torch_dtype") or block.get("dtype") or config.get("torch_dtype") or config.get("dtype")
    entries = [head.tensors.stored[stored] for stored in head.names.values()]
    names = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries if entry.dtype.is_floating_point})
    if isinstance(stated, str) and set(names) - {stated.removeprefix("torch.")} and head.layout != OWN:
        yield strike(traps.DTYPE, dtype=stated, stored=", ".join(names))
    if head.unknown_keys:
        yield strike(traps.UNKNOWN_KEYS, keys=", ".join(head.unknown_keys))


def check_numbers(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check for tensors that are zero or not finite."""
    names = {stored: name for name, stored in head.names.items()}
    for stored, entry in head.tensors.stored.items():
        of_target = stored.startswith("model.") and stored not in names  # in the same file
        if not entry.dtype.is_floating_point or of_target or stored.endswith("inv_freq"):
            continue
        values = head.tensors.load(stored).float()
        if count := int((~values.isfinite()).sum()):
            yield strike(traps.NOT_FINITE, name=stored, count=count, total=values.numel())
        elif (
            stored in names and values.numel() and not bool(values.any() or re.fullmatch(network.zeros, names[stored]))
        ):
            yield strike(traps.ALL_ZEROS, name=stored)


def check_target(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check the head against the given target."""
    if target is None or not head.shape:
        return
    for name, theirs in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if head.shape[name] != theirs:
            yield strike(traps.OTHER_SIZE, name=name, size=head.shape[name], theirs=theirs)
    for name, (count, total) in head.differing.items():
        yield strike(traps.OTHER_ROWS, count=count, total=total, name=head.names[name])


def check_origin(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check the target recorded in the head's provenance."""
    if target is None or not has(head.path, "provenance.json"):
        return
    try:
        made_for = read_json(head.path, "provenance.json").get("target")
    except ValueError as error:
        yield strike(traps.TORN_PROVENANCE, error=error)
        return
    if not isinstance(made_for, dict):
        return
    identity = target_identity(TargetSection(path=target.path))
    for part in ("weights", "config"):
        if isinstance(made_for.get(part), str) and made_for[part] != identity[part]:
            is_fatal = part == "weights"
            yield strike(traps.OTHER_TARGET, fatal=is_fatal, part=part, stated=made_for[part], theirs=identity[part])


def check_masked(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check what heads that draft several tokens at once say of their taps and their mask token."""
    taps, token = head.settings.get("taps"), head.settings.get("mask_token")
    if taps and list(taps) != sorted(taps):
        yield strike(traps.TAPS_UNSORTED, ids=list(taps))
    if token is not None and target and token < target.vocab_size - 1:
        ordinary = target.ordinary_tokens()
        if token in ordinary:
            yield strike(traps.ORDINARY_MASK, token=f"{token} ({ordinary[token]!r})")


def check_network(head: HeadFolder, network: Network, target: TargetFiles | None) -> Iterator[Strike]:
    """Check what engines read differently in heads of this network, which are of no matter to one of this project."""
    if head.layout != OWN:
        yield from network.list_faults(head, target)
    yield from list_vocabulary(head)


CHECKS = (check_network, check_rotary, check_config, check_numbers, check_target, check_origin, check_masked)


def lint(head: HeadFolder, network: Network, target: TargetFiles | None) -> list[Finding]:
    """All faults of a checkpoint, worst first, including those that prevent an import."""
    findings = list(head.problems)
    for check in CHECKS if head.shape else ():
        try:
            findings += [find(struck) for struck in check(head, network, target)]
        except Exception as error:  # of many kinds: a tensor that cannot be read after all, or of other dimensions
            what = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(f"{what} could not be looked at: {error!r:.200}"))
    unique = list({finding.what: finding for finding in findings}.values())
    return sorted(unique, key=lambda finding: not finding.fatal)


def find(struck: Strike) -> Finding:
    """The finding of a trap, for the engines whose tables name it unless it tells which layouts it strikes."""
    trap, reads = struck.trap, struck.reads
    engines = name_engines(reads) if reads else tuple(engine.title for engine in SERVERS if trap in engine.traps)
    values = {key: ", ".join(name_engines(value)) if callable(value) else value for key, value in struck.values.items()}
    return Finding(trap.what.format(**values), engines, struck.fatal, trap.fix.format(**values))


def name_engines(reads: Callable[[Any], bool]) -> tuple[str, ...]:
    """The engines one of whose layouts is such."""
    return tuple(engine.title for engine in SERVERS if any(map(reads, engine.networks.values())))
