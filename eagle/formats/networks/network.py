"""A network of heads as a table, by which a checkpoint is recognised, matched, inspected and converted."""

# H width, V vocabulary

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.checkpoint import bounded_weights, build_head
from eagle.formats.layout import Config
from eagle.formats.reading.faults import FoundFault
from eagle.formats.reading.head_folder import (
    EMBEDDING,
    OUTPUT,
    OWN,
    HeadFolder,
    compare_borrowed,
    compare_copies,
    list_some,
    read_own,
    read_sizes,
    refuse_tensors,
)
from eagle.formats.reading.target_files import EMBEDDINGS, LM_HEADS
from eagle.recipe import parse_section

ROTARY = {r"(.*\.)?(inv_freq|cos_cached|sin_cached)": "follows from the rotary parameters"}
INDICES = ("d2t", "t2d")  # tensors that hold no weights
COPY_BOTH = "Correct config.json, or copy both files again"
BORROWED = {EMBEDDING: EMBEDDINGS, OUTPUT: LM_HEADS}
Spelling = Mapping[str, str]  # our names and another tool's
Size = tuple[int, ...]


# -- what most networks do; a table names another function where its network differs ---------------------------------


def keep_name(head: HeadFolder, name: str, ours: str) -> str | None:
    """Return our name of a tensor, as its spelling gave it; other networks return None for what is not the head's."""
    return ours


def usual_shape(head: HeadFolder) -> Any:
    """Return the head's sizes: its config's, or the target's where only width and vocabulary matter."""
    width = head.shape["hidden_size"]
    if "rope_parameters" in head.shape:
        return head_shape(SimpleNamespace(**head.shape), **head.overrides)
    # a target whose layers turn in several ways has no one rotary
    if head.target:
        sizes = {**head.target.config, "rope_parameters": head.target.rope or None}
    else:
        sizes = {
            "num_attention_heads": 1,
            "intermediate_size": width,
            "max_position_embeddings": 2048,
        }
    return head_shape(SimpleNamespace(**{**sizes, **head.shape}))


def keep_size(name: str, size: Size) -> Size:
    """Return the size of the tensor in the file which holds one of ours of this size."""
    return size


def lack_nothing(head: HeadFolder, name: str) -> str:
    """Return why a tensor may be absent from the file; "" if it may not."""
    return ""


def settle_nothing(
    head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> list[str]:
    """Settle for an import what the config leaves open; returns notes on it."""
    return []


def load_or_zeros(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return one of our tensors by the file's; one that may be absent is zeros."""
    if name not in head.names:
        return torch.zeros(size)
    return head.load(name)


def find_no_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield the faults of this network: settings that engines read differently."""
    yield from ()


def describe_kind(head: HeadFolder) -> str:
    """Return the checkpoint's method."""
    return head.kind


def list_settings(head: HeadFolder) -> Config:
    """Return the facts that `inspect` shows."""
    return {
        **head.settings,
        "width": head.shape["hidden_size"],
        "vocabulary": head.shape["vocab_size"],
    }


@dataclass(frozen=True)
class Network:
    """One method's heads as other tools write them; each fact about their tensors stands in it once."""

    name: str  # as `inspect` prints it
    method: str
    # as a recipe would state them, from tensors and config
    read_settings: Callable[[HeadFolder], Config]
    methods: tuple[str, ...] = ()  # of this project whose heads these are
    # what it is recognised by: any of the four is enough
    tensors: str = "$^"  # begins the name of one, `model.` taken off
    # stands in architectures, model_type, speculators_model_type or projector_type
    words: str = "^$"
    keys: tuple[str, ...] = ()  # of config.json
    common: tuple[str, ...] = ()  # keys that a language model may have too
    # its tensors
    spellings: tuple[tuple[str, Spelling], ...] = ()  # by who writes them
    prefixes: tuple[str, ...] = ("model.",)  # that may stand in front of any name
    # patterns of what is not needed, and why
    spare: Mapping[str, str] = field(default_factory=lambda: ROTARY)
    # of the target, by our names
    borrowed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BORROWED)
    trains_embedding: bool = False  # whether its copy may differ from the target's
    # what else may be there, with its sides
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)  # of missing tensors
    # its config
    has_block: bool = True  # whether the sizes of a Llama block are there
    rotates: bool = True  # whether the rotary parameters there are those of its attention
    # whether tensors are compared with its sizes where something else is wrong too
    lists_all: bool = False
    takes_taps: bool = False  # whether an import may say which layers it reads
    takes_positions: bool = False  # whether an import takes the target's number of positions
    # where it differs from most
    rename: Callable[[HeadFolder, str, str], str | None] = keep_name
    read_shape: Callable[[HeadFolder], Any] = usual_shape
    size_of: Callable[[str, Size], Size] = keep_size
    may_lack: Callable[[HeadFolder, str], str] = lack_nothing
    settle: Callable[[HeadFolder, tuple[int, ...] | None, str | None], list[str]] = settle_nothing
    make_tensor: Callable[[HeadFolder, str, torch.Size], Tensor] = load_or_zeros
    find_faults: Callable[[HeadFolder], Iterator[FoundFault]] = find_no_faults
    describe: Callable[[HeadFolder], str] = describe_kind
    list_facts: Callable[[HeadFolder], Config] = list_settings


# -- matching a checkpoint with its network ---------------------------------------------------------------------------


def match(network: Network, head: HeadFolder) -> None:
    """Match each tensor and key of a recognised head; obstacles to an import become problems."""
    head.method = network.method
    # a head of this project has our names and its settings as they are
    if head.layout == OWN:
        read_own(head)
        # one network may serve several methods
        head.method = head.settings["kind"]
    else:
        copies = _name_tensors(network, head)
        if network.has_block:
            read_sizes(head)
        head.settings = network.read_settings(head)
        compare_copies(head, copies)
    for name in sorted(head.names.keys() & network.borrowed.keys()):
        compare_borrowed(
            head, name, network.borrowed[name], network.trains_embedding and name == EMBEDDING
        )
    if head.target and head.target_layers not in (None, head.target.layers):
        what = f"the head is for a target of {head.target_layers} layers, {head.target.path} has {head.target.layers}"
        head.problem(what, "Name the right target")
    _check_tensors(network, head)
    for wrong in dict.fromkeys(head.keys.wrong):
        head.problem(f"config.json: {wrong}", "Correct it by the run that made the head")


def _name_tensors(network: Network, head: HeadFolder) -> dict[str, str]:
    """Set this project's name of each tensor; returns ours of those that stand twice, by theirs."""
    head.names = {}
    copies: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    for name in sorted(head.tensors.stored):
        writer, ours = _find_name(network, head, name)
        if ours is None:
            reasons = (
                reason for pattern, reason in network.spare.items() if re.fullmatch(pattern, name)
            )
            left_out.setdefault(next(reasons, ""), []).append(name)
        elif ours in head.names:
            copies[name] = ours
        else:
            head.names[ours] = name
            if ours not in network.borrowed:  # which several writers call alike
                head.layout = writer
    for reason, names in left_out.items():
        if reason:
            head.notes.append(f"{list_some(names)} left out: {reason}")
        else:
            refuse_tensors(head, names)
    return copies


def _find_name(network: Network, head: HeadFolder, name: str) -> tuple[str, str | None]:
    """Find which trainer's spelling the name of a checkpoint's tensor fits.

    Returns:
        The trainer ("" for none), and this project's name for the tensor (None if there is none).
    """
    bare = _strip(network, name)
    # the first that fits, even if a later spelling is more specific
    for writer, spelling in network.spellings:
        for ours, theirs in spelling.items():
            parts = match_name(_strip(network, theirs), bare)
            if parts is not None:
                full_name = fill_name(ours, parts, {})
                # a tensor of the target's is not renamed: `rename` is for the head's own
                if full_name in network.borrowed:
                    return writer, full_name
                return writer, network.rename(head, name, full_name)
    # some trainers put a copy of the target's LM head beside any network
    if name == OUTPUT and OUTPUT in network.borrowed:
        return "", OUTPUT
    return "", None


def _strip(network: Network, name: str) -> str:
    """Return a name without the prefixes that some trainers write in front of it."""
    for prefix in network.prefixes:
        name = name.removeprefix(prefix)
    return name


def _build(network: Network, head: HeadFolder) -> TrainableDrafter:
    """Return a head with these settings and sizes, and uninitialised weights."""
    if head.layout == OWN:
        return build_head(head.config, str(head.path / "config.json"))
    # settings and sizes of unknown origin, which the method checks itself
    method: Any = DRAFTERS[head.method]
    settings = parse_section(
        method.Settings, head.settings, "no head of these settings can be made"
    )
    try:
        with bounded_weights():
            drafter: TrainableDrafter = method(settings, network.read_shape(head))
    except (
        Exception
    ) as error:  # of many kinds: pydantic checks the settings, transformers and torch the sizes
        raise ValueError(f"no head of these sizes can be made: {error!r:.300}") from None
    return drafter


def _check_tensors(network: Network, head: HeadFolder) -> None:
    """Check that every expected tensor is present, in its size and a number type, and no other one."""
    if head.problems and not network.lists_all:
        # earlier problems say more than the sizes that do not fit because of them
        return
    try:
        with torch.device("meta"):  # which takes no memory
            drafter = _build(network, head)
    except ValueError as error:
        head.problem(str(error), "Correct config.json")
        return
    # the sizes of tensors that may be there come from the config, those of the head's own from a head made of it
    sides = {**head.shape, "draft_vocab_size": head.draft_vocab_size}
    sizes: dict[str, Size] = {}
    for name, names in network.optional.items():
        sizes[name] = tuple(sides[side] for side in names)
    expected = drafter.state_dict()
    for name, tensor in expected.items():
        size = tuple(tensor.shape)
        sizes[name] = size if head.layout == OWN else network.size_of(name, size)
    for name, size in sizes.items():
        if name in expected or name in head.names:
            _check_tensor(network, head, name, size)
    others = [
        head.names[name]
        for name in sorted(head.names.keys() - sizes.keys() - network.borrowed.keys())
    ]
    # biases and norms of queries and keys are valid, but only as a complete set
    partial = [
        name
        for name in others
        if not network.lists_all and re.search(r"_proj\.bias|\.[qk]_norm\.", name)
    ]
    if partial:
        head.problem(f"tensors of no part of this head: {list_some(partial)}", COPY_BOTH)
    refuse_tensors(head, [name for name in others if name not in partial])


def _check_tensor(network: Network, head: HeadFolder, name: str, size: Size) -> None:
    """Record what is wrong with one tensor."""
    # what is missing, of another size or no weights
    entry = head.entry(name)
    if entry is None:
        reason = network.may_lack(head, name)
        if reason:
            head.note_once(reason)
        else:
            usual = "Engines may start from random numbers there: copy or export it again"
            head.problem(
                f"{name} is missing, expected {list(size)}", network.remedies.get(name, usual)
            )
    elif entry.shape != size:
        head.problem(f"{head.names[name]} is {list(entry.shape)}, expected {list(size)}", COPY_BOTH)
    elif name in INDICES:
        if name == "d2t" and entry.dtype.is_floating_point:
            head.problem(f"d2t is in {entry.dtype}, expected whole numbers", "Export again")
    elif name not in network.borrowed and (
        not entry.dtype.is_floating_point or entry.dtype.itemsize < 2
    ):
        head.problem(f"{head.names[name]} is in {entry.dtype}, expected plain weights", fatal=False)


# -- converting it ----------------------------------------------------------------------------------------------------


def convert(
    network: Network, head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> tuple[TrainableDrafter, list[str]]:
    """Return the head as one of this project, with notes on all that was assumed or left out."""
    _check_target_sizes(head)
    positions = []
    if network.takes_positions:
        positions = _take_positions(head)
    if head.problems:
        raise ValueError(describe_problems(head))
    # without taps a head reads the last state, as -1 says
    reads = tuple(head.settings.get("taps", (-1,)))
    if not network.takes_taps and taps not in (None, reads):
        raise ValueError(f"taps are {taps}, but such heads read {reads}: leave them out")
    settled = network.settle(head, taps, norm_output)
    notes = [*head.notes]
    unknown_keys = head.unknown_keys()
    if unknown_keys:
        notes.append(f"unknown keys of config.json, not used: {unknown_keys:.400}")
    notes += [*settled, *positions]
    # by the settings that are settled now
    head.kind = network.describe(head)
    drafter = _build(network, head)
    weights = {
        name: network.make_tensor(head, name, tensor.shape)
        for name, tensor in drafter.state_dict().items()
    }
    # the names are those of the file, which may be a sum or a cut of several tensors
    for name, weight in weights.items():
        if not bool(weight.float().isfinite().all()):
            raise ValueError(
                f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint"
            )
    dtypes = {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {
        torch.float32
    }
    if dtypes:
        listed = ", ".join(sorted(map(str, dtypes)))
        notes.append(f"weights in {listed}, held here in torch.float32, which is exact")
    drafter.load_state_dict(weights)
    return drafter, notes


def _check_target_sizes(head: HeadFolder) -> None:
    """Record that the head is for another target than the one it is compared with."""
    target = head.target
    width = head.shape.get("hidden_size")
    vocab_size = head.shape.get("vocab_size")
    if head.shape and target and (target.width, target.vocab_size) != (width, vocab_size):
        ours = f"{width} wide with {vocab_size} tokens"
        theirs = f"{target.width} wide with {target.vocab_size}"
        head.problem(
            f"the head is for a target {ours}, {target.path} is {theirs}: name the right target"
        )


def _take_positions(head: HeadFolder) -> list[str]:
    """Take the target's number of positions where it changes nothing."""
    ours = head.shape["max_position_embeddings"]
    theirs = head.target.positions if head.target else None
    # a scaling reads the number, and the default rotary does not
    if theirs in (None, ours) or head.shape["rope_parameters"]["rope_type"] != "default":
        return []
    head.shape["max_position_embeddings"] = theirs
    return [
        f"max_position_embeddings {ours} became {theirs}, the target's: it changes nothing that is computed"
    ]


def describe_problems(head: HeadFolder) -> str:
    """Return all problems that prevent an import."""
    lines = [f"{head.path}, {head.kind}, cannot become a head of this project:"]
    for problem in head.problems:
        lines.append(f"- {problem.sentence}")
    return "\n".join(lines)


# -- names of tensors in two spellings ---------------------------------------------------------------------------------


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the parts of a name for which `#` (a number) and `*` (anything) stand; None if the name is another."""
    match = _compile(pattern).fullmatch(name)
    return None if match is None else match.groups()


def fill_name(pattern: str, parts: Iterable[str], numbers: Mapping[str, Any]) -> str:
    """Return the name with these parts in place of `#` and `*`, and numbers in place of their names in braces."""
    rest = iter(parts)
    return re.sub(r"[#*]", lambda _: next(rest), pattern).format_map(numbers)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern of names as a regular expression; a number in braces may be any."""
    kinds = {"#": r"(\d+)", "*": r"((?!.*inv_freq).+)"}
    expression = ""
    for piece in re.split(r"(#|\*|\{\w+\})", pattern):
        expression += r"\d+" if piece.startswith("{") else kinds.get(piece, re.escape(piece))
    return re.compile(expression)


def rename_tensors(
    tensors: Mapping[str, Tensor], spelling: Spelling, **numbers: Any
) -> dict[str, Tensor]:
    """Return tensors under the names of another tool; a name that its spelling lacks stays."""
    return {_rename(name, spelling, numbers): tensor for name, tensor in tensors.items()}


def _rename(name: str, spelling: Spelling, numbers: Mapping[str, Any]) -> str:
    for ours, theirs in spelling.items():
        parts = match_name(ours, name)
        if parts is not None:
            return fill_name(theirs, parts, numbers)
    return name


def keep_names(*names: str) -> Spelling:
    """Return the spelling of names that are ours."""
    return dict(zip(names, names, strict=True))
