"""Print README's table across methods from two committed comparisons: `python -m docs_build.methods_table`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent.parent / "docs/results"
HEADER = """\
| acceptance length τ | seconds to train | weights | chain, T = 0 | chain, T = 1 | tree, T = 0 | tree, T = 1 |
|---|---:|---:|---:|---:|---:|---:|
"""


class Comparison(NamedTuple):
    """Methods on equal terms."""

    about: str
    file: str
    arms: tuple[str, ...]
    shapes: tuple[str, str]  # a chain and a tree


COMPARISONS = [
    Comparison(
        "60,000 tokens, 3 seeds: chains of 4, trees of 25",
        "compare_heads.json",
        ("eagle1", "hass", "eagle3", "medusa", "hydra", "mlp_speculator", "falcon", "blockwise"),
        ("chain of 4", "dynamic 25"),
    ),
    Comparison(
        "120,000 tokens, 1 seed: chains of 7, trees of 60",
        "compare_blocks.json",
        ("eagle1", "eagle3", "dflash", "dspark", "peagle", "mtp"),
        ("chain of 7", "tree of 60"),
    ),
]


def list_rows(comparison: Comparison) -> Iterator[str]:
    """Yield a line for each method of a comparison."""
    results = json.loads((RESULTS / comparison.file).read_text())
    arms = {arm["arm"]: arm for arm in results["arms"]}
    yield f"| *{comparison.about}* | | | | | | |\n"
    for name in comparison.arms:
        arm = arms[name]
        cells = [f"`{name}`", f"{arm['seconds']:.0f}", f"{arm['weights']:,}"]
        # chains first, as engines serve them
        for shape, temperature in product(comparison.shapes, (0, 1)):
            cells.append(f"{arm['tau'][f'{shape}, T = {temperature}']['value']:.2f}")
        yield f"| {' | '.join(cells)} |\n"


def methods_table() -> str:
    """Return the whole table."""
    table = HEADER
    for comparison in COMPARISONS:
        table += "".join(list_rows(comparison))
    return table


if __name__ == "__main__":
    print(methods_table(), end="")
