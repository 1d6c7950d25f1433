"""Heads that guess several tokens from one state, as other tools write them: which tensor and key is what here."""

# H width, I inner width, V vocabulary

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.networks import EMBEDDING
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.keys import short
from eagle.formats.reading.target_files import EMBEDDINGS, LM_HEADS, TargetFiles
from eagle.formats.reading.traps import Trap

OUTPUT = "lm_head.weight"
BORROWED = {EMBEDDING: EMBEDDINGS, OUTPUT: LM_HEADS}  # of the target, by our names and as a target may name them
ROTARY = r"(.*\.)?(inv_freq|cos_cached|sin_cached)"
FOLLOWS = "follows from the rotary parameters"
MOST = 64  # levels that any head has: a config may say anything


@dataclass(frozen=True)
class LevelReader:
    """Reads the heads of one method; `names` maps patterns of other tools' tensor names to ours."""

    method: str
    layouts: Mapping[str, Mapping[str, str]]  # by who writes them
    spare: Mapping[str, str] = field(default_factory=lambda: {ROTARY: FOLLOWS})  # what is not needed, and why
    borrowed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BORROWED)  # what heads here have not
    whole: tuple[str, ...] = ()  # our names of tensors that hold no weights

    def method_of(self, head: HeadFolder) -> str:
        """This project's method for such a head."""
        return self.method

    def rename(self, head: HeadFolder, name: str, ours: str) -> str | None:
        """Our name of a tensor, from what its pattern gave; None for one that is no part of the head."""
        return ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """The head's settings as a recipe would state them, from tensors and config."""
        raise NotImplementedError

    def target_layers(self, head: HeadFolder) -> int | None:
        """The number of the target's layers, where the config tells it."""
        return None

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """The sizes of the head, or of the target where they do not matter to the head."""
        width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
        plain = {"num_attention_heads": 1, "intermediate_size": width, "max_position_embeddings": 2048}
        held = {**target.config, "rope_parameters": target.rope or None} if target else plain
        return head_shape(SimpleNamespace(**{**held, "hidden_size": width, "vocab_size": vocab_size}))

    def size_of(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """That of the tensor in the file which holds one of ours of this size."""
        return size

    def make_tensor(self, head: HeadFolder, name: str) -> Tensor:
        """Make one of our tensors from the file's tensors."""
        return head.load(name)

    def list_traps(self, head: HeadFolder) -> Iterator[tuple[Trap, dict[str, Any]]]:
        """What engines read differently, with the values for the text."""
        yield from ()

    def list_facts(self, head: HeadFolder) -> dict[str, Any]:
        """Further facts for `inspect`."""
        return {}

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Why a tensor may be absent from the file; "" if it may not."""
        return ""


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


def compare_size(head: HeadFolder, key: str, stated: Any, found: int | None) -> None:
    """Note a size in the config that differs from the tensors'."""
    if None not in (stated, found) and stated != found:
        head.problem(f"config.json: {key} is {short(stated)}, the tensors have {found}", "Copy both files again")
