"""The format of a feature shard: how packed features are streamed to a file, and checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import Example
from eagle.data.identity import assets_folder
from eagle.data.packing import DTYPES
from eagle.data.stored_rows import Part
from eagle.disk import part_file, sha256, write_whole

CODES = {torch.int64: "I64", torch.int32: "I32"}  # the names of dtypes in a safetensors header


def shard_header(parts: Sequence[Part], rows: Sequence[int], dtype: str, width: int, metadata: dict[str, str]) -> bytes:
    """The safetensors header of a shard whose parts have so many rows, which can be written before its tensors."""
    tensors = {
        part.prefix + field.name: (field.code, field.shape(count, len(part.taps), width), field.dtype.itemsize)
        for part, count in zip(parts, rows, strict=True)
        for field in DTYPES[dtype]
    }
    return tensor_header(tensors, metadata)


def tensor_header(tensors: Mapping[str, tuple[str, list[int], int]], metadata: dict[str, str]) -> bytes:
    """The safetensors header of tensors in their order, each with its dtype's name, its shape and an entry's bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (code, shape, size) in tensors.items():
        start, end = end, end + math.prod(shape) * size
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_texts(path: Path, examples: Sequence[Example], count: int, tensors: dict[str, Tensor]) -> None:
    """Write tensors, and behind them the `count` tokens and loss masks of all examples, of which one is held at a time.

    Tokens follow entries of eight bytes and single bytes come last: a tensor begins where its dtype may.
    """
    shapes = {name: (CODES[tensor.dtype], list(tensor.shape), tensor.itemsize) for name, tensor in tensors.items()}
    shapes |= {"tokens": ("I32", [count], 4), "loss_mask": ("BOOL", [count], 1)}
    held = (tensor.contiguous() for tensor in tensors.values())
    tokens, masks = (example.tokens.int() for example in examples), (example.loss_mask for example in examples)
    pieces = chain([tensor_header(shapes, {})], map(_bytes_of, chain(held, tokens, masks)))
    write_whole(path, pieces)


class ShardWriter:
    """Writes one shard to disk as a stream; it is complete once its checksum file exists.

    The header and the shard's first tensor, the largest by far, are written at once. The others follow at the end.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path, self.part = path, part_file(path)
        self.digest = hashlib.sha256()
        self.later: list[list[Tensor]] = []  # of each tensor but the first, what it consists of
        self.file = self.part.open("xb", buffering=0)
        self._write(header)

    def append(self, packed: Sequence[Sequence[Tensor]]) -> None:
        """Append the packed rows of each part, of the next examples."""
        if not all(tensors[-1].sum(dtype=torch.float32).isfinite() for tensors in packed):
            raise ValueError("the target's hidden states are not finite: load it in another target.dtype")
        first, *others = (tensor for tensors in packed for tensor in tensors)
        self._write(_bytes_of(first))
        self.later = self.later or [[] for _ in others]
        for pieces, tensor in zip(self.later, others, strict=True):
            pieces.append(tensor)

    def close(self) -> int:
        """Write the other tensors, flush, rename the shard into place and write its checksum; returns 0: no tokens."""
        for pieces in self.later:
            for piece in pieces:
                self._write(_bytes_of(piece))
        self.later.clear()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
        line = f"{self.digest.hexdigest()}  {self.path.name}\n"
        write_whole(checksum_file(self.path), [line.encode()])
        return 0

    def discard(self) -> None:
        """Remove a shard that was not closed."""
        self.file.close()
        self.part.unlink(missing_ok=True)

    def _write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):  # an unbuffered file may write less than asked
            written = self.file.write(view)
            self.digest.update(view[:written])
            view = view[written:]


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().data


def shard_fault(path: Path, header: bytes, size: int, *, read: bool) -> str | None:
    """The fault of a shard by its expected header and size, or None; `read` also checks every byte."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != size:
        return f"truncated: {path.stat().st_size} of {size} bytes"
    if not checksum_file(path).is_file():
        return "without checksum"
    checksum = checksum_file(path).read_bytes().split()
    if len(checksum) != 2 or len(checksum[0]) != 64 or checksum[1] != path.name.encode():
        return f"{checksum_file(path).name} is damaged"
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            return "damaged at its start, or of another store"
    if read and sha256(path).encode() != checksum[0]:
        return "its bytes are not those that were written"
    return None


def changed_bytes(path: Path) -> str | None:
    """The fault of a shard whose bytes are not those that were written, or None.

    A shard that was found right is not read again on this machine until its file changes.
    """
    state = path.stat()
    checksum = checksum_file(path).read_text().split()[0]
    seen = f"{checksum} {state.st_size} {state.st_mtime_ns} {state.st_ino}"
    name = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:32]
    with suppress(OSError):  # without a folder for such notes it is read in every run
        note = assets_folder("shards", "checked") / name
        if note.is_file() and note.read_text() == seen:
            return None
    if sha256(path) != checksum:
        return "its bytes are not those that were written"
    with suppress(OSError):
        write_whole(assets_folder("shards", "checked") / name, [seen.encode()])
    return None


def checksum_file(path: Path) -> Path:
    """The checksum file of a shard, in the format of `sha256sum --check`."""
    return path.with_name(f"{path.name}.sha256")
