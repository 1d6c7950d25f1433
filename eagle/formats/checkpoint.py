"""A head on disk and on the hub: config.json, model.safetensors, and where they came from."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from eagle.core.arguments import nearest
from eagle.core.drafter import Budget, Drafter, TrainableDrafter
from eagle.device import in_dtype
from eagle.disk import write_tensors, write_text
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.several import FirstOf
from eagle.formats.card import model_card
from eagle.target.target import Target

ON_HUB = ("config.json", "model.safetensors", "recipe.yaml", "provenance.json", "README.md")


def save_pretrained(head: TrainableDrafter, folder: str | Path) -> None:
    """Write what a head is and its weights into a folder."""
    folder = Path(folder)
    config = {"settings": head.settings.model_dump(mode="json"), "shape": head.shape.to_dict()}
    write_text(folder / "config.json", json.dumps(config, indent=2))
    write_tensors(folder / "model.safetensors", head.state_dict())


def save_head(folder: str | Path, head: TrainableDrafter, recipe: str, provenance: dict[str, Any]) -> None:
    """Write a head and what made it aside, then put it in place whole."""
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    save_pretrained(head, aside)
    (aside / "recipe.yaml").write_text(recipe)
    (aside / "provenance.json").write_text(json.dumps(provenance, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def load_head(folder: str | Path) -> TrainableDrafter:
    """A trained head; ValueError with the file for a torn one, or a tensor too many, too few or of another size."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"no head at {folder}: expected the folder that training leaves in train.out, head or last")
    config = _read_config(folder)
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("shape"), dict):
        raise ValueError(
            f"the config.json in {folder} is none of this project's: expected the keys settings and shape; "
            f"`python -m eagle import {folder} OUT` makes a head of one that another tool or an export wrote"
        )
    head = _build(config, str(folder / "config.json"))
    weights, shapes = _read_weights(folder / "model.safetensors"), head.state_dict()
    missing, unknown = shapes.keys() - weights.keys(), weights.keys() - shapes.keys()
    if missing or unknown:
        raise ValueError(f"{folder} is not this head: missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name].shape:
            raise ValueError(
                f"{folder} is not this head: {name} is {list(tensor.shape)}, expected {list(shapes[name].shape)} by "
                "its config.json: copy both files again"
            )
    head.load_state_dict(weights)
    head.budget = _budget_of(config.get("budget"), str(folder / "config.json"))
    return head


def _read_config(folder: Path) -> dict[str, Any]:
    """The mapping in a folder's config.json, or ValueError with its name."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # text that is none, and JSON that is none, are ValueErrors
        raise ValueError(f"{path} cannot be read: {error}; is it cut short? Copy it again") from None
    return config if isinstance(config, dict) else {}


def _build(config: dict[str, Any], source: str) -> TrainableDrafter:
    """A head of these settings and sizes, with fresh weights."""
    try:
        settings = settings_of(config["settings"], source)
    except ValueError as error:
        raise ValueError(f"{error}; was the head made by a newer release? This one is {version('eagle')}") from None
    try:
        head: TrainableDrafter = DRAFTERS[settings.kind](settings, AutoConfig.for_model(**config["shape"]))
    except Exception as error:  # of many kinds: transformers and torch judge the sizes
        raise ValueError(f"{source}: no head of these sizes can be made: {error!r:.300}") from None
    return head


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or ValueError with its name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; is it cut short? Copy it again") from None


def _budget_of(values: dict[str, Any] | None, source: str) -> Budget | None:
    """How much the head drafts where its user does not say, or None if it was never tuned."""
    if values is None:
        return None
    try:
        paths = values["paths"] and tuple(map(tuple, values["paths"]))
        return Budget(**{**values, "paths": paths})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: budget cannot be read: {error!r}; tune it again, or take the key out") from None


def write_budget(folder: str | Path, budget: Budget) -> None:
    """Put into a head's folder what `load_head` hands out as its `budget`."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text()) | {"budget": asdict(budget)}
    write_text(file, json.dumps(config, indent=2))


def from_pretrained(path: str | Path, revision: str | None = None) -> TrainableDrafter:
    """A trained head from its folder, or from a hub's repository by its id."""
    folder = Path(path)
    if not folder.is_dir():
        folder = _from_hub(str(path), revision)
    if absent := [name for name in ON_HUB[:2] if not (folder / name).is_file()]:
        raise ValueError(f"no head in {path}: {', '.join(absent)} missing; expected a folder that save_head wrote")
    return load_head(folder)


def _from_hub(name: str, revision: str | None) -> Path:
    """The files of a head that a hub holds, in its cache; weights in other formats stay there."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(ON_HUB)))
    except Exception as error:  # of many kinds: not an id, no such repository, no network
        raise ValueError(f"no head at {name}: expected a folder, or a hub id as owner/name: {error}") from error


def push_to_hub(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a head that `save_head` wrote, with a model card; returns its address."""
    folder = Path(folder)
    from_pretrained(folder)  # what does not load is not published
    if not (folder / "README.md").exists():  # a card that someone has edited stays
        write_text(folder / "README.md", model_card(folder, repo_id))
    api = HfApi()
    address = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=list(ON_HUB))
    return str(address)


def _reader(folder: Path) -> Any:
    """The method that reads a folder which is none of a head: of its kind, or any causal language model."""
    config = _read_config(folder) if (folder / "config.json").is_file() else {}
    kind = config.get("kind", "draft_model" if "model_type" in config else None)
    if "settings" in config or kind is None:
        return None
    if not hasattr(DRAFTERS.get(kind), "load"):
        known = [name for name, method in DRAFTERS.items() if hasattr(method, "load")]
        raise ValueError(f"{folder / 'config.json'}: kind is {kind!r}, expected one of {', '.join(known)}")
    return DRAFTERS[kind]


def load_drafter(
    name: str | Path | Sequence[str | Path], target: Target, revision: str | None = None, **options: Any
) -> Drafter:
    """A drafter that is ready to draft for a target.

    It comes from a folder or the hub (a trained head, a table of counts, a language model), or from the name of a
    method that needs neither, to which the options go. Several, in a list or with commas between them, are asked in
    turn, until one of them has a draft; an option goes to each of them that has it.
    """
    if not isinstance(target, Target):
        raise ValueError(f"the target is a {type(target).__name__}, expected a Target: load_drafter(name, target)")
    names = _names_of(name)
    takes = {one: _options_of(one) for one in names}
    for option in options:
        if not any(option in known for known in takes.values()):
            known = sorted({known for one in names for known in takes[one]})
            raise ValueError(
                f"{', '.join(names)} has no option {option}{nearest(option, known)}: expected one of "
                f"{', '.join(known) or 'none: options belong to ' + ', '.join(FREE)}"
            )
    drafters = [
        _load_one(one, target, revision, {key: value for key, value in options.items() if key in takes[one]})
        for one in names
    ]
    return drafters[0] if len(drafters) == 1 else FirstOf(drafters)


FREE = {
    kind: method
    for kind, method in DRAFTERS.items()
    if not issubclass(method, TrainableDrafter) and not hasattr(method, "load")
}


def _names_of(name: Any) -> list[str]:
    """The names in a string with commas or in a list; a path is one name."""
    several = name.split(",") if isinstance(name, str) else [name] if isinstance(name, Path) else name
    if not isinstance(several, (list, tuple)) or not all(isinstance(one, (str, Path)) for one in several):
        raise ValueError(f"got {type(name).__name__} for a drafter's name, expected a string, a path or a list of them")
    names = [str(one).strip() for one in several]
    if not names or not all(names):
        raise ValueError(f"got {name!r} for a drafter, expected a folder, a hub id or one of {', '.join(FREE)}")
    return names


def _options_of(name: str) -> list[str]:
    """What a method that needs no files may be told."""
    return [*inspect.signature(FREE[name]).parameters] if name in FREE else []


def _load_one(name: str, target: Target, revision: str | None, options: dict[str, Any]) -> Drafter:
    """One drafter by its name, folder or hub id."""
    if name in FREE:
        return FREE[name](**options)
    folder = Path(name)
    if not folder.is_dir() and name.count("/") != 1:
        raise ValueError(
            f"no drafter {folder}{nearest(name, FREE)}: expected a folder with a trained head, counted tables or a "
            f"language model, or one of {', '.join(FREE)}"
        )
    if (method := _reader(folder)) is not None:
        return method.load(folder, target)
    head = in_dtype(from_pretrained(folder, revision).to(target.device), target.model.dtype)
    if head.taps and head.shape.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{folder} was made for a target {head.shape.hidden_size} wide, this one is "
            f"{target.config.hidden_size}: load the target that its recipe.yaml names"
        )
    if head.taps and head.shape.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"{folder} was made for a target of {head.shape.vocab_size} tokens, this one has "
            f"{target.config.vocab_size}: load the target that its recipe.yaml names"
        )
    return head.bind(target.head)
