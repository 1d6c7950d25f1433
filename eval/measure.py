"""Drafters on prompts, always beside `none`: `python -m eval.measure RECIPE [key=value ...]`."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from data_prep.tokens import load_tokenizer
from eagle.checkpoint import load_drafter
from eagle.decode import generate
from eagle.drafter import Budget
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target import Target
from eagle.verify import Sampling
from eval.prompts import first_turns
from eval.report import commit, loops, markdown


def rows(recipe: Recipe, target: Target, drafters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per temperature, prompt and drafter; the drafters take turns, so that a drifting machine hurts all."""
    budget = Budget(recipe.eval.nodes, recipe.eval.depth, recipe.eval.top_k)
    prompts = first_turns(recipe, target)
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
                    "loops": loops(trace.tokens),
                }


def what_ran(recipe: Recipe) -> dict[str, Any]:
    """What the figures belong to: project, packages, machine."""
    return {
        "target": recipe.target.path,
        "prompts": recipe.eval.count,
        "tree": f"{recipe.eval.nodes} nodes / {recipe.eval.depth} levels / top {recipe.eval.top_k}",
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": str(date.today()),
    }


def main(argv: list[str]) -> None:
    """Measure `none`, `ngram` and the recipe's head; append the rows to results.jsonl and print the summary."""
    recipe = Recipe.load(argv[0], argv[1:])
    target = Target.load(**{**recipe.target.model_dump(), "dtype": "float32"})
    target.tokenizer = load_tokenizer(recipe)
    head, kind = Path(recipe.train.out) / "head", recipe.drafter.kind
    drafters = {"none": load_drafter("none", target), "ngram": load_drafter("ngram", target)}
    drafters[kind] = load_drafter(head, target)
    results = Path(recipe.train.out) / "results.jsonl"
    with results.open("a") as file:
        file.write(json.dumps({"run": what_ran(recipe)}) + "\n")
        for row in rows(recipe, target, drafters):
            file.write(json.dumps(row) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    script(main)
