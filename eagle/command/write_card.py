"""Write the card of a head, of regenerated conversations or of a feature store."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.dataset_card import dataset_card
from eagle.disk import write_text
from eagle.formats.card import model_card


def main(argv: list[str]) -> None:
    """Write the model card or dataset card (README.md): what the files are, how they were made, how to load them."""
    parser = argparse.ArgumentParser(prog="eagle push --card", description=main.__doc__)
    parser.add_argument(
        "path",
        type=Path,
        help="a head, a feature store, or answers that `eagle prepare` generated",
    )
    parser.add_argument(
        "repository",
        nargs="?",
        metavar="OWNER/NAME",
        help="name on the hub (default: the folder's name)",
    )
    parser.add_argument("--name", metavar="OWNER/NAME", help="the same, as an option")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: README.md in the folder")
    args = parser.parse_intermixed_args(argv)
    path = args.path
    if not path.exists():
        raise ValueError(
            f"nothing is at {path}: expected a head, a feature store, or a file of conversations"
        )
    out = args.out or (path if path.is_dir() else path.parent) / "README.md"
    if out.exists():
        raise ValueError(f"{out} is there already: delete it, or name another file with --out")
    # a head lies in the folder `head` of its run, whose name says more
    name = args.repository or args.name or (path.parent.name if path.name == "head" else path.stem)
    is_head = (path / "model.safetensors").is_file()
    text = model_card(path, name) if is_head else dataset_card(path, name)
    write_text(out, text)
    print(f"{out}: choose a licence in it before you publish it")
