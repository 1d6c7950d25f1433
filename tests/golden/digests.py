"""Shorten values to hashes that name what they were made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# hexadecimal digits: two values share a hash once in four thousand million
LENGTH = 8


def digest(value: Any) -> str:
    """Return a hash of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values, whatever its dtype."""
    # bytes, as numpy knows neither bfloat16 nor float8
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist())


def digest_tensors(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, dtypes, shapes and values; the order of the names does not count."""
    named = dict(tensors)
    whole = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor_bytes(tensor))
    return whole.hexdigest()[:LENGTH]
