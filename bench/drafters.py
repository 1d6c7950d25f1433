"""Drafters by task, from what `eval.measure` recorded with `eval.costs=true`, and a model that drafts for itself.

`python bench/drafters.py RESULTS.jsonl RECIPE [key=value ...]` writes docs/results/drafters.json.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.machine import made_on
from eagle.core.decode import generate
from eagle.core.drafter import Budget
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.formats.checkpoint import load_drafter
from eagle.log import script
from eagle.recipe import Recipe
from eval.load_run import load_target
from eval.prompts import first_turns
from eval.results import SPEED_UP, count_cycles, count_seconds, prompt_key, read_results, speed_up
from eval.statistics import Estimate, estimate

OUT = Path("docs/results/drafters.json")
CHAIN, NEW_TOKENS = 4, 61
MODES = {"greedy": (0.0, "noise"), "shared noise": (1.0, "noise"), "drawn": (1.0, "sampled")}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What each answer adds: tokens and cycles, measured and modelled seconds, and those of `none`."""
    rows: list[dict[str, Any]] = []
    for group in read_results(path).groups():
        rows += [
            {
                "drafter": group.drafter,
                "temperature": group.temperature,
                "task": answer["task"],
                "conversation": prompt_key(answer)[1],
                "identical": answer["identical"],
                "taken": count_cycles(answer),
                "pace": count_seconds(answer),
                "beside": SPEED_UP.columns(answer),
                **({"modelled": answer["modelled"]} if "modelled" in answer and group.drafter != "none" else {}),
            }
            for answer in group.answers
        ]
    return rows


def for_itself(recipe: Recipe) -> dict[str, list[int]]:
    """How many tokens of each full draft a target keeps that drafts for itself, by mode: the last cycle is cut off."""
    target = load_target(recipe)
    drafter, prompts = load_drafter(recipe.target.path, target), first_turns(recipe, target)
    found: dict[str, list[int]] = {}
    for mode, (temperature, draw) in MODES.items():
        budget, counts = Budget.fixed(chain_paths(CHAIN), draw), [0] * (CHAIN + 1)  # type: ignore[arg-type]
        for request, prompt in enumerate(prompts):
            options = {"sampling": Sampling(temperature, request=request), "max_new_tokens": NEW_TOKENS, "stop": []}
            for cycle, _ in pairwise(generate(target, drafter, prompt, budget=budget, **options).cycles):
                counts[cycle.accepted] += 1
        found[mode] = counts
    return found


def _figure(rows: list[dict[str, Any]], column: str, statistic: Any = None) -> Estimate:
    clusters: dict[Any, list[Any]] = {}
    for row in rows:
        clusters.setdefault(row["conversation"], []).append(row[column])
    return estimate(clusters, statistic) if statistic else estimate(clusters)


def _said(found: Estimate, unit: str = "") -> str:
    return f"{found.value:.2f}{unit} ({found.low:.2f} to {found.high:.2f})"


def _groups(results: dict[str, Any], heat: float) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["temperature"] == heat:
            groups.setdefault(row["drafter"], []).append(row)
    return groups


def drafters_table(results: dict[str, Any]) -> str:
    """Acceptance length and speed of each drafter over all tasks, as Markdown."""
    lines = ["| T | drafter | τ | tokens/s | speed-up | modelled | output |", "|---" * 7 + "|"]
    for heat in sorted({row["temperature"] for row in results["rows"]}):
        for name, rows in _groups(results, heat).items():
            same = {True: "identical", None: "same law", False: "**differs**"}[_worst(rows)]
            gains = ["1", "1"]
            if name != "none":
                gains = [_said(_figure(rows, column, speed_up)) for column in ("beside", "modelled")]
            lines.append(
                f"| {heat:g} | {name} | {_said(_figure(rows, 'taken'))} | {_figure(rows, 'pace').value:.0f} | "
                f"{gains[0]} | {gains[1]} | {same} |"
            )
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{about}</sub>"])


def _worst(rows: list[dict[str, Any]]) -> bool | None:
    found = {row["identical"] for row in rows}
    return False if False in found else None if None in found else True


def tasks_table(results: dict[str, Any]) -> str:
    """Acceptance length and modelled speed-up by task, as Markdown."""
    tasks = sorted({row["task"] for row in results["rows"]})
    lines = [f"| T | drafter | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for heat in sorted({row["temperature"] for row in results["rows"]}):
        for name, rows in _groups(results, heat).items():
            if name == "none":
                continue
            cells = []
            for task in tasks:
                mine = [row for row in rows if row["task"] == task]
                gain = _figure(mine, "modelled", speed_up)
                cells.append(f"{_figure(mine, 'taken').value:.2f}: {_said(gain, ' ×')}")
            lines.append(f"| {heat:g} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def own_table(results: dict[str, Any]) -> str:
    """What a target keeps of what it drafts for itself, as Markdown."""
    lines = ["| mode | cycles | tokens committed per cycle | cycles with fewer |", "|---|---|---|---|"]
    for mode, counts in results["own"].items():
        cycles, mean = sum(counts), sum((kept + 1) * count for kept, count in enumerate(counts)) / max(sum(counts), 1)
        lines.append(f"| {mode} | {cycles} | {mean:.4g} | {cycles - counts[-1]} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Read, let the target draft for itself, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what eval.measure wrote")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the recipe")
    args = parser.parse_args(argv)
    path, recipe = args.results, Recipe.load(args.recipe, args.overrides)
    rows = rows_of(path)
    header = read_results(path).header
    about = {"target": Path(header["target"]).name, "dtype": header["dtype"], "new_tokens": header["new_tokens"]}
    prompts = len({row["conversation"] for row in rows})
    found = {"machine": made_on(**about, prompts=prompts), "rows": rows, "own": for_itself(recipe)}
    found["machine"]["commit"] = header["commit"]
    OUT.write_text(json.dumps(found) + "\n")
    found = json.loads(OUT.read_text())
    print(drafters_table(found), tasks_table(found), own_table(found), sep="\n\n")


if __name__ == "__main__":
    script(main)
