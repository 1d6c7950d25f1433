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
    """Write the `size` most frequent tokens.

    The file has `d2t` [D], what to add to a draft id to get the target's, and `t2d` [V], whether a target id can be
    drafted.
    """
    selected = most_frequent(counts, size)
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[selected] = True
    tensors = {"d2t": selected - torch.arange(size), "t2d": t2d}
    write_tensors(path, tensors, {"identity": json.dumps({**identity, "size": size})})


def load_draft_vocab(
    path: str | Path, expected: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return `d2t` [D] and `t2d` [V]; refuse a file that was made from another tokenizer or other data."""
    if not Path(path).is_file():
        raise ValueError(
            f"no draft vocabulary at {path}: run `eagle prepare RECIPE --only draft-vocab` first"
        )
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
        identity = json.loads(metadata.get("identity", "{}"))  # of the tokenizer and the data
        for key, value in (expected or {}).items():
            actual = identity.get(key)
            if actual != value:
                raise ValueError(
                    f"the draft vocabulary {path} was made with {key} = {actual!r}, this run needs {value!r}: "
                    "make it again, or name another file"
                )
        return file.get_tensor("d2t"), file.get_tensor("t2d")
