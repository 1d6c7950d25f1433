"""The format of a feature shard: how features are packed, streamed to a file, and checked."""

# T tokens, L taps, D target width

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.disk import part_file, sha256, write_whole

DTYPES = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float8": (torch.float8_e4m3fn, "F8_E4M3"),
}
LARGEST_FLOAT8 = 448.0


def packed(features: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Features [..., L, D] as they are stored; for float8 with a scale per token and tap."""
    if dtype != "float8":
        return (features.to(DTYPES[dtype][0]),)
    scales = (features.abs().amax(-1).float() / LARGEST_FLOAT8).clamp_min(torch.finfo(torch.float32).tiny)
    return (features / scales[..., None]).to(torch.float8_e4m3fn), scales


def unpacked(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """Features as they are trained on; float8 comes back as bfloat16."""
    return values if scales is None else (values.float() * scales[..., None]).bfloat16()


def token_bytes(dtype: str, taps: int, width: int) -> int:
    """What the features of one token take on disk."""
    return taps * (width * DTYPES[dtype][0].itemsize + (4 if dtype == "float8" else 0))


def shard_header(dtype: str, tokens: int, taps: int, width: int, metadata: dict[str, str]) -> bytes:
    """The start of a safetensors file of that many tokens; its sizes are known before its contents."""
    end = tokens * taps * width * DTYPES[dtype][0].itemsize
    tensors: dict[str, Any] = {
        "__metadata__": metadata,
        "features": {"dtype": DTYPES[dtype][1], "shape": [tokens, taps, width], "data_offsets": [0, end]},
    }
    if dtype == "float8":
        tensors["scales"] = {"dtype": "F32", "shape": [tokens, taps], "data_offsets": [end, end + tokens * taps * 4]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """Streams one shard to disk: header, features, scales. It counts as whole once its checksum stands beside it."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path, self.part = path, part_file(path)
        self.digest = hashlib.sha256()
        self.scales: list[Tensor] = []
        self.file = self.part.open("xb", buffering=0)
        self._write(header)

    def append(self, values: Tensor, scales: Tensor | None = None) -> None:
        """The packed features [T, L, D] of the next example."""
        if not (values if scales is None else scales).sum(dtype=torch.float32).isfinite():
            raise ValueError("the target's hidden states are not finite: load it in another target.dtype")
        self._write(values.contiguous().view(torch.uint8).numpy().data)
        if scales is not None:
            self.scales.append(scales)

    def close(self) -> None:
        """Write what is left, wait for the disk, and give the shard its name and its checksum."""
        if self.scales:
            self._write(torch.cat(self.scales).contiguous().numpy().data)
            self.scales.clear()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
        line = f"{self.digest.hexdigest()}  {self.path.name}\n"
        write_whole(checksum_file(self.path), [line.encode()])

    def discard(self) -> None:
        """Leave nothing of a shard that was not closed."""
        self.file.close()
        self.part.unlink(missing_ok=True)

    def _write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):  # a raw file may take less than it is given
            written = self.file.write(view)
            self.digest.update(view[:written])
            view = view[written:]


def shard_fault(path: Path, header: bytes, size: int, *, read: bool) -> str | None:
    """What is wrong with a shard of that header and size, or None; with `read`, every byte is looked at."""
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


def checksum_file(path: Path) -> Path:
    """Where the checksum of a shard stands, as `sha256sum --check` reads it."""
    return path.with_name(f"{path.name}.sha256")
