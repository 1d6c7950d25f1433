"""Record what is written: saved heads, exports for every engine, imports of them, and feature stores, as hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.golden import access
from tests.golden.digests import digest, digest_tensors

# of the target that heads are written for: deep enough for the taps that engines read
LAYERS = 8
# keys that name a library
VERSIONS = {"transformers_version"}
STORES = {
    "eagle1": ["drafter={kind: eagle1}", "features.dtype=float32"],
    "eagle1, bfloat16": ["drafter={kind: eagle1}", "features.dtype=bfloat16"],
    "eagle1, float8": ["drafter={kind: eagle1}", "features.dtype=float8"],
    "eagle1, float6": ["drafter={kind: eagle1}", "features.dtype=float6"],
    "eagle3": [
        "drafter={kind: eagle3, taps: [0, 2, -1]}",
        "features.dtype=float32",
        "data.turns=last",
    ],
    "dflash": ["drafter={kind: dflash}", "features.dtype=float32", "features.shard_bytes=100000"],
}


def file_items(folder: Path) -> dict[str, Any]:
    """Return an item for each file of each kind."""
    return {
        **saved_heads(folder / "saved"),
        **exports(folder / "exports"),
        **imports(folder / "imports"),
        **stores(folder / "stores"),
    }


def saved_heads(folder: Path) -> dict[str, Any]:
    """Return hashes of every head as it is saved, and whether it comes back as it was."""
    target = access.make_target(num_hidden_layers=LAYERS)
    items: dict[str, Any] = {}
    for name in access.HEADS:
        head = access.exact_head(name, target)
        access.save_head(folder / name, head, "recipe", {"step": 1})
        back = access.load_head(folder / name).state_dict()
        same = digest_tensors(back) == digest_tensors(head.state_dict())
        items[f"saved {name}"] = {**describe_folder(folder / name), "comes back": same}
    return items


def exports(folder: Path) -> dict[str, Any]:
    """Return hashes of every head in every engine's layout that is not refused, and of what is read of it again."""
    target = access.make_target(num_hidden_layers=LAYERS)
    items: dict[str, Any] = {}
    for name in access.HEADS:
        items |= exports_of(name, target, folder)
    return items


def exports_of(name: str, target: Any, folder: Path) -> dict[str, Any]:
    """Return the items of one head."""
    head = access.exact_head(name, target)
    items: dict[str, Any] = {}
    for engine in access.engines():
        out = folder / name / engine
        # an exporter that begins to refuse, or to write, changes the names of the items
        if not access.export_head(head, target, engine, out):
            continue
        items[f"{name} for {engine}"] = describe_folder(out)
        back = access.import_head(out)
        if back is not None:
            items[f"{name} read from {engine}"] = digest_tensors(back.state_dict())
    return items


def imports(folder: Path) -> dict[str, Any]:
    """Return hashes of what is read of heads that other tools wrote: settings, sizes and tensors."""
    items: dict[str, Any] = {}
    for name in access.FOREIGN:
        access.write_foreign(name, folder / name)
        head = access.import_head(folder / name)
        if head is not None:
            settings = digest(head.settings.model_dump(mode="json"))
            shape = digest(without_library(head.shape.to_dict()))
            items[f"import of {name}"] = f"{settings} {shape} {digest_tensors(head.state_dict())}"
    return items


def describe_folder(folder: Path) -> dict[str, str]:
    """Return the names of a folder's files, with hashes of its configs and of its tensors."""
    described = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            described[name] = digest(without_library(json.loads(path.read_text())))
        elif path.suffix == ".safetensors":
            described[name] = digest_tensors(load_file(path))
        elif path.suffix in (".bin", ".pt", ".pth"):
            described[name] = digest_tensors(torch.load(path))
        elif path.is_file():
            # words may change: recipes and notes are compared by being there
            described[name] = "a text"
    return described


def without_library(config: Any) -> Any:
    """Return a config without what another version of transformers would write otherwise."""
    if not isinstance(config, Mapping):
        return config
    usual = access.config_of_library()
    kept = {}
    for key, value in config.items():
        # what says nothing today may be left out, or be joined by more of its kind, tomorrow
        if key not in VERSIONS and (key not in usual or usual[key] != value):
            kept[key] = without_library(value)
    return kept


def stores(folder: Path) -> dict[str, Any]:
    """Return hashes of the tokens, masks and features in the stores of some recipes."""
    access.write_target(folder)
    items: dict[str, Any] = {}
    for name, overrides in STORES.items():
        store = folder / name
        access.extract_command(
            access.recipe_arguments(folder, f"features.store={store}", *overrides)
        )
        items[f"store of {name}"] = {
            part: digest_tensors(tensors) for part, tensors in access.read_store(store).items()
        }
    return items
