"""Beam search with drafts beside transformers' own: `python bench/beam_search.py RECIPE [key=value ...]`.

Steps of each forward by what drafts (the recipe's head, lookup, nothing), and the CPU seconds of transformers'
`generate(num_beams=...)` over those of each. All take turns on each of the recipe's prompts, and all answers are
compared.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import process_time
from typing import Any

import torch

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Target, beam_search, load_drafter
from eagle.core.drafter import Drafter
from eagle.log import script
from eagle.recipe import Recipe
from eval.prompts import first_turns

BEAMS = (2, 4)
WIDTHS = (2, 4, 8)  # drafts of each level for each beam; the second is what a search takes by itself
TOLERANCE = 1e-4


class Figures:
    """Sums over prompts of one way to search."""

    def __init__(self, drafter: Drafter, budget: Budget) -> None:
        self.drafter, self.budget = drafter, budget
        self.seconds, self.steps, self.forwards, self.near_ties, self.equal = 0.0, 0, 0, 0, 0

    def add(self, target: Target, prompt: list[int], expected: tuple[list[int], float], **options: Any) -> None:
        """Add the figures of one prompt, compared with the answer and score of transformers."""
        begun = process_time()
        result = beam_search(target, self.drafter, prompt, budget=self.budget, **options)
        self.seconds += process_time() - begun
        self.steps, self.forwards = self.steps + result.steps - 1, self.forwards + result.forwards
        self.near_ties += result.near_ties > 0
        self.equal += result.tokens[0] == expected[0] and abs(result.scores[0] - expected[1]) < TOLERANCE

    def row(self, seconds: float, prompts: int) -> dict[str, Any]:
        """The row of the result file, with transformers' seconds."""
        return {
            "steps_per_forward": round(self.steps / self.forwards, 3),
            "steps": self.steps,
            "forwards": self.forwards,
            "speed_over_transformers": round(seconds / self.seconds, 3),
            "equal": f"{self.equal} of {prompts}",
            "near_ties": self.near_ties,
        }


def search_theirs(target: Target, prompt: list[int], beams: int, limit: int) -> tuple[list[int], float, float]:
    """The answer of transformers, its score, and the CPU seconds that it took."""
    model: Any = target.model
    begun = process_time()
    options = {"num_beams": beams, "max_new_tokens": limit, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(torch.tensor([prompt]), output_scores=True, **options)
    return output.sequences[0, len(prompt) :].tolist(), float(output.sequences_scores[0]), process_time() - begun


def measure(target: Target, head: str, prompts: list[list[int]], limit: int) -> list[dict[str, Any]]:
    """A row for each number of beams and each way to draft."""
    drafters = {name: load_drafter(name, target) for name in ("none", "ngram", head)}
    rows = []
    search_theirs(target, prompts[0], BEAMS[0], limit)  # warms up
    for drafter in drafters.values():
        beam_search(target, drafter, prompts[0], beams=BEAMS[0], max_new_tokens=limit)
    for beams in BEAMS:
        ways = {(name, WIDTHS[1]): drafter for name, drafter in drafters.items()}
        ways |= {(head, width): drafters[head] for width in WIDTHS}
        figures = {
            (name, width): Figures(drafter, Budget(3 * width * beams, 3, min(2, width) * beams, sharpness=1.0))
            for (name, width), drafter in ways.items()
        }
        seconds = 0.0
        for prompt in prompts:
            answer, score, spent = search_theirs(target, prompt, beams, limit)
            for way in figures.values():
                way.add(target, prompt, (answer, score), beams=beams, max_new_tokens=limit)
            seconds += spent
        rows += [
            {
                "beams": beams,
                "drafter": Path(name).parent.name or name,
                "width": width,
                **way.row(seconds, len(prompts)),
            }
            for (name, width), way in figures.items()
        ]
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    header = ["beams", "drafts", "for each beam and level", "steps a forward", "speed over transformers", "equal"]
    rows = []
    for row in results["rows"]:
        width = "" if row["drafter"] == "none" else row["width"]
        figures = f"{row['steps_per_forward']:.2f}", f"{row['speed_over_transformers']:.2f}"
        rows.append([row["beams"], row["drafter"], width, *figures, row["equal"]])
    return markdown(header, rows, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, default=Path("docs/results/beam_search.json"))
    args = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)
    recipe = Recipe.load(args.recipe, args.overrides)
    target = Target.load(recipe.target.path, dtype="float32", device="cpu")
    prompts, limit = first_turns(recipe, target), recipe.eval.max_new_tokens
    machine = made_on(target=Path(recipe.target.path).name, prompts=len(prompts), max_new_tokens=limit)
    results = {"machine": machine, "rows": measure(target, f"{recipe.train.out}/head", prompts, limit)}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
