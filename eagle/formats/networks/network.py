"""A network of heads as a table: its tensors' names in each spelling, what is borrowed, and how sizes are read."""

# H width, V vocabulary

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.layout import Layout
from eagle.formats.reading.head_folder import HeadFolder, read_rope, short
from eagle.formats.reading.target_files import EMBEDDINGS, LM_HEADS, TargetFiles
from eagle.formats.reading.traps import Strike

FEATURES, FUSED = "features", "fused"  # EAGLE-1's network and EAGLE-3's
EMBEDDING, OUTPUT, MASK_HIDDEN = "embed_tokens.weight", "lm_head.weight", "mask_hidden"
ROTARY = r"(.*\.)?(inv_freq|cos_cached|sin_cached)"
FOLLOWS = "follows from the rotary parameters"
USUAL_THETA = 10000.0  # of Llama when the first methods were written, which some trainers keep whatever the target has
Spelling = Mapping[str, str]  # our names and another tool's


# -- names ------------------------------------------------------------------------------------------------------------


def match_name(pattern: str, name: str) -> tuple[str, ...] | None:
    """The parts of a name for which `#` (a number) and `*` (anything) stand; None if the name is another."""
    found = _compile(pattern).fullmatch(name)
    return None if found is None else found.groups()


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


# -- writing ----------------------------------------------------------------------------------------------------------


def network_of(drafter: TrainableDrafter) -> str:
    """The name of a drafter's network."""
    return str(drafter.network["network"])


@dataclass(frozen=True)
class NetworkLayout:
    """One engine's layout of one network."""

    serve: str  # Markdown, in which HEAD, TARGET and DEPTH stand for themselves
    architectures: tuple[str, ...] = ()
    until: str = ""  # the last version of the engine that reads it, where a later one does not
    blocks: int = 1  # the most that a head may have: none of several was run in any engine
    slides: bool = False  # whether it reads a window without sinks from layer_types
    finish: Callable[[Layout, TrainableDrafter, Any], Layout] | None = None  # what this engine alone needs

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The layout of a head; ValueError with the settings that the engine cannot serve."""
        raise NotImplementedError


# -- reading ----------------------------------------------------------------------------------------------------------


class Network:
    """One method's heads as other tools write them; each fact about their tensors stands in it once."""

    method: str
    spellings: tuple[tuple[str, Spelling], ...] = ()  # by who writes them
    prefixes: tuple[str, ...] = ("model.",)  # that may stand in front of any name
    spare: Mapping[str, str] = {ROTARY: FOLLOWS}  # patterns of what is not needed, and why
    borrowed: Mapping[str, tuple[str, ...]] = {EMBEDDING: EMBEDDINGS, OUTPUT: LM_HEADS}  # of the target, by our names
    own_copies: tuple[str, ...] = ()  # the borrowed that may differ from the target's, for a head may have trained them
    indices: tuple[str, ...] = ()  # tensors that hold no weights
    zeros: str = r".*\.bias"  # what may be all zeros
    remedies: Mapping[str, str] = {}  # of missing tensors
    lists_all: bool = False  # whether tensors are compared with the config's sizes where something else is wrong too
    rotates: bool = True  # whether the config's rotary parameters are those of its attention

    def method_of(self, head: HeadFolder) -> str:
        """This project's method for such a head."""
        return self.method

    def rename(self, head: HeadFolder, name: str, ours: str) -> str | None:
        """Our name of a tensor, from the one that its spelling gave; None for one that is no part of the head."""
        return ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """The head's settings as a recipe would state them, from tensors and config."""
        raise NotImplementedError

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """The sizes of the head, by its config."""
        return head_shape(SimpleNamespace(**head.shape))

    def target_layers(self, head: HeadFolder) -> int | None:
        """The number of the target's layers, where the config tells it."""
        return None

    def size_of(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """The size of the tensor in the file which holds one of ours of this size."""
        return size

    def sizes_beside(self, head: HeadFolder) -> dict[str, tuple[int, ...]]:
        """Tensors that may stand beside the network's, with their sizes."""
        return {}

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Why a tensor may be absent from the file; "" if it may not."""
        return ""

    def settle(
        self, head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None, notes: list[str]
    ) -> None:
        """Settle for an import what the config leaves open; ValueError if taps are asked for that it does not read."""
        reads = tuple(head.settings.get("taps", (-1,)))
        if taps not in (None, reads):
            raise ValueError(f"taps are {taps}, but such heads read {reads}: leave them out")

    def make_tensor(self, head: HeadFolder, name: str) -> Tensor:
        """Make one of our tensors from the file's tensors."""
        return head.load(name)

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """What engines read differently in heads of this network."""
        yield from ()

    def describe(self, head: HeadFolder) -> str:
        """The checkpoint's method."""
        return head.kind

    def list_facts(self, head: HeadFolder) -> dict[str, Any]:
        """The facts that `inspect` shows."""
        return {**head.settings, "width": head.shape["hidden_size"], "vocabulary": head.shape["vocab_size"]}


# -- sizes and counts -------------------------------------------------------------------------------------------------


def count_parts(head: HeadFolder, pattern: str) -> int:
    """The number of different indices at one place of our names."""
    return len({found[1] for name in head.names if (found := re.match(pattern, name))})


def compare_count(head: HeadFolder, stated: int | None, found: int, what: str) -> int:
    """The count found in the file; a note if the config states another one."""
    if stated is not None and stated > found:
        head.problem(f"config.json says {stated} {what}, the file holds {found}", "Copy it again")
    elif stated not in (None, found):
        head.notes.append(f"config.json says {stated} {what}, the file holds {found}, which are read")
    return found


def compare_size(head: HeadFolder, key: str, stated: Any, found: int | None) -> None:
    """Note a size in the config that differs from the tensors'."""
    if None not in (stated, found) and stated != found:
        head.problem(f"config.json: {key} is {short(stated)}, the tensors have {found}", "Copy both files again")


def read_sides(head: HeadFolder, target: TargetFiles | None, width: str, rows: str) -> None:
    """Width and vocabulary, by the tensors that have them, else as the config or the target says."""
    for key, name, side in (("hidden_size", width, 1), ("vocab_size", rows, 0)):
        stated, entry = head.keys.size(key), head.entry(name)
        found = entry.shape[side] if entry and len(entry.shape) == 2 else None
        compare_size(head, key, stated, found)
        size = found or stated or (target and (target.width if key == "hidden_size" else target.vocab_size))
        if not size:
            head.problem(
                f"no {key} in config.json, and no tensor tells it", "Name the target with --target", fatal=False
            )
        head.shape[key] = size or 1


def borrow_sizes(head: HeadFolder, target: TargetFiles | None) -> Any:
    """The target's sizes with the head's own width and vocabulary, for a head to which the others do not matter."""
    width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
    plain = {"num_attention_heads": 1, "intermediate_size": width, "max_position_embeddings": 2048}
    held = {**target.config, "rope_parameters": target.rope or None} if target else plain
    return head_shape(SimpleNamespace(**{**held, "hidden_size": width, "vocab_size": vocab_size}))


def read_sizes(head: HeadFolder) -> None:
    """The block's sizes from the config, else from its tensors, else Llama's defaults."""
    block = head.block
    width = _read_size(head, "hidden_size", "fc.weight")
    heads = block.size("num_attention_heads")
    if heads is None:
        head.problem("config.json: no num_attention_heads", "Take it from the config of the training run")
    head.shape = {
        "hidden_size": width,
        "intermediate_size": _read_size(head, "intermediate_size", "layers.0.mlp.gate_proj.weight"),
        "num_attention_heads": heads or 1,
        "vocab_size": _read_size(head, "vocab_size", EMBEDDING if EMBEDDING in head.names else "t2d"),
        "rope_parameters": read_rope(block, head.notes),
    }
    defaults = {
        "num_key_value_heads": heads or 1,
        "head_dim": max(width // (heads or 1), 1),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    for name, default in defaults.items():
        value = block.number(name) if name == "rms_norm_eps" else block.size(name)
        if not value:
            head.notes.append(f"no {name}: {default}, as in a Llama config without one")
        head.shape[name] = value or default
    head.shape["rms_norm_eps"] = float(head.shape["rms_norm_eps"])
    shared = head.shape["num_key_value_heads"]
    if heads and heads % shared:
        head.problem(f"config.json: {heads} heads cannot share {shared} key-value heads", "Correct one of them")


def _read_size(head: HeadFolder, name: str, tensor: str) -> int:
    """A size by the config, else the rows of a tensor."""
    size, entry = head.block.size(name), head.entry(tensor)
    if size is None and entry is not None and len(entry.shape) > 0:
        size = entry.shape[0]
        head.notes.append(f"no {name}: {size}, the rows of {tensor}")
    if not size:
        head.problem(f"config.json: no {name}", "Take it from the config of the target or of the training run")
    return size or 1


def refuse_settings(head: HeadFolder, refused: Mapping[str, bool], part: str = "head") -> None:
    """Record the settings that no head of this project has, with their values."""
    for name in (name for name, is_refused in refused.items() if is_refused):
        sections = (head.keys, head.block, head.nested)
        value = next((section.values[name] for section in sections if name in section.values), None)
        head.problem(f"config.json: {name} is {short(value)}, which no {part} here can be", fatal=False)


def take_keys(head: HeadFolder, *names: str) -> None:
    """Mark keys that do not matter as used, wherever they stand."""
    for section in (head.keys, head.block, head.nested):
        section.taken |= set(names)


def reorder_taps(tensors: Mapping[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """The columns of `fc` and the norms of the taps in another order."""
    columns = tensors["fc.weight"].chunk(len(order), dim=1)
    moved = {"fc.weight": torch.cat([columns[tap] for tap in order], dim=1)}
    if MASK_HIDDEN in tensors:  # what stands for taps that are not known
        masks = tensors[MASK_HIDDEN].chunk(len(order), dim=-1)
        moved[MASK_HIDDEN] = torch.cat([masks[tap] for tap in order], dim=-1)
    norms = {f"fc_norm.{place}.weight": f"fc_norm.{tap}.weight" for place, tap in enumerate(order)}
    return {**tensors, **moved, **{name: tensors[source] for name, source in norms.items() if source in tensors}}
