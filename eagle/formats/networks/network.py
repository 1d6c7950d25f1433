"""A network of heads as a table, by which a checkpoint is recognised, matched, inspected and converted."""

# H width, V vocabulary

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
from eagle.formats.reading.head_folder import (
    EMBEDDING,
    OUTPUT,
    OWN,
    Finding,
    HeadFolder,
    compare_borrowed,
    compare_copies,
    list_some,
    read_own,
    read_sizes,
    refuse_tensors,
)
from eagle.formats.reading.target_files import EMBEDDINGS, LM_HEADS, TargetFiles
from eagle.formats.reading.traps import Strike
from eagle.recipe import parse_section

ROTARY = r"(.*\.)?(inv_freq|cos_cached|sin_cached)"
FOLLOWS = "follows from the rotary parameters"
Spelling = Mapping[str, str]  # our names and another tool's


class Network:
    """One method's heads as other tools write them; each fact about their tensors stands in it once."""

    name: str = ""  # as `inspect` prints it
    method: str
    methods: tuple[str, ...] = ()  # of this project whose heads these are
    tensors: str = "$^"  # begins the name of one, `model.` taken off: any of these four signs is enough
    words: str = "^$"  # stands in architectures, model_type, speculators_model_type or projector_type
    keys: tuple[str, ...] = ()  # of config.json
    common: tuple[str, ...] = ()  # keys that a language model may have too
    spellings: tuple[tuple[str, Spelling], ...] = ()  # by who writes them
    prefixes: tuple[str, ...] = ("model.",)  # that may stand in front of any name
    spare: Mapping[str, str] = {ROTARY: FOLLOWS}  # patterns of what is not needed, and why
    borrowed: Mapping[str, tuple[str, ...]] = {EMBEDDING: EMBEDDINGS, OUTPUT: LM_HEADS}  # of the target, by our names
    own_copies: tuple[str, ...] = ()  # the borrowed that may differ from the target's, for a head may have trained them
    indices: tuple[str, ...] = ()  # tensors that hold no weights
    zeros: str = r".*\.bias"  # what may be all zeros
    remedies: Mapping[str, str] = {}  # of missing tensors
    beside: Mapping[str, tuple[str, ...]] = {}  # what may stand beside the network's tensors, with its sides
    has_block: bool = True  # whether its config has the sizes of a Llama block
    lists_all: bool = False  # whether tensors are compared with the config's sizes where something else is wrong too
    rotates: bool = True  # whether the config's rotary parameters are those of its attention
    takes_taps: bool = False  # whether an import may say which layers it reads
    takes_positions: bool = False  # whether an import takes the target's number of positions

    def rename(self, head: HeadFolder, name: str, ours: str) -> str | None:
        """Our name of a tensor, from the one that its spelling gave; None for one that is no part of the head."""
        return ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """The head's settings as a recipe would state them, from tensors and config."""
        raise NotImplementedError

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """The sizes of the head: its config's, or the target's where only width and vocabulary matter."""
        if self.has_block:
            return head_shape(SimpleNamespace(**head.shape), **head.overrides)
        width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
        plain = {"num_attention_heads": 1, "intermediate_size": width, "max_position_embeddings": 2048}
        held = {**target.config, "rope_parameters": target.rope or None} if target else plain
        return head_shape(SimpleNamespace(**{**held, "hidden_size": width, "vocab_size": vocab_size}))

    def size_of(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """The size of the tensor in the file which holds one of ours of this size."""
        return size

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Why a tensor may be absent from the file; "" if it may not."""
        return ""

    def settle(
        self, head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None, norm_output: str | None
    ) -> list[str]:
        """Settle for an import what the config leaves open; returns notes on it."""
        return []

    def make_tensor(self, head: HeadFolder, name: str, size: torch.Size) -> Tensor:
        """Make one of our tensors from the file's tensors; one that may be absent is zeros."""
        return head.load(name) if name in head.names else torch.zeros(size)

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """The traps of this network: settings that engines read differently."""
        yield from ()

    def describe(self, head: HeadFolder) -> str:
        """The checkpoint's method."""
        return head.kind

    def list_facts(self, head: HeadFolder) -> Config:
        """The facts that `inspect` shows."""
        return {**head.settings, "width": head.shape["hidden_size"], "vocabulary": head.shape["vocab_size"]}

    # -- matching and converting --------------------------------------------------------------------------------------

    def match(self, head: HeadFolder, target: TargetFiles | None) -> None:
        """Match each tensor and key of a recognised head; obstacles to an import become problems."""
        head.method = self.method
        if head.layout == OWN:
            read_own(head)
        else:
            copies = self._name_tensors(head)
            if self.has_block:
                read_sizes(head)
            head.settings = self.read_settings(head, target)
            compare_copies(head, copies)
        head.list_unknown_keys()
        for name in sorted(head.names.keys() & self.borrowed.keys()):
            compare_borrowed(head, name, self.borrowed[name], name in self.own_copies, target)
        if target and head.target_layers not in (None, target.layers):
            what = f"the head is for a target of {head.target_layers} layers, {target.path} has {target.layers}"
            head.problem(what, "Name the right target")
        self._check_tensors(head, target)
        fix = "Correct it by the run that made the head"
        head.problems += [Finding(f"config.json: {wrong}", fix=fix) for wrong in dict.fromkeys(head.keys.wrong)]

    def _name_tensors(self, head: HeadFolder) -> dict[str, str]:
        """This project's name of each tensor; the duplicates by name."""
        head.names, copies, left_out = {}, dict[str, str](), dict[str, list[str]]()
        for name in sorted(head.tensors.stored):
            who, ours = self._find_name(head, name)
            if ours is None:
                why = next((why for pattern, why in self.spare.items() if re.fullmatch(pattern, name)), "")
                left_out.setdefault(why, []).append(name)
            elif ours in head.names:
                copies[name] = ours
            else:
                head.names[ours] = name
                head.layout = head.layout if ours in self.borrowed else who
        for why, names in left_out.items():
            if why:
                head.notes.append(f"{list_some(names)} left out: {why}")
            else:
                refuse_tensors(head, names)
        return copies

    def _find_name(self, head: HeadFolder, name: str) -> tuple[str, str | None]:
        """Whose spelling a tensor's name fits, and this project's name."""
        bare = self._strip(name)
        for who, spelling in self.spellings:
            for ours, theirs in spelling.items():
                if (parts := match_name(self._strip(theirs), bare)) is not None:
                    full_name = fill_name(ours, parts, {})
                    return who, full_name if full_name in self.borrowed else self.rename(head, name, full_name)
        return "", OUTPUT if name == OUTPUT and OUTPUT in self.borrowed else None

    def _strip(self, name: str) -> str:
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name

    def _build(self, head: HeadFolder, target: TargetFiles | None) -> TrainableDrafter:
        """A head with these settings and sizes, and uninitialised weights."""
        if head.layout == OWN:
            return build_head(head.config, str(head.path / "config.json"))
        method: Any = DRAFTERS[head.method]
        settings = parse_section(method.Settings, head.settings, "no head of these settings can be made")
        try:
            with bounded_weights():
                drafter: TrainableDrafter = method(settings, self.read_shape(head, target))
        except Exception as error:  # of many kinds: pydantic checks the settings, transformers and torch the sizes
            raise ValueError(f"no head of these sizes can be made: {error!r:.300}") from None
        return drafter

    def _check_tensors(self, head: HeadFolder, target: TargetFiles | None) -> None:
        """Check that every expected tensor is present, in its size and a number type, and no other one."""
        if head.problems and not self.lists_all:  # which say more than sizes that do not fit
            return
        try:
            with torch.device("meta"):  # which takes no memory
                drafter = self._build(head, target)
        except ValueError as error:
            head.problem(str(error), "Correct config.json")
            return
        expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        if head.layout != OWN:
            expected = {name: self.size_of(name, size) for name, size in expected.items()}
        sides = {**head.shape, "draft_vocab_size": head.draft_vocab_size}
        beside = {name: tuple(sides[side] for side in named) for name, named in self.beside.items()}
        for name, size in {**beside, **expected}.items():
            if name in expected or name in head.names:
                self._check_tensor(head, name, size)
        expected_names = expected.keys() | self.borrowed.keys() | beside.keys()
        others = [head.names[name] for name in sorted(head.names.keys() - expected_names)]
        optional = [name for name in others if not self.lists_all and re.search(r"_proj\.bias|\.[qk]_norm\.", name)]
        if optional:  # heads of this network may have such, all of them or none
            what = f"tensors of no part of this head: {list_some(optional)}"
            head.problem(what, "Correct config.json, or copy both files again")
        if unknown := [name for name in others if name not in optional]:
            refuse_tensors(head, unknown)

    def _check_tensor(self, head: HeadFolder, name: str, size: tuple[int, ...]) -> None:
        """Record what is wrong with one tensor."""
        entry = head.entry(name)
        if entry is None:
            if why := self.may_lack(head, name):
                head.notes += [why] if why not in head.notes else []
            else:
                usual = "Engines may start from random numbers there: copy or export it again"
                head.problem(f"{name} is missing, expected {list(size)}", self.remedies.get(name, usual))
        elif entry.shape != size:
            what = f"{head.names[name]} is {list(entry.shape)}, expected {list(size)}"
            head.problem(what, "Correct config.json, or copy both files again")
        elif name in self.indices:
            if name == "d2t" and entry.dtype.is_floating_point:
                head.problem(f"d2t is in {entry.dtype}, expected whole numbers", "Export again")
        elif name not in self.borrowed and (not entry.dtype.is_floating_point or entry.dtype.itemsize < 2):
            head.problem(f"{head.names[name]} is in {entry.dtype}, expected plain weights", fatal=False)

    def convert(
        self, head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None, norm_output: str | None
    ) -> tuple[TrainableDrafter, list[str]]:
        """The head as one of this project, with notes on all that was assumed or left out."""
        width, vocab_size = head.shape.get("hidden_size"), head.shape.get("vocab_size")
        if head.shape and target and (target.width, target.vocab_size) != (width, vocab_size):
            ours, theirs = f"{width} wide with {vocab_size} tokens", f"{target.width} wide with {target.vocab_size}"
            head.problem(f"the head is for a target {ours}, {target.path} is {theirs}: name the right target")
        positions = _take_positions(head, target) if self.takes_positions else []
        _refuse_problems(head)
        keys = ", ".join(head.unknown_keys)
        unknown = [f"unknown keys of config.json, not used: {keys:.400}"] if keys else []
        reads = tuple(head.settings.get("taps", (-1,)))
        if not self.takes_taps and taps not in (None, reads):
            raise ValueError(f"taps are {taps}, but such heads read {reads}: leave them out")
        settled = self.settle(head, target, taps, norm_output)
        notes = [*head.notes, *unknown, *settled, *positions]
        head.kind = self.describe(head)
        drafter = self._build(head, target)
        expected = drafter.state_dict().items()
        weights = {name: self.make_tensor(head, name, tensor.shape) for name, tensor in expected}
        for name, weight in weights.items():
            if not bool(weight.float().isfinite().all()):
                raise ValueError(f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint")
        if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {torch.float32}:
            notes.append(
                f"weights in {', '.join(sorted(map(str, dtypes)))}, held here in torch.float32, which is exact"
            )
        drafter.load_state_dict(weights)
        return drafter, notes


def _refuse_problems(head: HeadFolder) -> None:
    """Raise a ValueError with all problems that prevent an import."""
    listed = [f"- {problem.what}{f'. {problem.fix}' if problem.fix else ''}" for problem in head.problems]
    if listed:
        named = f"{head.path}, {head.kind},"
        raise ValueError("\n".join([f"{named} cannot become a head of this project:", *listed]))


def _take_positions(head: HeadFolder, target: TargetFiles | None) -> list[str]:
    """Take the target's number of positions where it changes nothing."""
    ours, theirs = head.shape["max_position_embeddings"], target.positions if target else None
    if theirs in (None, ours) or head.shape["rope_parameters"]["rope_type"] != "default":
        return []
    head.shape["max_position_embeddings"] = theirs
    return [f"max_position_embeddings {ours} became {theirs}, the target's: it changes nothing that is computed"]


# -- names of tensors in two spellings ---------------------------------------------------------------------------------


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """The parts of a name for which `#` (a number) and `*` (anything) stand; None if the name is another."""
    match = _compile(pattern).fullmatch(name)
    return None if match is None else match.groups()


def fill_name(pattern: str, parts: Iterable[str], numbers: Mapping[str, Any]) -> str:
    """The name with these parts in place of `#` and `*`, and with numbers in place of their names in braces."""
    rest = iter(parts)
    return re.sub(r"[#*]", lambda _: next(rest), pattern).format_map(numbers)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """A pattern of names as a regular expression; a number in braces may be any."""
    kinds = {"#": r"(\d+)", "*": r"((?!.*inv_freq).+)"}
    pieces = re.split(r"(#|\*|\{\w+\})", pattern)
    return re.compile("".join(r"\d+" if part[:1] == "{" else kinds.get(part, re.escape(part)) for part in pieces))


def rename_tensors(tensors: Mapping[str, Tensor], spelling: Spelling, **numbers: Any) -> dict[str, Tensor]:
    """Tensors under the names of another tool; a name that its spelling lacks stays."""
    return {_rename(name, spelling, numbers): tensor for name, tensor in tensors.items()}


def _rename(name: str, spelling: Spelling, numbers: Mapping[str, Any]) -> str:
    for ours, theirs in spelling.items():
        if (parts := match_name(ours, name)) is not None:
            return fill_name(theirs, parts, numbers)
    return name


def keep_names(*names: str) -> Spelling:
    """The spelling of names that are ours."""
    return dict(zip(names, names, strict=True))
