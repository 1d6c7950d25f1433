"""The sizes and counts of a checkpoint, by its config and its tensors."""

# H width, V vocabulary

from __future__ import annotations

import re
from typing import Any

from eagle.formats.reading.head_folder import EMBEDDING, HeadFolder, read_rope, short
from eagle.formats.reading.target_files import TargetFiles


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
        stated, entry = head.keys.read(key), head.entry(name)
        found = entry.shape[side] if entry and len(entry.shape) == 2 else None
        compare_size(head, key, stated, found)
        size = found or stated or (target and (target.width if key == "hidden_size" else target.vocab_size))
        if not size:
            head.problem(
                f"no {key} in config.json, and no tensor tells it", "Name the target with --target", fatal=False
            )
        head.shape[key] = size or 1


def read_sizes(head: HeadFolder) -> None:
    """The block's sizes from the config, else from its tensors, else Llama's defaults."""
    block = head.block
    width = _read_size(head, "hidden_size", "fc.weight")
    heads = block.read("num_attention_heads")
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
        value = block.read(name)
        if not value:
            head.notes.append(f"no {name}: {default}, as in a Llama config without one")
        head.shape[name] = value or default
    head.shape["rms_norm_eps"] = float(head.shape["rms_norm_eps"])
    shared = head.shape["num_key_value_heads"]
    if heads and heads % shared:
        head.problem(f"config.json: {heads} heads cannot share {shared} key-value heads", "Correct one of them")


def _read_size(head: HeadFolder, name: str, tensor: str) -> int:
    """A size by the config, else the rows of a tensor."""
    size, entry = head.block.read(name), head.entry(tensor)
    if size is None and entry is not None and len(entry.shape) > 0:
        size = entry.shape[0]
        head.notes.append(f"no {name}: {size}, the rows of {tensor}")
    if not size:
        head.problem(f"config.json: no {name}", "Take it from the config of the target or of the training run")
    return size or 1
