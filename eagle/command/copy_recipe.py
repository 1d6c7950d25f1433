"""List the recipes that come with eagle, and copy one to edit it."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from textwrap import shorten

from eagle.shipped import find_recipe, recipe_names

FOLDERS = {
    "compare": "comparisons, for `eagle compare`",
    "accelerate": "several processes, for `--config_file`",
}


def main(argv: list[str]) -> None:
    """List the recipes that come with eagle; with a name, print that recipe, or copy it to edit it."""
    parser = argparse.ArgumentParser(prog="eagle recipes", description=main.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as tiny/eagle1")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="write the recipe there")
    args = parser.parse_args(argv)
    if args.name is None:
        if args.copy is not None:
            raise ValueError(
                "--copy needs the name of a recipe: `eagle recipes tiny/eagle1 --copy my.yaml`"
            )
        print(listing())
        return
    text = find_recipe(args.name).read_text()
    if args.copy is None:
        print(text, end="")
        return
    if args.copy.exists():
        raise ValueError(f"{args.copy} is there already: name another file, or delete it")
    args.copy.parent.mkdir(parents=True, exist_ok=True)
    args.copy.write_text(text)
    print(f"{args.copy} is a copy of {args.name}: edit it, then `eagle train {args.copy} --check`")


def listing() -> str:
    """Return the names by folder, each with the first line of its file."""
    lines = []
    for folder, names in groupby(recipe_names(), key=lambda name: name.split("/")[0]):
        about = f": {FOLDERS[folder]}" if folder in FOLDERS else ""
        lines.append(f"\n{folder}{about}")
        for name in names:
            first_line = find_recipe(name).read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"  {name:<30}{shorten(first_line, 90, placeholder=' ...')}")
    return "\n".join(lines).lstrip()
