"""A recipe that lies in the folder of a head, which another may have made: it names no code unless that is trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CODE = re.compile(r".+:[A-Za-z_]\w*")  # PATH.py:CLASS or MODULE:CLASS


class Trust:
    """What the user of this process has said of code that lies in the folders of heads."""

    in_recipes = False  # whether recipes there may name code, as `eagle --trust-code` asks


def check_code(values: dict[str, Any], path: Path, overridden: Iterable[str]) -> None:
    """Refuse a recipe beside a head's weights that names code in a key which the command line does not set."""
    is_beside_head = (path.parent / "model.safetensors").exists() and (path.parent / "config.json").exists()
    if not is_beside_head or Trust.in_recipes:
        return
    for key, value in list_code(values):
        if any(key == said or key.startswith(f"{said}.") for said in overridden):
            continue
        raise ValueError(
            f"{path} lies in the folder of a head and would run code: {key} is {value!r:.200}. Read that code first, "
            f"then trust it with --trust-code, or name it yourself with {key}={value!s:.200}"
        )


def list_code(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a recipe that make code run which is not the package's own, with their values."""
    target = values.get("target")
    if isinstance(target, dict) and target.get("trust_remote_code"):
        yield "target.trust_remote_code", target["trust_remote_code"]
    for section, key in (("drafter", "kind"), ("regenerate", "drafter")):
        held = values.get(section)
        yield from _named(f"{section}.{key}", held.get(key) if isinstance(held, dict) else None)
    evaluated = values.get("eval")
    drafters = evaluated.get("drafters") if isinstance(evaluated, dict) else None
    for name, held in drafters.items() if isinstance(drafters, dict) else ():
        yield from _named(f"eval.drafters.{name}.head", held.get("head") if isinstance(held, dict) else None)


def _named(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key with its value, if one of the names in the value is that of code."""
    if isinstance(value, str) and any(CODE.fullmatch(name.strip()) for name in value.split(",")):
        yield key, value
