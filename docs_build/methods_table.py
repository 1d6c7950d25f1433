"""Print README's table across methods from two committed comparisons: `python -m docs_build.methods_table`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent.parent / "docs/results"
HEADER = """\
| acceptance length τ | seconds to train | weights | chain, T = 0 | chain, T = 1 | tree, T = 0 | tree, T = 1 |
|---|---:|---:|---:|---:|---:|---:|
"""


class Part(NamedTuple):
    """Methods on equal terms."""

    about: str
    file: str
    arms: tuple[str, ...]
    shapes: tuple[str, str]


PARTS = [
    Part(
        "60,000 tokens, 3 seeds: chains of 4, trees of 25",
        "compare_heads.json",
        ("eagle1", "hass", "eagle3", "medusa", "hydra", "mlp_speculator", "falcon", "blockwise"),
        ("chain of 4", "dynamic 25"),
    ),
    Part(
        "120,000 tokens, 1 seed: chains of 7, trees of 60",
        "compare_blocks.json",
        ("eagle1", "eagle3", "dflash", "dspark", "peagle", "mtp"),
        ("chain of 7", "tree of 60"),
    ),
]


def list_rows(part: Part) -> Iterator[str]:
    """A line for each method of a part."""
    arms = {arm["arm"]: arm for arm in json.loads((RESULTS / part.file).read_text())["arms"]}
    yield f"| *{part.about}* | | | | | | |\n"
    for arm in map(arms.__getitem__, part.arms):
        columns = (f"{shape}, T = {temperature}" for shape in part.shapes for temperature in (0, 1))
        taus = " | ".join(f"{arm['tau'][column]['value']:.2f}" for column in columns)
        yield f"| `{arm['arm']}` | {arm['seconds']:.0f} | {arm['weights']:,} | {taus} |\n"


def methods_table() -> str:
    """The whole table."""
    return HEADER + "".join(row for part in PARTS for row in list_rows(part))


if __name__ == "__main__":
    print(methods_table(), end="")
