"""Record the command line and every shipped recipe: options, defaults, and the values that a recipe comes to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import eagle
from tests.golden import access
from tests.golden.digests import digest

# a line that begins with an option: its spellings, its help
OPTION = re.compile(r"^ *(-[^ ].*?)(?:  +(.*))?$")
SPELLING = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
CHOICES = re.compile(r"\{([^}]*)\}")
DEFAULT = re.compile(r"default: *([^;)]*)")


def command_items(folder: Path) -> dict[str, Any]:
    """Return an item for each verb, public name, method, recipe and comparison."""
    items: dict[str, Any] = {}
    for verb in access.VERBS:
        items[f"help of {verb}"] = describe_help(access.help_text(verb))
    for name in eagle.__all__:
        items[f"eagle.{name}"] = describe_signature(getattr(eagle, name))
    defaults = {name: access.default_settings(name) for name in access.TRAINED}
    for name, settings in defaults.items():
        items[f"settings of {name}"] = settings
    items |= recipes(defaults)
    return items


def describe_help(text: str) -> dict[str, str]:
    """Return the options of a help text with their choices and defaults, without its prose."""
    described: dict[str, str] = {}
    # positional arguments, and which options must be given
    usage = " ".join(text.partition("\n\n")[0].split())
    described["usage"] = re.sub(r"\[-h\] ", "", usage)
    for block in option_blocks(text):
        spellings, _, _ = block.partition("  ")
        named = ", ".join(sorted(set(SPELLING.findall(spellings))))
        choices = " ".join(f"{{{found}}}" for found in CHOICES.findall(spellings))
        default = " ".join(f"default {found.strip()}" for found in DEFAULT.findall(block))
        described[named] = f"{choices} {default}".strip()
    return described


def option_blocks(text: str) -> Iterator[str]:
    """Yield each option with all lines of its help joined; two spaces divide its spellings from it."""
    block = ""
    for line in text.splitlines():
        option = OPTION.match(line)
        # help that is longer than a line goes on below it, further to the right
        if option or not line.startswith("   "):
            if block:
                yield block
            block = ""
        if option:
            block = f"{option[1]}  {option[2] or ''}"
        elif block:
            block = f"{block} {' '.join(line.split())}"
    if block:
        yield block


def describe_signature(value: Any) -> dict[str, str]:
    """Return the parameters of a public name with their defaults."""
    described = {}
    for parameter in inspect.signature(value).parameters.values():
        default = parameter.default
        described[parameter.name] = "" if default is inspect.Parameter.empty else repr(default)
    # an object's address differs in every process
    return {name: re.sub(r" at 0x\w+", "", text) for name, text in described.items()}


def recipes(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of every recipe whose values are not the defaults, and a hash of those of each arm."""
    usual = flatten(access.default_recipe())
    items: dict[str, Any] = {
        f"section {name}": values for name, values in access.default_recipe().items()
    }
    files, comparisons = access.shipped_recipes()
    for file in files:
        items[f"recipe {file.parent.name}/{file.stem}"] = unusual(
            access.resolve_recipe(file), usual, methods
        )
    for file in comparisons:
        arms = access.resolve_comparison(file)
        items[f"recipe compare/{file.stem}"] = {
            name: digest(unusual(values, usual, methods)) for name, values in arms.items()
        }
    return items


def unusual(
    recipe: Mapping[str, Any],
    usual: Mapping[str, Any],
    methods: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the keys of a recipe whose values are not the defaults; a section that is left out is none of them."""
    method = methods.get(recipe["drafter"]["kind"], {})
    defaults = {**usual, **flatten({"drafter": method})}
    named = {}
    for key, value in flatten(recipe).items():
        if value != defaults.get(key):
            named[key] = value
    return named


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dots between the keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
