"""YAML of unknown origin as plain values, and overrides of such values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle.web import hide_users

MAX_VALUES = 1_000_000  # of one file; a value counts again for every reference (`*name`) to it


def parse_yaml(text: str | bytes, source: str) -> Any:
    """Return the values of a YAML text of unknown origin.

    Args:
        text: The text.
        source: Its name in error messages, such as a path.

    Raises:
        ValueError: The text is no YAML, its values contain themselves, or its references multiply to too many values.
    """
    try:
        values = yaml.safe_load(text)
        # a few lines of references to references can stand for billions of values (a "billion laughs" attack); called
        # for its refusal
        count_values(values, counts={})
    except RecursionError:
        raise ValueError(f"{source} is no YAML that can be read: it is nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is no YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return values


def count_values(values: Any, counts: dict[int, int | None]) -> int:
    """Return how many values nested values hold, and refuse too many of them, or values that contain themselves.

    Args:
        values: Mappings, lists and scalars.
        counts: The count of every container that was visited, by its id; None for one that is being counted now. It
            saves counting a container again for every reference to it, and is filled here.
    """
    if not isinstance(values, dict | list):
        return 1
    if id(values) in counts:
        known = counts[id(values)]
        if known is None:
            raise ValueError(
                "its values hold themselves, expected plain values without `*` references to what is open"
            )
        return known
    counts[id(values)] = None
    children: Any = values
    # keys count, too: they may be long texts
    if isinstance(values, dict):
        children = [*values.keys(), *values.values()]
    total = 1 + sum(count_values(child, counts) for child in children)
    if total > MAX_VALUES:
        raise ValueError(
            f"its references stand for more than {MAX_VALUES:,} values: write them out"
        )
    counts[id(values)] = total
    return total


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the top-level keys and values of a recipe's YAML file. Errors name the file, and a line if known."""
    values = parse_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        got = "an empty file" if values is None else f"a {type(values).__name__}"
        raise ValueError(
            f"{path} holds {got}, expected keys and values, as `eagle recipes tiny/eagle1` prints them"
        )
    return values


def lay_over(values: dict[str, Any], override: str) -> None:
    """Set the value of one override, `key.sub=value`, in nested values, in place; missing sections are made."""
    key, equals, value = override.partition("=")
    if not equals:
        # an override may hold the password of a server, which no message may show
        raise ValueError(f"override {hide_users(override)!r}: expected key.sub=value")
    *parents, last = key.split(".")
    # go down to the section of the last key
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(
                f"override {hide_users(override)!r}: {parent} holds a value, not a section"
            )
    try:
        values[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(
            f"override {hide_users(override)!r}: its value is no YAML: {problem}; quote it"
        ) from None
