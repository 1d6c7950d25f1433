"""Targets in GGUF files: unpacked once into a folder as `save_pretrained` writes it, which all stages read.

A GGUF file holds a model's config, tokenizer, chat template and mostly quantised weights in one file, for llama.cpp.
The folder holds the dequantised weights in float32, which rounds none of them, and lies where Hugging Face's libraries
keep what can be made again (HF_ASSETS_CACHE).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path, hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle.disk import lock_folder, sha256, write_text
from eagle.target.whole import check_weights

SUFFIX = ".gguf"
MAGIC = b"GGUF"
# `owner/name:file.gguf`, the name of a file on a hub
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+:.+")
# a shard of a model that llama.cpp's tools have split, which transformers cannot read
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# the file that is written last into a folder, which shows that it is complete, and names the GGUF file
ORIGIN = "gguf.json"
EXPECTED = "expected a GGUF file of a causal language model that transformers reads"


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file, on disk or on a hub."""
    return str(path).lower().endswith(SUFFIX)


def model_folder(path: str | Path, revision: str | None = None) -> str | Path:
    """Return the folder that a GGUF file is unpacked into, which transformers can load; any other path unchanged.

    A file that has not been unpacked yet is unpacked now.
    """
    if not is_gguf(path):
        return path
    file = find_gguf(str(path), revision)
    # size and time of change tell whether the checksum of an earlier call is still that of the file
    state = file.stat()
    return _open_folder(file, state.st_size, state.st_mtime_ns)


def gguf_checksum(folder: Path) -> str | None:
    """Return the sha256 of the GGUF file that a folder was unpacked from; None for a folder of another origin."""
    origin = folder / ORIGIN
    if not origin.is_file():
        return None
    checksum: str = json.loads(origin.read_text())["sha256"]
    return checksum


def find_gguf(path: str, revision: str | None = None) -> Path:
    """Return the path of a GGUF file on disk; a file on a hub, named `owner/name:file.gguf`, is downloaded.

    Raises:
        ValueError: if there is no such file, or if its first bytes are not those of a GGUF file.
    """
    if SPLIT.search(path):
        raise ValueError(
            f"{path} is one shard of a split GGUF file, expected a whole one: merge the shards with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    file = Path(path)
    if not file.exists() and ON_HUB.fullmatch(path):
        repo, _, name = path.partition(":")
        file = Path(hf_hub_download(repo, name, revision=revision))
    if not file.is_file():
        raise ValueError(
            f"no GGUF file at {path}: expected a file, or owner/name:file.gguf for one of the hub"
        )
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(
            f"{path} is no GGUF file: got the first bytes {start!r}, expected {MAGIC!r}; fetch it again"
        )
    return file


# cached by size and time of change too, so that the checksum of a large file is computed once
@lru_cache(64)
def _open_folder(file: Path, size: int, changed: int) -> Path:
    """Return the folder of an unpacked GGUF file, and unpack the file first if no process has done so.

    Args:
        file: the GGUF file.
        size: its size in bytes.
        changed: the time of its last change in ns.
    """
    checksum = sha256(file)
    folder = cached_assets_path("eagle", "gguf", checksum[:16])
    if (folder / ORIGIN).is_file():
        return folder
    # one process of a launch unpacks; the others wait here, and find the folder complete
    with lock_folder(folder, wait=True):
        if not (folder / ORIGIN).is_file():
            unpack_gguf(file, folder)
            write_text(folder / ORIGIN, json.dumps({"file": file.name, "sha256": checksum}))
    return folder


def unpack_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file's config, tokenizer and dequantised weights into a folder, as `save_pretrained` does.

    Raises:
        ValueError: if the file cannot be read, lacks weights, or its weights do not fit on the disk.
    """
    if find_spec("gguf") is None:
        raise ValueError(f"{file} needs the package gguf to be read: `pip install gguf`")
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    # newer releases of transformers dequantise only if they are asked to
    if hasattr(transformers, "GgufConfig"):
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loader: Any = AutoModelForCausalLM
    with _explaining_errors(file):
        model, report = loader.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **source
        )
    # a weight that transformers does not find under its name would be random
    check_weights(file, model, report)

    needed = sum(weight.nbytes for weight in model.parameters())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{file} takes {needed / 1e9:.1f} GB in float32, and {folder} has {free / 1e9:.1f} GB left: make room, or "
            "set HF_ASSETS_CACHE to a folder on another disk"
        )
    print(f"unpacking {file} once: {needed / 1e9:.1f} GB of float32 weights in {folder}")
    model.save_pretrained(folder)
    with _explaining_errors(file):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)


@contextmanager
def _explaining_errors(file: Path) -> Iterator[None]:
    """A context in which errors of transformers' and gguf's readers become ValueErrors that name the file.

    For a truncated or corrupt file these readers may raise any exception.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{file} cannot be read: {reason:.300}; {EXPECTED}") from error


def hint_files(folder: Path) -> str:
    """Return the end of the error about a folder without config.json: a hint to a GGUF file in it, or ""."""
    files = sorted(name for name in os.listdir(folder) if is_gguf(name))
    if not files:
        return ""
    return f"; for a GGUF target name the file, as {folder / files[0]}"
