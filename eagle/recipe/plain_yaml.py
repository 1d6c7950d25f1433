"""YAML of unknown origin: values alone, and not many more than its text is long."""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 1_000_000  # of one file, each reference counted as often as it stands


def parse_yaml(text: str | bytes, source: str) -> Any:
    """The values of a YAML text; ValueError for what is none, holds itself, or grows by references to references."""
    try:
        values = yaml.safe_load(text)
        count_values(values, {})
    except RecursionError:
        raise ValueError(f"{source} is no YAML that can be read: it is nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is no YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return values


def count_values(values: Any, counts: dict[int, int | None]) -> int:
    """How many values nested values hold; `counts` has those of the parts counted before, None for open ones."""
    if not isinstance(values, dict | list):
        return 1
    if id(values) in counts:
        known = counts[id(values)]
        if known is None:
            raise ValueError("its values hold themselves, expected plain values without `*` references to what is open")
        return known
    counts[id(values)] = None
    parts = [*values.keys(), *values.values()] if isinstance(values, dict) else values
    total = 1 + sum(count_values(part, counts) for part in parts)
    if total > MOST_VALUES:
        raise ValueError(f"its references stand for more than {MOST_VALUES:,} values: write them out")
    counts[id(values)] = total
    return total
