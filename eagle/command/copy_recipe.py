"""List the recipes that come with eagle, and copy one to edit it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from textwrap import shorten

import yaml

from eagle.log import JSON_HELP, json_alone
from eagle.shipped import find_recipe, recipe_names

# listed after those of models, in this order
FOLDERS = {
    "tiny": "a small model that is made here, without downloads",
    "compare": "comparisons, for `eagle compare`",
    "accelerate": "several processes, for `--config_file`",
}


def main(argv: list[str]) -> None:
    """List the shipped recipes. With a name, print this recipe, or copy it to a file."""
    parser = argparse.ArgumentParser(prog="eagle recipes", description=main.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as tiny/eagle1")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="file for the copy")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_args(argv)
    with json_alone(args.json) as write_json:
        if args.name is None:
            if args.copy is not None:
                raise ValueError(
                    "--copy needs the name of a recipe: `eagle recipes tiny/eagle1 --copy my.yaml`"
                )
            recipes = first_lines()
            print(listing(recipes))
            write_json(recipes)
            return
        text = find_recipe(args.name).read_text()
        if args.copy is None:
            print(text, end="")
        else:
            copy_to(args.copy, args.name, text)
        write_json(yaml.safe_load(text))


def copy_to(path: Path, name: str, text: str) -> None:
    """Write a recipe into a new file."""
    if path.exists():
        raise ValueError(f"{path} is there already: name another file, or delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"{path} is a copy of {name}: edit it, then `eagle train {path} --check`")


def first_lines() -> dict[str, str]:
    """Return the first line of each recipe by its name: those of models first, then those in `FOLDERS`."""

    # False sorts first: recipes of models by name, then the others by the order of their folders in `FOLDERS`
    def rank(name: str) -> tuple[bool, int]:
        """Return the key by which a recipe's name is sorted; equal keys keep their order, that of names."""
        folder = name.split("/")[0]
        return folder in FOLDERS, [*FOLDERS, folder].index(folder)

    lines = {}
    for name in sorted(recipe_names(), key=rank):
        lines[name] = find_recipe(name).read_text().partition("\n")[0].removeprefix("# ")
    return lines


def listing(recipes: Mapping[str, str]) -> str:
    """Return what `eagle recipes` prints: the names by folder, each with the first line of its recipe."""
    lines = []
    for folder, names in groupby(recipes, key=lambda name: name.split("/")[0]):
        about = f": {FOLDERS[folder]}" if folder in FOLDERS else ""
        lines.append(f"\n{folder}{about}")
        lines += [f"  {name:<30}{shorten(recipes[name], 90, placeholder=' ...')}" for name in names]
    return "\n".join(lines).lstrip()
