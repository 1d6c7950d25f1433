"""Drafters on prompts, always beside `none`: `python -m eval.measure RECIPE [key=value ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from eagle.checkpoint import load_drafter
from eagle.decode import generate
from eagle.drafter import Budget
from eagle.log import progress
from eagle.recipe import Recipe
from eagle.target import Target
from eagle.verify import Sampling
from eval.prompts import first_turns


def rows(recipe: Recipe, target: Target, drafters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per temperature, prompt and drafter; the drafters take turns, so that a drifting machine hurts all."""
    budget = Budget(recipe.eval.nodes, recipe.eval.depth, recipe.eval.top_k)
    prompts = first_turns(recipe.eval.prompts, target, recipe.eval.count)
    for temperature in recipe.eval.temperatures:
        for number, prompt in enumerate(progress(prompts, f"decode at T = {temperature:g}", len(prompts))):
            sampling, plain = Sampling(temperature=temperature, request=number), None
            for name, drafter in drafters.items():
                target.forget()
                begun = perf_counter()
                trace = generate(
                    target, drafter, prompt, sampling=sampling, budget=budget, max_new_tokens=recipe.eval.max_new_tokens
                )
                plain = plain or trace.tokens
                yield {
                    "drafter": name,
                    "temperature": temperature,
                    "prompt": number,
                    "tokens": len(trace.tokens),
                    "cycles": len(trace.cycles),
                    "committed": sum(cycle.committed for cycle in trace.cycles),
                    "seconds": perf_counter() - begun,
                    "identical": trace.tokens == plain,
                }


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per drafter and temperature: acceptance length, speed, speed-up over `none`, and whether nothing was lost."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    speed = {key: sum(r["tokens"] for r in group) / sum(r["seconds"] for r in group) for key, group in groups.items()}
    return [
        {
            "temperature": temperature,
            "drafter": name,
            "acceptance_length": sum(r["committed"] for r in group) / max(sum(r["cycles"] for r in group), 1),
            "tokens_per_second": speed[temperature, name],
            "speed_up": speed[temperature, name] / speed[temperature, "none"],
            "identical": all(r["identical"] for r in group),
        }
        for (temperature, name), group in groups.items()
    ]


def main(argv: list[str]) -> None:
    """Measure `none`, `ngram` and the recipe's head; append the rows to results.jsonl and print the summary."""
    recipe = Recipe.load(argv[0], argv[1:])
    target = Target.load(recipe.target.path, dtype="float32", revision=recipe.target.revision)
    head, kind = Path(recipe.train.out) / "head", recipe.drafter.kind
    drafters = {"none": load_drafter("none", target), "ngram": load_drafter("ngram", target)}
    drafters[kind] = load_drafter(head, target)
    found = []
    with (Path(recipe.train.out) / "results.jsonl").open("a") as file:
        for row in rows(recipe, target, drafters):
            file.write(json.dumps(row) + "\n")
            found.append(row)
    for row in summary(found):
        print(
            f"T = {row['temperature']:<4g} {row['drafter']:<8} tau {row['acceptance_length']:.2f}  "
            f"{row['tokens_per_second']:6.1f} tokens/s  x{row['speed_up']:.2f}  "
            f"{'identical to plain decoding' if row['identical'] else 'DIFFERS from plain decoding'}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
