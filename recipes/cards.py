"""Which recipe fits on which card, and how: `python -m recipes.cards [RECIPE ...] [--out FILE]` prints Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe
from recipes.forecast import CARDS, GB, card_bytes, empty_head, shipped, sizes_of_target

MEMORY = (24, 40, 80, 141)  # GB of a GPU
# GB for the driver, for libraries, and for fragmentation.
RESERVED = 2
MOST_CARDS = 64


class Way(NamedTuple):
    """A way to spread a run; later ways change more of the recipe."""

    cards: int
    shard_target: bool
    zero: int
    accumulation: int


def fits(path: str) -> Iterator[dict[str, Any]]:
    """Yield for each size of GPU the first way that fits: accumulation, then ZeRO-2, then a sharded target."""
    recipe = Recipe.load(path)
    sizes = sizes_of_target(recipe.target)
    head = empty_head(settings_of(recipe.drafter.model_dump(), path), sizes.config)

    @cache
    def needed(way: Way) -> int:
        train = recipe.train.model_copy(update={"accumulation": way.accumulation})
        features = recipe.features.model_copy(update={"shard_target": way.shard_target})
        changed = recipe.model_copy(update={"train": train, "features": features})
        return card_bytes(changed, head, sizes, way.cards, stage=way.zero)

    # Each way is measured at most once, and those behind the first that fits not at all.
    ways = list(list_ways(recipe))
    for memory in MEMORY:
        available = (memory - RESERVED) * GB
        fitting = next((way for way in ways if needed(way) <= available), None)
        best = fitting or min(ways, key=needed)
        yield {
            "recipe": path,
            "card": memory,
            "fits": fitting is not None,
            **best._asdict(),
            "bytes": needed(best),
        }


def list_ways(recipe: Recipe) -> Iterator[Way]:
    """Yield the ways in which a recipe may run, those that change least first."""
    # Only a target that computes features while training can be sharded, or is worth more than one machine.
    is_live = recipe.features.store is None
    max_cards = MOST_CARDS if is_live else CARDS
    accumulation = recipe.train.accumulation
    powers = [2**exponent for exponent in range(10)]
    for cards, shard_target, zero, factor in product(powers, (False, True), (0, 2), powers):
        cards *= CARDS
        has_whole_sequences = cards * accumulation * factor <= recipe.train.batch_size
        if (
            cards > max_cards
            or (shard_target and not is_live)
            or (factor > 1 and not has_whole_sequences)
        ):
            continue
        yield Way(cards, shard_target, zero, accumulation * factor)


def card_table(results: Any) -> str:
    """Return a Markdown table with a row for each recipe and a column for each size of GPU."""
    cells: dict[str, list[str]] = {}
    for row in results["cards"]:
        cells.setdefault(row["recipe"], []).append(describe(row))
    names = " | ".join(f"{memory} GB" for memory in MEMORY)
    lines = [f"| recipe, on {CARDS} cards of | {names} |", "|---" * (len(MEMORY) + 1) + "|"]
    lines += [f"| `{path}` | {' | '.join(row)} |" for path, row in cells.items()]
    return "\n".join(lines)


def describe(row: dict[str, Any]) -> str:
    """Return the memory that a recipe needs on a GPU, and what has to be changed for that."""
    size = f"{row['bytes'] / GB:.1f} GB"
    if not row["fits"]:
        return f"no: {size} at least"
    notes = [size]
    if row["accumulation"] > 1:
        notes.append(f"`train.accumulation={row['accumulation']}`")
    if row["shard_target"]:
        notes.append("`features.shard_target=true`")
    if row["zero"]:
        notes.append(f"`zero{row['zero']}.yaml`")
    if row["cards"] != CARDS:
        notes.append(f"{row['cards']} cards")
    return ", ".join(notes)


def main(argv: list[str]) -> None:
    """Print the table of recipes, and write its figures to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m recipes.cards", description=__doc__)
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="by default all that are for cards"
    )
    parser.add_argument("--out", type=Path, help="a file for the figures")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for path in args.recipes or shipped():
        rows += fits(path)
    results = {"cards": rows}
    print(card_table(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    script(main)
