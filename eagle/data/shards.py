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


def pack_features(features: Tensor, dtype: str) -> tuple[Tensor, ...]:
    """Features [..., L, D] in their storage dtype; float8 adds a scale [..., L] per token and tap."""
    if dtype != "float8":
        return (features.to(DTYPES[dtype][0]),)
    scales = (features.abs().amax(-1).float() / LARGEST_FLOAT8).clamp_min(torch.finfo(torch.float32).tiny)
    return (features / scales[..., None]).to(torch.float8_e4m3fn), scales


def unpack_features(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """Features in their training dtype: float8 is scaled back to bfloat16."""
    return values if scales is None else (values.float() * scales[..., None]).bfloat16()


def token_bytes(dtype: str, taps: int, width: int) -> int:
    """Bytes on disk of one token's features."""
    return taps * (width * DTYPES[dtype][0].itemsize + (4 if dtype == "float8" else 0))


def shard_header(dtype: str, tokens: int, taps: int, width: int, metadata: dict[str, str]) -> bytes:
    """The safetensors header of a shard of `tokens` tokens, which can be written before its tensors."""
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
    """Writes one shard to disk as a stream: header, features, scales. It is complete once its checksum file exists."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path, self.part = path, part_file(path)
        self.digest = hashlib.sha256()
        self.scales: list[Tensor] = []
        self.file = self.part.open("xb", buffering=0)
        self._write(header)

    def append(self, values: Tensor, scales: Tensor | None = None) -> None:
        """Append the packed features [T, L, D] of the next example."""
        if not (values if scales is None else scales).sum(dtype=torch.float32).isfinite():
            raise ValueError("the target's hidden states are not finite: load it in another target.dtype")
        self._write(values.contiguous().view(torch.uint8).numpy().data)
        if scales is not None:
            self.scales.append(scales)

    def close(self) -> int:
        """Write the scales, flush, rename the shard into place and write its checksum; returns 0, it has no tokens."""
        if self.scales:
            self._write(torch.cat(self.scales).contiguous().numpy().data)
            self.scales.clear()
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


def checksum_file(path: Path) -> Path:
    """The checksum file of a shard, in the format of `sha256sum --check`."""
    return path.with_name(f"{path.name}.sha256")
