"""Read an untrusted folder: run nothing in it, follow no link out of it, check sizes before allocating."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle.formats.reading.folder_paths import CONFIG_BYTES, check_not_hollow, has, plain_file, read_bytes

INDEX_BYTES, HEADER_BYTES = 16_000_000, 4_000_000
LARGEST = 40_000_000_000  # of all tensors together
WHOLE = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FolderTensors:
    """All tensors of a folder by name, read on demand."""

    stored: dict[str, TensorEntry] = field(default_factory=dict)
    pickled: dict[Path, dict[str, Tensor]] = field(default_factory=dict)  # of .bin files, mapped and not read
    files: list[Path] = field(default_factory=list)  # as they are called in the folder

    def load(self, name: str) -> Tensor:
        """The values of one tensor."""
        path = self.stored[name].file
        if path in self.pickled:
            return self.pickled[path][name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)


def read_json(folder: Path, name: str, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON mapping; NaN, infinities and duplicate keys are refused."""
    path = plain_file(folder, name)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{folder / name} has {size:,} bytes, expected at most {most:,}: none is that long")
    return parse_json(read_bytes(path, size), str(folder / name))


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """Parse JSON bytes as a mapping."""
    try:
        value = json.loads(
            text.decode("utf-8"), parse_constant=_refuse, parse_float=_parse_float, object_pairs_hook=_build_mapping
        )
    except (ValueError, RecursionError) as error:  # a decoding error is a ValueError
        raise ValueError(f"{source} is not JSON: {_shorten(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds {type(value).__name__}, expected a mapping")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _build_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return dict(pairs)


def _shorten(error: object) -> str:
    """The first line of an error, without terminal control characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(letter if letter.isprintable() else "?" for letter in lines[0][:200])


# -- weights ----------------------------------------------------------------------------------------------------------


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index; without an index, the file with all tensors, safetensors before pickles."""
    for whole in WHOLE:
        if has(folder, whole):
            return {"": whole}
        if has(folder, f"{whole}.index.json"):
            files = read_json(folder, f"{whole}.index.json", INDEX_BYTES).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise ValueError(f"{folder / whole}.index.json: weight_map must map each tensor to a file")
            return files
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        if whole == "model.safetensors" and len(others) == 1:
            return {"": others[0]}
    expected = (
        "model.safetensors or pytorch_model.bin, whole or with an index, or medusa_lm_head.pt or hydra_lm_head.pt"
    )
    raise ValueError(f"no weights in {folder}: expected {expected}")


def read_tensors(folder: Path, most: int | None = LARGEST) -> FolderTensors:
    """The entries of the weight files, checked against file sizes; no tensor is read yet."""
    tensors, files = FolderTensors(), _weight_map(folder)
    for name in sorted(set(files.values())):
        path, shown = plain_file(folder, name), folder / name
        check_not_hollow(path, shown)
        if name.endswith(".safetensors"):
            entries = read_header(path, shown)
        elif name.endswith((".bin", ".pt")):
            tensors.pickled[path] = _map_pickle(path, shown)
            pickled = tensors.pickled[path].items()
            entries = {key: TensorEntry(value.dtype, tuple(value.shape), path) for key, value in pickled}
        else:
            raise ValueError(f"{shown}: expected weights in .safetensors, .bin or .pt")
        if odd := [key for key in entries if not key.isprintable() or len(key) > 200]:
            raise ValueError(f"{shown} holds a tensor called {odd[0]!r:.200}: this is no name")
        if twice := sorted(entries.keys() & tensors.stored.keys()):
            raise ValueError(f"{shown} holds {twice[0]}, which another file holds too")
        tensors.stored.update(entries)
        tensors.files.append(shown)
    if "" not in files and (wrong := sorted(files.keys() ^ tensors.stored.keys())):
        raise ValueError(
            f"{folder}: index and files differ in {', '.join(map(repr, wrong[:4])):.300}: copy them all again"
        )
    total = sum(entry.bytes for entry in tensors.stored.values())
    if most is not None and total > most:
        raise ValueError(
            f"the tensors in {folder} take {total:,} bytes, expected at most {LARGEST:,}: this is no draft head"
        )
    return tensors


def read_header(path: Path, shown: Path) -> dict[str, TensorEntry]:
    """The header of a safetensors file, whose tensors must cover the file exactly and in order."""
    size = path.stat().st_size
    length = int.from_bytes(read_bytes(path, 8), "little")
    if size < 8 or length > size - 8 or length > HEADER_BYTES:
        raise ValueError(
            f"{shown} has {size:,} bytes and a header of {length:,}: it is cut short, or no safetensors file"
        )
    header = parse_json(read_bytes(path, 8 + length)[8:], f"the header of {shown}")
    header.pop("__metadata__", None)
    entries, spans = {}, []
    for name, line in header.items():
        dtype, shape, start, stop = _parse_entry(line, f"{shown}: {name!r:.100}")
        entry = entries[name] = TensorEntry(dtype, shape, path)
        if stop - start != entry.bytes:
            needed = f"needs {entry.bytes:,} bytes, it has {stop - start:,}"
            raise ValueError(f"{shown}: {name!r:.100} of shape {list(shape)} in {dtype} {needed}")
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"{shown}: its tensors overlap or leave gaps at byte {min(start, end):,}")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"{shown}: its tensors take {end:,} bytes and the file has {size - 8 - length:,} for them")
    return entries


def _parse_entry(entry: Any, where: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Parse one entry of a header."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{where} does not say dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has dtype {dtype!r:.50}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise ValueError(f"{where} has shape {shape!r:.100}, expected up to 8 sizes")
    if not all(type(place) is int and 0 <= place < 2**50 for place in (start, stop)):
        raise ValueError(f"{where} has offsets {start!r:.30}, {stop!r:.30}, expected two places in the file")
    return DTYPES[dtype], tuple(shape), start, stop


def _map_pickle(path: Path, shown: Path) -> dict[str, Tensor]:
    """A .bin file's tensors, memory-mapped, without running code of its pickle."""
    size = path.stat().st_size
    _check_uncompressed(path, shown, size)
    try:  # on the device without memory first, for the sizes that the pickle claims
        _check_claims(torch.load(path, map_location="meta", weights_only=True), size)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds: code in the pickle, a torn file, sizes that nothing holds
        reason = _shorten(error)
        raise ValueError(
            f"{shown} cannot be read as weights alone (torch.load, weights_only=True): {reason}; expected names and "
            "plain tensors: save it again, or as safetensors"
        ) from None
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _check_uncompressed(path: Path, shown: Path, size: int) -> None:
    """Refuse compressed archives before reading them."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        reason = _shorten(error)
        raise ValueError(
            f"{shown} is not what torch.save has written since 1.6: {reason}. Save it again, or as safetensors"
        ) from None
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError(f"{shown} holds compressed parts, expected what torch.save writes: save it again")


def _check_claims(claimed: Any, size: int) -> None:
    if not isinstance(claimed, dict) or not all(isinstance(name, str) for name in claimed):
        raise ValueError(f"it holds {type(claimed).__name__}, expected a mapping of names to tensors")
    for name, tensor in claimed.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name[:100]} is {type(tensor).__name__}, expected a plain tensor")
        if not tensor.is_contiguous() or tensor.numel() * tensor.dtype.itemsize > size:
            raise ValueError(f"{name[:100]} of shape {list(tensor.shape)} does not lie whole in {size:,} bytes")
