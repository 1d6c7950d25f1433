"""Which recipe fits on which card, and how: `python -m recipes.cards [RECIPE ...] [--out FILE]` prints Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe
from recipes.forecast import CARDS, GB, card_bytes, empty_head, shipped, sizes_of_target

MEMORY = (24, 40, 80, 141)  # GB of a card
RESERVED = 2  # of them for the driver, for libraries, and for gaps between what is held
MOST_CARDS = 64


def fits(path: str) -> Iterator[dict[str, Any]]:
    """For each card the first way that fits, least changed first: accumulation, ZeRO-2, a target that is spread."""
    recipe = Recipe.load(path)
    sizes = sizes_of_target(recipe.target)
    head = empty_head(settings_of(recipe.drafter.model_dump(), path), sizes.config)

    @cache
    def needed(cards: int, shard: bool, stage: int, accumulation: int) -> int:
        train = recipe.train.model_copy(update={"accumulation": accumulation})
        features = recipe.features.model_copy(update={"shard_target": shard})
        asked = recipe.model_copy(update={"train": train, "features": features})
        return card_bytes(asked, head, sizes, cards, stage=stage)

    live = recipe.features.store is None
    powers = [2**power for power in range(10)]
    ways = [
        (cards, shard, stage, recipe.train.accumulation * more)
        for cards in (CARDS * power for power in powers)
        for shard in (False, True)
        for stage in (0, 2)
        for more in powers
        if cards <= (MOST_CARDS if live else CARDS) and (live or not shard)
        if more == 1 or cards * recipe.train.accumulation * more <= recipe.train.batch_size
    ]
    for memory in MEMORY:
        room = (memory - RESERVED) * GB
        fitting = next((way for way in ways if needed(*way) <= room), None)
        cards, shard, stage, accumulation = best = fitting or min(ways, key=lambda way: needed(*way))
        yield {
            "recipe": path,
            "card": memory,
            "fits": fitting is not None,
            "cards": cards,
            "shard_target": shard,
            "zero": stage,
            "accumulation": accumulation,
            "bytes": needed(*best),
        }


def card_table(results: Any) -> str:
    """A row for each recipe, a column for each card."""
    rows: dict[str, list[str]] = {}
    for row in results["cards"]:
        rows.setdefault(row["recipe"], []).append(describe(row))
    names = " | ".join(f"{memory} GB" for memory in MEMORY)
    lines = [f"| recipe, on {CARDS} cards of | {names} |", "|---" * (len(MEMORY) + 1) + "|"]
    return "\n".join([*lines, *(f"| `{path}` | {' | '.join(cells)} |" for path, cells in rows.items())])


def describe(row: dict[str, Any]) -> str:
    """How a recipe fits on a card."""
    size = f"{row['bytes'] / GB:.1f} GB"
    if not row["fits"]:
        return f"no: {size} at least"
    changed = [f"`train.accumulation={row['accumulation']}`"] if row["accumulation"] > 1 else []
    changed += ["`features.shard_target=true`"] if row["shard_target"] else []
    changed += [f"`zero{row['zero']}.yaml`"] if row["zero"] else []
    changed += [f"{row['cards']} cards"] if row["cards"] != CARDS else []
    return ", ".join([size, *changed])


def main(argv: list[str]) -> None:
    """Search, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m recipes.cards", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="by default all that are for cards")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    asked = parser.parse_args(argv)
    results = {"cards": [row for path in asked.recipes or shipped() for row in fits(path)]}
    print(card_table(results))
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    script(main)
