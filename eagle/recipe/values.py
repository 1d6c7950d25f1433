"""Plain values of a recipe, from YAML and from overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle.recipe.plain_yaml import parse_yaml
from eagle.web import hide_users


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file; what is no YAML, or no sections, is refused by file and line."""
    values = parse_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        got = "an empty file" if values is None else f"a {type(values).__name__}"
        raise ValueError(f"{path} holds {got}, expected keys and values, as `eagle recipes tiny/eagle1` prints them")
    return values


def lay_over(values: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in nested values, in place."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ValueError(f"override {hide_users(override)!r}: expected key.sub=value")
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {hide_users(override)!r}: {parent} holds a value, not a section")
    try:
        values[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"override {hide_users(override)!r}: its value is no YAML: {problem}; quote it") from None
