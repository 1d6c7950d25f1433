"""Read an untrusted folder: run nothing in it, follow no link out of it, check sizes before allocating."""

from __future__ import annotations

import json
import math
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# limits in bytes, above any honest file of the kind
CONFIG_BYTES = 1_000_000
INDEX_BYTES = 16_000_000
HEADER_BYTES = 4_000_000
TENSOR_BYTES = 40_000_000_000
# a file's name without slashes, which cannot lead out of the folder
PLAIN_NAME = re.compile(r"[\w][\w.\-+]*")
# in the order in which they are looked for
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


# -- paths ------------------------------------------------------------------------------------------------------------


def folder_at(path: str | Path) -> Path:
    """Return the folder at a path with all links followed; ValueError if there is none."""
    try:
        folder = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"no folder at {path}: {error}; expected one with config.json and weights"
        ) from None
    if not folder.is_dir():
        raise ValueError(f"{path} is no folder: expected one with config.json and weights")
    return folder


def check_empty(out: str | Path, source: Path) -> None:
    """Raise ValueError for an output folder that is not empty, or that overlaps its source.

    Args:
        out: The folder to write, which need not be there.
        source: The folder that is read, with all links followed.
    """
    folder = Path(out)
    if folder.is_symlink() or (
        folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    ):
        raise ValueError(f"{folder} is there already: name a new folder, or take it away")
    # `save_head` writes the head here first and then renames it
    staging = folder.with_name(folder.name + ".part")
    if staging.is_symlink() or staging.exists():
        raise ValueError(f"{staging} is there already: name a new folder, or take it away")
    real = folder.resolve()
    if real.is_relative_to(source) or source.is_relative_to(real):
        raise ValueError(f"{out} lies in {source}, or around it: name another folder for the head")


def plain_file(folder: Path, name: str) -> Path:
    """Return the path, with links followed, of a regular file in a folder; ValueError for anything else.

    Links may lead only inside the folder or into the hub cache around it.
    """
    if not PLAIN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of a file in {folder}: expected letters, digits, dots and dashes"
        )
    real = resolve_inside(folder / name, folder)
    if not stat.S_ISREG(real.stat().st_mode):
        raise ValueError(f"{folder / name} is not a file: expected one with data")
    return real


def resolve_inside(path: Path, folder: Path) -> Path:
    """Return a path with all links followed; ValueError if it leads out of the folder, or to nothing.

    If the folder is a snapshot in the hub's cache, its files are links to the cache's `blobs`, which is allowed.
    """
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    allowed = [root]
    for parent in root.parents:
        # the cache: models--OWNER--NAME/snapshots/COMMIT/FILE links to models--OWNER--NAME/blobs/HASH
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            allowed.append(parent.parent / "blobs")
    if not any(real.is_relative_to(parent) for parent in allowed):
        raise ValueError(
            f"{path} is a link to {real}, outside of the folder: copy the file there if it is meant"
        )
    return real


def check_links(folder: Path) -> None:
    """Raise ValueError if an entry of a folder is a link that leads outside; nothing is done without such a folder.

    A checkpoint of unknown origin could else make us read or publish other files of the machine.
    """
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_symlink():
                resolve_inside(path, folder)


def has(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name, of any kind, even a link to nothing.

    Config and weights of a checkpoint are looked for by it.
    """
    return (folder / name).exists() or (folder / name).is_symlink()


def check_not_hollow(path: Path, display_path: Path) -> None:
    """Raise ValueError for a sparse file: a long file without data on the disk would fill memory with zeros.

    Args:
        path: The file, with links followed.
        display_path: Its name for messages, before links are followed.
    """
    status = path.stat()
    size = status.st_size
    # st_blocks counts 512 bytes each; systems without it are trusted. File systems that compress may need only an
    # eighth of the size, and 4,096 bytes may be stored without a block.
    if getattr(status, "st_blocks", size) * 512 * 8 < size - 4096:
        raise ValueError(
            f"{display_path} says to have {size:,} bytes, and almost none are on the disk: copy it again"
        )


# -- texts ------------------------------------------------------------------------------------------------------------


def read_bounded(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a file in a folder; ValueError if there are more than `max_bytes`.

    The limit keeps a file of unknown origin from filling the memory.
    """
    path = plain_file(folder, name)
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(
            f"{folder / name} has {size:,} bytes, expected at most {max_bytes:,}: none is that long"
        )
    return read_start(path, size)


def read_start(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file, fewer if it is shorter; ValueError if it cannot be read.

    A safetensors file begins with its header, so that no tensor need be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_text(folder: Path, name: str, max_bytes: int) -> str:
    """Return the text of a file in a folder; ValueError if it is longer than `max_bytes` or no UTF-8.

    The limit keeps a file of unknown origin from filling the memory.
    """
    try:
        return read_bounded(folder, name, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / name} is no text: {error}; copy it again") from None


def read_json(folder: Path, name: str, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON mapping in a file of a folder; ValueError for NaN, infinities, duplicate keys and other JSON."""
    return parse_json(read_bounded(folder, name, max_bytes), str(folder / name))


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """Return the mapping that JSON bytes hold; ValueError for NaN, infinities, duplicate keys and other JSON.

    Args:
        text: The bytes.
        source: Where they come from, for messages.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_constant=_refuse,
            parse_float=_parse_float,
            object_pairs_hook=_build_mapping,
        )
    except (ValueError, RecursionError) as error:  # a decoding error is a ValueError
        raise ValueError(f"{source} is not JSON: {_shorten(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds {type(value).__name__}, expected a mapping")
    return value


def _refuse(constant: str) -> Any:
    """Raise ValueError for a constant such as NaN, which JSON does not have and Python's parser would accept."""
    raise ValueError(f"{constant} is not a number")


def _parse_float(text: str) -> float:
    """Return a number of a JSON text as a float; ValueError if it is too large for one.

    JSON's parser calls it for each number with a fraction or an exponent.
    """
    value = float(text)
    # Python reads 1e999 as infinity
    return value if math.isfinite(value) else _refuse(text)


def _build_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a mapping.

    ValueError for a key that occurs twice, as readers disagree which value counts.
    """
    mapping = dict[str, Any]()
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"the key {name!r} stands twice")
        mapping[name] = value
    return mapping


def _shorten(error: object) -> str:
    """Return the first line of an error, which may quote a file of unknown origin, without control characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(letter if letter.isprintable() else "?" for letter in lines[0][:200])


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes, by its shape and dtype."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FolderTensors:
    """All tensors of a folder by name, read on demand."""

    stored: dict[str, TensorEntry] = field(default_factory=dict)
    # the tensors of .bin and .pt files, memory-mapped
    pickled: dict[Path, dict[str, Tensor]] = field(default_factory=dict)
    # by their names in the folder, before links are followed
    files: list[Path] = field(default_factory=list)

    def load(self, name: str) -> Tensor:
        """Return the values of one tensor by its name in the file, on the CPU.

        It is read from the disk now.
        """
        path = self.stored[name].file
        if path in self.pickled:
            return self.pickled[path][name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)


def read_tensors(folder: Path, max_bytes: int | None = TENSOR_BYTES) -> FolderTensors:
    """Return the tensors of a folder's weight files by their headers, checked against file sizes; none is read yet.

    Args:
        folder: The folder.
        max_bytes: A limit on the size of all tensors together; None for none, as for a target.
    """
    tensors = FolderTensors()
    weight_map = _read_weight_map(folder)
    for name in sorted(set(weight_map.values())):
        _add_file(tensors, folder, name)
    # without an index the map is {"": FILE}: there is nothing to compare the file with
    if "" not in weight_map:
        differing = sorted(weight_map.keys() ^ tensors.stored.keys())
        if differing:
            some = ", ".join(map(repr, differing[:4]))
            raise ValueError(
                f"{folder}: index and files differ in {some:.300}: copy them all again"
            )
    total = sum(entry.bytes for entry in tensors.stored.values())
    if max_bytes is not None and total > max_bytes:
        raise ValueError(
            f"the tensors in {folder} take {total:,} bytes, expected at most {max_bytes:,}: this is no draft head"
        )
    return tensors


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return which file holds each tensor: its name -> a file's name, by the index.

    Without an index it is {"": FILE}, where FILE holds all tensors. ValueError if the folder has no weights.
    """
    for name in WEIGHT_FILES:
        if has(folder, name):
            return {"": name}
        if has(folder, f"{name}.index.json"):
            files = read_json(folder, f"{name}.index.json", INDEX_BYTES).get("weight_map")
            if not isinstance(files, dict) or not all(
                isinstance(file, str) for file in files.values()
            ):
                raise ValueError(
                    f"{folder / name}.index.json: weight_map must map each tensor to a file"
                )
            return files
        # a single safetensors file of any name is preferred to the pickles that follow
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        if name == "model.safetensors" and len(others) == 1:
            return {"": others[0]}
    raise ValueError(
        f"no weights in {folder}: expected model.safetensors or pytorch_model.bin, whole or with an index, or "
        "medusa_lm_head.pt or hydra_lm_head.pt"
    )


def _add_file(tensors: FolderTensors, folder: Path, name: str) -> None:
    """Add the entries of one weight file to `tensors`, after checks of the file and of the tensors' names.

    Args:
        tensors: The tensors of the folder's earlier files; it is changed.
        folder: The folder.
        name: The file's name in it.
    """
    path = plain_file(folder, name)
    display_path = folder / name
    check_not_hollow(path, display_path)
    if name.endswith(".safetensors"):
        entries = read_header(path, display_path)
    elif name.endswith((".bin", ".pt")):
        mapped = _map_pickle(path, display_path)
        tensors.pickled[path] = mapped
        entries = {
            key: TensorEntry(tensor.dtype, tuple(tensor.shape), path)
            for key, tensor in mapped.items()
        }
    else:
        raise ValueError(f"{display_path}: expected weights in .safetensors, .bin or .pt")
    # names are printed on a terminal: refuse control characters
    for key in entries:
        if not key.isprintable() or len(key) > 200:
            raise ValueError(f"{display_path} holds a tensor called {key!r:.200}: this is no name")
    duplicates = sorted(entries.keys() & tensors.stored.keys())
    if duplicates:
        raise ValueError(f"{display_path} holds {duplicates[0]}, which another file holds too")
    tensors.stored.update(entries)
    tensors.files.append(display_path)


def read_header(path: Path, display_path: Path) -> dict[str, TensorEntry]:
    """Return the tensors in the header of a safetensors file; ValueError unless they cover the file exactly.

    No tensor is read.

    Args:
        path: The file, with links followed.
        display_path: Its name for messages, before links are followed.
    """
    # the file: 8 bytes with the header's length, the header in JSON, the tensors
    size = path.stat().st_size
    length = int.from_bytes(read_start(path, 8), "little")
    if size < 8 or length > size - 8 or length > HEADER_BYTES:
        raise ValueError(
            f"{display_path} has {size:,} bytes and a header of {length:,}: it is cut short, or no safetensors file"
        )
    header = parse_json(read_start(path, 8 + length)[8:], f"the header of {display_path}")
    # the only key that is no tensor
    header.pop("__metadata__", None)
    entries = {}
    spans = []  # (start, stop) of each tensor in bytes, counted from the end of the header
    for name, values in header.items():
        dtype, shape, start, stop = _parse_entry(values, f"{display_path}: {name!r:.100}")
        entry = TensorEntry(dtype, shape, path)
        if stop - start != entry.bytes:
            needed = f"needs {entry.bytes:,} bytes, it has {stop - start:,}"
            raise ValueError(
                f"{display_path}: {name!r:.100} of shape {list(shape)} in {dtype} {needed}"
            )
        entries[name] = entry
        spans.append((start, stop))
    # spans that overlap would let a small file claim any number of tensors
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(
                f"{display_path}: its tensors overlap or leave gaps at byte {min(start, end):,}"
            )
        end = stop
    if end != size - 8 - length:
        raise ValueError(
            f"{display_path}: its tensors take {end:,} bytes and the file has {size - 8 - length:,} for them"
        )
    return entries


def _parse_entry(entry: Any, where: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Read the entry of one tensor in a safetensors header; ValueError if it is not as the format has it.

    Args:
        entry: The tensor's value in the header, any JSON.
        where: The file and the tensor, for messages.

    Returns:
        Its dtype and its shape, and the bytes after the header at which it starts and stops.
    """
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        start, stop = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{where} does not say dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has dtype {dtype!r:.50}, expected one of {', '.join(DTYPES)}")
    # generous limits on dimensions, sizes and bytes keep absurd numbers out of all that follows
    if not isinstance(shape, list) or len(shape) > 8 or not _are_counts(shape, 2**40):
        raise ValueError(f"{where} has shape {shape!r:.100}, expected up to 8 sizes")
    if not _are_counts([start, stop], 2**50):
        raise ValueError(
            f"{where} has offsets {start!r:.30}, {stop!r:.30}, expected two places in the file"
        )
    return DTYPES[dtype], tuple(shape), start, stop


def _are_counts(values: list[Any], end: int) -> bool:
    """Return whether all values of unknown origin are whole numbers from 0 to below `end`.

    Sizes and offsets in a file's header must be such numbers.
    """
    # `type` and not isinstance, since true is an int too
    return all(type(value) is int and 0 <= value < end for value in values)


def _map_pickle(path: Path, display_path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .bin or .pt file, memory-mapped, without running code of its pickle.

    ValueError if it holds anything but names and plain tensors that lie whole in the file.

    Args:
        path: The file, with links followed.
        display_path: Its name for messages, before links are followed.
    """
    size = path.stat().st_size
    _check_uncompressed(path, display_path, size)
    try:
        # first on the meta device, which takes no memory, to check the sizes that the pickle claims
        for name, tensor in _claimed_tensors(path):
            if (
                not isinstance(tensor, Tensor)
                or tensor.layout is not torch.strided
                or tensor.is_quantized
            ):
                raise ValueError(
                    f"{name[:100]} is {type(tensor).__name__}, expected a plain tensor"
                )
            if not tensor.is_contiguous() or tensor.numel() * tensor.dtype.itemsize > size:
                raise ValueError(
                    f"{name[:100]} of shape {list(tensor.shape)} does not lie whole in {size:,} bytes"
                )
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # errors of many kinds: code in the pickle, a torn file, sizes that do not fit into memory
    except Exception as error:
        raise ValueError(
            f"{display_path} cannot be read as weights alone (torch.load, weights_only=True): {_shorten(error)}; "
            "expected names and plain tensors: save it again, or as safetensors"
        ) from None
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _claimed_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and values as a pickle claims them; tensors are on the meta device, with sizes and no data.

    ValueError if the pickle is no mapping with names.
    """
    claimed = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(claimed, dict) or not all(isinstance(name, str) for name in claimed):
        raise ValueError(
            f"it holds {type(claimed).__name__}, expected a mapping of names to tensors"
        )
    yield from claimed.items()


def _check_uncompressed(path: Path, display_path: Path, size: int) -> None:
    """Raise ValueError for a compressed archive before it is read: a small one may hold any number of zeros.

    Args:
        path: A .bin or .pt file, which torch.save writes as an uncompressed zip archive.
        display_path: Its name for messages, before links are followed.
        size: The file's size in bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{display_path} is not what torch.save has written since 1.6: {_shorten(error)}. Save it again, or as "
            "safetensors"
        ) from None
    is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if is_compressed or sum(member.file_size for member in members) > size:
        raise ValueError(
            f"{display_path} holds compressed parts, expected what torch.save writes: save it again"
        )
