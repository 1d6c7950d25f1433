"""Lookahead by task and size, and what a token may cost for it to pay, from what `eval.measure` recorded.

`python bench/lookahead.py RESULTS.jsonl ...`, measured with `eval.costs=true`, writes docs/results/lookahead.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.machine import markdown, write_results
from eagle.log import script
from eval.costs import Costs
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    MODELLED_SPEED_UP,
    Group,
    Results,
    count_cycles,
    cycles,
    read_results,
)

OUT = Path("docs/results/lookahead.json")
ABOUT = ("dtype", "new_tokens", "machine", "torch", "transformers", "commit", "count", "date")


def rows_of(results: Results) -> list[dict[str, Any]]:
    """A row per drafter, temperature and prompt set: acceptance, nodes read, and speed in modelled time."""
    rows = []
    for group in results.groups():
        for name in sorted({answer["set"] for answer in group.answers}):
            if group.drafter != "none":
                part = group.select(lambda answer, name=name: answer["set"] == name)  # type: ignore[misc]
                rows.append({"drafter": group.drafter, "temperature": group.temperature, "set": name, **figures(part)})
    return rows


def figures(group: Group) -> dict[str, Any]:
    """Estimates with their intervals; `pays_below` is the cost of each further token of a forward, over its first."""
    tokens, count = (sum(column) for column in zip(*map(count_cycles, group.answers), strict=True))
    nodes = sum(cycle["nodes"] for answer in group.answers for cycle in cycles(answer)) / count
    tau, speed = group.estimate(ACCEPTANCE_LENGTH), group.estimate(MODELLED_SPEED_UP)
    return {
        "answers": len(group.answers),
        "identical": group.identical,
        "tau": [tau.value, tau.low, tau.high],
        "nodes": nodes,
        "speed": [speed.value, speed.low, speed.high],
        "pays_below": (tokens / count - 1) / max(nodes, 1e-9),
    }


def prices_of(results: Results) -> dict[int, float]:
    """Seconds of a forward of so many tokens over those of one, at the middle context."""
    costs = Costs.parse(results.header["costs"]["none"])
    context = costs.contexts[len(costs.contexts) // 2]
    return {size: costs.read(size, context) / costs.read(1, context) for size in costs.sizes}


def main(argv: list[str]) -> None:
    """Print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    every = [read_results(path) for path in args.results]
    rows = sorted((row for results in every for row in rows_of(results)), key=lambda row: row["temperature"])
    runs = [{name: results.header[name] for name in ABOUT} | {"prices": prices_of(results)} for results in every]
    cells = [
        [
            *(f"{row['temperature']:g}", row["set"], row["drafter"], str(row["answers"])),
            *("{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("tau", "speed")),
            *(f"{row['nodes']:.1f}", f"{row['pays_below']:.3f}"),
        ]
        for row in rows
    ]
    header = ["T", "prompts", "drafter", "answers", "τ", "modelled", "nodes a cycle", "pays below"]
    print(markdown(header, cells, {name: runs[0][name] for name in ABOUT}))
    write_results(args.out, {"runs": runs, "rows": rows})


if __name__ == "__main__":
    script(main)
