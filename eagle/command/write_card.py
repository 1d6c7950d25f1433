"""Write the card of a head, of regenerated conversations or of a feature store."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from eagle.disk import write_text
from eagle.formats.card import model_card


def main(argv: list[str]) -> None:
    """Write the README.md that a hub shows: what this is, what it was made from, how to load it."""
    parser = argparse.ArgumentParser(prog="eagle card", description=main.__doc__)
    parser.add_argument("path", type=Path, help="a head, a feature store, or conversations that `eagle prepare` wrote")
    parser.add_argument("--name", metavar="OWNER/NAME", help="on the hub; by default the name of the folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: README.md in the folder")
    args = parser.parse_args(argv)
    folder = args.path if args.path.is_dir() else args.path.parent
    if not args.path.exists():
        raise ValueError(f"nothing is at {args.path}: expected a head, a feature store, or a file of conversations")
    out = args.out or folder / "README.md"
    if out.exists():
        raise ValueError(f"{out} is there already: delete it, or name another file with --out")
    name = args.name or (args.path.parent.name if args.path.name == "head" else args.path.stem)
    is_head = (args.path / "model.safetensors").is_file()
    make = model_card if is_head else import_module("data_prep.dataset_card").dataset_card
    write_text(out, make(args.path, name))
    print(f"{out}: choose a licence in it before you publish it")
