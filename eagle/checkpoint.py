"""A head on disk and on the hub: config.json, model.safetensors, and where they came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load_file
from transformers import AutoConfig

from eagle.card import model_card
from eagle.device import in_dtype
from eagle.disk import write_tensors, write_text
from eagle.drafter import Budget, Drafter, TrainableDrafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.several import FirstOf
from eagle.target import Target

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
    """A trained head; a tensor too many or too few is refused."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"no head at {folder}: expected the folder that training leaves in train.out, head or last")
    config = json.loads((folder / "config.json").read_text())
    settings = settings_of(config["settings"], str(folder / "config.json"))
    head: TrainableDrafter = DRAFTERS[settings.kind](settings, AutoConfig.for_model(**config["shape"]))
    weights = load_file(folder / "model.safetensors")
    missing, unknown = head.state_dict().keys() - weights.keys(), weights.keys() - head.state_dict().keys()
    if missing or unknown:
        raise ValueError(f"{folder} is not this head: missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    head.load_state_dict(weights)
    head.budget = _budget_of(config.get("budget"))
    return head


def _budget_of(values: dict[str, Any] | None) -> Budget | None:
    """How much the head drafts where its user does not say, or None if it was never tuned."""
    if values is None:
        return None
    paths = values["paths"] and tuple(map(tuple, values["paths"]))
    return Budget(**{**values, "paths": paths})


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
    if "settings" not in json.loads((folder / "config.json").read_text()):
        raise ValueError(f"the config.json in {path} is none of this project's: expected the keys settings and shape")
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
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
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
    turn, until one of them has a draft.
    """
    several = name.split(",") if isinstance(name, str) else [name] if isinstance(name, Path) else name
    names = [str(one) for one in several]
    if len(names) > 1:
        return FirstOf([load_drafter(one, target, revision) for one in names])
    free = {
        kind: method
        for kind, method in DRAFTERS.items()
        if not issubclass(method, TrainableDrafter) and not hasattr(method, "load")
    }
    if names[0] in free:
        return free[names[0]](**options)
    folder = Path(names[0])
    if options:
        raise ValueError(f"{folder} takes no options, which belong to {', '.join(free)}: got {', '.join(options)}")
    if not folder.is_dir() and names[0].count("/") != 1:
        raise ValueError(
            f"no drafter {folder}: expected a folder with a trained head, counted tables or a language model, or one "
            f"of {', '.join(free)}"
        )
    if (method := _reader(folder)) is not None:
        return method.load(folder, target)
    head = in_dtype(from_pretrained(folder, revision).to(target.device), target.model.dtype)
    if head.taps and head.shape.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{folder} was made for a target {head.shape.hidden_size} wide, this one is "
            f"{target.config.hidden_size}: load the target that its recipe.yaml names"
        )
    return head.bind(target.head)
