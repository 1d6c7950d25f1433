"""The identity of a set of features: fingerprints of every file and setting that decides them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path, snapshot_download
from huggingface_hub.errors import HFValidationError

from eagle.data.stored_rows import TapRoles
from eagle.disk import sha256
from eagle.log import progress
from eagle.recipe import Recipe, TargetSection
from eagle.recipe.mixes import files_of
from eagle.target.gguf import gguf_checksum, is_gguf, model_folder

WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
LONG = 5_000_000_000  # bytes, from which on a progress bar is shown
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TEMPLATE = ("chat_template*", "tokenizer_config.json")
# keys of `data` that decide no token, or by files
NOT_IDENTITY = {
    "train",
    "heldout",
    "template",
    "allow_broken",
    "cache",
    "num_proc",
    "drop_duplicates",
    "images",
}
FINGERPRINTS = {  # fields of an identity that are fingerprints, and of which files
    "target.weights": "the target's weights (*.safetensors or *.bin, or its GGUF file)",
    "target.config": "the target's config.json",
    "target.adapter": "the adapter's weights and adapter_config.json",
    "tokenizer": "the target's tokenizer (tokenizer*, vocab*, merges.txt, *.model and the like)",
    "template": "the chat template (data.template, or the target's chat_template* and tokenizer_config.json)",
    "data.source": "the files of data.train, or of the mix that it names",
    "data.images.files": "the names and sizes of the images in data.images",
    "data.images.processor": "the target's preprocessor_config.json and processor_config.json",
}
# version of the rules by which answers are masked; features of other versions are refused
MASK_RULES = 3


def identity(recipe: Recipe, roles: TapRoles) -> dict[str, Any]:
    """Return all settings and fingerprints that decide the features of a recipe."""
    return {
        "target": target_identity(recipe.target),
        **data_identity(recipe),
        "masks": {"rules": MASK_RULES, "stop_ids": stop_ids(recipe.target)},
        **tap_identity(roles),
        "dtype": recipe.features.dtype,
    }


def tap_identity(roles: TapRoles) -> dict[str, Any]:
    """Return the taps, and those of them that are kept at every slot that heads read."""
    return {"taps": list(roles.taps), "inputs": list(roles.inputs)}


def target_identity(section: TargetSection) -> dict[str, Any]:
    """Return the target's weights, config, precision, quantisation and adapter."""
    folder = folder_of(section.path, section.revision, (*WEIGHTS, "config.json"))
    # a folder may hold the same weights in both formats
    weights = sorted(folder.glob(WEIGHTS[0])) or sorted(folder.glob(WEIGHTS[1]))
    config = json.loads((folder / "config.json").read_text())
    adapter = None
    if section.adapter:
        adapter = fingerprint(_matching(section.adapter, None, (*WEIGHTS, "adapter_config.json")))
    # the float weights of a GGUF target are made from its file
    checksum = gguf_checksum(folder)
    return {
        "weights": checksum[:16] if checksum else fingerprint(weights),
        "config": fingerprint([folder / "config.json"]),
        "dtype": section.dtype,
        "quantization": config.get("quantization_config"),
        "adapter": adapter,
    }


def in_precision(fields: dict[str, Any], dtype: object) -> dict[str, Any]:
    """Return the identity with the target dtype "auto" replaced by `dtype`."""
    target = fields.get("target", {})
    if target.get("dtype") != "auto":
        return fields
    return {**fields, "target": {**target, "dtype": str(dtype).removeprefix("torch.")}}


def data_identity(recipe: Recipe) -> dict[str, Any]:
    """Return the conversations, tokenizer and chat template."""
    data = recipe.data
    target = recipe.target
    # a dataset of the hub is known by its name and revision
    source: Any = fingerprint(files_of(data.train)) if Path(data.train).exists() else data.train
    conversations = {"source": source, **data.model_dump(mode="json", exclude=NOT_IDENTITY)}
    if data.drop_duplicates:
        # older stores do not name it
        conversations["drop_duplicates"] = True
    if data.images is not None:
        conversations["images"] = images_identity(recipe)
    target_template = _matching(target.path, target.revision, TEMPLATE)
    return {
        "tokenizer": fingerprint(_matching(target.path, target.revision, TOKENIZER)),
        "template": fingerprint([Path(data.template)] if data.template else target_template),
        "data": conversations,
    }


def images_identity(recipe: Recipe) -> dict[str, str]:
    """Return fingerprints of the images' names and sizes, and of the processor; bytes are checked as they are read."""
    assert recipe.data.images is not None
    folder = Path(recipe.data.images)
    files = sorted(
        file for file in folder.rglob("*") if file.suffix.lower() in IMAGES and file.is_file()
    )
    lines = [f"{file.relative_to(folder)} {file.stat().st_size}" for file in files]
    return {
        "files": _digest(lines),
        "processor": fingerprint(_matching(recipe.target.path, recipe.target.revision, PROCESSOR)),
    }


def stop_ids(section: TargetSection) -> list[int]:
    """Return the EOS tokens of a target's generation config; [] without such a file."""
    for path in _matching(section.path, section.revision, ("generation_config.json",)):
        try:
            eos = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is no generation config: {error}; expected an object of JSON"
            ) from None
        if eos is None:
            return []
        return eos if isinstance(eos, list) else [eos]
    return []


def fingerprint(files: Sequence[Path]) -> str:
    """Return one checksum of the names and bytes of some files."""
    is_long = sum(path.stat().st_size for path in files) > LONG
    lines = []
    for path in progress(files, "fingerprint", len(files), unit="files", show=is_long):
        lines.append(f"{path.name} {_checksum(path)}")
    return _digest(lines)


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def assets_folder(kind: str, name: str) -> Path:
    """Return a folder for what can be made again, where Hugging Face's libraries keep such things."""
    return cached_assets_path("eagle", kind, name)


def _checksum(path: Path) -> str:
    """Return a file's sha256."""
    # large files of the hub's cache are links to files named by it
    name = path.resolve().name
    if path.is_symlink() and len(name) == 64:
        return name
    state = path.stat()
    return _read_once(path, state.st_size, state.st_mtime_ns)


@lru_cache(1024)
def _read_once(path: Path, size: int, changed: int) -> str:
    """Return the checksum of a file in this state, which the features of a command and its tokens both ask for."""
    return sha256(path)


def _matching(path: str, revision: str | None, patterns: tuple[str, ...]) -> list[Path]:
    folder = folder_of(path, revision, patterns)
    files: set[Path] = set()
    for pattern in patterns:
        files.update(file for file in folder.glob(pattern) if file.is_file())
    return sorted(files)


def folder_of(path: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return the local folder of a model, downloading the files that match if it is a hub id.

    A GGUF file is unpacked whole.
    """
    if is_gguf(path):
        return Path(model_folder(path, revision))
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError:
        raise ValueError(
            f"no model at {path}: expected a folder that is there, or a hub id as owner/name"
        ) from None


def target_name(recipe: Recipe) -> dict[str, Any]:
    """Return the path, revision and adapter of a target, for comparisons without its files."""
    return recipe.target.model_dump(include={"path", "revision", "adapter"})


def differences(got: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, got, expected) of every leaf in which two nested dicts differ."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            yield from differences(
                got.get(key), expected.get(key), f"{name}.{key}" if name else key
            )
    elif got != expected:
        yield name, got, expected


def describe_difference(name: str, got: Any, needed: Any) -> str:
    """Return one difference between a store and a run, with the files that its fingerprint is of."""
    line = f"the store has {got!r}, this run needs {needed!r}"
    if name in FINGERPRINTS:
        line += f" as the fingerprint of {FINGERPRINTS[name]}"
    return line
