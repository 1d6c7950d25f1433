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
LONG = 5_000_000_000  # bytes: more than this takes long to read, so that a progress bar is shown
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TEMPLATE = ("chat_template*", "tokenizer_config.json")
# keys of `data` that decide no token, or that decide them by files whose fingerprints are taken
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
    """Return all settings and fingerprints that decide the features of a recipe.

    A feature store keeps its identity, and is refused by a run that needs another one. A fingerprint is a checksum of
    files.

    Args:
        recipe: The recipe.
        roles: The taps (layer inputs of the target) that are needed at every token, and those before learned ones
            alone.
    """
    return {
        "target": target_identity(recipe.target),
        **data_identity(recipe),
        "masks": {"rules": MASK_RULES, "stop_ids": stop_ids(recipe.target)},
        **tap_identity(roles),
        "dtype": recipe.features.dtype,
    }


def tap_identity(roles: TapRoles) -> dict[str, Any]:
    """Return the taps (layer inputs of the target), and as `inputs` those of them that are kept at every token.

    The others are kept only before learned tokens.
    """
    return {"taps": list(roles.taps), "inputs": list(roles.inputs)}


def target_identity(section: TargetSection) -> dict[str, Any]:
    """Return what identifies a target: fingerprints of weights, config and adapter, its precision and quantisation."""
    folder = folder_of(section.path, section.revision, (*WEIGHTS, "config.json"))
    # a folder may hold the same weights in both formats, and transformers loads safetensors first
    weights = sorted(folder.glob(WEIGHTS[0])) or sorted(folder.glob(WEIGHTS[1]))
    config = json.loads((folder / "config.json").read_text())
    adapter = None
    if section.adapter:
        adapter = fingerprint(_matching(section.adapter, None, (*WEIGHTS, "adapter_config.json")))
    # the weights of a GGUF target were unpacked from its file, whose checksum says more than theirs
    checksum = gguf_checksum(folder)
    return {
        # as long as a fingerprint
        "weights": checksum[:16] if checksum else fingerprint(weights),
        "config": fingerprint([folder / "config.json"]),
        "dtype": section.dtype,
        "quantization": config.get("quantization_config"),
        "adapter": adapter,
    }


def in_precision(fields: dict[str, Any], dtype: object) -> dict[str, Any]:
    """Return an identity with the target dtype "auto" replaced by the one that the target was loaded in.

    An identity is what decides a set of features, and is compared field by field.

    Args:
        fields: The identity.
        dtype: The dtype of the loaded target, a torch dtype or its name.
    """
    target = fields.get("target", {})
    if target.get("dtype") != "auto":
        return fields
    return {**fields, "target": {**target, "dtype": str(dtype).removeprefix("torch.")}}


def data_identity(recipe: Recipe) -> dict[str, Any]:
    """Return what identifies the tokens of a recipe: its conversations, tokenizer and chat template."""
    data = recipe.data
    target = recipe.target
    # a dataset of the hub is identified by its name and revision, local files by their bytes
    source: Any = data.train
    if Path(data.train).exists():
        source = fingerprint(files_of(data.train))
    conversations = {"source": source, **data.model_dump(mode="json", exclude=NOT_IDENTITY)}
    if data.drop_duplicates:
        # stores of earlier releases do not have this key, so it is left out where it is false
        conversations["drop_duplicates"] = True
    if data.images is not None:
        conversations["images"] = images_identity(recipe)
    # by default the template is the target's own
    target_template = _matching(target.path, target.revision, TEMPLATE)
    return {
        "tokenizer": fingerprint(_matching(target.path, target.revision, TOKENIZER)),
        "template": fingerprint([Path(data.template)] if data.template else target_template),
        "data": conversations,
    }


def images_identity(recipe: Recipe) -> dict[str, str]:
    """Return fingerprints of the names and sizes of the images, and of the target's processor.

    The bytes of an image are checked when it is read, by the checksum that its conversation carries.
    """
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
    """Return the ids of the EOS tokens in a target's generation config; [] without such a file."""
    # one file at most
    for path in _matching(section.path, section.revision, ("generation_config.json",)):
        try:
            eos = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is no generation config: {error}; expected an object of JSON"
            ) from None
        # a config may name no EOS token, one, or a list of them
        if eos is None:
            return []
        return eos if isinstance(eos, list) else [eos]
    return []


def fingerprint(files: Sequence[Path]) -> str:
    """Return one checksum of the names and bytes of some files, by which a store of features knows them again."""
    is_long = sum(path.stat().st_size for path in files) > LONG
    lines = []
    for path in progress(files, "fingerprint", len(files), unit="files", show=is_long):
        lines.append(f"{path.name} {_checksum(path)}")
    return _digest(lines)


def _digest(lines: list[str]) -> str:
    """Return a short checksum of some lines: the first 16 hex digits of their SHA-256."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def assets_folder(kind: str, name: str) -> Path:
    """Return a folder for files that can be made again, in the cache of Hugging Face's libraries.

    Args:
        kind: The folder's parent folder, such as "shards".
        name: The folder's own name.
    """
    return cached_assets_path("eagle", kind, name)


def _checksum(path: Path) -> str:
    """Return a file's SHA-256, in 64 hex digits.

    Large files are not read twice.
    """
    # large files of the hub's cache are links to files that are named by their sha256, which has 64 digits
    name = path.resolve().name
    if path.is_symlink() and len(name) == 64:
        return name
    state = path.stat()
    return _sha256_once(path, state.st_size, state.st_mtime_ns)


@lru_cache(1024)
def _sha256_once(path: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file, read once as long as its size and its time of change are the same.

    `size` and `changed` serve as keys of the cache alone. A command asks for a file twice, for its features and for its
    tokens.
    """
    return sha256(path)


def _matching(path: str, revision: str | None, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of a model that match one of the patterns, in order, each once.

    Args:
        path: A folder, a hub id or a GGUF file, of the model.
        revision: A branch, tag or commit of the hub id; None for its newest.
        patterns: Glob patterns of the model's folder.
    """
    folder = folder_of(path, revision, patterns)
    files: set[Path] = set()
    for pattern in patterns:
        files.update(file for file in folder.glob(pattern) if file.is_file())
    return sorted(files)


def folder_of(path: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return the local folder of a model.

    Args:
        path: A folder, a hub id of which the matching files are downloaded, or a GGUF file, which is unpacked whole.
        revision: A branch, tag or commit of the hub id; None for its newest.
        patterns: The files that are needed.
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
    """Return the path, revision and adapter of a recipe's target, for comparisons where its files are not here."""
    return recipe.target.model_dump(include={"path", "revision", "adapter"})


def differences(got: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, got, expected) of every leaf in which two nested dicts differ; None for a missing one.

    `name` is the prefix of the names, which only the recursion gives.
    """
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            dotted = f"{name}.{key}" if name else key
            yield from differences(got.get(key), expected.get(key), dotted)
    elif got != expected:
        yield name, got, expected


def describe_difference(name: str, got: Any, needed: Any) -> str:
    """Return a phrase on one difference between a store and a run; for a fingerprint it names the files.

    Args:
        name: The dotted name of the difference.
        got: What the store has.
        needed: What the run needs.
    """
    line = f"the store has {got!r}, this run needs {needed!r}"
    if name in FINGERPRINTS:
        line += f" as the fingerprint of {FINGERPRINTS[name]}"
    return line
