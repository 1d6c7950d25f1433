"""Check a checkpoint of any network for known faults, with the affected engines and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from eagle.data.identity import target_identity
from eagle.formats.engines.registry import SERVERS
from eagle.formats.networks.layers_and_tokens import find_wrong_vocabulary
from eagle.formats.networks.network import Network
from eagle.formats.reading import faults
from eagle.formats.reading.config_keys import USUAL_THETA
from eagle.formats.reading.faults import FoundFault, report
from eagle.formats.reading.files import TensorEntry, has, read_json
from eagle.formats.reading.head_folder import EMBEDDING, MODELOPT, OWN, Finding, HeadFolder
from eagle.recipe import TargetSection


def check_network(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield what inference engines read differently in heads of this network, and faults of the draft vocabulary.

    No engine reads a head in this project's own layout, so the first does not concern it.
    """
    if head.layout != OWN:
        yield from network.find_faults(head)
    yield from find_wrong_vocabulary(head)


def check_rotary(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield faults of the rotary parameters: how the config states them, and where they are not the target's.

    `head` is the checkpoint while it is read, and `network` the table of its network.
    """
    rope = head.shape.get("rope_parameters")
    has_attention = any(".self_attn." in name for name in head.names)
    # no head without attention uses them, and in some networks the config's parameters are not the head's
    if rope is None or not has_attention or not (network.rotates or head.layout == OWN):
        return
    theta = rope["rope_theta"]
    kind = rope["rope_type"]
    if head.block.values.get("rope_theta") is None and theta != USUAL_THETA:
        yield report(faults.ROPE_THETA_NESTED, theta=theta)
    # empty for a target whose kinds of layers have different rotary parameters
    theirs = head.target.rope if head.target else None
    if theirs:
        if theirs["rope_theta"] != theta:
            # some trainers keep Llama's 10,000 for any target, and their heads are trained with it
            is_usual = theta == USUAL_THETA and head.layout != OWN
            reason = "; some trainers do that on purpose" if is_usual else ""
            values = {"theta": theta, "theirs": theirs["rope_theta"], "why": reason}
            yield report(faults.OTHER_THETA, fatal=not is_usual, **values)
        # the other parameters, without theta, which was compared
        if {**rope, "rope_theta": 0} != {**theirs, "rope_theta": 0}:
            yield report(faults.OTHER_SCALING, kind=kind, theirs=theirs["rope_type"])
    if kind != "default" and head.layout == MODELOPT:
        yield report(faults.MODELOPT_SCALING, kind=kind)


def check_config(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield a fault if the config states another dtype than the tensors have, and one for keys that nothing here knows.

    `network` is not read: all checks have the same arguments. `head` is the checkpoint while it is read; `eagle
    inspect` prints the faults.
    """
    block = head.block.values
    config = head.config
    # older configs say torch_dtype, newer ones dtype, in either section
    dtype = (
        block.get("torch_dtype")
        or block.get("dtype")
        or config.get("torch_dtype")
        or config.get("dtype")
    )
    stored = _list_dtypes([head.tensors.stored[name] for name in head.names.values()])
    if (
        isinstance(dtype, str)
        and head.layout != OWN
        and set(stored) - {dtype.removeprefix("torch.")}
    ):
        yield report(faults.DTYPE, dtype=dtype, stored=", ".join(stored))
    keys = head.unknown_keys()
    if keys:
        yield report(faults.UNKNOWN_KEYS, keys=keys)


def _list_dtypes(entries: list[TensorEntry]) -> list[str]:
    """Return the floating-point dtypes among tensors, sorted, as configs name them: such as "bfloat16"."""
    dtypes = {str(entry.dtype) for entry in entries if entry.dtype.is_floating_point}
    return sorted(dtype.removeprefix("torch.") for dtype in dtypes)


def check_numbers(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield a fault for each tensor that is not finite, or all zeros where a new head of the network has others.

    `head` is the checkpoint while it is read; `eagle inspect` prints the faults.
    """
    # our names by those in the file
    ours = {stored: name for name, stored in head.names.items()}
    for stored, entry in head.tensors.stored.items():
        # some files hold tensors of the target beside the head's; inv_freq follows from the rotary parameters
        is_of_target = stored.startswith("model.") and stored not in ours
        if not entry.dtype.is_floating_point or is_of_target or stored.endswith("inv_freq"):
            continue
        values = head.tensors.load(stored).float()
        count = int((~values.isfinite()).sum())
        if count:
            yield report(faults.NOT_FINITE, name=stored, count=count, total=values.numel())
            continue
        # zeros are normal in a bias, and no fault in a tensor that is not the head's
        name = ours.get(stored, "bias")
        is_zero_at_first = name.endswith("bias") or re.fullmatch(network.zero_at_first, name)
        may_be_zero = is_zero_at_first or not values.numel()
        if not may_be_zero and not bool(values.any()):
            yield report(faults.ALL_ZEROS, name=stored)


def check_target(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield faults of the head's sizes and its embedding as compared with the target, if there is one.

    `network` is not read: all checks have the same arguments. `head` is the checkpoint while it is read.
    """
    if head.target is None:
        return
    # `convert` raises the same, which `inspect` never reaches
    for name, theirs in (
        ("hidden_size", head.target.width),
        ("vocab_size", head.target.vocab_size),
    ):
        if head.shape[name] != theirs:
            yield report(faults.OTHER_SIZE, name=name, size=head.shape[name], theirs=theirs)
    embedding = head.entry(EMBEDDING)
    # `match` has counted the rows of the head's embedding that are not the target's
    if head.differing_rows and embedding:
        name = head.names[EMBEDDING]
        yield report(
            faults.OTHER_ROWS, count=head.differing_rows, total=embedding.shape[0], name=name
        )


def check_origin(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield a fault if the head was trained on another target, by the checksums that its provenance.json records.

    `network` is not read: all checks have the same arguments.
    """
    if head.target is None or not has(head.path, "provenance.json"):
        return
    try:
        made_for = read_json(head.path, "provenance.json").get("target")
    except ValueError as error:
        yield report(faults.TORN_PROVENANCE, error=error)
        return
    # a head of another tool, or an imported one, does not record its target
    if not isinstance(made_for, dict):
        return
    # the checksums of the target's files, computed as training computes them
    identity = target_identity(TargetSection(path=head.target.path))
    for part in ("weights", "config"):
        recorded = made_for.get(part)
        if isinstance(recorded, str) and recorded != identity[part]:
            values = {"part": part, "stated": recorded, "theirs": identity[part]}
            yield report(faults.OTHER_TARGET, fatal=part == "weights", **values)


def check_masked(head: HeadFolder, network: Network) -> Iterator[FoundFault]:
    """Yield faults of the taps, the layers that the head reads, and of its mask token.

    A head that drafts several tokens in one forward reads the mask token where a token is not known yet. `network` is
    not read: all checks have the same arguments. `head` is the checkpoint while it is read.
    """
    taps = head.settings.get("taps")
    token = head.settings.get("mask_token")
    if taps and list(taps) != sorted(taps):
        yield report(faults.TAPS_UNSORTED, ids=list(taps))
    # the mask should occur in no sequence; the vocabulary's last token, the default, is taken not to
    if token is not None and head.target and token < head.target.vocab_size - 1:
        ordinary = head.target.ordinary_tokens()
        if token in ordinary:
            yield report(faults.ORDINARY_MASK, token=f"{token} ({ordinary[token]!r})")


CHECKS = (
    check_network,
    check_rotary,
    check_config,
    check_numbers,
    check_target,
    check_origin,
    check_masked,
)


def lint(head: HeadFolder, network: Network | None) -> list[Finding]:
    """Return all faults of a checkpoint, fatal ones first, including those that prevent an import.

    Args:
        head: The checkpoint, after `match`.
        network: Its network; None if it was not recognised, so that only its problems are known.
    """
    findings = [_mark_refusal(problem) for problem in head.problems]
    if network is not None and head.shape:
        for check in CHECKS:
            try:
                findings += [describe_fault(found) for found in check(head, network)]
            except Exception as error:  # of many kinds: a tensor that cannot be read after all, or of other dimensions
                what = check.__name__.removeprefix("check_").replace("_", " ")
                findings.append(Finding(f"{what} could not be looked at: {error!r:.200}"))
    # a fault may be found twice: list it once, as it was found last
    unique = list({finding.what: finding for finding in findings}.values())
    return sorted(unique, key=lambda finding: not finding.fatal)


def _mark_refusal(problem: Finding) -> Finding:
    """Return a problem that prevents an import; where engines do not mind, it says that only the import fails."""
    if problem.fatal or problem.fix:
        return problem
    return replace(problem, fix="`eagle import` refuses the head for it")


def describe_fault(found: FoundFault) -> Finding:
    """Return a fault as `eagle inspect` shows it, with the engines that it affects and its text filled in."""
    # engines are picked by their layouts, or by their lists of faults
    if found.affects:
        engines = _name_engines(found.affects)
    else:
        engines = tuple(engine.title for engine in SERVERS if found.fault in engine.faults)
    values = dict(found.values)
    for key, value in values.items():
        # a function picks engines by their layouts, which the text then names, such as those that can serve the head
        if callable(value):
            values[key] = ", ".join(_name_engines(value))
    return Finding(
        found.fault.what.format(**values), engines, found.fatal, found.fault.fix.format(**values)
    )


def _name_engines(affects: Callable[[Any], bool]) -> tuple[str, ...]:
    """Return the titles of the inference engines with a layout, of any network, for which `affects` is true."""
    return tuple(engine.title for engine in SERVERS if any(map(affects, engine.networks.values())))
