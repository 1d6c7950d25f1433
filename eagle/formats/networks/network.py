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
from eagle.formats.networks.layers_and_tokens import INDICES, read_draft_tokens
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
COPY_BOTH = "Correct config.json, or copy both files again"
# tensors of the target, by our names, and how their names end in the target's own files
BORROWED = {EMBEDDING: EMBEDDINGS, OUTPUT: LM_HEADS}
# patterns of our tensor names, and what another tool calls such tensors
Spelling = Mapping[str, str]
Size = tuple[int, ...]


# -- what most networks do; a table names another function where its network differs ---------------------------------


def keep_name(head: HeadFolder, name: str, ours: str) -> str | None:
    """Return `ours` unchanged: the default of `Network.rename`.

    A network's own function may return another name, or None for a tensor that is not the head's.

    Args:
        head: The checkpoint.
        name: The tensor's name in the file.
        ours: Our name for it, as the tool's table in `Network.spellings` gives it.
    """
    return ours


def usual_shape(head: HeadFolder) -> Any:
    """Return the transformers config of sizes that the head is built with: the default of `Network.read_shape`.

    `head.shape` holds all sizes of a head with a Llama block. Heads without one (Medusa) have only width and
    vocabulary there. Nothing computes with their other sizes, which are the target's or placeholders.
    """
    width = head.shape["hidden_size"]
    # `read_sizes` filled in all sizes of a Llama block; `overrides` are the sizes that the tensors decide
    if "rope_parameters" in head.shape:
        return head_shape(SimpleNamespace(**head.shape), **head.overrides)
    # `rope` is empty for a target whose layers differ in their rotary parameters
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
    """Return `size` unchanged: the default of `Network.stored_size`.

    A network's own function returns another size for tensors that other tools store in another shape.

    Args:
        name: Our name of the tensor.
        size: Its size in a head of this project.
    """
    return size


def lack_nothing(head: HeadFolder, name: str) -> str:
    """Return "", as no tensor may be absent from the file: the default of `Network.may_lack`.

    A network's own function returns the reason, for the user, why the tensor of our name `name` may be absent.
    """
    return ""


def settle_nothing(
    head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> list[str]:
    """Decide nothing and return no notes: the default of `Network.settle`.

    A network's own function decides at an import what the config leaves open, changes `head.settings` accordingly
    and returns notes on it for the user.

    Args:
        head: The checkpoint.
        taps: The layers whose inputs the head reads, if the user says so.
        norm_output: What the config's key `norm_output` means, if the user says so.
    """
    return []


def load_or_zeros(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return the value of one of our tensors as the file has it: the default of `Network.make_tensor`.

    If the file lacks it, it is one that `Network.may_lack` allows to be absent, such as a bias, and is zeros.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        size: Its size in the head that is built.
    """
    if name not in head.names:
        return torch.zeros(size)
    return head.load(name)


def find_no_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield nothing: the default of `Network.find_faults`.

    A network's own function yields what engines would read differently in such a checkpoint.
    """
    yield from ()


def describe_kind(head: HeadFolder) -> str:
    """Return what the checkpoint was recognised as, usually its network's name: the default of `Network.describe`."""
    return head.kind


def list_settings(head: HeadFolder) -> Config:
    """Return what `eagle inspect` prints of the head, its settings and sizes: the default of `Network.list_facts`."""
    return {
        **head.settings,
        "width": head.shape["hidden_size"],
        "vocabulary": head.shape["vocab_size"],
    }


@dataclass(frozen=True)
class Network:
    """How other tools write the heads of one method, as a table.

    Checkpoints are recognised, matched, checked and converted by it, so each fact about their tensors is stated once.
    """

    name: str  # as `inspect` prints it
    method: str  # the method of this project that an imported head becomes
    # returns the settings of the head, as a recipe would state them, from tensors and config
    read_settings: Callable[[HeadFolder], Config]
    methods: tuple[str, ...] = ()  # all methods of this project whose heads have this network
    # a checkpoint is recognised by any of these four
    tensors: str = "$^"  # a pattern that the start of some tensor's name matches, without `model.`
    # a pattern found in architectures, model_type, speculators_model_type or projector_type of the config
    type_words: str = "^$"
    config_keys: tuple[str, ...] = ()  # keys of config.json that no other network has
    ambiguous_keys: tuple[str, ...] = ()  # keys that a language model may have too
    # its tensors
    spellings: tuple[tuple[str, Spelling], ...] = ()  # (tool, how it names the tensors)
    prefixes: tuple[str, ...] = ("model.",)  # some tools write these in front of every name
    # patterns of tensors that are not needed, and the reason
    ignored: Mapping[str, str] = field(default_factory=lambda: ROTARY)
    # the target's tensors, which a head here does not store: our name, and the endings of the target's names for it
    borrowed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BORROWED)
    trains_embedding: bool = False  # whether the head's embedding may differ from the target's
    # tensors that may be there too: our name, and the sizes of its dimensions by their names in the config
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)  # missing tensor -> advice
    zero_at_first: str = "$^"  # a pattern of our names: tensors that are all zeros in a new head
    # its config
    has_block: bool = True  # whether it has the sizes of a Llama block
    rotates: bool = True  # whether its rotary parameters are those of the head's attention
    # whether the sizes of tensors are checked even after another problem was found
    lists_all: bool = False
    takes_taps: bool = False  # whether the user of an import may say which layers the head reads
    takes_positions: bool = False  # whether an import takes the target's number of positions
    # functions for what differs between networks; the docstrings of the defaults, above, say what each is for
    # (head, name in the file, our name) -> our final name; None if the tensor is not the head's
    rename: Callable[[HeadFolder, str, str], str | None] = keep_name
    # returns the config of sizes that the head is built with
    read_shape: Callable[[HeadFolder], Any] = usual_shape
    # (our name, size here) -> size in the file
    stored_size: Callable[[str, Size], Size] = keep_size
    # (head, our name) -> why the tensor may be absent from the file, "" if it may not
    may_lack: Callable[[HeadFolder, str], str] = lack_nothing
    # (head, the user's taps, the user's meaning of `norm_output`) -> notes; changes `head.settings`
    settle: Callable[[HeadFolder, tuple[int, ...] | None, str | None], list[str]] = settle_nothing
    # (head, our name, size here) -> the tensor's value in the imported head
    make_tensor: Callable[[HeadFolder, str, torch.Size], Tensor] = load_or_zeros
    # yields what engines read differently
    find_faults: Callable[[HeadFolder], Iterator[FoundFault]] = find_no_faults
    # returns what `inspect` calls the checkpoint, and what it prints of it
    describe: Callable[[HeadFolder], str] = describe_kind
    list_facts: Callable[[HeadFolder], Config] = list_settings


# -- matching a checkpoint with its network ---------------------------------------------------------------------------


def match(network: Network, head: HeadFolder) -> None:
    """Fill in the head's tensor names, sizes and settings by its network's table; record all that is wrong.

    It changes `head` in place and returns nothing. Whatever prevents an import becomes an entry of `head.problems`:
    `inspect` lists them, `convert` raises them.

    Args:
        network: The table of the network that the checkpoint was recognised as.
        head: The checkpoint, as `read_folder` returns it.
    """
    head.method = network.method
    # a head of this project has our tensor names, and its config states its settings
    if head.layout == OWN:
        read_own(head)
        # one network may serve several methods
        head.method = head.settings["kind"]
    else:
        copies = _name_tensors(network, head)  # duplicates: name in the file -> our name
        if network.has_block:
            read_sizes(head)
        head.settings = network.read_settings(head)
        compare_copies(head, copies)
    # a head here uses the target's own embedding and LM head, so copies in the file are compared with these
    for name in sorted(head.names.keys() & network.borrowed.keys()):
        may_differ = network.trains_embedding and name == EMBEDDING
        rows = None  # token ids of the rows of the target's tensor that the copy holds; None for all rows
        size = head.draft_vocab_size
        if name == OUTPUT and 0 < size < head.shape["vocab_size"]:
            # the LM head of a head with a draft vocabulary has the target's rows of these tokens alone; `d2t` has each
            # draft token's id less its index
            entry = head.entry("d2t")
            if entry is None or entry.shape != (size,):
                continue  # `_check_tensors` reports a missing or misshapen d2t
            rows, reason = read_draft_tokens(head.load("d2t").long(), head.shape["vocab_size"])
            if rows is None:
                head.problem(reason)
                continue
        compare_borrowed(head, name, network.borrowed[name], may_differ, rows=rows)
    # the config may tell how many layers the head's target has
    if head.target and head.target_layers not in (None, head.target.layers):
        what = f"the head is for a target of {head.target_layers} layers, {head.target.path} has {head.target.layers}"
        head.problem(what, "Name the right target")
    _check_tensors(network, head)
    # values of a wrong type in the config; a key that was read twice is listed twice: report it once
    for wrong in dict.fromkeys(head.keys.wrong):
        head.problem(f"config.json: {wrong}", "Correct it by the run that made the head")


def _name_tensors(network: Network, head: HeadFolder) -> dict[str, str]:
    """Set `head.names` (our name of each tensor -> its name in the file) and `head.layout` (the tool that wrote it).

    Other tensors are noted if the network's table says why they are not needed, and refused if not.

    Returns:
        The duplicates (name in the file -> our name): tensors whose name of ours an earlier tensor has already.
    """
    head.names = {}
    copies: dict[str, str] = {}
    # why tensors are not needed, "" for unknown ones -> names in the file
    left_out: dict[str, list[str]] = {}
    for name in sorted(head.tensors.stored):
        writer, ours = _find_name(network, head, name)
        if ours is None:
            reasons = (
                reason for pattern, reason in network.ignored.items() if re.fullmatch(pattern, name)
            )
            left_out.setdefault(next(reasons, ""), []).append(name)
        elif ours in head.names:
            copies[name] = ours
        else:
            head.names[ours] = name
            # several tools give the target's tensors the same names, so these do not tell who wrote the file
            if ours not in network.borrowed:
                head.layout = writer
    for reason, names in left_out.items():
        if reason:
            head.notes.append(f"{list_some(names)} left out: {reason}")
        else:
            refuse_tensors(head, names)
    return copies


def _find_name(network: Network, head: HeadFolder, name: str) -> tuple[str, str | None]:
    """Find which trainer's spelling the name of a checkpoint's tensor fits.

    Args:
        network: The table of the head's network.
        head: The checkpoint.
        name: The tensor's name in the file.

    Returns:
        The trainer ("" for none), and this project's name for the tensor (None if there is none).
    """
    bare = _strip(network, name)
    # the first pattern that fits counts, even if a later one is more specific
    for writer, spelling in network.spellings:
        for ours, theirs in spelling.items():
            parts = match_name(_strip(network, theirs), bare)
            if parts is not None:
                # the same numbers and endings in our pattern, which has no words in braces
                full_name = fill_name(ours, parts, numbers={})
                # `rename` is only for the head's own tensors, not for copies of the target's
                if full_name in network.borrowed:
                    return writer, full_name
                return writer, network.rename(head, name, full_name)
    # some trainers add a copy of the target's LM head to any network's tensors
    if name == OUTPUT and OUTPUT in network.borrowed:
        return "", OUTPUT
    return "", None


def _strip(network: Network, name: str) -> str:
    """Return a name without the prefixes that some trainers write in front of it."""
    for prefix in network.prefixes:
        name = name.removeprefix(prefix)
    return name


def _build(network: Network, head: HeadFolder) -> TrainableDrafter:
    """Return a head of this project with the checkpoint's settings and sizes, and fresh weights.

    ValueError if no head has these settings or sizes. `head` is matched, so that its settings are known.
    """
    if head.layout == OWN:
        return build_head(head.config, str(head.path / "config.json"))
    # settings and sizes come from a file of unknown origin, so the method's own checks may refuse them
    method: Any = DRAFTERS[head.method]
    settings = parse_section(
        method.Settings, head.settings, "no head of these settings can be made"
    )
    try:
        with bounded_weights():
            drafter: TrainableDrafter = method(settings, network.read_shape(head))
    # errors of many kinds: pydantic checks the settings, transformers and torch the sizes
    except Exception as error:
        raise ValueError(f"no head of these sizes can be made: {error!r:.300}") from None
    return drafter


def _check_tensors(network: Network, head: HeadFolder) -> None:
    """Check that every expected tensor is present in its size and a number type, and that no other tensor is.

    Whatever is wrong is added to `head.problems`.
    """
    if head.problems and not network.lists_all:
        # sizes that do not fit may only follow from the earlier problems, which say more
        return
    try:
        with torch.device("meta"):  # which takes no memory
            drafter = _build(network, head)
    except ValueError as error:
        head.problem(str(error), "Correct config.json")
        return
    # optional tensors: the table names their dimensions, whose sizes the config gives
    config_sizes = {**head.shape, "draft_vocab_size": head.draft_vocab_size}
    sizes: dict[str, Size] = {}
    for name, dimensions in network.optional.items():
        sizes[name] = tuple(config_sizes[dimension] for dimension in dimensions)
    # the head's own tensors: the sizes are those of a head that is built from the config
    expected = drafter.state_dict()
    for name, tensor in expected.items():
        size = tuple(tensor.shape)
        sizes[name] = size if head.layout == OWN else network.stored_size(name, size)
    # an optional tensor that the built head does not have may be absent
    for name, size in sizes.items():
        if name in expected or name in head.names:
            _check_tensor(network, head, name, size)
    # names in the file; copies of the target's tensors were compared with the target already
    unexpected = [
        head.names[name]
        for name in sorted(head.names.keys() - sizes.keys() - network.borrowed.keys())
    ]
    # a network has biases and norms of queries and keys in every layer or in none: those left over are a part of a set.
    # With `lists_all` they are refused below, with what each is.
    partial = [
        name
        for name in unexpected
        if not network.lists_all and re.search(r"_proj\.bias|\.[qk]_norm\.", name)
    ]
    if partial:
        head.problem(f"tensors of no part of this head: {list_some(partial)}", COPY_BOTH)
    refuse_tensors(head, [name for name in unexpected if name not in partial])


def is_plain(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be read as weights: floating-point numbers of at least two bytes.

    float8 has one byte and needs scales, which nothing here applies.
    """
    return dtype.is_floating_point and dtype.itemsize >= 2


def _check_tensor(network: Network, head: HeadFolder, name: str, size: Size) -> None:
    """Add to `head.problems` what is wrong with one expected tensor: it is missing, misshapen, or no plain weights.

    Args:
        network: The head's network.
        head: The checkpoint.
        name: The tensor's name in this project.
        size: Its expected size in the file.
    """
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
        # d2t and t2d are no weights; a mask t2d is read from any type
        if name == "d2t" and entry.dtype.is_floating_point:
            head.problem(f"d2t is in {entry.dtype}, expected whole numbers", "Export again")
    # a borrowed tensor was compared already
    elif name not in network.borrowed and not is_plain(entry.dtype):
        head.problem(f"{head.names[name]} is in {entry.dtype}, expected plain weights", fatal=False)


# -- converting it ----------------------------------------------------------------------------------------------------


def convert(
    network: Network, head: HeadFolder, taps: tuple[int, ...] | None, norm_output: str | None
) -> tuple[TrainableDrafter, list[str]]:
    """Return a matched head as one of this project, with notes on all that was assumed or left out.

    Args:
        network: The head's network.
        head: The checkpoint, after `match`.
        taps: The layers whose inputs the head reads, if the user says so.
        norm_output: What the config's key `norm_output` means, if the user says so ("next-step" or "lm-head").

    Returns:
        The head with the checkpoint's weights, and the notes.

    Raises:
        ValueError: with all problems that prevent it.
    """
    _check_target_sizes(head)
    positions = []  # notes on the number of positions
    if network.takes_positions:
        positions = _take_positions(head)
    if head.problems:
        raise ValueError(describe_problems(head))
    # a method without the setting reads the target's last hidden state, which tap -1 stands for
    reads = tuple(head.settings.get("taps", (-1,)))
    if not network.takes_taps and taps not in (None, reads):
        raise ValueError(f"taps are {taps}, but such heads read {reads}: leave them out")
    settled = network.settle(head, taps, norm_output)
    notes = [*head.notes]
    unknown_keys = head.unknown_keys()
    if unknown_keys:
        notes.append(f"unknown keys of config.json, not used: {unknown_keys:.400}")
    notes += [*settled, *positions]
    # the name may depend on settings that are only final now: EAGLE-3.1 is EAGLE-3 with two switches
    head.kind = network.describe(head)
    drafter = _build(network, head)
    weights = {
        name: network.make_tensor(head, name, tensor.shape)
        for name, tensor in drafter.state_dict().items()
    }
    # checked only now, since `make_tensor` may add to the file's values or leave rows of them out
    for name, weight in weights.items():
        if not bool(weight.float().isfinite().all()):
            raise ValueError(
                f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint"
            )
    # the head's own parameters are in float32
    dtypes = {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {
        torch.float32
    }
    if dtypes:
        listed = ", ".join(sorted(map(str, dtypes)))
        notes.append(f"weights in {listed}, held here in torch.float32, which is exact")
    drafter.load_state_dict(weights)
    return drafter, notes


def _check_target_sizes(head: HeadFolder) -> None:
    """Record a problem if the head's width or vocabulary is not that of the target it is compared with."""
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
    """Set `head.shape["max_position_embeddings"]` to the target's where that changes no result; return notes on it.

    There is no note if nothing was changed.
    """
    ours = head.shape["max_position_embeddings"]
    theirs = head.target.positions if head.target else None
    # rotary scalings compute with the number, the default rotary embedding does not
    if theirs in (None, ours) or head.shape["rope_parameters"]["rope_type"] != "default":
        return []
    head.shape["max_position_embeddings"] = theirs
    return [
        f"max_position_embeddings {ours} became {theirs}, the target's: it changes nothing that is computed"
    ]


def describe_problems(head: HeadFolder) -> str:
    """Return the message of a refused import: the checkpoint, and each of its problems on a line."""
    lines = [f"{head.path}, {head.kind}, cannot become a head of this project:"]
    for problem in head.problems:
        lines.append(f"- {problem.sentence}")
    return "\n".join(lines)


# -- names of tensors in two spellings ---------------------------------------------------------------------------------


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the parts of a tensor's name that match `#` (a number) and `*` (anything) in a pattern, else None.

    For example, `layers.#.*` matches `layers.0.mlp.up_proj.weight`: ("0", "mlp.up_proj.weight").
    """
    match = _compile(pattern).fullmatch(name)
    return None if match is None else match.groups()


def fill_name(pattern: str, parts: Iterable[str], numbers: Mapping[str, Any]) -> str:
    """Return the name that a pattern stands for.

    Args:
        pattern: A pattern of names, such as `layers.#.*`.
        parts: What replaces each `#` and `*`, in order, as `match_name` returns it.
        numbers: What replaces each word in braces, such as {"layer": 32} for `{layer}`.
    """
    rest = iter(parts)
    return re.sub(r"[#*]", lambda _: next(rest), pattern).format_map(numbers)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern of names as a regular expression, with a group for each `#` and `*`.

    A word in braces, such as `{layer}`, matches any number and has no group.
    """
    # `*` does not match inv_freq, a buffer of rotary embeddings that is no weight
    wildcards = {"#": r"(\d+)", "*": r"((?!.*inv_freq).+)"}
    expression = ""
    for piece in re.split(r"(#|\*|\{\w+\})", pattern):
        expression += r"\d+" if piece.startswith("{") else wildcards.get(piece, re.escape(piece))
    return re.compile(expression)


def rename_tensors(
    tensors: Mapping[str, Tensor], spelling: Spelling, **numbers: Any
) -> dict[str, Tensor]:
    """Return our tensors under the names of another tool, for an export; a name that its spelling lacks stays.

    Args:
        tensors: The tensors by our names.
        spelling: Patterns of our names, and the tool's.
        numbers: The numbers for words in braces, such as layer=32.
    """
    return {_rename(name, spelling, numbers): tensor for name, tensor in tensors.items()}


def _rename(name: str, spelling: Spelling, numbers: Mapping[str, Any]) -> str:
    """Return another tool's name for one of our tensors: by the first pattern that matches `name`, else `name` itself.

    The arguments are those of `rename_tensors`.
    """
    for ours, theirs in spelling.items():
        parts = match_name(ours, name)
        if parts is not None:
            return fill_name(theirs, parts, numbers)
    return name


def keep_names(*names: str) -> Spelling:
    """Return the spelling of a tool that names these tensors as this project does: each pattern stands for itself."""
    return dict(zip(names, names, strict=True))
