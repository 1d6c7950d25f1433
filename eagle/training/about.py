"""What a run is known by: the settings that decide its head, and the provenance beside every head that it saves."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from eagle import __version__
from eagle.drafters import DRAFTERS
from eagle.drafters.outside import describe_code
from eagle.recipe import Recipe

# training settings that may change between a run and its continuation
FREE = {"out", "stem", "wandb", "keep", "choose", "patience", "checkpoint_every", "validate_every", "decode"}
FREE |= {"processes", "shard_head", "compile", "log_with", "project"}


def decisive_settings(train: dict[str, Any]) -> dict[str, Any]:
    """The training settings that decide what a head becomes."""
    unused = FREE if train["schedule"] == "wsd" else FREE | {"decay_share"}
    unused = unused if train["on_policy"] else unused | {"on_policy"}
    return {key: value for key, value in train.items() if key not in unused}


def run_identity(recipe: Recipe, features: dict[str, Any], processes: int) -> dict[str, Any]:
    """The identity of a run, which a continuation must share."""
    values = recipe.model_dump(mode="json")
    settings = decisive_settings(values["train"])
    method = DRAFTERS.find(recipe.drafter.kind)
    code = describe_code(method) if method is not None else None
    identity = {"processes": processes, "features": features, "drafter": values["drafter"], "train": settings}
    return identity if code is None else {**identity, "code": code}


def describe_run(commit: str, features: dict[str, Any], **run: Any) -> dict[str, Any]:
    """The provenance of a head: code, versions, what the run has done, and the identity of its features."""
    versions = {"eagle": __version__} | {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return {"commit": commit, **versions, **run, **features}
