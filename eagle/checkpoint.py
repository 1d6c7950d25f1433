"""A head on disk: config.json, model.safetensors, and where they came from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle.drafter import Drafter, TrainableDrafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.target import Target


def save_head(folder: str | Path, head: TrainableDrafter, recipe: str, provenance: dict[str, Any]) -> None:
    """Write a head aside, then put it in place whole."""
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    config = {"settings": head.settings.model_dump(mode="json"), "shape": head.shape.to_dict()}
    (aside / "config.json").write_text(json.dumps(config, indent=2))
    (aside / "recipe.yaml").write_text(recipe)
    (aside / "provenance.json").write_text(json.dumps(provenance, indent=2))
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in head.state_dict().items()}, aside / "model.safetensors"
    )
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def load_head(folder: str | Path) -> TrainableDrafter:
    """A trained head; a tensor too many or too few is refused."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    settings = settings_of(config["settings"], str(folder / "config.json"))
    head = DRAFTERS[settings.kind](settings, LlamaConfig(**config["shape"]))
    weights = load_file(folder / "model.safetensors")
    missing, unknown = head.state_dict().keys() - weights.keys(), weights.keys() - head.state_dict().keys()
    if missing or unknown:
        raise ValueError(f"{folder} is not this head: missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    head.load_state_dict(weights)
    return head


def load_drafter(name_or_folder: str | Path, target: Target) -> Drafter:
    """A trained head from its folder, or a method without weights by its name, ready to draft for a target."""
    method = DRAFTERS.get(str(name_or_folder))
    if method is not None and not issubclass(method, TrainableDrafter):
        return method()
    if not (Path(name_or_folder) / "config.json").is_file():
        names = [name for name, known in DRAFTERS.items() if not issubclass(known, TrainableDrafter)]
        raise ValueError(f"no drafter {name_or_folder}: expected a folder with a trained head, or one of {names}")
    head = load_head(name_or_folder).to(target.device, target.model.dtype)
    if head.shape.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{name_or_folder} was made for a target {head.shape.hidden_size} wide, this one is "
            f"{target.config.hidden_size}: load the target that its recipe.yaml names"
        )
    return head.bind(target.head)  # type: ignore[return-value]
