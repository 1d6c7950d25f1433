"""The file of a draft vocabulary, keyed to the tokenizer and the data that it was made of."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import most_frequent
from eagle.disk import open_tensors, write_tensors


def save_draft_vocab(path: str | Path, counts: Tensor, size: int, identity: dict[str, Any]) -> None:
    """Write `d2t` (what to add to a draft id to get the target's) and `t2d` (whether a target id can be drafted)."""
    kept = most_frequent(counts, size)
    tensors = {"d2t": kept - torch.arange(size), "t2d": torch.zeros(len(counts), dtype=torch.bool)}
    tensors["t2d"][kept] = True
    write_tensors(path, tensors, {"identity": json.dumps({**identity, "size": size})})


def load_draft_vocab(path: str | Path, expected: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """`d2t` [D] and `t2d` [V]; refused if made from anything but the expected tokenizer and data."""
    if not Path(path).is_file():
        raise ValueError(f"no draft vocabulary at {path}: run `eagle draft-vocab RECIPE` first")
    with open_tensors(path) as file:
        made = json.loads((file.metadata() or {}).get("identity", "{}"))
        for key, value in (expected or {}).items():
            if made.get(key) != value:
                raise ValueError(
                    f"the draft vocabulary {path} was made with {key} = {made.get(key)!r}, this run needs {value!r}: "
                    "make it again, or name another file"
                )
        return file.get_tensor("d2t"), file.get_tensor("t2d")
