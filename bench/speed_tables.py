"""Speed of drafters on a target: `python -m bench.speed_tables RECIPE [key=value ...]`.

The recipe names the target, prompts, temperatures, batch sizes and `eval.drafters`. A real target decodes as it is
(`--size own`). A small one is widened to the cost of a large one (`bench.widen`), and its drafters in step. All arms
of a setting take turns at each batch of prompts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine_line, made_on, write_results
from bench.speed_arms import PEERS, PLAIN, POLICY, SHAPES, THEIRS, WideTarget
from bench.speed_report import OWN, Setting, compute_cells, table
from eagle.core.budget import Budget, Policy
from eagle.core.sampling import Sampling
from eagle.decoding.cycle_times import bare_costs
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eval.load_run import load_named, load_target
from eval.prompts import encode_prompt, questions
from eval.tune import CHAINS, Tuning, answer_prompts, chain, dynamic, search

TUNED = "tuned"
CANDIDATES = [*map(chain, CHAINS), *dynamic()]
# with the chain of a block of 16 slots
TABLE_SHAPES = {**SHAPES, "chain 15": chain(15)}
PENDING = 2  # tokens that a drafter reads in its first forward of a cycle


def read_weights(size: str) -> float | None:
    """Return how many weights a widened target has; None for a target as it is."""
    if size == OWN:
        return None
    # as "1.5 B"
    return 1e9 * float(size.split()[0])


def list_arms(recipe: Recipe, batch: int) -> list[str]:
    """Return all arms of a setting, plain decoding first; transformers assists and looks up one sequence alone."""
    peers = [THEIRS] if batch > 1 else list(PEERS)
    drafted = product(recipe.eval.drafters, (*TABLE_SHAPES, TUNED, POLICY))
    return [PLAIN, *peers, *(f"{name}, {shape}" for name, shape in drafted)]


def read_prompts(recipe: Recipe, target: Any, context: int) -> list[list[int]]:
    """Return the first turns of the recipe's questions, repeated or cut to `context` tokens unless that is 0."""
    prompts = []
    for question in questions(recipe):
        prompt = encode_prompt(recipe, target, question)
        if prompt is None:
            continue
        if context:
            prompt = (prompt * (context // len(prompt) + 1))[-context:]
        prompts.append(prompt)
    return prompts


def group_prompts(prompts: Sequence[list[int]], batch: int) -> list[list[list[int]]]:
    """Return batches of prompts; where there are fewer than one holds, they are taken again."""
    num_groups = max(len(prompts) // batch, 1)
    repeated = [prompts[i % len(prompts)] for i in range(num_groups * batch)]
    return [repeated[first : first + batch] for first in range(0, len(repeated), batch)]


class SpeedRun:
    """A target, widened or as it is, with the tuned budgets of its drafters."""

    def __init__(self, recipe: Recipe, size: str, dtype: str) -> None:
        section = recipe.target.model_copy(update={"dtype": dtype})
        self.recipe = recipe.model_copy(update={"target": section})
        # as `Target.load` packs weights
        packed = dtype == "bfloat16" if section.packed is None else section.packed
        self.wide = WideTarget(
            load_target(self.recipe, packed=False),
            read_weights(size),
            lambda name, target: load_named(self.recipe, target, name),
            recipe.eval.drafters,
            packed=packed,
        )
        self.budgets: dict[str, Budget] = {}
        self.costs: dict[str, float | None] = {}  # of a cycle of one sequence, by arm

    def tune(self, name: str) -> Budget:
        """Return the fastest budget for one sequence.

        The target and the drafter draft as they were before widening, since their tokens are the same.
        """
        if name in self.budgets:
            return self.budgets[name]
        small = self.wide.small
        drafter = load_named(self.recipe, small, name)
        answers = answer_prompts(self.recipe, small, drafter.taps)
        shortest = min(answer.prompt for answer in answers)
        longest = max(len(answer.tokens) for answer in answers)
        context = (shortest + longest) // 2

        # acceptance is the small pair's, costs are the wide pair's
        wide_drafter = self.wide.drafter(name)
        costs = bare_costs(self.wide.target, wide_drafter, (context,), rounds=3)
        tuning = Tuning(small, drafter, answers, costs)
        self.budgets[name] = search(tuning, CANDIDATES).budget

        for shape, budget in {**TABLE_SHAPES, TUNED: self.budgets[name]}.items():
            rows = costs.rows(drafter, budget, PENDING)
            # a drafter without forwards has no modelled cost
            if rows is not None:
                cycle = costs.cycle(budget.nodes, rows, context)
                self.costs[f"{name}, {shape}"] = round(cycle / costs.read(1, context), 3)
        return self.budgets[name]

    def make_plan(self, arm: str, prompts: list[list[int]]) -> Budget | Policy | None:
        """Return the budget or the policy of an arm; None for what drafts nothing."""
        name, _, shape = arm.partition(", ")
        if arm == PLAIN or arm in PEERS:
            return None
        if shape == TUNED:
            return self.tune(name)
        if shape != POLICY:
            return TABLE_SHAPES[shape]
        # a policy stays within the tuned budget, in a batch within a chain of 3
        budget = self.tune(name) if len(prompts) == 1 else chain(3)
        return self.wide.policy(name, prompts, budget if budget.nodes else chain(3))

    def time_arms(self, setting: Setting, arms: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the figures of each arm on each batch of prompts.

        Args:
            setting: How the target is asked.
            arms: Names as `list_arms` gives them, plain decoding first.
        """
        prompts = read_prompts(self.recipe, self.wide.target, setting.context)
        batches = group_prompts(prompts, setting.batch)

        runners = {}
        for arm in arms:
            runners[arm] = self.wide.runner(arm, self.make_plan(arm, batches[0]))
            # not timed: what only a first call does
            runners[arm](batches[0][:1], Sampling(setting.temperature), 4)

        figures: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for i, batch in enumerate(progress(batches, "time", len(batches), unit="batches")):
            sampling = Sampling(setting.temperature, request=i * setting.batch)
            expected: list[list[int]] = []
            # arms take turns at each batch, so that a drifting machine slows all alike
            for arm, run in runners.items():
                row, answers = run(batch, sampling, self.recipe.eval.max_new_tokens)
                expected = expected or answers
                row["texts"] = len(batch)
                row["unequal"] = count_unequal(arm, setting.temperature, answers, expected)
                figures[arm].append(row)
        return figures


def count_unequal(
    arm: str, temperature: float, answers: list[list[int]], plain: list[list[int]]
) -> int | None:
    """Return the number of answers unlike plain decoding's; None where they are not compared.

    Args:
        arm: What gave the answers.
        temperature: Of both.
        answers: The tokens of the arm's answers.
        plain: Those of plain decoding, in the same order.
    """
    # transformers samples with noise of its own, so that its answers at T > 0 are others
    if arm == PLAIN or (arm in PEERS and temperature):
        return None
    return sum(answer != expected for answer, expected in zip(answers, plain, strict=True))


def read_options(argv: list[str]) -> Namespace:
    """Return the options of the command line."""
    parser = command_line("python -m bench.speed_tables", __doc__)
    parser.add_argument(
        "--size", default="1 B", help="of the widened target, or 'own': not widened (default: 1 B)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (default: 1)")
    parser.add_argument("--context", type=int, default=0, help="tokens of a prompt; 0: its own")
    parser.add_argument("--arms", nargs="+", help="only these beside 'none', as 'eagle1, chain 3'")
    parser.add_argument("--out", type=Path, default=Path("docs/results/speed_tables.json"))
    args = parser.parse_intermixed_args(argv)
    if args.threads < 1:
        parser.error(f"got --threads {args.threads}, expected at least 1")
    return args


def main(argv: list[str]) -> None:
    """Time the arms, and write and print their table."""
    args = read_options(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    torch.set_num_threads(args.threads)
    run = SpeedRun(recipe, args.size, args.dtype)
    cells = []
    for batch, temperature in product(recipe.eval.batch_size, recipe.eval.temperatures):
        setting = Setting(
            size=args.size,
            dtype=args.dtype,
            threads=args.threads,
            context=args.context,
            batch=batch,
            temperature=temperature,
        )
        # plain decoding is always there: answers and speeds are compared with it
        arms = [
            arm for arm in list_arms(recipe, batch) if arm == PLAIN or arm in (args.arms or [arm])
        ]
        figures = run.time_arms(setting, arms)
        cells += compute_cells(setting, figures, run.costs if batch == 1 else {})
    results: dict[str, Any] = {
        "machine": made_on(
            target=Path(recipe.target.path).name, new_tokens=recipe.eval.max_new_tokens
        ),
        "shares": run.wide.shares,
        "budgets": {name: str(budget) for name, budget in run.budgets.items()},
        "cells": cells,
    }
    print(table(results), machine_line(results["machine"]), sep="\n\n")
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
