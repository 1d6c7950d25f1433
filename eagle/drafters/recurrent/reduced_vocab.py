"""The file of a draft vocabulary, keyed to the tokenizer and the data that it was made of."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import most_frequent, token_counts
from eagle.disk import open_tensors, write_tensors


def count_frequent(
    supervised: Iterable[Tensor] | None, size: int, vocab_size: int, *, key: str
) -> Tensor:
    """Return the `size` most frequent supervised tokens [size] in ascending order.

    Args:
        supervised: The supervised tokens of each sequence.
        size: How many tokens are chosen.
        vocab_size: The target's.
        key: The recipe's key that asks for them, for the error.

    Raises:
        ValueError: No sequences were given, or the vocabulary is smaller than `size`.
    """
    if supervised is None:
        raise ValueError(f"{key} is {size}, but no texts were given: call for_target with them")
    return most_frequent(token_counts(supervised, vocab_size), size)


def save_draft_vocab(path: str | Path, counts: Tensor, size: int, identity: dict[str, Any]) -> None:
    """Write a draft vocabulary of the `size` most frequent tokens to a file.

    The file has `d2t` [D], which is added to a draft token's id to get the target's id, and `t2d` [V], whether a target
    token is in the draft vocabulary.

    Args:
        path: The file.
        counts: [V], how often each token is supervised in the data.
        size: D.
        identity: What names the tokenizer and the data; `load_draft_vocab` compares it.
    """
    selected = most_frequent(counts, size)
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[selected] = True
    tensors = {"d2t": selected - torch.arange(size), "t2d": t2d}
    write_tensors(path, tensors, {"identity": json.dumps({**identity, "size": size})})


def load_draft_vocab(
    path: str | Path, expected: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return `d2t` [D] and `t2d` [V] of a draft vocabulary file, as `save_draft_vocab` describes them.

    ValueError if its identity differs from `expected`: it was made with another tokenizer or from other data.
    """
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
